// The disk without us: extents read, or written and synced, one behind the other, past the page cache.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ballast/storage/io/arena.h"
#include "ballast/storage/io/block_file.h"
#include "ballast/storage/io/io_queue.h"

namespace ballast::bench {

struct FileExtent {
  const storage::BlockFile* file = nullptr;
  uint64_t offset = 0, bytes = 0;  // multiples of 4096
};

// Blocks of at most 1 MiB, eight in flight. Threads: the one that made it.
class DiskAlone {
 public:
  static absl::StatusOr<DiskAlone> Make();
  // In the order given.
  absl::Status Read(absl::Span<const FileExtent> extents) { return Transfer(storage::IoRequest::Kind::kRead, extents); }
  // The file's first `bytes`, then fdatasync. What it held is lost.
  absl::Status WriteAndSync(const storage::BlockFile& file, uint64_t bytes);

 private:
  DiskAlone() = default;
  absl::Status Transfer(storage::IoRequest::Kind kind, absl::Span<const FileExtent> extents);

  storage::Arena buffers_;
  std::unique_ptr<storage::IoQueue> queue_;  // dies before the memory registered with it
};

}  // namespace ballast::bench
