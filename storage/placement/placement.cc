#include "ballast/storage/placement/placement.h"

#include <algorithm>
#include <limits>

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

bool IsFrozen(const PlanRequest& request, size_t chunk) {
  return !request.frozen.empty() && request.frozen[chunk] != Frozen::kNo;
}

// Elements that steps update.
uint64_t Trained(const PlanRequest& request) {
  uint64_t elements = 0;
  for (size_t i = 0; i < request.elements.size(); ++i) {
    if (!IsFrozen(request, i)) elements += request.elements[i];
  }
  return elements;
}

// HBM takes the first chunks that fit, and their working copies if there is room. A store without working copies puts
// nothing in HBM: the trainer lends host memory, which the GPU's kernels do not write. Nor are frozen chunks there.
void FillHbm(const PlanRequest& request, Plan& plan) {
  uint64_t room = request.free.hbm;
  for (size_t i = 0; i < request.elements.size(); ++i) {
    const StateLayout layout = request.LayoutOf(i);
    const uint64_t state = layout.StateBytes(request.elements[i]);
    const uint64_t working = layout.WorkingBytes(request.elements[i]);
    if (!layout.working_copies() || state > room) continue;
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
  uint64_t state_left = 0;
  for (size_t i = 0; i < plan->chunks.size(); ++i) {
    const StateLayout layout = request.LayoutOf(i);
    if (!request.copyless.empty() && request.copyless[i]) plan->chunks[i].working = std::nullopt;
    if (plan->chunks[i].working == TierKind::kDram) plan->working.dram += layout.WorkingBytes(request.elements[i]);
    if (plan->chunks[i].state != TierKind::kHbm) state_left += layout.StateBytes(request.elements[i]);
  }
  plan->slice_bytes = request.provisional_bytes_per_element * Trained(request) + request.value_buffer_bytes;
  return state_left;
}

// DRAM needed before any state.
uint64_t Fixed(const PlanRequest& request, const Plan& plan) {
  const bool flushes = request.durable && plan.state.hbm > 0;
  return plan.working.dram + plan.slice_bytes + (flushes ? request.flush_buffer_bytes : 0);
}

// DRAM needed before any state if some state is on NVMe. Any number may be configured: an overflow would look like
// room.
uint64_t Staged(const PlanRequest& request, const Plan& plan, uint64_t passing) {
  const uint64_t bytes = plan.working.dram + plan.slice_bytes + plan.pull.bytes() + passing;
  return bytes + std::min(request.staging_bytes, std::numeric_limits<uint64_t>::max() - bytes);
}

// Gives slices the least memory: they are read back. `passing`: DRAM for first values, which none need then.
void ReadBack(const PlanRequest& request, Plan* plan, uint64_t* passing) {
  const uint64_t shared = request.read_back->shared_bytes;
  const uint64_t least = shared + request.read_back->buffer_bytes_min;
  if (least >= plan->slice_bytes + *passing) return;
  *passing = 0;
  plan->reads_back = true;
  plan->slice_bytes = least;
  plan->spill_bytes = request.read_back->spill_bytes;
  plan->read_back_bytes = Trained(request) * request.layout.gradient_element_bytes() - shared;
}

// Working copies that do not fit into `room`, DRAM for all working copies, are left out, where pulls can do without.
// Copies that stay are spread: so a forward pass finds work in memory while the disk reads the next masters.
void LeaveCopiesOut(const PlanRequest& request, uint64_t room, Plan* plan) {
  const auto has_copy = [&](size_t i) {
    const ChunkPlacement& chunk = plan->chunks[i];
    return chunk.state != TierKind::kHbm && chunk.working.has_value() && request.LayoutOf(i).working_copies();
  };
  const auto bytes_of = [&](size_t i) { return request.LayoutOf(i).WorkingBytes(request.elements[i]); };
  uint64_t all = 0;
  for (size_t i = 0; i < plan->chunks.size(); ++i) all += has_copy(i) ? bytes_of(i) : 0;
  const uint64_t stay = plan->working.dram - all;  // copies of state in HBM
  room = std::min(all, room - std::min(room, stay));
  uint64_t passed = 0, kept = 0;
  for (size_t i = 0; i < plan->chunks.size(); ++i) {
    if (!has_copy(i)) continue;
    passed += bytes_of(i);
    const auto due = static_cast<uint64_t>(static_cast<unsigned __int128>(room) * passed / all);
    if (kept + bytes_of(i) <= due) {
      kept += bytes_of(i);
    } else {
      plan->chunks[i].working = std::nullopt;
      plan->pull = *request.pull;
    }
  }
  plan->working.dram = stay + kept;
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
    for (size_t i = 0; i < plan.chunks.size(); ++i) {
      chunks.push_back({request.elements[i], plan.chunks[i], request.LayoutOf(i).frozen()});
    }
    StepShape shape = request.shape;
    shape.durable = request.durable;
    if (const uint64_t elements = Trained(request); plan.reads_back && elements > 0) {
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
  const auto copyless = std::count_if(chunks.begin(), chunks.end(), [](const auto& c) { return !c.working.has_value(); });
  if (copyless > 0) {
    absl::StrAppend(&text, " The working copies of ", copyless, " chunks do not fit in dram: pulls of these round the ",
                    "masters, which they read from nvme by way of ", pull.bytes(), " bytes of dram.");
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
  uint64_t passing = request.passing_bytes;
  const uint64_t fixed = Fixed(request, plan) + passing;
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

  uint64_t fixed_staged = Staged(request, plan, passing);
  if (fixed_staged > request.free.dram && request.read_back.has_value()) {
    ReadBack(request, &plan, &passing);
    fixed_staged = Staged(request, plan, passing);
  }
  if (fixed_staged > request.free.dram && request.pull.has_value()) {
    uint64_t others = fixed_staged - plan.working.dram + request.pull->bytes();
    if (plan.reads_back) others += request.read_back->buffer_bytes_max - request.read_back->buffer_bytes_min;
    Plan leaner = plan;
    LeaveCopiesOut(request, request.free.dram - std::min(request.free.dram, others), &leaner);
    // A few small copies take less than the memory for pulls without them.
    if (const uint64_t staged = Staged(request, leaner, passing); staged < fixed_staged) {
      plan = std::move(leaner);
      fixed_staged = staged;
    }
  }
  uint64_t room = request.free.dram - std::min(request.free.dram, fixed_staged);
  if (plan.reads_back) {
    // Buffers come before state: with too few buffers each step would wait for the log slice by slice.
    const uint64_t more = std::min(room, request.read_back->buffer_bytes_max - request.read_back->buffer_bytes_min);
    plan.slice_bytes += more;
    room -= more;
  }
  for (const bool frozen : {true, false}) {
    for (size_t i = 0; i < plan.chunks.size(); ++i) {
      if (plan.chunks[i].state == TierKind::kHbm || IsFrozen(request, i) != frozen) continue;
      const uint64_t state = request.LayoutOf(i).StateBytes(request.elements[i]);
      const TierKind tier = state <= room ? TierKind::kDram : TierKind::kNvme;
      if (tier == TierKind::kDram) room -= state;
      plan.chunks[i].state = tier;
      plan.state[tier] += state;
    }
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
  uint64_t passing = 0;  // frozen chunks that come back have their values
  if (request.read_back.has_value()) ReadBack(request, &plan, &passing);
  uint64_t least = std::min(all, Staged(request, plan, passing));
  if (request.pull.has_value()) {
    LeaveCopiesOut(request, 0, &plan);
    least = std::min(least, Staged(request, plan, passing));
  }
  return least;
}

}  // namespace ballast::storage
