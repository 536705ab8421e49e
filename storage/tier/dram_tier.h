// CPU memory: arenas that are touched when they are allocated, page-locked for the server's GPU if it has one, and else
// locked against swapping where the limit of locked memory allows that. Where page-locking is refused the memory is
// used pageable, at half the speed; one line in the log says so.
#pragma once

#include <optional>

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
  // `gpu`: the device whose HBM is a tier beside this one.
  DramTier(Ledger* ledger, std::optional<int> gpu) : ledger_(ledger), gpu_(gpu) {}
  // `bytes` rounded up to 4096. RESOURCE_EXHAUSTED (BUDGET).
  // kBeyond: also if the budget was lowered and what is above it has not moved yet: for what such moves need.
  enum class Limit { kBudget, kBeyond };
  absl::StatusOr<DramBlock> Allocate(uint64_t bytes, absl::string_view what, Limit limit = Limit::kBudget);
  // Memory as Allocate's, for who has taken its share of the budget.
  absl::StatusOr<Arena> Map(uint64_t bytes) const;
  bool beside_gpu() const { return gpu_.has_value(); }

 private:
  Ledger* const ledger_;
  const std::optional<int> gpu_;
};

}  // namespace ballast::storage
