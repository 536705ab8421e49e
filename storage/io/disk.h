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
    // Creates the file if it is missing, locks it against other openers, and empties it. If another opener holds the
    // lock, Open waits, because a killed process may still hold it. On the system's disk it waits 5 s, then returns
    // FAILED_PRECONDITION (BUSY).
    kEmptied,
    kKept,    // the same, but keeps the content
    kShared,  // opens without a lock and keeps the content; INTERNAL (IO) if there is no file
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
