// A lock on a file that lasts exactly as long as the process that took the lock.
//
// Uses fcntl record locks. Unlike flock's, they are not inherited by a forked child, so a data loader that outlives its
// killed parent does not keep the rank; and the kernel tells the holder's process id. They belong to the process, not
// to the descriptor, and closing any descriptor of the file drops the lock. So a table lists the locks of this process,
// and nobody opens a file that is in it.
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
  // Returns the process that holds the lock of `path`, if any; 0 if the file system does not tell the process.
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
