#include "ballast/storage/tier/dram_tier.h"

#include <spdlog/spdlog.h>

#include <mutex>

#include "ballast/proto/base/status.h"
#include "ballast/storage/io/block_file.h"

namespace ballast::storage {
namespace {

void SayPageable() {
  static std::once_flag said;
  std::call_once(said, [] { spdlog::info("DRAM of the budget may be swapped out: raise the limit of locked memory"); });
}

// Said once: the limit refuses all later memory as well.
void SayNotPageLocked(const absl::Status& refused) {
  static std::once_flag said;
  std::call_once(said, [&] {
    spdlog::warn("memory stays pageable, which halves the speed of the GPU's copies: {}",
                 std::string(refused.message()));
  });
}

}  // namespace

absl::StatusOr<DramBlock> DramTier::Allocate(uint64_t bytes, absl::string_view what, Limit limit, TierPart part) {
  bytes = AlignUp(bytes);
  BudgetLease lease;
  if (limit == Limit::kBeyond) {
    lease = ledger_->LeaseBeyond(TierKind::kDram, bytes, part);
  } else {
    BALLAST_ASSIGN_OR_RETURN(lease, ledger_->Lease(TierKind::kDram, bytes, what, part));
  }
  BALLAST_ASSIGN_OR_RETURN(Arena arena, Map(bytes));
  return DramBlock(std::move(lease), std::move(arena));
}

absl::StatusOr<DramBlock> DramTier::AllocateToFill(uint64_t bytes, absl::string_view what) {
  if (beside_gpu()) return Allocate(bytes, what);
  bytes = AlignUp(bytes);
  BALLAST_ASSIGN_OR_RETURN(BudgetLease lease, ledger_->Lease(TierKind::kDram, bytes, what, TierPart::kState));
  BALLAST_ASSIGN_OR_RETURN(Arena arena, Arena::Map(bytes, Arena::Touch::kLater));
  Lock(&arena, Arena::Touch::kLater);
  return DramBlock(std::move(lease), std::move(arena));
}

void DramTier::Settle(DramBlock* block) const {
  if (!beside_gpu()) block->arena_.TouchBesideUse();
}

absl::StatusOr<Arena> DramTier::Map(uint64_t bytes) const {
  BALLAST_ASSIGN_OR_RETURN(Arena arena, Arena::Map(bytes));
  if (gpu_.has_value()) {
    const absl::Status locked = arena.PageLockFor(*gpu_);
    if (!locked.ok()) SayNotPageLocked(locked);
  }
  Lock(&arena);
  return arena;
}

void DramTier::Lock(Arena* arena, Arena::Touch touch) const {
  if (arena->page_locked() || arena->Lock(touch)) return;
  locked_.store(false, std::memory_order_relaxed);
  SayPageable();
}

}  // namespace ballast::storage
