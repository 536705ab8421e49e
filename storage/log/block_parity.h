// The parity of many blocks: what rebuilds one of them that the disk does not return as it was written. A disk loses or
// changes single blocks far more often than several of the same few MiB.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "absl/types/span.h"
#include "ballast/storage/io/block_file.h"

namespace ballast::storage {

// XOR of all blocks of kIoAlignment bytes, the last one padded with zeros; and the sum of all 64-bit words, by which a
// rebuilt block is checked beside the bytes' own CRC32C: among a thousand blocks one that is wrong would fit 32 bits
// once in four million cases of several damaged blocks.
// Threads: one.
class BlockParity {
 public:
  // Appends bytes. All calls but the last give whole 64-bit words.
  void Add(absl::Span<const std::byte> bytes);

  bool empty() const { return block_ == nullptr; }
  // kIoAlignment bytes. REQUIRES: !empty().
  absl::Span<const std::byte> block() const;
  // Never 0, so that 0 can say that there is no parity.
  uint32_t sum() const;

 private:
  static constexpr size_t kWords = kIoAlignment / sizeof(uint64_t);
  std::unique_ptr<std::array<uint64_t, kWords>> block_;
  size_t next_ = 0;  // word of the block
  uint64_t sum_ = 0;
};

// Rebuilds the damaged block of `bytes`, if it is a single one: returns its index. Otherwise returns none and leaves
// `bytes` as they were. `block`, `sum`: as a BlockParity of the bytes had them; `crc32c`: of the whole bytes.
// Takes up to the square of the number of blocks: 0.2 s for 4 MiB.
std::optional<uint64_t> RebuildBlock(absl::Span<const std::byte> block, uint32_t sum, uint32_t crc32c,
                                     absl::Span<std::byte> bytes);

}  // namespace ballast::storage
