#include "ballast/storage/io/file_lock.h"

#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <fstream>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ballast/proto/base/status.h"
#include "ballast/storage/io/block_file.h"

namespace ballast::storage {

namespace {

constexpr absl::Duration kLockPoll = absl::Milliseconds(5);  // F_OFD_SETLKW has no deadline
constexpr absl::Duration kSilentWait = absl::Seconds(1);
// Waits for a holder that ends; for one that does not look so (yet).
constexpr absl::Duration kEndingMax = absl::Seconds(10), kKilledMax = absl::Milliseconds(500);

// 0, or the errno.
int TryLock(int fd) {
  struct flock whole = {};
  whole.l_type = F_WRLCK;
  whole.l_whence = SEEK_SET;
  return fcntl(fd, F_OFD_SETLK, &whole) == 0 ? 0 : errno;
}

// The process that holds a FileLock, by what it wrote into the file; empty if it has not yet.
std::string HolderOf(int fd) {
  char text[32] = {};
  const ssize_t length = pread(fd, text, sizeof(text) - 1, 0);
  return std::string(absl::StripAsciiWhitespace(absl::string_view(text, length > 0 ? length : 0)));
}

// Has the process ended, or does it only give back its memory any more?
bool IsEnding(const std::string& pid) {
  std::ifstream command(absl::StrCat("/proc/", pid, "/cmdline"));
  return !command.is_open() || command.peek() == std::ifstream::traits_type::eof();
}

// A process that was killed has its lock for a moment, or for as long as its memory takes to be given back.
absl::Status LockOnceTheDeadHaveLeft(int fd, const std::string& path) {
  const absl::Time began = absl::Now();
  absl::Status locked = LockDescriptor(fd, path, absl::ZeroDuration());
  while (absl::IsFailedPrecondition(locked)) {
    const std::string holder = HolderOf(fd);
    const bool mine = holder == absl::StrCat(getpid());
    if (mine || absl::Now() - began > (IsEnding(holder) ? kEndingMax : kKilledMax)) break;
    locked = LockDescriptor(fd, path, kLockPoll);
  }
  return locked;
}

}  // namespace

absl::Status LockDescriptor(int fd, const std::string& path, absl::Duration wait_max) {
  const auto began = std::chrono::steady_clock::now();
  bool said = false;
  int error = 0;
  while ((error = TryLock(fd)) != 0) {
    if (error != EAGAIN && error != EACCES) return IoError(error, "lock", path, 0, 0);
    const absl::Duration waited = absl::FromChrono(std::chrono::steady_clock::now() - began);
    if (waited >= wait_max) break;
    if (waited >= kSilentWait && !said) {
      spdlog::warn("{} is locked: waiting for at most {} until the transfers of a process that died are over", path,
                   absl::FormatDuration(wait_max));
      said = true;
    }
    absl::SleepFor(std::min(kLockPoll, wait_max - waited));
  }
  if (error == 0) return absl::OkStatus();
  const std::string waited =
      wait_max > absl::ZeroDuration()
          ? absl::StrCat(": its lock was not free within ", absl::FormatDuration(wait_max),
                         ", in which transfers of a process that died would have ended; see who has it open")
          : "";
  return model::Error(absl::StatusCode::kFailedPrecondition, model::kBusy, absl::StrCat(path, " is in use", waited));
}

absl::StatusOr<FileLock> FileLock::Take(const std::string& path, const std::string& what) {
  const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (fd < 0) return IoError(errno, "open", path, 0, 0);
  FileLock lock(fd);
  if (const absl::Status locked = LockOnceTheDeadHaveLeft(fd, path); !locked.ok()) {
    if (locked.code() != absl::StatusCode::kFailedPrecondition) return locked;
    const std::string pid = HolderOf(fd);
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

}  // namespace ballast::storage
