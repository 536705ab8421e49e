// CPU memory: arenas, touched at allocation. On a server with a GPU the tier page-locks the memory for the GPU.
// Otherwise it locks the memory against swapping if the limit of locked memory allows. If the system refuses
// page-locking, the memory stays pageable, the GPU's copies run at half the speed, and the server's log says so.
#pragma once

#include <atomic>
#include <optional>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "ballast/storage/memory/arena.h"
#include "ballast/storage/tier/ledger.h"

namespace ballast::storage {

// Zeroed memory, starting at a 2 MiB boundary, with its share of the budget.
class DramBlock {
 public:
  DramBlock() = default;
  DramBlock(BudgetLease lease, Arena arena) : lease_(std::move(lease)), arena_(std::move(arena)) {}
  absl::Span<std::byte> bytes() const { return arena_.bytes(); }
  // From now on `bytes` of the block count for another part of the tier. Call it at most once.
  void MarkRest(uint64_t bytes, TierPart part) {
    rest_ = lease_.Split(bytes);
    rest_.Mark(part);
  }
  // From now on the bytes count for this account.
  void Charge(const std::shared_ptr<Account>& account) {
    lease_.Charge(account);
    rest_.Charge(account);
  }
  // Returns a part's budget and memory; the part must not be used any more. REQUIRES: aligned to 4096; the memory is
  // not page-locked.
  void GiveBack(absl::Span<std::byte> part) {
    arena_.Discard(part);
    lease_.Split(part.size());
  }
  // The same for a part of what MarkRest named.
  void GiveBackOfRest(absl::Span<std::byte> part) {
    arena_.Discard(part);
    rest_.Split(part.size());
  }

 private:
  friend class DramTier;
  BudgetLease lease_, rest_;  // returned after the memory is gone
  Arena arena_;
};

// Threads: any.
class DramTier {
 public:
  // `gpu`: the device of the server's HBM tier, if it has an HBM tier.
  DramTier(Ledger* ledger, std::optional<int> gpu) : ledger_(ledger), gpu_(gpu) {}
  // `bytes` are rounded up to 4096. RESOURCE_EXHAUSTED (BUDGET).
  // kBeyond: ignores the budget. For buffers of moves after the budget was lowered, while usage is still above it.
  enum class Limit { kBudget, kBeyond };
  absl::StatusOr<DramBlock> Allocate(uint64_t bytes, absl::string_view what, Limit limit = Limit::kBudget,
                                     TierPart part = TierPart::kState);
  // The same within the budget, for memory that its owner fills later. Pages become resident and locked at their first
  // use, or by Settle, which another thread may call meanwhile. On a server with a GPU they are so from the start.
  absl::StatusOr<DramBlock> AllocateToFill(uint64_t bytes, absl::string_view what);
  void Settle(DramBlock* block) const;
  // Memory as from Allocate, for a caller that has taken its budget already.
  absl::StatusOr<Arena> Map(uint64_t bytes) const;
  // All memory from here is locked, for a GPU or against swapping.
  bool locked() const { return locked_.load(std::memory_order_relaxed); }
  bool beside_gpu() const { return gpu_.has_value(); }

 private:
  void Lock(Arena* arena, Arena::Touch touch = Arena::Touch::kNow) const;

  Ledger* const ledger_;
  const std::optional<int> gpu_;
  mutable std::atomic<bool> locked_{true};
};

}  // namespace ballast::storage
