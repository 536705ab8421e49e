// The devices of the NVMe tier and their files: opens the files that are there, says why others are not, and makes
// further files.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "ballast/storage/io/disk.h"
#include "ballast/storage/tier/ledger.h"
#include "ballast/storage/tier/nvme_file.h"

namespace ballast::storage {

// Name of a device's file: "nvme.tier", then "nvme.tier.1".
std::string NvmeFilePath(absl::string_view directory, uint64_t number);
std::string ShowFileId(NvmeFileId id);

// Threads: one at a time. After Open the set of devices stays the same; files may only be added.
class NvmeDevices {
 public:
  struct Device {
    NvmeDevice options;
    size_t share = 0;
    std::vector<std::unique_ptr<NvmeFile>> files;
    double assigned = 0;  // bytes of extents and rooms so far, divided by the speed
    double speed = 1;
    bool missing = false;  // a file that entries name is not there
    bool extends = false;  // may get further files
    absl::Status foreign;  // OK, or why a file in the directory is not this server's, or cannot be read
  };

  NvmeDevices(const TiersOptions& options, Ledger* ledger, Disk* disk)
      : ledger_(ledger), disk_(disk), known_(options.known), file_bytes_max_(options.nvme_file_bytes_max) {}
  // As NvmeTier::Open. Once.
  absl::Status Open(const TiersOptions& options);
  // Use instead of Open: one device, over an empty file of the caller.
  void OpenOn(std::unique_ptr<BlockFile> file);

  const std::vector<std::unique_ptr<Device>>& all() const { return devices_; }
  // Null if no file has this id.
  NvmeFile* Find(NvmeFileId id) const;
  // OK, or why the file was not found.
  absl::Status CheckThere(NvmeFileId id) const;
  // Makes a further file with an id of its own. Blocks: once in kNvmeFileBytesMax.
  absl::Status Grow(Device* device);

 private:
  using Moved = std::vector<std::pair<NvmeFileId, std::string>>;  // files and their new paths
  void List(const TiersOptions& options);
  absl::Status FindFiles(Device* device);
  absl::Status TakeFile(Device* device, const std::string& path);
  absl::Status MissFiles(const TiersOptions& options, Device* device);
  // Extents to keep of files that no device has. True if one is of a file that nobody knows.
  bool MissKept(const std::vector<ExtentPlace>& kept);
  // Keeps the file's extents. The file may lie elsewhere than last time, if its new place takes them.
  absl::Status Keep(const std::vector<ExtentPlace>& kept, bool unnamed_stays, NvmeFile* file, Moved* moved);
  absl::Status NotThere(NvmeFileId id, absl::string_view why) const;
  void Miss(NvmeFileId id, absl::string_view why);
  void AddFile(Device* device, std::unique_ptr<BlockFile> file, NvmeFileId id);

  Ledger* const ledger_;
  Disk* const disk_;
  const KnownFiles known_;
  const uint64_t file_bytes_max_;
  std::vector<std::unique_ptr<Device>> devices_;
  std::map<NvmeFileId, absl::Status> missing_;
  std::set<std::string> damaged_;  // paths of files without readable first blocks
};

}  // namespace ballast::storage
