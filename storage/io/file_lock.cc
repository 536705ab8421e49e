#include "ballast/storage/io/file_lock.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "ballast/proto/model/status.h"
#include "ballast/storage/io/block_file.h"

namespace ballast::storage {

absl::Status LockDescriptor(int fd, const std::string& path) {
  struct flock whole = {};
  whole.l_type = F_WRLCK;
  whole.l_whence = SEEK_SET;
  if (fcntl(fd, F_OFD_SETLK, &whole) == 0) return absl::OkStatus();
  if (errno != EAGAIN && errno != EACCES) return IoError(errno, "lock", path, 0, 0);
  return model::Error(absl::StatusCode::kFailedPrecondition, model::kBusy, absl::StrCat(path, " is in use"));
}

absl::StatusOr<FileLock> FileLock::Take(const std::string& path, const std::string& what) {
  const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (fd < 0) return IoError(errno, "open", path, 0, 0);
  FileLock lock(fd);
  if (const absl::Status locked = LockDescriptor(fd, path); !locked.ok()) {
    if (locked.code() != absl::StatusCode::kFailedPrecondition) return locked;
    char holder[32] = {};
    const ssize_t length = pread(fd, holder, sizeof(holder) - 1, 0);
    const absl::string_view pid = absl::StripAsciiWhitespace(absl::string_view(holder, length > 0 ? length : 0));
    return model::Error(absl::StatusCode::kFailedPrecondition, model::kBusy,
                        absl::StrCat(what, " is in use by process ", pid.empty() ? "(starting)" : pid,
                                     "; stop it, or choose another one"));
  }
  const std::string pid = absl::StrCat(getpid(), "\n");
  if (ftruncate(fd, 0) != 0 || pwrite(fd, pid.data(), pid.size(), 0) != static_cast<ssize_t>(pid.size())) {
    return IoError(errno, "write", path, 0, pid.size());
  }
  return lock;
}

FileLock::~FileLock() {
  if (fd_ >= 0) close(fd_);
}

}  // namespace ballast::storage
