// The disk under a data directory, and how the kernel lets a server use it.
#include <fcntl.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <filesystem>
#include <map>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/services/daemon/disk_room.h"
#include "ballast/services/daemon/machine_files.h"
#include "ballast/services/monitoring/show.h"
#include "ballast/services/tools/doctor/checks.h"
#include "ballast/storage/io/disk.h"
#include "ballast/storage/io/io_queue.h"

namespace ballast::services {
namespace {

namespace fs = std::filesystem;

constexpr long kXfsMagic = 0x58465342;
constexpr long kNfsMagic = 0x6969;
constexpr long kCifsMagic = static_cast<long>(0xff534d42);
constexpr long kSmb2Magic = static_cast<long>(0xfe534d42);
constexpr long kFuseMagic = 0x65735546;
constexpr long kZfsMagic = 0x2fc12fc1;

Check CheckIoUring(const Subject& subject) {
  Check check{Verdict::kOk, "io_uring", storage::IoBackendProbe(), "io_uring"};
  if (check.found == "io_uring") return check;
  check.verdict = Verdict::kNote;
  const std::string status = ReadMachineFile(subject.root + "/proc/self/status");
  const std::string disabled = ReadMachineFile(subject.root + "/proc/sys/kernel/io_uring_disabled");
  if (!disabled.empty() && disabled != "0") {
    absl::StrAppend(&check.found, "; kernel.io_uring_disabled is ", disabled);
    check.mend = "sysctl kernel.io_uring_disabled=0";
  } else if (NumberAfter(status, "Seccomp:").value_or(0) == 2) {
    absl::StrAppend(&check.found, "; a seccomp filter is on");
    check.mend =
        "a profile that allows io_uring_setup, io_uring_enter and io_uring_register (deploy/seccomp): podman, "
        "docker: --security-opt seccomp=FILE; Kubernetes: seccompProfile.localhostProfile";
  } else if (IsWsl(subject.root)) {
    check.mend =
        "wsl --update (WSL 1: wsl --set-version DISTRIBUTION 2); if the kernel still has none, one built with "
        "CONFIG_IO_URING, named by kernel= under [wsl2] in %UserProfile%\\.wslconfig";
  } else {
    check.mend = "Linux 5.6 or later";
  }
  return check;
}

struct FileSystem {
  std::string name;
  std::string trouble;  // empty: a local disk
};
FileSystem FileSystemOf(const fs::path& folder) {
  static const std::map<long, FileSystem> kKnown = {
      {EXT4_SUPER_MAGIC, {"ext4", ""}},
      {kXfsMagic, {"xfs", ""}},
      {BTRFS_SUPER_MAGIC, {"btrfs", "copies each written block, which fragments nvme.tier"}},
      {kZfsMagic, {"zfs", "copies each written block, which fragments nvme.tier"}},
      {TMPFS_MAGIC, {"tmpfs", "is memory: durable jobs do not survive a restart of the machine"}},
      {RAMFS_MAGIC, {"ramfs", "is memory: durable jobs do not survive a restart of the machine"}},
      {OVERLAYFS_SUPER_MAGIC, {"overlayfs", "is deleted with its container"}},
      {kNfsMagic, {"nfs", "is a disk of another machine: slower, and two servers can take its locks"}},
      {kCifsMagic, {"cifs", "is a disk of another machine: slower, and two servers can take its locks"}},
      {kSmb2Magic, {"smb2", "is a disk of another machine: slower, and two servers can take its locks"}},
      {V9FS_MAGIC, {"9p", "is another system's, as Windows' drives under WSL: slow"}},
      {kFuseMagic, {"fuse", "runs in a process, which may be slow and may end"}},
  };
  struct statfs info = {};
  if (statfs(folder.c_str(), &info) != 0) return {"unknown", ""};
  const auto known = kKnown.find(static_cast<long>(info.f_type));
  return known != kKnown.end() ? known->second : FileSystem{absl::StrCat("type 0x", absl::Hex(info.f_type)), ""};
}

// Opens a file as the server does, and removes it.
Check CheckDirect(const fs::path& folder) {
  Check check{Verdict::kOk, "direct transfers", "O_DIRECT",
              absl::StrCat("O_DIRECT in blocks of ", storage::kIoAlignment, " bytes")};
  const std::string path = folder / absl::StrCat(".ballast-doctor-", getpid());
  const auto file = storage::SystemDisk()->Open(path, storage::Disk::Mode::kEmptied);
  unlink(path.c_str());
  if (!file.ok()) {
    check.verdict = Verdict::kBad;
    check.found = std::string(file.status().message());
    check.mend = absl::StrCat("mount ", folder.string(), " writable, or name another data_directory");
    return check;
  }
  struct statx info = {};
  if (statx((*file)->fd(), "", AT_EMPTY_PATH, STATX_DIOALIGN, &info) == 0 && (info.stx_mask & STATX_DIOALIGN) != 0) {
    absl::StrAppend(&check.found, " in blocks of ", info.stx_dio_offset_align, " bytes");
  }
  if ((*file)->buffered_because().empty()) return check;
  check.verdict = Verdict::kNote;
  check.found = (*file)->buffered_because() + "; through the page cache, at more CPU and memory";
  check.mend = "data_directory on ext4 or xfs, on a disk with blocks of at most 4096 bytes";
  return check;
}

void AddSpace(const StateServerOptions& options, Checks* checks) {
  for (const DiskAllowance& allowance : AllowedDisks(options)) {
    const Verdict verdict = allowance.room == DiskRoom::kEnough ? Verdict::kOk : Verdict::kBad;
    checks->push_back({verdict, "free space", allowance.found, allowance.wanted, allowance.mend});
  }
}

}  // namespace

Checks CheckDisk(const Subject& subject) {
  Checks checks = {CheckIoUring(subject)};
  if (!subject.config.has_value()) return checks;
  const std::string& directory = subject.config->server.data_directory;
  const fs::path nearest = NearestFolder(directory);
  Check data{Verdict::kOk, "data directory", nearest.string(), "a folder that this user may write"};
  std::error_code error;
  if (!fs::is_directory(nearest, error) || access(nearest.c_str(), W_OK | X_OK) != 0) {
    data.verdict = Verdict::kBad;
    data.found = absl::StrCat(nearest.string(), fs::is_directory(nearest, error)
                                                    ? absl::StrCat(": no right to write there for user ", geteuid())
                                                    : ": no folder");
    data.mend = absl::StrCat("install -d -o USER ", directory, "; or name another data_directory");
    checks.push_back(data);
    return checks;
  }
  if (nearest != fs::absolute(directory, error)) absl::StrAppend(&data.found, ", below which the server makes its own");
  checks.push_back(data);
  const FileSystem file_system = FileSystemOf(nearest);
  Check kind{Verdict::kOk, "file system", file_system.name, "ext4 or xfs on a local disk"};
  if (!file_system.trouble.empty()) {
    kind.verdict = Verdict::kNote;
    absl::StrAppend(&kind.found, ", which ", file_system.trouble);
    kind.mend = "data_directory on ext4 or xfs of a local NVMe disk";
  }
  checks.push_back(kind);
  checks.push_back(CheckDirect(nearest));
  AddSpace(subject.config->server, &checks);
  return checks;
}

}  // namespace ballast::services
