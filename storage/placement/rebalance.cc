#include "ballast/storage/placement/rebalance.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "ballast/proto/model/status.h"

namespace ballast::storage {
namespace {

absl::Status Short(TierKind tier, uint64_t budget, uint64_t fixed, const char* what) {
  return model::Error(absl::StatusCode::kResourceExhausted, model::kBudget,
                      absl::StrCat("a ", TierName(tier), " budget of ", budget, " bytes is short of ", fixed - budget,
                                   " bytes: ", what, " take ", fixed, " and do not move"));
}

bool Moves(const PlacedChunk& chunk) { return chunk.placement.state != TierKind::kHbm; }

struct StateBytes {
  uint64_t all = 0;  // that may move
  uint64_t working = 0;
  TierBytes now;
};

StateBytes StateOf(const JobHolding& job) {
  StateBytes state;
  for (const PlacedChunk& chunk : job.chunks) {
    if (!Moves(chunk)) continue;
    const uint64_t bytes = job.layout.StateBytes(chunk.elements);
    state.all += bytes;
    state.working += job.layout.WorkingBytes(chunk.elements);
    state.now[chunk.placement.state] += bytes;
  }
  return state;
}

// Of a job with so much DRAM for state and so much NVMe.
absl::StatusOr<JobTarget> PlanJob(const JobHolding& job, const StateBytes& state, uint64_t dram, uint64_t nvme) {
  // Working copies, which MakePlan counts, are taken already.
  PlanRequest request{.free = {.dram = dram + job.staging_bytes_missing + state.working, .nvme = nvme},
                      .elements = {},
                      .layout = job.layout,
                      .provisional_bytes_per_element = 0,
                      .staging_bytes = job.staging_bytes_missing,
                      .durable = job.durable,
                      .placed = {},
                      .shape = job.shape};
  for (const PlacedChunk& chunk : job.chunks) {
    if (Moves(chunk)) {
      request.elements.push_back(chunk.elements);
    } else {
      request.placed.push_back(chunk);
    }
  }
  absl::StatusOr<Plan> plan = MakePlan(request);
  if (!plan.ok()) return model::Annotate(plan.status(), absl::StrCat("job '", job.name, "'"));
  JobTarget target{.plan = *std::move(plan), .state = {}};
  size_t next = 0;
  for (const PlacedChunk& chunk : job.chunks) {
    target.state.push_back(Moves(chunk) ? target.plan.chunks[next++].state : TierKind::kHbm);
  }
  return target;
}

}  // namespace

absl::StatusOr<std::vector<JobTarget>> PlanBudgets(const TierBytes& budget, const TierBytes& used,
                                                   absl::Span<const JobHolding> jobs) {
  if (budget.hbm < used.hbm) return Short(TierKind::kHbm, budget.hbm, used.hbm, "chunks in hbm and its scratch memory");
  TierBytes fixed = used;
  uint64_t all = 0, staging = 0;
  std::vector<StateBytes> states;
  for (const JobHolding& job : jobs) {
    const StateBytes& state = states.emplace_back(StateOf(job));
    all += state.all;
    staging += job.staging_bytes_missing;
    fixed.dram -= std::min(fixed.dram, state.now.dram);
    // Durable state has its place on NVMe wherever it lives.
    if (!job.durable) fixed.nvme -= std::min(fixed.nvme, state.now.nvme);
  }
  const char* const kDramHolds = "working copies, slices in flight, buffers and pinned copies";
  if (budget.dram < fixed.dram) return Short(TierKind::kDram, budget.dram, fixed.dram, kDramHolds);
  if (budget.nvme < fixed.nvme) {
    return Short(TierKind::kNvme, budget.nvme, fixed.nvme, "gradient logs, durable versions and pinned copies");
  }
  uint64_t dram = budget.dram - fixed.dram, nvme = budget.nvme - fixed.nvme;
  const bool fits = all <= dram;
  if (!fits && dram < staging) {
    return Short(TierKind::kDram, budget.dram, fixed.dram + staging,
                 "working copies, slices in flight, pinned copies and buffers for moving nvme state");
  }
  if (!fits) dram -= staging;
  std::vector<JobTarget> targets;
  uint64_t before = 0, taken = 0;  // state of the jobs before, and DRAM of these
  for (size_t i = 0; i < jobs.size(); ++i) {
    before += states[i].all;
    // What one job's chunks leave of its share is the next one's.
    const auto share =
        static_cast<uint64_t>(static_cast<unsigned __int128>(dram) * before / std::max(all, uint64_t{1}));
    BALLAST_ASSIGN_OR_RETURN(JobTarget target, PlanJob(jobs[i], states[i], fits ? states[i].all : share - taken,
                                                       jobs[i].durable ? states[i].all : nvme));
    taken += target.plan.state.dram;
    if (!jobs[i].durable) nvme -= target.plan.state.nvme;
    targets.push_back(std::move(target));
  }
  return targets;
}

}  // namespace ballast::storage
