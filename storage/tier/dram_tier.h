// CPU memory: arenas that are touched when they are allocated, pinned when the server has a GPU, and else locked against
// swapping where the limit of locked memory allows that.
#pragma once

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "ballast/storage/io/arena.h"
#include "ballast/storage/tier/ledger.h"

namespace ballast::storage {

// Zeroed memory from a 2 MiB boundary on, with its share of the budget.
class DramBlock {
 public:
  DramBlock() = default;
  DramBlock(BudgetLease lease, Arena arena) : lease_(std::move(lease)), arena_(std::move(arena)) {}
  absl::Span<std::byte> bytes() const { return arena_.bytes(); }
  // Returns the budget and the memory of a part, which must not be used any more. REQUIRES: aligned to 4096; memory
  // that is not pinned.
  void GiveBack(absl::Span<std::byte> part) {
    arena_.Discard(part);
    lease_.Split(part.size());
  }

 private:
  BudgetLease lease_;  // returned after the memory is gone
  Arena arena_;
};

// Threads: any.
class DramTier {
 public:
  DramTier(Ledger* ledger, bool pin) : ledger_(ledger), pin_(pin) {}
  // `bytes` rounded up to 4096. RESOURCE_EXHAUSTED (BUDGET).
  // kBeyond: also if the budget was lowered and what is above it has not moved yet: for what such moves need.
  enum class Limit { kBudget, kBeyond };
  absl::StatusOr<DramBlock> Allocate(uint64_t bytes, absl::string_view what, Limit limit = Limit::kBudget);

 private:
  Ledger* const ledger_;
  const bool pin_;
};

}  // namespace ballast::storage
