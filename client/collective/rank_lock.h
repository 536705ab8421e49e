// A lock on a file that lasts exactly as long as the process that took it.
//
// fcntl record locks: unlike flock's, they are not inherited by a forked child, so a data loader that outlives its
// killed parent does not keep the rank; and they tell the holder's process id. They belong to the process, not to the
// descriptor, and closing any descriptor of the file drops them: so one table per process knows the locks held here.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>

#include "absl/status/statusor.h"

namespace ballast::client {

class RankLock {
 public:
  // Creates the file if needed; never removes it. Errors: ALREADY_EXISTS (RANK_TAKEN, names the holder's process), IO.
  static absl::StatusOr<RankLock> Take(const std::string& path);
  // The process that holds the lock of `path`, if any; 0 if the file system does not tell which.
  static std::optional<pid_t> Holder(const std::string& path);

  RankLock(RankLock&& other) noexcept;
  RankLock& operator=(RankLock&& other) = delete;
  ~RankLock();

 private:
  RankLock(std::string path, int fd);
  std::string path_;
  int fd_;
};

}  // namespace ballast::client
