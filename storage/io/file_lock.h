// Who may use a directory: an open-file-description lock on a file in it, with the holder's pid inside for people.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "ballast/storage/io/descriptor.h"

namespace ballast::storage {

// Locks the whole file behind `fd` until the descriptor is closed, also against other descriptors of this process.
// A process that was killed has its locks for as long as a transfer of its io_uring is under way, which may be after it
// was waited for. So whoever knows that no other process may use the file waits: once the lock is had, nothing that a
// dead one sent to the file can still arrive there.
// Threads: any; blocks for at most `wait_max`, and says so in the log after a second.
// Errors: FAILED_PRECONDITION (BUSY), another has it and kept it; INTERNAL (IO) otherwise.
absl::Status LockDescriptor(int fd, const std::string& path, absl::Duration wait_max);

// Held until destroyed; the kernel drops it when the process dies, whatever children of it live on.
class FileLock {
 public:
  // Creates `path` if needed; does not wait. FAILED_PRECONDITION (BUSY): `what` is in use, with the holder's pid;
  // INTERNAL (IO) otherwise.
  static absl::StatusOr<FileLock> Take(const std::string& path, const std::string& what);
  FileLock(FileLock&&) noexcept = default;
  FileLock& operator=(FileLock&&) = delete;

 private:
  explicit FileLock(int fd) : file_(fd) {}
  Descriptor file_;
};

}  // namespace ballast::storage
