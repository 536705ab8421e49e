#include "ballast/storage/tier/dram_tier.h"

#include "ballast/proto/model/status.h"
#include "ballast/storage/io/block_file.h"

namespace ballast::storage {

absl::StatusOr<DramBlock> DramTier::Allocate(uint64_t bytes, absl::string_view what, Limit limit) {
  bytes = AlignUp(bytes);
  BudgetLease lease;
  if (limit == Limit::kBeyond) {
    lease = ledger_->LeaseBeyond(TierKind::kDram, bytes);
  } else {
    BALLAST_ASSIGN_OR_RETURN(lease, ledger_->Lease(TierKind::kDram, bytes, what));
  }
  BALLAST_ASSIGN_OR_RETURN(Arena arena, Arena::Map(bytes, pin_));
  return DramBlock(std::move(lease), std::move(arena));
}

}  // namespace ballast::storage
