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
#include "ballast/storage/io/disk.h"
#include "ballast/storage/tier/ledger.h"

namespace ballast::storage {

class NvmeTier;

// A reserved part of the file, with its share of the budget. Its initial content is undefined.
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
  // Frees the extent and returns its share of the budget. The blocks on the disk stay, for the next extent allocated
  // with this share.
  BudgetLease TakeLease();
  // Returns the extent to the tier as a kept extent: the content stays, for the next run of the server.
  void Leave();

 private:
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
  // Returns the space behind the last extent to the disk. Call only after all wanted state was found: state that no
  // entry names may lie there.
  absl::Status Trim();
  // DATA_LOSS (IO) unless the extent was kept and has not been taken since.
  absl::StatusOr<NvmeExtent> TakeKept(uint64_t offset);

  // `bytes` are rounded up to 4096. RESOURCE_EXHAUSTED: (BUDGET), or (IO) if the disk itself is full.
  absl::StatusOr<NvmeExtent> Allocate(uint64_t bytes, absl::string_view what);
  // As Allocate, but splits the budget off `room`, which the caller has taken already. After an error `room` is
  // unchanged.
  absl::StatusOr<NvmeExtent> AllocateFrom(BudgetLease* room, uint64_t bytes, absl::string_view what);
  const BlockFile& file() const { return *file_; }
  // fdatasync for any of the jobs that share the file. The system reports a lost write once, to one caller, and the
  // lost write may be another job's. So after an error every later call, for any job, returns this error.
  absl::Status Sync();

 private:
  friend class NvmeExtent;
  NvmeTier(std::unique_ptr<BlockFile> file, Ledger* ledger) : file_(std::move(file)), ledger_(ledger) {}
  absl::Status Keep(std::vector<ExtentPlace> kept, bool unnamed_stays);
  uint64_t Place(uint64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void KeepAgain(NvmeExtent extent);
  enum class Blocks { kGivenBack, kKept };
  void Free(uint64_t offset, uint64_t bytes, Blocks blocks);
  void FreeLocked(uint64_t offset, uint64_t bytes, Blocks blocks) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Makes sure that the disk has blocks for the range.
  absl::Status Reserve(uint64_t offset, uint64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void NoteReserved(uint64_t offset, uint64_t end) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void NoteUnreserved(uint64_t offset, uint64_t end) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::unique_ptr<BlockFile> file_;
  Ledger* const ledger_;
  absl::Mutex sync_mutex_;
  absl::Status sync_failed_ ABSL_GUARDED_BY(sync_mutex_);
  absl::Mutex mutex_;
  std::map<uint64_t, uint64_t> free_ ABSL_GUARDED_BY(mutex_);  // offset -> bytes, neighbours joined
  uint64_t end_ ABSL_GUARDED_BY(mutex_) = 0;                   // end of the last extent
  // Ranges for which the disk has blocks: offset -> end, neighbours joined.
  std::map<uint64_t, uint64_t> reserved_ ABSL_GUARDED_BY(mutex_);
  std::map<uint64_t, NvmeExtent> kept_ ABSL_GUARDED_BY(mutex_);
  std::vector<NvmeExtent> disputed_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ballast::storage
