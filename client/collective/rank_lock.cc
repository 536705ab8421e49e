#include "ballast/client/collective/rank_lock.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/base/attributes.h"
#include "absl/base/const_init.h"
#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/synchronization/mutex.h"
#include "ballast/proto/base/status.h"

namespace ballast::client {
namespace {

ABSL_CONST_INIT absl::Mutex held_mutex(absl::kConstInit);

// Path -> process that took the lock: after a fork the child finds its parent's id, not its own.
absl::flat_hash_map<std::string, pid_t>& Held() ABSL_EXCLUSIVE_LOCKS_REQUIRED(held_mutex) {
  static auto* const held = new absl::flat_hash_map<std::string, pid_t>;
  return *held;
}

bool HeldHere(const std::string& path) ABSL_EXCLUSIVE_LOCKS_REQUIRED(held_mutex) {
  const auto it = Held().find(path);
  return it != Held().end() && it->second == getpid();
}

struct flock WholeFile() {
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  return lock;
}

std::optional<pid_t> HolderOf(int fd) {
  struct flock lock = WholeFile();
  if (fcntl(fd, F_GETLK, &lock) != 0 || lock.l_type == F_UNLCK) return std::nullopt;
  return lock.l_pid > 0 ? lock.l_pid : 0;
}

absl::Status Taken(const std::string& path, pid_t holder) {
  return model::Error(absl::StatusCode::kAlreadyExists, model::kRankTaken,
                      absl::StrCat(path, " is held by ",
                                   holder == 0 ? "a process of another machine" : absl::StrCat("process ", holder),
                                   "; expected one process per rank: stop that one, or give this one another rank"));
}

absl::Status IoError(absl::string_view what, const std::string& path) {
  return model::Error(absl::StatusCode::kInternal, model::kIo,
                      absl::StrCat(what, " ", path, ": ", std::strerror(errno)));
}

}  // namespace

RankLock::RankLock(std::string path, int fd) : path_(std::move(path)), fd_(fd) {}

RankLock::RankLock(RankLock&& other) noexcept : path_(std::move(other.path_)), fd_(std::exchange(other.fd_, -1)) {}

RankLock::~RankLock() {
  if (fd_ < 0) return;
  absl::MutexLock lock(&held_mutex);
  // In a forked child the table's entry is the parent's.
  if (HeldHere(path_)) Held().erase(path_);
  close(fd_);
}

absl::StatusOr<RankLock> RankLock::Take(const std::string& path) {
  absl::MutexLock mutex_lock(&held_mutex);
  if (HeldHere(path)) return Taken(path, getpid());
  const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (fd < 0) return IoError("cannot open", path);
  // More than one round only if a holder lets go between the two questions.
  for (;;) {
    struct flock lock = WholeFile();
    if (fcntl(fd, F_SETLK, &lock) == 0) break;
    if (errno != EACCES && errno != EAGAIN && errno != EINTR) {
      const absl::Status status = IoError("cannot lock", path);
      close(fd);
      return status;
    }
    if (const std::optional<pid_t> holder = HolderOf(fd); holder.has_value()) {
      close(fd);
      return Taken(path, *holder);
    }
  }
  Held()[path] = getpid();
  return RankLock(path, fd);
}

std::optional<pid_t> RankLock::Holder(const std::string& path) {
  absl::MutexLock mutex_lock(&held_mutex);
  if (HeldHere(path)) return getpid();
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return std::nullopt;
  const std::optional<pid_t> holder = HolderOf(fd);
  close(fd);
  return holder;
}

}  // namespace ballast::client
