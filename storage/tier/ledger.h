// A server's budgets and their usage. A tier takes every byte from the ledger before it allocates the byte.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

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
  BudgetLease(Ledger* ledger, TierKind tier, uint64_t bytes, TierPart part, size_t share = 0)
      : ledger_(ledger), tier_(tier), bytes_(bytes), part_(part), share_(share) {}
  BudgetLease(BudgetLease&& other) noexcept { *this = std::move(other); }
  BudgetLease& operator=(BudgetLease&& other) noexcept;
  ~BudgetLease() { Release(); }
  uint64_t bytes() const { return bytes_; }
  TierPart part() const { return part_; }
  const std::shared_ptr<Account>& account() const { return account_; }
  // Splits `bytes` off into a lease of their own. REQUIRES: bytes <= bytes().
  BudgetLease Split(uint64_t bytes) {
    bytes_ -= bytes;
    BudgetLease split(ledger_, tier_, bytes, part_, share_);
    split.account_ = account_;
    return split;
  }
  // From now on the bytes count for this part of the tier.
  void Mark(TierPart part);
  // From now on the bytes count for this account; null: for the server itself.
  void Charge(std::shared_ptr<Account> account);
  // Adds a lease of the same budget and share. Its bytes now count for this lease's part and account.
  void Join(BudgetLease other) {
    if (ledger_ == nullptr) {
      *this = std::move(other);
      return;
    }
    other.Mark(part_);
    other.Charge(account_);
    bytes_ += std::exchange(other.bytes_, 0);
  }

 private:
  void Release();
  Ledger* ledger_ = nullptr;
  TierKind tier_ = TierKind::kDram;
  uint64_t bytes_ = 0;
  TierPart part_ = TierPart::kState;
  size_t share_ = 0;
  std::shared_ptr<Account> account_;
};

// A device's part of the NVMe budget.
struct NvmeShare {
  std::string path;  // the device's directory
  uint64_t bytes = 0;
};

// Threads: any.
class Ledger {
 public:
  explicit Ledger(const TierBytes& budget) : budget_(budget) {}
  // `shares` make up budget.nvme; the first is the data directory's. Bytes of NVMe are taken from a share.
  Ledger(const TierBytes& budget, const std::vector<NvmeShare>& shares);
  TierBytes budget() const;
  // Bytes taken beyond a lowered budget stay taken until they are returned; meanwhile Take and Lease refuse. The shares
  // of NVMe keep their proportions.
  void SetBudget(const TierBytes& budget) ABSL_LOCKS_EXCLUDED(mutex_);
  // A share's device is missing: removes the share's bytes from the budget. REQUIRES: none of them is taken.
  void DropShare(size_t share);
  TierBytes used() const;
  TierUsage usage() const;
  // Bytes that share `share` of NVMe still has; of a ledger without shares, that the budget has.
  uint64_t NvmeFree(size_t share) const;
  // RESOURCE_EXHAUSTED (BUDGET) says what `what` needs and how many bytes are missing.
  // `account`: whose the bytes are; null: the server's own. Return and Remark name the same.
  absl::Status Take(TierKind tier, uint64_t bytes, absl::string_view what, TierPart part, size_t share = 0,
                    Account* account = nullptr);
  void Return(TierKind tier, uint64_t bytes, TierPart part, size_t share = 0, Account* account = nullptr);
  void Remark(TierKind tier, uint64_t bytes, TierPart from, TierPart to, Account* account = nullptr);
  // Bytes that are taken become another account's.
  void Charge(TierKind tier, uint64_t bytes, TierPart part, Account* from, Account* to);
  PartBytes taken(const Account& account) const;
  // Takes the bytes even beyond the budget.
  BudgetLease LeaseBeyond(TierKind tier, uint64_t bytes, TierPart part);
  absl::StatusOr<BudgetLease> Lease(TierKind tier, uint64_t bytes, absl::string_view what,
                                    TierPart part = TierPart::kState, size_t share = 0);

  void CountTraffic(TierKind tier, uint64_t read, uint64_t written);
  TierTraffic traffic() const;
  void CountMove(TierKind from, TierKind to, MoveReason why, uint64_t bytes);
  MovedBytes moved() const;

 private:
  struct Share {
    NvmeShare configured;
    uint64_t budget = 0, used = 0;
  };
  bool Shared(TierKind tier) const ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return tier == TierKind::kNvme && !shares_.empty();
  }

  mutable absl::Mutex mutex_;
  std::vector<Share> shares_ ABSL_GUARDED_BY(mutex_);  // of NVMe; empty: one device has all of it
  TierBytes budget_ ABSL_GUARDED_BY(mutex_);
  TierBytes used_ ABSL_GUARDED_BY(mutex_);
  PartBytes parts_ ABSL_GUARDED_BY(mutex_) = {};
  std::atomic<uint64_t> read_[kTierKinds] = {};
  std::atomic<uint64_t> written_[kTierKinds] = {};
  std::atomic<uint64_t> moved_[kTierKinds][kTierKinds][kMoveReasons] = {};
};

}  // namespace ballast::storage
