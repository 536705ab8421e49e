// Aligned buffers for tests of a disk, told apart by their fill byte.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "ballast/storage/io/block_file.h"

namespace ballast::storage {

class Blocks {
 public:
  explicit Blocks(uint64_t count, uint8_t fill = 0) : blocks_(count) { Fill(fill); }

  void Fill(uint8_t fill) { std::fill(span().begin(), span().end(), std::byte{fill}); }
  absl::Span<std::byte> span() {
    return absl::MakeSpan(reinterpret_cast<std::byte*>(blocks_.data()), blocks_.size() * kIoAlignment);
  }
  // Part of the buffer; need not be aligned to blocks.
  absl::Span<std::byte> Part(uint64_t offset, uint64_t bytes) { return span().subspan(offset, bytes); }
  uint8_t at(uint64_t offset) { return static_cast<uint8_t>(span()[offset]); }
  bool AllAre(uint8_t fill) {
    return std::all_of(span().begin(), span().end(), [&](std::byte b) { return b == std::byte{fill}; });
  }

 private:
  struct alignas(kIoAlignment) Block {
    std::byte bytes[kIoAlignment];
  };
  std::vector<Block> blocks_;
};

}  // namespace ballast::storage
