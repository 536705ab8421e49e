// The space of a stash, within its budgets: DRAM, then a file. Knows no parts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "ballast/storage/io/block_file.h"
#include "ballast/storage/memory/arena.h"
#include "ballast/storage/memory/slabs.h"
#include "ballast/storage/tier/dram_tier.h"
#include "ballast/storage/tier/ledger.h"
#include "ballast/storage/tier/nvme_tier.h"

namespace ballast::stash {

// Threads: any, but UseFile comes first.
class StashSpace {
 public:
  // `gpu`: page-locks all memory for this device.
  StashSpace(const storage::TierBytes& budget, std::optional<int> gpu) : ledger_(budget), dram_tier_(&ledger_, gpu) {}
  // Without a file there are no extents.
  void UseFile(std::unique_ptr<storage::BlockFile> file) {
    nvme_ = storage::NvmeTier::OpenOn(std::move(file), &ledger_);
  }
  // Null without a file.
  const storage::BlockFile* file() const { return nvme_ == nullptr ? nullptr : &nvme_->file(); }
  absl::StatusOr<storage::Arena> MapBesideBudget(uint64_t bytes) { return dram_tier_.Map(bytes); }

  // Bytes: a multiple of kIoAlignment. Empty if the budget is spent.
  absl::Span<std::byte> TakeDram(uint64_t bytes);
  void ReturnDram(absl::Span<std::byte> taken) { dram_.Return(taken); }
  // While extents leave, their space counts as there: waits for it. RESOURCE_EXHAUSTED: (BUDGET) says how many bytes
  // are short, (DISK_FULL).
  absl::StatusOr<storage::NvmeExtent> TakeExtent(uint64_t bytes) ABSL_LOCKS_EXCLUDED(mutex_);
  // An extent will come to Return, perhaps once its transfer has ended.
  void Leaves() ABSL_LOCKS_EXCLUDED(mutex_);
  // The room of an extent, announced by Leaves, is for later ones. Does nothing with an empty one.
  void Return(storage::NvmeExtent extent) ABSL_LOCKS_EXCLUDED(mutex_);
  // Of all callers of TakeExtent.
  double waited_seconds() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  absl::StatusOr<storage::NvmeExtent> TryExtent(uint64_t bytes) ABSL_LOCKS_EXCLUDED(mutex_);
  absl::StatusOr<storage::NvmeRoom> MoreRoom(uint64_t bytes) ABSL_LOCKS_EXCLUDED(mutex_);

  storage::Ledger ledger_;
  storage::DramTier dram_tier_;
  storage::Slabs dram_;
  std::unique_ptr<storage::NvmeTier> nvme_;

  absl::Mutex turns_;  // callers that take an extent take turns; before mutex_
  mutable absl::Mutex mutex_;
  absl::CondVar changed_;                                                  // an extent came back
  std::vector<storage::BudgetLease> dram_leases_ ABSL_GUARDED_BY(mutex_);  // of the slabs of dram_
  storage::NvmeRoom room_ ABSL_GUARDED_BY(mutex_);                         // of the file, in no extent
  uint64_t leaving_ ABSL_GUARDED_BY(mutex_) = 0;                           // extents that are not in room_ yet
  uint64_t returned_ ABSL_GUARDED_BY(mutex_) = 0;                          // extents that came to room_
  absl::Duration waited_ ABSL_GUARDED_BY(mutex_) = absl::ZeroDuration();
};

}  // namespace ballast::stash
