// Disk: a file of extents. At start the tier keeps the extents with state of durable jobs; all other space is free.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "ballast/storage/io/block_file.h"
#include "ballast/storage/io/disk.h"
#include "ballast/storage/tier/ledger.h"
#include "ballast/storage/tier/space/file_space.h"

namespace ballast::storage {

class NvmeTier;

// Promised space of the file, with its share of the budget: an extent made from a room finds its blocks on the disk.
class NvmeRoom {
 public:
  NvmeRoom() = default;
  NvmeRoom(NvmeTier* tier, BudgetLease lease) : tier_(tier), lease_(std::move(lease)) {}
  NvmeRoom(NvmeRoom&& other) noexcept { *this = std::move(other); }
  NvmeRoom& operator=(NvmeRoom&& other) noexcept;
  ~NvmeRoom() { Release(FileSpace::Blocks::kGiveBack); }
  uint64_t bytes() const { return lease_.bytes(); }
  void Mark(TierPart part) { lease_.Mark(part); }
  // Splits `bytes` off into a room of their own. REQUIRES: bytes <= bytes().
  NvmeRoom Split(uint64_t bytes) { return {tier_, lease_.Split(bytes)}; }
  // Adds a room of the same tier, which becomes of the same part.
  void Join(NvmeRoom other);
  // Ends the promise, and leaves the blocks to the next run of the server, which then finds them on a full disk too.
  void Leave() { Release(FileSpace::Blocks::kStay); }

 private:
  friend class NvmeTier;
  void Release(FileSpace::Blocks blocks);
  NvmeTier* tier_ = nullptr;
  BudgetLease lease_;
};

// A part of the file that has its blocks, with its share of the budget. Its initial content is undefined.
class NvmeExtent {
 public:
  NvmeExtent() = default;
  NvmeExtent(NvmeTier* tier, uint64_t offset, BudgetLease lease)
      : tier_(tier), offset_(offset), lease_(std::move(lease)) {}
  NvmeExtent(NvmeExtent&& other) noexcept { *this = std::move(other); }
  NvmeExtent& operator=(NvmeExtent&& other) noexcept;
  ~NvmeExtent() { Release(); }
  uint64_t offset() const { return offset_; }
  uint64_t bytes() const { return lease_.bytes(); }
  void Mark(TierPart part) { lease_.Mark(part); }
  // Frees the extent; its space, blocks and budget, is promised to the caller.
  NvmeRoom TakeRoom();
  // Returns the extent to the tier as a kept extent: the content stays, for the next run of the server.
  void Leave();

 private:
  friend class NvmeTier;
  ByteRange range() const { return {offset_, offset_ + bytes()}; }
  void Release();
  NvmeTier* tier_ = nullptr;
  uint64_t offset_ = 0;
  BudgetLease lease_;
};

// Threads: any.
class NvmeTier {
 public:
  ~NvmeTier();  // kept extents that nobody took stay on the disk
  // Opens `directory`/nvme.tier, or creates it. INTERNAL (IO) if the file cannot be written; FAILED_PRECONDITION (BUSY)
  // if another server has the file.
  // `options.kept`: extents whose content must stay; TakeKept hands them out. Extents that overlap stay on the disk,
  // but TakeKept refuses them, like extents outside the file. RESOURCE_EXHAUSTED (BUDGET) if the kept extents exceed
  // the budget.
  static absl::StatusOr<std::unique_ptr<NvmeTier>> Open(const TiersOptions& options, Ledger* ledger, Disk* disk);
  // A tier over an empty file of the caller's.
  static std::unique_ptr<NvmeTier> OpenOn(std::unique_ptr<BlockFile> file, Ledger* ledger);
  // Returns the space behind the last extent to the disk. Call only after all wanted state was found: state that no
  // entry names may lie there.
  absl::Status Trim();
  // DATA_LOSS (IO) unless the extent was kept and has not been taken since.
  absl::StatusOr<NvmeExtent> TakeKept(uint64_t offset);

  // `bytes` are rounded up to 4096. RESOURCE_EXHAUSTED: (BUDGET), or (DISK_FULL) if the disk itself is full. Either
  // call may wait for the disk, and holds up no other call while it reserves blocks.
  absl::StatusOr<NvmeExtent> Allocate(uint64_t bytes, absl::string_view what);
  // As Allocate, for extents that are made later; until then the bytes are spare.
  absl::StatusOr<NvmeRoom> Promise(uint64_t bytes, absl::string_view what) {
    return Promise(bytes, what, FileSpace::Shape::kAnyPieces);
  }
  // Makes an extent of a part of `room`. REQUIRES: `bytes` <= room->bytes(), a multiple of 4096. After an error `room`
  // is unchanged. A full disk is no error, unless another program took what FileSpace had just given back to the disk.
  // Only if the room's blocks lie in fragments, the call reserves others, and all calls of the tier wait meanwhile; on
  // a full disk the call waits for promises in the making.
  absl::StatusOr<NvmeExtent> AllocateFrom(NvmeRoom* room, uint64_t bytes, absl::string_view what);
  const BlockFile& file() const { return *file_; }
  // As SharedSync, for any of the jobs that share the file.
  absl::Status Sync() { return sync_.Sync(); }

 private:
  friend class NvmeExtent;
  friend class NvmeRoom;
  NvmeTier(std::unique_ptr<BlockFile> file, Ledger* ledger)
      : file_(std::move(file)), ledger_(ledger), sync_(file_.get()), space_(file_.get()) {}
  absl::Status Keep(std::vector<ExtentPlace> kept, bool unnamed_stays);
  void KeepAgain(NvmeExtent extent);
  absl::StatusOr<NvmeRoom> Promise(uint64_t bytes, absl::string_view what, FileSpace::Shape shape)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Promises `bytes`, which have blocks then.
  absl::Status Reserve(uint64_t bytes, FileSpace::Shape shape) ABSL_LOCKS_EXCLUDED(mutex_);
  // Bytes of blocks that nobody uses, and that may stay on the disk within the budget.
  uint64_t UnusedMax() const;

  const std::unique_ptr<BlockFile> file_;
  Ledger* const ledger_;
  SharedSync sync_;
  absl::Mutex mutex_;
  FileSpace space_ ABSL_GUARDED_BY(mutex_);
  std::map<uint64_t, NvmeExtent> kept_ ABSL_GUARDED_BY(mutex_);
  std::vector<NvmeExtent> disputed_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ballast::storage
