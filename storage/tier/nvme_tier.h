// Disk: one file of extents. At start it keeps those that durable jobs have state in; the rest is free.
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

// A reserved part of the file, with its share of the budget. Its old content is undefined.
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
  // Frees the extent but keeps its share of the budget, and its blocks on the disk for who comes with that share.
  BudgetLease TakeLease();
  // Lets the content be, for the next run of the server, and the tier have the extent, as one that it kept.
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
  ~NvmeTier();  // what was kept and not taken stays on the disk
  // Creates `directory`/nvme.tier. INTERNAL (IO) if that cannot be written; FAILED_PRECONDITION (BUSY) if another
  // server has it.
  // `options.kept`: extents whose content must stay, which TakeKept hands out, except those that overlap others or lie
  // outside the file: their bytes stay. RESOURCE_EXHAUSTED (BUDGET) if the budget no longer holds them.
  static absl::StatusOr<std::unique_ptr<NvmeTier>> Open(const TiersOptions& options, Ledger* ledger, Disk* disk);
  // Gives back to the disk what lies behind the last extent. Not before all that is wanted was found: what nobody named
  // may lie there.
  absl::Status Trim();
  // DATA_LOSS (IO) unless it was kept, and not taken since.
  absl::StatusOr<NvmeExtent> TakeKept(uint64_t offset);

  // `bytes` rounded up to 4096. RESOURCE_EXHAUSTED: (BUDGET), or (IO) if the disk itself is full.
  absl::StatusOr<NvmeExtent> Allocate(uint64_t bytes, absl::string_view what);
  // As Allocate, of a share of the budget that the caller has, which `bytes` leave; after an error it has them still.
  absl::StatusOr<NvmeExtent> AllocateFrom(BudgetLease* room, uint64_t bytes, absl::string_view what);
  const BlockFile& file() const { return *file_; }
  // fdatasync for one of the jobs that share the file. The system tells of a lost write once, so after an error every
  // later call, whoever's, gets that error: what it wrote may be what was lost.
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
  // Makes sure that the disk has blocks for it.
  absl::Status Reserve(uint64_t offset, uint64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void NoteUnreserved(uint64_t offset, uint64_t end) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::unique_ptr<BlockFile> file_;
  Ledger* const ledger_;
  absl::Mutex sync_mutex_;
  absl::Status sync_failed_ ABSL_GUARDED_BY(sync_mutex_);
  absl::Mutex mutex_;
  std::map<uint64_t, uint64_t> free_ ABSL_GUARDED_BY(mutex_);  // offset -> bytes, neighbours joined
  uint64_t end_ ABSL_GUARDED_BY(mutex_) = 0;                   // of the last extent
  // Of what the disk has blocks for; offset -> end, neighbours joined.
  std::map<uint64_t, uint64_t> reserved_ ABSL_GUARDED_BY(mutex_);
  std::map<uint64_t, NvmeExtent> kept_ ABSL_GUARDED_BY(mutex_);
  std::vector<NvmeExtent> disputed_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ballast::storage
