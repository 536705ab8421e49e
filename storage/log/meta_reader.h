// Reads the metas of batches from a log's file: heads of segments and batches, and small records.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <functional>
#include <optional>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ballast/storage/io/block_file.h"
#include "ballast/storage/log/batch_encoder.h"
#include "ballast/storage/log/log_format.h"

namespace ballast::storage {

// A large read brings many metas where little lies between them, as with small slices. Where large slices lie between
// metas, a read is as large as both copies of a usual meta. Threads: one.
class MetaReader {
 public:
  static constexpr uint64_t kWindowBytes = uint64_t{1} << 20;
  // Largest distance of a meta from the last meta for a large read.
  static constexpr uint64_t kCloseBytes = kWindowBytes / 8;

  // Borrows `file`. `count`: told of the bytes of each read; may be empty.
  explicit MetaReader(const BlockFile* file, std::function<void(uint64_t bytes)> count = {})
      : file_(file), count_(std::move(count)), window_(nullptr, std::free) {}

  // Blocks [offset, offset + bytes) of the file, valid until the next call. Reads nothing at or behind `limit` that was
  // not asked for. INTERNAL (IO).
  absl::StatusOr<absl::Span<const std::byte>> Read(uint64_t offset, uint64_t bytes, uint64_t limit);

 private:
  absl::Status Fill(uint64_t offset, uint64_t bytes);

  const BlockFile* file_;
  std::function<void(uint64_t)> count_;
  LogMemory window_;
  uint64_t window_bytes_ = 0;   // grows with the largest read
  uint64_t at_ = 0, held_ = 0;  // the window's bytes in the file
  uint64_t last_ = 0;           // offset of the last call
};

// Reads a batch from the first whole copy of its meta. `which`: offset, meta_bytes, number, incarnation and salt; what
// lies there and differs in one of them was left by an earlier life of the segment. None if neither copy is whole.
// INTERNAL (IO) if neither is whole and the disk cannot read both. `limit`: the end of its segment in the file.
absl::StatusOr<std::optional<ReadBatch>> ReadBatchOf(MetaReader* reader, const BatchHead& which, uint64_t limit);

}  // namespace ballast::storage
