// A server's budgets and their usage. A tier takes every byte from the ledger before it allocates the byte.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "ballast/storage/placement/placement.h"
#include "ballast/storage/tier/tiers.h"

namespace ballast::storage {

class Ledger;

// Bytes of a budget, returned by the destructor.
class BudgetLease {
 public:
  BudgetLease() = default;
  BudgetLease(Ledger* ledger, TierKind tier, uint64_t bytes, TierPart part)
      : ledger_(ledger), tier_(tier), bytes_(bytes), part_(part) {}
  BudgetLease(BudgetLease&& other) noexcept { *this = std::move(other); }
  BudgetLease& operator=(BudgetLease&& other) noexcept;
  ~BudgetLease() { Release(); }
  uint64_t bytes() const { return bytes_; }
  // Splits `bytes` off into a lease of their own. REQUIRES: bytes <= bytes().
  BudgetLease Split(uint64_t bytes) {
    bytes_ -= bytes;
    return {ledger_, tier_, bytes, part_};
  }
  // From now on the bytes are of this part of the tier.
  void Mark(TierPart part);
  // Adds a lease of the same budget, which becomes of the same part.
  void Join(BudgetLease other) {
    if (ledger_ == nullptr) {
      *this = std::move(other);
      return;
    }
    other.Mark(part_);
    bytes_ += std::exchange(other.bytes_, 0);
  }

 private:
  void Release();
  Ledger* ledger_ = nullptr;
  TierKind tier_ = TierKind::kDram;
  uint64_t bytes_ = 0;
  TierPart part_ = TierPart::kState;
};

// Threads: any.
class Ledger {
 public:
  explicit Ledger(const TierBytes& budget) : budget_(budget) {}
  TierBytes budget() const;
  // Bytes taken beyond a lowered budget stay taken until they are returned; meanwhile Take and Lease refuse.
  void SetBudget(const TierBytes& budget);
  TierBytes used() const;
  TierUsage usage() const;
  // RESOURCE_EXHAUSTED (BUDGET) says what `what` needs and how many bytes are missing.
  absl::Status Take(TierKind tier, uint64_t bytes, absl::string_view what, TierPart part);
  void Return(TierKind tier, uint64_t bytes, TierPart part);
  void Remark(TierKind tier, uint64_t bytes, TierPart from, TierPart to);
  // Takes the bytes even beyond the budget.
  BudgetLease LeaseBeyond(TierKind tier, uint64_t bytes, TierPart part);
  absl::StatusOr<BudgetLease> Lease(TierKind tier, uint64_t bytes, absl::string_view what,
                                    TierPart part = TierPart::kState);

  void CountTraffic(TierKind tier, uint64_t read, uint64_t written);
  TierTraffic traffic() const;
  void CountMove(TierKind from, TierKind to, MoveReason why, uint64_t bytes);
  MovedBytes moved() const;

 private:
  mutable absl::Mutex mutex_;
  TierBytes budget_ ABSL_GUARDED_BY(mutex_);
  TierBytes used_ ABSL_GUARDED_BY(mutex_);
  std::array<TierBytes, kTierParts> parts_ ABSL_GUARDED_BY(mutex_) = {};
  std::atomic<uint64_t> read_[kTierKinds] = {};
  std::atomic<uint64_t> written_[kTierKinds] = {};
  std::atomic<uint64_t> moved_[kTierKinds][kTierKinds][kMoveReasons] = {};
};

}  // namespace ballast::storage
