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

// A job's state after HBM was given out.
struct JobState {
  std::vector<bool> in_hbm;  // by chunk
  uint64_t hbm = 0;          // state of the chunks in HBM, with the working copies that stay there
  uint64_t host = 0;         // state of all other chunks
  uint64_t host_working = 0;
  uint64_t leaving = 0;  // working copies that go from HBM to DRAM
  TierBytes now;         // everything that may move, in its present tier
};

bool WorkingInHbm(const PlacedChunk& chunk) { return chunk.placement.working == TierKind::kHbm; }

uint64_t AllState(const JobHolding& job) {
  uint64_t bytes = 0;
  for (const PlacedChunk& chunk : job.chunks) bytes += job.layout.Of(chunk.frozen, chunk.placement).StateBytes(chunk.elements);
  return bytes;
}

// The first chunks that fit are in HBM: the next forward wants them first.
JobState GiveHbm(const JobHolding& job, uint64_t room) {
  JobState state;
  for (const PlacedChunk& chunk : job.chunks) {
    const StateLayout layout = job.layout.Of(chunk.frozen, chunk.placement);
    const uint64_t bytes = layout.StateBytes(chunk.elements);
    const uint64_t working = layout.WorkingBytes(chunk.elements);
    const uint64_t there = bytes + (WorkingInHbm(chunk) ? working : 0);
    state.now[chunk.placement.state] += bytes;
    if (WorkingInHbm(chunk)) state.now.hbm += working;
    const bool fits = layout.working_copies() && there <= room;
    state.in_hbm.push_back(fits);
    if (fits) {
      room -= there;
      state.hbm += there;
      continue;
    }
    state.host += bytes;
    state.host_working += working;
    if (WorkingInHbm(chunk)) state.leaving += working;
  }
  return state;
}

uint64_t FlushBuffer(const JobHolding& job, const JobState& state) {
  return job.durable && state.hbm > 0 ? job.flush_buffer_bytes_missing : 0;
}

// The plan of a job with this much DRAM for state outside HBM, and this much NVMe.
absl::StatusOr<Plan> PlanJob(const JobHolding& job, const JobState& state, uint64_t dram, uint64_t nvme) {
  // Working copies, which MakePlan counts, are taken already.
  PlanRequest request{.free = {.dram = dram + job.staging_bytes_missing + state.host_working, .nvme = nvme},
                      .elements = {},
                      .frozen = {},
                      .copyless = {},
                      .layout = job.layout,
                      .pull = {},
                      .provisional_bytes_per_element = 0,
                      .staging_bytes = job.staging_bytes_missing,
                      .durable = job.durable,
                      .placed = {},
                      .shape = job.shape};
  for (size_t i = 0; i < job.chunks.size(); ++i) {
    if (state.in_hbm[i]) {
      request.placed.push_back({job.chunks[i].elements, {TierKind::kHbm, job.chunks[i].placement.working}});
    } else {
      request.frozen.push_back(job.chunks[i].frozen);
      request.copyless.push_back(!job.chunks[i].placement.working.has_value());
      request.elements.push_back(job.chunks[i].elements);
    }
  }
  absl::StatusOr<Plan> host = MakePlan(request);
  if (!host.ok()) return model::Annotate(host.status(), absl::StrCat("job '", job.name, "'"));
  Plan plan = *host;
  plan.chunks.clear();
  size_t next = 0;
  for (size_t i = 0; i < job.chunks.size(); ++i) {
    if (!state.in_hbm[i]) {
      plan.chunks.push_back(host->chunks[next++]);
      continue;
    }
    plan.chunks.push_back({TierKind::kHbm, job.chunks[i].placement.working});
    plan.state.hbm += job.layout.StateBytes(job.chunks[i].elements);
    plan.working[*job.chunks[i].placement.working] += job.layout.WorkingBytes(job.chunks[i].elements);
  }
  return plan;
}

// `bytes` in proportion to `part` of `whole`.
uint64_t Share(uint64_t bytes, uint64_t part, uint64_t whole) {
  return static_cast<uint64_t>(static_cast<unsigned __int128>(bytes) * part / std::max(whole, uint64_t{1}));
}

}  // namespace

absl::StatusOr<std::vector<Plan>> PlanBudgets(const TierBytes& budget, const TierBytes& used,
                                              absl::Span<const JobHolding> jobs) {
  TierBytes fixed = used;
  uint64_t all = 0;
  for (const JobHolding& job : jobs) {
    all += AllState(job);
    const TierBytes now = GiveHbm(job, 0).now;
    for (const TierKind tier : {TierKind::kHbm, TierKind::kDram, TierKind::kNvme}) {
      // Durable state has its place on NVMe wherever it lives.
      if (tier != TierKind::kNvme || !job.durable) fixed[tier] -= std::min(fixed[tier], now[tier]);
    }
  }
  if (budget.hbm < fixed.hbm) return Short(TierKind::kHbm, budget.hbm, fixed.hbm, "the tier's scratch memory");
  std::vector<JobState> states;
  uint64_t before = 0, taken = 0;  // state of the jobs so far, and their usage of the tier
  for (const JobHolding& job : jobs) {
    before += AllState(job);
    // The next job gets the part of the share that a job's chunks leave free.
    taken += states.emplace_back(GiveHbm(job, Share(budget.hbm - fixed.hbm, before, all) - taken)).hbm;
    fixed.dram += states.back().leaving + FlushBuffer(job, states.back());
  }

  all = 0;
  uint64_t staging = 0;
  for (size_t i = 0; i < jobs.size(); ++i) {
    all += states[i].host;
    if (states[i].host > 0) staging += jobs[i].staging_bytes_missing - FlushBuffer(jobs[i], states[i]);
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
  std::vector<Plan> plans;
  before = taken = 0;
  for (size_t i = 0; i < jobs.size(); ++i) {
    before += states[i].host;
    const uint64_t share = fits ? states[i].host : Share(dram, before, all) - taken;
    BALLAST_ASSIGN_OR_RETURN(Plan plan, PlanJob(jobs[i], states[i], share, jobs[i].durable ? AllState(jobs[i]) : nvme));
    // State beyond the share lies in the room of the job's own staging, which the job then does not take.
    taken += std::min(plan.state.dram, share);
    if (!jobs[i].durable) nvme -= plan.state.nvme;
    plans.push_back(std::move(plan));
  }
  return plans;
}

}  // namespace ballast::storage
