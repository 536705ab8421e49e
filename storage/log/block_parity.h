// The parity of many blocks. If the disk does not return one of them as written, that block is rebuilt from the parity
// and the other blocks. A disk loses or changes single blocks far more often than several blocks of the same few MiB.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "absl/types/span.h"
#include "ballast/storage/io/block_file.h"

namespace ballast::storage {

// The XOR of all blocks of kIoAlignment bytes, the last block padded with zeros; and the sum of all 64-bit words. The
// sum checks a rebuilt block beside the CRC32C of the bytes: where several of a thousand blocks are damaged, 32 bits
// alone would accept a wrong rebuilt block in one case of four million. Threads: one.
class BlockParity {
 public:
  // Appends bytes. REQUIRES: every call but the last gives whole 64-bit words.
  void Add(absl::Span<const std::byte> bytes);

  bool empty() const { return block_ == nullptr; }
  // kIoAlignment bytes. REQUIRES: !empty().
  absl::Span<const std::byte> block() const;
  // The sum is never 0: 0 can stand for "no parity".
  uint32_t sum() const;

 private:
  static constexpr size_t kWords = kIoAlignment / sizeof(uint64_t);
  std::unique_ptr<std::array<uint64_t, kWords>> block_;
  size_t next_ = 0;  // word of the block
  uint64_t sum_ = 0;
};

// If a single block of `bytes` is damaged, rebuilds it and returns its index. Otherwise returns none and leaves `bytes`
// as they were. `block`, `sum`: from a BlockParity of the undamaged bytes; `crc32c`: of the undamaged bytes. The time
// grows with the square of the number of blocks: 0.2 s for 4 MiB.
std::optional<uint64_t> RebuildBlock(absl::Span<const std::byte> block, uint32_t sum, uint32_t crc32c,
                                     absl::Span<std::byte> bytes);

}  // namespace ballast::storage
