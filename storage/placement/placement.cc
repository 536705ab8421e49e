#include "ballast/storage/placement/placement.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ballast/proto/model/status.h"

namespace ballast::storage {
namespace {

uint64_t Short(uint64_t needed, uint64_t free) { return needed > free ? needed - free : 0; }

std::string Shortage(const char* tier, uint64_t missing, uint64_t needed, uint64_t free, const std::string& what) {
  return absl::StrCat(tier, " is short of ", missing, " bytes: ", what, " needs ", needed, ", ", free,
                      " are free; raise the ", tier, " budget by at least ", missing, " bytes");
}

// HBM takes the first chunks that fit, and their working copies if there is room. A store without working copies puts
// nothing in HBM: the trainer lends host memory, which the GPU's kernels do not write.
void FillHbm(const PlanRequest& request, Plan& plan) {
  if (!request.layout.working_copies()) return;
  uint64_t room = request.free.hbm;
  for (size_t i = 0; i < request.elements.size(); ++i) {
    const uint64_t state = request.layout.StateBytes(request.elements[i]);
    const uint64_t working = request.layout.WorkingBytes(request.elements[i]);
    if (state > room) continue;
    plan.chunks[i].state = TierKind::kHbm;
    room -= state;
    plan.state.hbm += state;
    if (working > room) continue;
    plan.chunks[i].working = TierKind::kHbm;
    room -= working;
    plan.working.hbm += working;
  }
}

// Fills HBM and returns the bytes of state left for the host. Sets working copies and slices.
uint64_t FillMemory(const PlanRequest& request, Plan* plan) {
  plan->chunks.resize(request.elements.size());
  FillHbm(request, *plan);
  uint64_t state_left = 0, elements = 0;
  for (size_t i = 0; i < plan->chunks.size(); ++i) {
    if (plan->chunks[i].working == TierKind::kDram)
      plan->working.dram += request.layout.WorkingBytes(request.elements[i]);
    if (plan->chunks[i].state != TierKind::kHbm) state_left += request.layout.StateBytes(request.elements[i]);
    elements += request.elements[i];
  }
  plan->slice_bytes = request.provisional_bytes_per_element * elements;
  return state_left;
}

// DRAM needed before any state.
uint64_t Fixed(const PlanRequest& request, const Plan& plan) {
  const bool flushes = request.durable && plan.state.hbm > 0;
  return plan.working.dram + plan.slice_bytes + (flushes ? request.flush_buffer_bytes : 0);
}

// DRAM needed before any state if some state is on NVMe. Any number may be configured: an overflow would look like
// room.
uint64_t Staged(const PlanRequest& request, const Plan& plan) {
  const uint64_t bytes = plan.working.dram + plan.slice_bytes;
  return bytes + std::min(request.staging_bytes, std::numeric_limits<uint64_t>::max() - bytes);
}

// Gives slices the least memory: they are read back.
void ReadBack(const PlanRequest& request, Plan* plan) {
  const uint64_t shared = request.read_back->shared_bytes;
  const uint64_t least = shared + request.read_back->buffer_bytes_min;
  if (least >= plan->slice_bytes) return;
  plan->reads_back = true;
  plan->slice_bytes = least;
  plan->spill_bytes = request.read_back->spill_bytes;
  const uint64_t elements = std::accumulate(request.elements.begin(), request.elements.end(), uint64_t{0});
  plan->read_back_bytes = elements * request.layout.gradient_element_bytes() - shared;
}

// The last check: what NVMe must hold. Both tiers are named where both are short.
absl::StatusOr<Plan> CheckNvme(const PlanRequest& request, Plan plan, std::vector<std::string> shortages) {
  if (request.durable) plan.durable_bytes = plan.state.hbm + plan.state.dram;
  const uint64_t needed = plan.state.nvme + plan.durable_bytes + request.nvme_fixed_bytes + plan.spill_bytes;
  if (const uint64_t missing = Short(needed, request.free.nvme); missing > 0) {
    shortages.push_back(Shortage("nvme", missing, needed, request.free.nvme,
                                 request.durable   ? "durable state, room for its next versions and the gradient log"
                                 : plan.reads_back ? "what finds no room in dram, state and slices in flight,"
                                                   : "state that finds no room in dram"));
  }
  if (shortages.empty()) {
    if (request.shape.machine == nullptr) return plan;
    std::vector<PlacedChunk> chunks = request.placed;
    for (size_t i = 0; i < plan.chunks.size(); ++i) chunks.push_back({request.elements[i], plan.chunks[i]});
    StepShape shape = request.shape;
    shape.durable = request.durable;
    if (plan.reads_back) {
      const uint64_t elements = std::accumulate(request.elements.begin(), request.elements.end(), uint64_t{0});
      shape.read_back_share = static_cast<double>(plan.read_back_bytes) /
                              static_cast<double>(elements * request.layout.gradient_element_bytes());
    }
    plan.prediction = PredictStep(shape, request.layout, chunks);
    return plan;
  }
  return model::Error(absl::StatusCode::kResourceExhausted, model::kBudget, absl::StrJoin(shortages, ". "));
}

}  // namespace

const char* TierName(TierKind tier) {
  switch (tier) {
    case TierKind::kHbm:
      return "hbm";
    case TierKind::kDram:
      return "dram";
    case TierKind::kNvme:
      return "nvme";
  }
  return "unknown";
}

std::string Plan::Explain() const {
  uint64_t count[kTierKinds] = {};
  for (const ChunkPlacement& chunk : chunks) ++count[static_cast<int>(chunk.state)];
  std::vector<std::string> parts;
  for (const TierKind tier : {TierKind::kHbm, TierKind::kDram, TierKind::kNvme}) {
    if (count[static_cast<int>(tier)] == 0 && working[tier] == 0) continue;
    parts.push_back(absl::StrCat(TierName(tier), " holds the state of ", count[static_cast<int>(tier)], " chunks (",
                                 state[tier], " bytes) and ", working[tier], " bytes of working copies"));
  }
  std::string text = absl::StrCat("Of ", chunks.size(), " chunks ", absl::StrJoin(parts, "; "), ". ");
  if (state.nvme > 0) {
    absl::StrAppend(&text,
                    "Faster tiers are filled first, so what is on nvme found no room in dram: there, working copies, ",
                    "slices of the step in flight and buffers for moving nvme state come before state.");
  } else if (state.hbm > 0 && state.dram > 0) {
    absl::StrAppend(&text, "hbm is filled first; what is in dram found no room there.");
  } else {
    absl::StrAppend(&text, "All of it fits there, and no faster tier has room.");
  }
  if (reads_back) {
    absl::StrAppend(&text, " The slices of a step do not fit beside them: they have ", slice_bytes,
                    " bytes of dram until they are on the disk, and ", read_back_bytes,
                    " bytes are read back from it in each step.");
  }
  if (prediction.has_value()) absl::StrAppend(&text, " ", prediction->Explain());
  return text;
}

absl::StatusOr<Plan> MakePlan(const PlanRequest& request) {
  Plan plan;
  const uint64_t state_left = FillMemory(request, &plan);
  const uint64_t fixed = Fixed(request, plan);
  if (fixed + state_left <= request.free.dram) {
    plan.state.dram = state_left;  // the placements' default
    return CheckNvme(request, std::move(plan), {});
  }
  if (request.free.nvme == 0) {
    const uint64_t needed = fixed + state_left;
    return model::Error(absl::StatusCode::kResourceExhausted, model::kBudget,
                        absl::StrCat(Shortage("dram", needed - request.free.dram, needed, request.free.dram,
                                              "state, working copies and slices in flight"),
                                     ", or give an nvme budget"));
  }

  uint64_t fixed_staged = Staged(request, plan);
  if (fixed_staged > request.free.dram && request.read_back.has_value()) {
    ReadBack(request, &plan);
    fixed_staged = Staged(request, plan);
  }
  uint64_t room = request.free.dram - std::min(request.free.dram, fixed_staged);
  if (plan.reads_back) {
    // Buffers come before state: with too few buffers each step would wait for the log slice by slice.
    const uint64_t more = std::min(room, request.read_back->buffer_bytes_max - request.read_back->buffer_bytes_min);
    plan.slice_bytes += more;
    room -= more;
  }
  for (size_t i = 0; i < plan.chunks.size(); ++i) {
    if (plan.chunks[i].state == TierKind::kHbm) continue;
    const uint64_t state = request.layout.StateBytes(request.elements[i]);
    const TierKind tier = state <= room ? TierKind::kDram : TierKind::kNvme;
    if (tier == TierKind::kDram) room -= state;
    plan.chunks[i].state = tier;
    plan.state[tier] += state;
  }
  std::vector<std::string> shortages;
  if (const uint64_t missing = Short(fixed_staged, request.free.dram); missing > 0) {
    shortages.push_back(Shortage("dram", missing, fixed_staged, request.free.dram,
                                 "working copies, slices in flight and buffers for moving nvme state"));
  }
  return CheckNvme(request, std::move(plan), std::move(shortages));
}

uint64_t LeastDram(const PlanRequest& request) {
  Plan plan;
  const uint64_t state_left = FillMemory(request, &plan);
  const uint64_t all = Fixed(request, plan) + state_left;
  if (request.read_back.has_value()) ReadBack(request, &plan);
  return std::min(all, Staged(request, plan));
}

}  // namespace ballast::storage
