// Disk: files of extents on one or several devices. A device is a directory with a share of the budget; it has one
// file, and further files where the first became as long as a file may be. An extent lies in one file and knows it, so
// a version may go to another device than the one that the version before lies on.
//
// New extents are striped over the devices by their measured speeds; a version whose room is there already goes where
// the least is being written. A device that fails gets no new extents. Nothing of a device that is not there at start,
// or whose place another disk has taken, is created anew or freed while entries name it: TakeKept says so.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "ballast/storage/io/disk.h"
#include "ballast/storage/tier/ledger.h"
#include "ballast/storage/tier/nvme/device_header.h"
#include "ballast/storage/tier/nvme/nvme_file.h"

namespace ballast::storage {

// Name of a device's file: "nvme.tier", then "nvme.tier.1".
std::string NvmeFilePath(absl::string_view directory, uint64_t number);
std::string ShowFileId(NvmeFileId id);

// Promised space in any of the tier's files, with its share of the budgets: an extent made from a room finds its blocks
// on the disk. An extent needs a part in one piece, so a room of N times the largest extent, in N files, holds one.
class NvmeRoom {
 public:
  NvmeRoom() = default;
  NvmeRoom(FileRoom part) { Join(std::move(part)); }  // NOLINT(google-explicit-constructor)
  uint64_t bytes() const;
  void Mark(TierPart part);
  void Charge(const std::shared_ptr<Account>& account);
  // Splits `bytes` off into a room of their own, in one file if a part is so large. REQUIRES: bytes <= bytes().
  NvmeRoom Split(uint64_t bytes);
  // Adds a room, which becomes of the part of the tier, and of the account, that this room is of.
  void Join(NvmeRoom other);
  void Join(FileRoom part);
  // Ends the promise, and leaves the blocks to the next run of the server, which then finds them on a full disk too.
  void Leave();

 private:
  friend class NvmeTier;
  std::vector<FileRoom> parts_;  // of different files, none empty
};

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
  // OK, or why the file was not found at start.
  absl::Status CheckThere(NvmeFileId id) const;

  // `bytes` are rounded up to 4096. RESOURCE_EXHAUSTED: (BUDGET), or (DISK_FULL) if the disks themselves are full.
  // Either call may wait for a disk, and holds up no other call while it reserves blocks.
  absl::StatusOr<NvmeExtent> Allocate(uint64_t bytes, absl::string_view what);
  // As Allocate, for extents that are made later; until then the bytes are spare. `grain`: size of the extents, where
  // they are alike: parts are multiples of it.
  absl::StatusOr<NvmeRoom> Promise(uint64_t bytes, absl::string_view what, uint64_t grain = kGrainBytes);
  // Makes an extent of a part of `room`. REQUIRES: Holds(*room, bytes), a multiple of 4096. Errors:
  // NvmeFile::AllocateFrom's; then `room` is unchanged.
  absl::StatusOr<NvmeExtent> AllocateFrom(NvmeRoom* room, uint64_t bytes, absl::string_view what);
  // Has the room a part for an extent of `bytes`, on a device that does not fail? On any, where all fail.
  bool Holds(const NvmeRoom& room, uint64_t bytes) const;
  // Makes sure that Holds(*room, bytes): gets blocks in one file, and gives back as many of the room's other parts.
  // REQUIRES: bytes <= room->bytes(). Errors: Promise's.
  absl::Status Gather(NvmeRoom* room, uint64_t bytes, absl::string_view what);
  // Files that a room may have parts in.
  uint64_t file_count() const;

  // REQUIRES: CheckThere(id).
  const BlockFile& file(NvmeFileId id = 0) const;
  // As NvmeFile::Sync, for these files alone: another device's failure is no concern of theirs.
  absl::Status Sync(std::vector<NvmeFileId> ids);

 private:
  static constexpr uint64_t kGrainBytes = uint64_t{16} << 20;
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
  NvmeTier(const TiersOptions& options, Ledger* ledger, Disk* disk)
      : ledger_(ledger), disk_(disk), known_(options.known), file_bytes_max_(options.nvme_file_bytes_max) {}
  absl::Status OpenDevices(const TiersOptions& options);
  absl::Status FindFiles(Device* device) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status TakeFile(Device* device, const std::string& path) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status MissFiles(const TiersOptions& options, Device* device) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status NotThere(NvmeFileId id, absl::string_view why) const ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  void Miss(NvmeFileId id, absl::string_view why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AddFile(Device* device, std::unique_ptr<BlockFile> file, NvmeFileId id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Makes a further file with an id of its own. Blocks: once in kNvmeFileBytesMax.
  absl::Status Grow(Device* device) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  NvmeFile* Find(NvmeFileId id) const ABSL_SHARED_LOCKS_REQUIRED(mutex_);
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
  Disk* const disk_;
  const KnownFiles known_;
  const uint64_t file_bytes_max_;
  // Devices do not come or go, files come only.
  mutable absl::Mutex mutex_;
  std::vector<std::unique_ptr<Device>> devices_ ABSL_GUARDED_BY(mutex_);
  std::map<NvmeFileId, absl::Status> missing_ ABSL_GUARDED_BY(mutex_);
  std::set<std::string> damaged_ ABSL_GUARDED_BY(mutex_);  // paths of files without readable first blocks
};

}  // namespace ballast::storage
