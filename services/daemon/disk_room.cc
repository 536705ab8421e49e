#include "ballast/services/daemon/disk_room.h"

#include <sys/stat.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <filesystem>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ballast/services/monitoring/show.h"

namespace ballast::services {
namespace {

namespace fs = std::filesystem;

// Directories that share a file system.
struct SharedDisk {
  dev_t device = 0;
  std::string nearest;                   // a folder there
  std::vector<std::string> directories;  // each once
  uint64_t budget = 0;                   // of them all
  uint64_t beside = 0;                   // what the server needs beyond the budget
};

void AddDirectory(const std::string& directory, uint64_t budget, uint64_t beside, std::vector<SharedDisk>* disks) {
  const std::string nearest = NearestFolder(directory);
  struct stat info = {};
  (void)stat(nearest.c_str(), &info);
  auto disk =
      std::find_if(disks->begin(), disks->end(), [&](const SharedDisk& other) { return other.device == info.st_dev; });
  if (disk == disks->end()) disk = disks->insert(disks->end(), {info.st_dev, nearest, {}, 0, 0});
  const auto same = [&](const std::string& other) {
    std::error_code error;
    return other == directory || fs::equivalent(other, directory, error);
  };
  if (std::none_of(disk->directories.begin(), disk->directories.end(), same)) disk->directories.push_back(directory);
  disk->budget += budget;
  disk->beside += beside;
}

// Bytes on the disk of files that are a server's already.
uint64_t Occupied(const std::string& folder) {
  uint64_t bytes = 0;
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder, error)) {
    struct stat info = {};
    if (entry.is_regular_file(error) && lstat(entry.path().c_str(), &info) == 0) bytes += info.st_blocks * 512;
  }
  return bytes;
}

DiskAllowance Allowance(const SharedDisk& disk) {
  DiskAllowance allowance;
  allowance.wanted = absl::StrCat(ShowBytes(disk.budget), " (budget.nvme)");
  if (disk.beside > 0) absl::StrAppend(&allowance.wanted, " and ", ShowBytes(disk.beside));
  if (disk.directories.size() > 1) absl::StrAppend(&allowance.wanted, " in ", absl::StrJoin(disk.directories, " and "));
  struct statvfs info = {};
  if (statvfs(disk.nearest.c_str(), &info) != 0) {
    allowance.room = DiskRoom::kUnknown;
    allowance.found = absl::StrCat(disk.nearest, " cannot be asked");
    allowance.mend = "name another directory";
    return allowance;
  }
  uint64_t own = 0;
  for (const std::string& directory : disk.directories) own += Occupied(directory);
  const uint64_t free = info.f_bavail * info.f_frsize, room = free + own, wanted = disk.budget + disk.beside;
  allowance.found = absl::StrCat(ShowBytes(free), " on ", disk.nearest);
  if (own > 0) absl::StrAppend(&allowance.found, ", and ", ShowBytes(own), " are the server's already");
  if (room >= wanted) return allowance;
  allowance.room = DiskRoom::kTooLittle;
  allowance.mend = absl::StrCat("free ", ShowBytes(wanted - room), ", or budget.nvme: at most ",
                                ShowBytes(room - std::min(room, disk.beside)));
  return allowance;
}

}  // namespace

std::string NearestFolder(const std::string& folder) {
  std::error_code error;
  fs::path path = fs::absolute(folder, error);
  while (!fs::exists(path, error) && path != path.root_path()) path = path.parent_path();
  return path;
}

std::vector<DiskAllowance> AllowedDisks(const StateServerOptions& options) {
  std::vector<SharedDisk> disks;
  AddDirectory(options.data_directory, options.nvme_devices.empty() ? options.budget.nvme : 0, kCatalogBytes, &disks);
  for (const storage::NvmeDevice& device : options.nvme_devices) {
    AddDirectory(device.directory, device.budget, 0, &disks);
  }
  std::vector<DiskAllowance> allowances;
  for (const SharedDisk& disk : disks) allowances.push_back(Allowance(disk));
  return allowances;
}

}  // namespace ballast::services
