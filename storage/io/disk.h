// Where a server's files lie: the machine's file systems, or a simulated disk in a test.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "ballast/storage/io/block_file.h"
#include "ballast/storage/io/io_queue.h"

namespace ballast::storage {

// Threads: any.
class Disk {
 public:
  enum class Mode {
    kEmptied,  // created if missing, locked against other openers, emptied. Open waits for a lock held elsewhere, for
               // 5 s on the system's disk, since a killed process may still hold it; then FAILED_PRECONDITION (BUSY)
    kKept,     // as kEmptied, but the content stays
    kShared,   // must exist, or INTERNAL (IO); not locked, the content stays
  };
  virtual ~Disk() = default;
  virtual absl::StatusOr<std::unique_ptr<BlockFile>> Open(const std::string& path, Mode mode) = 0;
  virtual bool Exists(const std::string& path) const;
  // On OK the file's directory entry and content are gone, durably. OK as well if there was no file.
  virtual absl::Status Remove(const std::string& path) = 0;
  // A queue for this disk's files. Errors: as MakeIoQueue's.
  virtual absl::StatusOr<std::unique_ptr<IoQueue>> MakeQueue(const IoQueueOptions& options) = 0;
};

// The file systems of this machine. A new file's directory entry is synced before Open returns.
Disk* SystemDisk();

}  // namespace ballast::storage
