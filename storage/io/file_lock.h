// Locks a directory for a process: an open-file-description lock on a file in the directory. The file holds the
// process's pid, for people.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "ballast/proto/base/descriptor.h"

namespace ballast::storage {

// Locks the whole file behind `fd` until the descriptor is closed, also against other descriptors of this process.
// A killed process keeps its locks while a transfer of its io_uring is under way, perhaps even after its parent has
// waited for it. So a caller that knows that no living process uses the file should wait: once the caller has the lock,
// no write of the dead process can reach the file.
// Threads: any; blocks for at most `wait_max`, and says so in the log after a second.
// Errors: FAILED_PRECONDITION (BUSY) if another opener kept the lock; INTERNAL (IO) otherwise.
absl::Status LockDescriptor(int fd, const std::string& path, absl::Duration wait_max);

// A lock held until destroyed; the kernel drops the lock when the process dies, even if children live on.
class FileLock {
 public:
  // Creates `path` if needed. Waits half a second for another process that holds the lock, and 10 s for one that ends:
  // a server that was killed may be started again at once. FAILED_PRECONDITION (BUSY): `what` is in use, with the
  // holder's pid; INTERNAL (IO) otherwise.
  static absl::StatusOr<FileLock> Take(const std::string& path, const std::string& what);
  FileLock(FileLock&&) noexcept = default;
  FileLock& operator=(FileLock&&) = delete;

 private:
  explicit FileLock(int fd) : file_(fd) {}
  model::Descriptor file_;
};

}  // namespace ballast::storage
