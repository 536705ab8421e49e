#include "ballast/services/space/dry_run_answer.h"

#include <algorithm>
#include <optional>

#include "absl/strings/str_cat.h"
#include "ballast/services/space/prediction.h"

namespace ballast::services {
namespace {

void AddTiers(const storage::TierBytes& state, const storage::TierBytes& working, const storage::TierBytes& other,
              const storage::TierBytes& free, v1::OpenResponse* answer) {
  for (int i = 0; i < storage::kTierKinds; ++i) {
    const auto kind = static_cast<storage::TierKind>(i);
    v1::PlannedTier* const tier = answer->add_tiers();
    tier->set_tier(storage::TierName(kind));
    tier->set_state_bytes(state[kind]);
    tier->set_working_bytes(working[kind]);
    tier->set_other_bytes(other[kind]);
    tier->set_free_bytes(free[kind]);
  }
}

}  // namespace

Retiled RetiledBy(const SpaceState& state, const SpaceNeed& need, const model::EpochPlan& plan, uint64_t free_dram) {
  Retiled retiled;
  HeldChunks held = need.held;
  std::erase(held, nullptr);
  if (!need.makes_store) {
    const uint64_t needed = SliceBytes(state.store->layout(), state.read_back_bytes, plan, held, state.spares);
    const uint64_t missing = needed - std::min(needed, state.memory->reserved_bytes());
    // Beyond the budget the job's own state and working copies make room.
    retiled.slice_bytes = std::min(missing, free_dram);
  }
  std::optional<JournalSize> size = SpillOf(need, plan, held);
  // As a real Open does where all chunks are there.
  if (need.wanted.logged() && (!need.wanted.elements.empty() || need.journal.segment_bytes == 0)) {
    size = need.wanted.journal_size(need.journal.segment_bytes);
  }
  if (size.has_value()) retiled.journal_bytes = size->bytes() - std::min(size->bytes(), need.journal.bytes);
  return retiled;
}

v1::OpenResponse DryRunAnswer(const SpaceNeed& need, const Retiled& retiled, const storage::PlanRequest& request,
                              const storage::Plan& placed) {
  v1::OpenResponse answer;
  answer.set_plan(placed.Explain());
  if (need.wanted.logged()) absl::StrAppend(answer.mutable_plan(), " ", need.wanted.ExplainLog());
  const uint64_t staging = placed.state.nvme > 0                     ? request.staging_bytes
                           : request.durable && placed.state.hbm > 0 ? request.flush_buffer_bytes
                                                                     : 0;
  const bool counted = need.wanted.logged() || placed.spill_bytes > 0;
  storage::TierBytes other;
  other.dram = placed.slice_bytes + placed.pull.bytes() + staging + retiled.slice_bytes;
  other.nvme = request.nvme_fixed_bytes + (counted ? placed.spill_bytes : retiled.journal_bytes);
  storage::TierBytes state = placed.state;
  state.nvme += placed.durable_bytes;
  AddTiers(state, placed.working, other, request.free, &answer);
  if (placed.prediction.has_value()) *answer.mutable_prediction() = PredictionMessage(*placed.prediction);
  return answer;
}

v1::OpenResponse DryRunAnswer(const Retiled& retiled, const storage::TierBytes& free) {
  v1::OpenResponse answer;
  answer.set_plan("All of the job's chunks have their places here already.");
  storage::TierBytes other;
  other.dram = retiled.slice_bytes;
  other.nvme = retiled.journal_bytes;
  AddTiers({}, {}, other, free, &answer);
  return answer;
}

}  // namespace ballast::services
