#include "ballast/tests/bench/throttled_disks.h"

#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "ballast/proto/base/status.h"

namespace ballast::bench {
namespace {

namespace fs = std::filesystem;

// The command's output.
absl::StatusOr<std::string> Run(const std::string& command) {
  FILE* const pipe = popen(absl::StrCat(command, " 2>&1").c_str(), "r");
  if (pipe == nullptr) return absl::UnavailableError(absl::StrCat("`", command, "` cannot be run"));
  std::string output;
  char part[256];
  while (std::fgets(part, sizeof(part), pipe) != nullptr) output += part;
  output = std::string(absl::StripAsciiWhitespace(output));
  if (pclose(pipe) == 0) return output;
  return absl::UnavailableError(absl::StrCat("`", command, "`: ", output));
}

absl::Status WriteTo(const std::string& path, const std::string& text) {
  std::ofstream file(path);
  file << text;
  file.close();
  if (file.good()) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("'", text, "' cannot be written to ", path));
}

// This process's group below the mount of a hierarchy: the path in the line of /proc/self/cgroup with these
// controllers.
std::string OwnGroup(const std::string& controllers) {
  std::ifstream lines("/proc/self/cgroup");
  for (std::string line; std::getline(lines, line);) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second != std::string::npos && line.substr(first + 1, second - first - 1) == controllers) {
      return line.substr(second + 1);
    }
  }
  return "/";
}

}  // namespace

absl::StatusOr<std::unique_ptr<ThrottledDisks>> ThrottledDisks::Make(const std::string& directory,
                                                                     const Options& options) {
  std::unique_ptr<ThrottledDisks> disks(new ThrottledDisks);
  BALLAST_RETURN_IF_ERROR(disks->JoinGroup());
  for (int i = 0; i < options.count; ++i) {
    BALLAST_RETURN_IF_ERROR(disks->AddDisk(directory, i, options.disk_bytes));
    BALLAST_RETURN_IF_ERROR(disks->Throttle(disks->loops_.back(), options.bytes_per_s));
  }
  return disks;
}

absl::Status ThrottledDisks::AddDisk(const std::string& directory, int number, uint64_t bytes) {
  const std::string image = absl::StrCat(directory, "/disk-", number, ".image");
  const std::string mount = absl::StrCat(directory, "/disk-", number);
  BALLAST_RETURN_IF_ERROR(Run(absl::StrCat("fallocate -l ", bytes, " ", image)).status());
  BALLAST_ASSIGN_OR_RETURN(const std::string loop, Run(absl::StrCat("losetup --find --show --direct-io=on ", image)));
  loops_.push_back(loop);
  BALLAST_RETURN_IF_ERROR(Run(absl::StrCat("mkfs.ext4 -q -E nodiscard ", loop)).status());
  fs::create_directories(mount);
  BALLAST_RETURN_IF_ERROR(Run(absl::StrCat("mount ", loop, " ", mount)).status());
  mounted_.push_back(mount);
  return absl::OkStatus();
}

absl::Status ThrottledDisks::JoinGroup() {
  const std::string first = "/sys/fs/cgroup/blkio", second = "/sys/fs/cgroup";
  unified_ = !fs::exists(first);
  parent_ = unified_ ? second + OwnGroup("") : first + OwnGroup("blkio");
  if (unified_) BALLAST_RETURN_IF_ERROR(WriteTo(second + "/cgroup.subtree_control", "+io"));
  const std::string group = absl::StrCat(unified_ ? second : first, "/ballast-bench-", getpid());
  std::error_code error;
  fs::create_directory(group, error);
  if (error) return absl::UnavailableError(absl::StrCat(group, ": ", error.message()));
  group_ = group;
  return WriteTo(group_ + "/cgroup.procs", absl::StrCat(getpid()));
}

absl::Status ThrottledDisks::Throttle(const std::string& loop, uint64_t bytes_per_s) const {
  struct stat info;
  if (stat(loop.c_str(), &info) != 0) return absl::UnavailableError(absl::StrCat(loop, " is not there"));
  const std::string device = absl::StrCat(major(info.st_rdev), ":", minor(info.st_rdev));
  if (unified_) {
    return WriteTo(group_ + "/io.max", absl::StrCat(device, " rbps=", bytes_per_s, " wbps=", bytes_per_s));
  }
  const std::string rate = absl::StrCat(device, " ", bytes_per_s);
  BALLAST_RETURN_IF_ERROR(WriteTo(group_ + "/blkio.throttle.read_bps_device", rate));
  return WriteTo(group_ + "/blkio.throttle.write_bps_device", rate);
}

ThrottledDisks::~ThrottledDisks() {
  for (const std::string& mount : mounted_) (void)Run("umount " + mount);
  for (const std::string& loop : loops_) (void)Run("losetup --detach " + loop);
  if (group_.empty()) return;
  (void)WriteTo(parent_ + "/cgroup.procs", absl::StrCat(getpid()));
  std::error_code ignored;
  fs::remove(group_, ignored);
}

}  // namespace ballast::bench
