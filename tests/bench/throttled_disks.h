// Disks of equal and known speed: loop devices over files, with an ext4 each, that blk-throttle holds to a rate. Needs
// root, losetup, mkfs.ext4, mount and the blkio controller, of cgroups 1 or 2.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace ballast::bench {

// Owns mounts, loop devices and the control group that this process is in meanwhile.
class ThrottledDisks {
 public:
  struct Options {
    int count = 2;
    uint64_t disk_bytes = 0;
    uint64_t bytes_per_s = 0;  // of reads, and as many of writes
  };
  // Everything lies in `directory`. UNAVAILABLE with the command that failed, after which nothing is left.
  static absl::StatusOr<std::unique_ptr<ThrottledDisks>> Make(const std::string& directory, const Options& options);
  ~ThrottledDisks();
  // Directories, one on each disk.
  const std::vector<std::string>& paths() const { return mounted_; }

 private:
  ThrottledDisks() = default;
  absl::Status AddDisk(const std::string& directory, int number, uint64_t bytes);
  absl::Status JoinGroup();
  absl::Status Throttle(const std::string& loop, uint64_t bytes_per_s) const;

  std::vector<std::string> loops_, mounted_;
  std::string group_, parent_;  // directories of the control groups
  bool unified_ = false;
};

}  // namespace ballast::bench
