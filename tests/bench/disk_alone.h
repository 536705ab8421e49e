// The speed of the disk alone: reads extents one after another, or writes and syncs a file, with direct I/O.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ballast/storage/io/block_file.h"
#include "ballast/storage/io/io_queue.h"
#include "ballast/storage/memory/arena.h"

namespace ballast::bench {

struct FileExtent {
  const storage::BlockFile* file = nullptr;
  uint64_t offset = 0, bytes = 0;  // multiples of 4096
};

// Transfers blocks of at most 1 MiB, eight in flight. Threads: only the thread that called Make.
class DiskAlone {
 public:
  static absl::StatusOr<DiskAlone> Make();
  // Reads `extents` in the given order.
  absl::Status Read(absl::Span<const FileExtent> extents) { return Transfer(storage::IoRequest::Kind::kRead, extents); }
  // Overwrites the file's first `bytes`, then calls fdatasync. The old content is lost.
  absl::Status WriteAndSync(const storage::BlockFile& file, uint64_t bytes);

 private:
  DiskAlone() = default;
  absl::Status Transfer(storage::IoRequest::Kind kind, absl::Span<const FileExtent> extents);

  storage::Arena buffers_;
  std::unique_ptr<storage::IoQueue> queue_;  // destroyed before its registered memory
};

}  // namespace ballast::bench
