// What a dry run of an Open answers: the bytes of each tier that a real Open would take, beside what is free.
#pragma once

#include <cstdint>

#include "ballast/proto/model/epoch_plan.h"
#include "ballast/services/space/space_need.h"
#include "ballast/storage/placement/placement.h"
#include "ballast/v1/state_service.pb.h"

namespace ballast::services {

// Further bytes that a real Open takes for the job's present chunks, as the plan cuts them; at most these, where the
// DRAM budget is short and state or working copies make room. Missing chunks count a log themselves.
struct Retiled {
  uint64_t slice_bytes = 0;    // of DRAM
  uint64_t journal_bytes = 0;  // of NVMe, for the log or the spill
};
Retiled RetiledBy(const SpaceState& state, const SpaceNeed& need, const model::EpochPlan& plan, uint64_t free_dram);

// A dry run's answers: for missing chunks, placed by `placed`; and where nothing is missing, with `free` in the tiers.
v1::OpenResponse DryRunAnswer(const SpaceNeed& need, const Retiled& retiled, const storage::PlanRequest& request,
                              const storage::Plan& placed);
v1::OpenResponse DryRunAnswer(const Retiled& retiled, const storage::TierBytes& free);

}  // namespace ballast::services
