// Who may use a directory: an open-file-description lock on a file in it, with the holder's pid inside for people.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ballast::storage {

// Locks the whole file behind `fd` until the descriptor is closed, also against other descriptors of this process.
// FAILED_PRECONDITION (BUSY) if another has it.
absl::Status LockDescriptor(int fd, const std::string& path);

// Held until destroyed; the kernel drops it when the process dies.
class FileLock {
 public:
  // Creates `path` if needed. FAILED_PRECONDITION (BUSY): `what` is in use, with the holder's pid; INTERNAL (IO)
  // otherwise.
  static absl::StatusOr<FileLock> Take(const std::string& path, const std::string& what);
  FileLock(FileLock&& other) noexcept : fd_(other.fd_) { other.fd_ = -1; }
  FileLock& operator=(FileLock&&) = delete;
  ~FileLock();

 private:
  explicit FileLock(int fd) : fd_(fd) {}
  int fd_;
};

}  // namespace ballast::storage
