// Reads a log's file for a scan: heads and metas, which are there twice, and payloads.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ballast/storage/io/block_file.h"
#include "ballast/storage/log/batch_encoder.h"
#include "ballast/storage/log/log_format.h"
#include "ballast/storage/log/meta_reader.h"
#include "ballast/storage/memory/arena.h"

namespace ballast::storage {

// Counts the bytes read, and remembers which blocks the disk could not read: most disks report rot as EIO, but a block
// may be readable the next time, so an unreadable block is never taken for the end of the log. Threads: one.
class ScanReader {
 public:
  // Borrows `file`. `read_bytes` (may be null) grows in step with read_bytes().
  ScanReader(const BlockFile* file, std::atomic<uint64_t>* read_bytes) : file_(*file), told_(read_bytes) {}

  // Before all reads: the file's size, up to which bytes are counted.
  absl::StatusOr<uint64_t> Begin();
  // What follows is valid until the next call. INTERNAL (IO).
  absl::StatusOr<absl::Span<const std::byte>> Read(uint64_t offset, uint64_t bytes);
  // Reads one of two copies, and perhaps more, but not beyond `limit`. If the disk cannot read the copy: empty.
  absl::StatusOr<absl::Span<const std::byte>> ReadCopy(uint64_t offset, uint64_t bytes, uint64_t limit);
  // The segment's batch that begins at `offset`, if its first copy is whole.
  absl::StatusOr<std::optional<ReadBatch>> ReadBatchAt(uint64_t offset, uint64_t limit, const SegmentHead& segment);
  MetaReader& metas() { return metas_; }

  // Why ReadCopy could not read the first such block at or behind `offset`, or the one there. OK: there is none.
  absl::Status UnreadFrom(uint64_t offset) const;
  absl::Status UnreadAt(uint64_t offset) const;
  // A block that was read twice counts twice, up to the file's size.
  uint64_t read_bytes() const { return read_bytes_; }

 private:
  void Count(uint64_t bytes);

  const BlockFile& file_;
  std::atomic<uint64_t>* const told_;
  Arena buffer_;                                                        // of payloads, and of a search
  MetaReader metas_{&file_, [this](uint64_t bytes) { Count(bytes); }};  // of everything else
  uint64_t file_bytes_ = 0;
  uint64_t read_bytes_ = 0;
  std::map<uint64_t, absl::Status> unreadable_;  // by offset
};

}  // namespace ballast::storage
