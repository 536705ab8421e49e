// Disk: files of extents on one or several devices. A device is a directory with a share of the budget; it has one
// file, and further files where the first became as long as a file may be. An extent lies in one file and knows it, so
// a version may go to another device than the one that the version before lies on.
//
// New extents are striped over the devices by their measured speeds; a version whose room is there already goes where
// the least is being written. A device that fails gets no new extents. If a device is missing at start, or another disk
// is in its place, the tier neither recreates its files nor frees its extents while entries name them: TakeKept returns
// an error for these.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "ballast/storage/io/disk.h"
#include "ballast/storage/tier/ledger.h"
#include "ballast/storage/tier/nvme_devices.h"
#include "ballast/storage/tier/nvme_file.h"
#include "ballast/storage/tier/nvme_room.h"

namespace ballast::storage {

// Threads: any.
class NvmeTier {
 public:
  // Opens the files of `options.devices`, or creates them. `options.kept`: extents whose content must stay; TakeKept
  // hands them out, except as NvmeFile::Keep says. A device whose directory or file is missing, or has been replaced by
  // another, stays closed if `kept` names one of its files, and its share leaves the budget. Otherwise INVALID_ARGUMENT
  // (BAD_CONFIG) for a directory that is not there, DATA_LOSS (IO) for a file that is not this server's. INTERNAL (IO)
  // if a file cannot be written; FAILED_PRECONDITION (BUSY) if another server has it; RESOURCE_EXHAUSTED (BUDGET) if
  // the kept extents exceed a share.
  static absl::StatusOr<std::unique_ptr<NvmeTier>> Open(const TiersOptions& options, Ledger* ledger, Disk* disk);
  // A tier over an empty file of the caller's.
  static std::unique_ptr<NvmeTier> OpenOn(std::unique_ptr<BlockFile> file, Ledger* ledger);
  // As NvmeFile::Trim, of all files.
  absl::Status Trim();
  // INTERNAL (IO) if the file's device is not there, with the path and what to do, DATA_LOSS (IO) if the file is there
  // without its first blocks; DATA_LOSS (IO) as NvmeFile::TakeKept.
  absl::StatusOr<NvmeExtent> TakeKept(uint64_t offset, NvmeFileId id = 0);
  // Frees a kept extent that no job takes. REQUIRES: no entry that a restart looks at names it. Errors: TakeKept's.
  absl::Status FreeKept(uint64_t offset, NvmeFileId id = 0) { return TakeKept(offset, id).status(); }
  // OK, or why the file was not found at start.
  absl::Status CheckThere(NvmeFileId id) const;

  // `bytes` are rounded up to 4096. RESOURCE_EXHAUSTED: (BUDGET), or (DISK_FULL) if the disks themselves are full.
  // Either call may wait for a disk, and holds up no other call while it reserves blocks.
  absl::StatusOr<NvmeExtent> Allocate(uint64_t bytes, absl::string_view what);
  // As Allocate, for extents that are made later; until then the bytes are spare. `grain`: parts of the room are
  // multiples of it; the size of the extents if all have the same.
  absl::StatusOr<NvmeRoom> Promise(uint64_t bytes, absl::string_view what, uint64_t grain = kGrainBytes);
  // Makes an extent of a part of `room`. REQUIRES: Holds(*room, bytes), a multiple of 4096. Errors:
  // NvmeFile::AllocateFrom's; then `room` is unchanged.
  absl::StatusOr<NvmeExtent> AllocateFrom(NvmeRoom* room, uint64_t bytes, absl::string_view what);
  // Whether the room has a part for an extent of `bytes`, on a device that does not fail; if all fail, on any device.
  bool Holds(const NvmeRoom& room, uint64_t bytes) const;
  // Makes Holds(*room, bytes) true: reserves `bytes` in one file, and releases as many from the room's other parts.
  // REQUIRES: bytes <= room->bytes(). Errors: Promise's.
  absl::Status Gather(NvmeRoom* room, uint64_t bytes, absl::string_view what);
  // Files that a room may have parts in.
  uint64_t file_count() const;

  // REQUIRES, for both: CheckThere(id). `home`: to rewrite what lies there.
  const BlockFile& file(NvmeFileId id = 0) const;
  NvmeFile* home(NvmeFileId id) { return FindFile(id); }
  // As NvmeFile::Sync, for these files alone: another device's failure does not matter to them.
  absl::Status Sync(std::vector<NvmeFileId> ids);

 private:
  static constexpr uint64_t kGrainBytes = uint64_t{16} << 20;
  using Device = NvmeDevices::Device;
  NvmeTier(const TiersOptions& options, Ledger* ledger, Disk* disk)
      : ledger_(ledger), file_bytes_max_(options.nvme_file_bytes_max), devices_(options, ledger, disk) {}
  NvmeFile* FindFile(NvmeFileId id) const ABSL_LOCKS_EXCLUDED(mutex_);
  std::vector<NvmeFile*> Files() const ABSL_LOCKS_EXCLUDED(mutex_);
  // Devices with `bytes` free in their share, the one first that is to get the next bytes.
  std::vector<Device*> Candidates(uint64_t bytes) const ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  // A room in one file; of the device, or of the first device that has it.
  absl::StatusOr<FileRoom> PromiseOn(Device* device, uint64_t bytes, absl::string_view what, FileSpace::Shape shape)
      ABSL_LOCKS_EXCLUDED(mutex_);
  absl::StatusOr<FileRoom> PromiseAnywhere(uint64_t bytes, absl::string_view what, FileSpace::Shape shape)
      ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status Short(uint64_t bytes, absl::string_view what) const;
  double SpeedOf(const NvmeFile& file) const ABSL_LOCKS_EXCLUDED(mutex_);

  Ledger* const ledger_;
  const uint64_t file_bytes_max_;
  mutable absl::Mutex mutex_;
  NvmeDevices devices_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ballast::storage
