#include "ballast/storage/tier/dram_tier.h"

#include <spdlog/spdlog.h>

#include <mutex>

#include "ballast/proto/model/status.h"
#include "ballast/storage/io/block_file.h"

namespace ballast::storage {
namespace {

void SayPageable() {
  static std::once_flag said;
  std::call_once(said, [] { spdlog::info("DRAM of the budget may be swapped out: raise the limit of locked memory"); });
}

}  // namespace

absl::StatusOr<DramBlock> DramTier::Allocate(uint64_t bytes, absl::string_view what, Limit limit) {
  bytes = AlignUp(bytes);
  BudgetLease lease;
  if (limit == Limit::kBeyond) {
    lease = ledger_->LeaseBeyond(TierKind::kDram, bytes);
  } else {
    BALLAST_ASSIGN_OR_RETURN(lease, ledger_->Lease(TierKind::kDram, bytes, what));
  }
  BALLAST_ASSIGN_OR_RETURN(Arena arena, Arena::Map(bytes, pin_));
  if (!arena.pinned() && !arena.Lock()) SayPageable();
  return DramBlock(std::move(lease), std::move(arena));
}

}  // namespace ballast::storage
