// A server's budgets and their usage. A tier takes every byte from the ledger before it allocates the byte.
#pragma once

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
  BudgetLease(Ledger* ledger, TierKind tier, uint64_t bytes) : ledger_(ledger), tier_(tier), bytes_(bytes) {}
  BudgetLease(BudgetLease&& other) noexcept { *this = std::move(other); }
  BudgetLease& operator=(BudgetLease&& other) noexcept;
  ~BudgetLease() { Release(); }
  uint64_t bytes() const { return bytes_; }
  // Splits `bytes` off into a lease of their own. REQUIRES: bytes <= bytes().
  BudgetLease Split(uint64_t bytes) {
    bytes_ -= bytes;
    return {ledger_, tier_, bytes};
  }
  // Adds a lease of the same budget.
  void Join(BudgetLease other) {
    if (ledger_ == nullptr) {
      *this = std::move(other);
      return;
    }
    bytes_ += std::exchange(other.bytes_, 0);
  }

 private:
  void Release();
  Ledger* ledger_ = nullptr;
  TierKind tier_ = TierKind::kDram;
  uint64_t bytes_ = 0;
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
  absl::Status Take(TierKind tier, uint64_t bytes, absl::string_view what);
  void Return(TierKind tier, uint64_t bytes);
  // Takes the bytes even beyond the budget.
  BudgetLease LeaseBeyond(TierKind tier, uint64_t bytes);
  absl::StatusOr<BudgetLease> Lease(TierKind tier, uint64_t bytes, absl::string_view what);

  void CountTraffic(TierKind tier, uint64_t read, uint64_t written);
  TierTraffic traffic() const;

 private:
  mutable absl::Mutex mutex_;
  TierBytes budget_ ABSL_GUARDED_BY(mutex_);
  TierBytes used_ ABSL_GUARDED_BY(mutex_);
  std::atomic<uint64_t> read_[kTierKinds] = {};
  std::atomic<uint64_t> written_[kTierKinds] = {};
};

}  // namespace ballast::storage
