#include "ballast/storage/placement/rebalance.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/storage/placement/candidates.h"
#include "ballast/storage/placement/plan_cost.h"

namespace ballast::storage {
namespace {

absl::Status Short(TierKind tier, uint64_t budget, uint64_t fixed, const char* what) {
  return model::Error(absl::StatusCode::kResourceExhausted, model::kBudget,
                      absl::StrCat("a ", TierName(tier), " budget of ", budget, " bytes is short of ", fixed - budget,
                                   " bytes: ", what, " take ", fixed, " and do not move"));
}

uint64_t AllState(const JobHolding& job) {
  uint64_t bytes = 0;
  for (const PlacedChunk& chunk : job.chunks)
    bytes += job.layout.Of(chunk.form, chunk.placement).StateBytes(chunk.elements);
  return bytes;
}

PlanRequest RequestOf(const JobHolding& job) {
  PlanRequest request{.free = {},
                      .elements = {},
                      .forms = {},
                      .layout = job.layout,
                      .pull = job.pull,
                      .provisional_bytes_per_element = 0,
                      .staging_bytes = job.staging_bytes_missing,
                      .durable = job.durable,
                      .placed = {},
                      .present = {},
                      .shape = job.shape};
  for (const PlacedChunk& chunk : job.chunks) {
    request.elements.push_back(chunk.elements);
    request.forms.push_back(chunk.form);
    request.present.push_back(chunk.placement);
  }
  return request;
}

// A job's state after HBM was given out.
struct JobState {
  uint64_t hbm = 0;      // state of the chunks in HBM, with the working copies that stay there
  uint64_t host = 0;     // state of all other chunks
  uint64_t working = 0;  // working copies in DRAM
  uint64_t leaving = 0;  // those of them that are in HBM now
};

JobState GiveHbm(PlanRequest* request, const Choice& choice, uint64_t room) {
  request->free.hbm = room;
  Plan plan;
  FillHbm(*request, choice, &plan);
  JobState state;
  for (size_t i = 0; i < plan.chunks.size(); ++i) {
    const StateLayout layout = request->LayoutOf(i);
    const uint64_t bytes = layout.StateBytes(request->elements[i]);
    const uint64_t working = layout.WorkingBytes(request->elements[i]);
    const bool copy_in_hbm = plan.chunks[i].working == TierKind::kHbm;
    (plan.chunks[i].state == TierKind::kHbm ? state.hbm : state.host) += bytes;
    (copy_in_hbm ? state.hbm : state.working) += working;
    if (!copy_in_hbm && request->present[i].working == TierKind::kHbm) state.leaving += working;
  }
  return state;
}

// The bytes of everything that may move, in its present tier.
TierBytes Movable(const PlanRequest& request) {
  TierBytes now;
  for (size_t i = 0; i < request.elements.size(); ++i) {
    const StateLayout layout = request.LayoutOf(i);
    now[request.present[i].state] += layout.StateBytes(request.elements[i]);
    if (request.present[i].working == TierKind::kHbm) now.hbm += layout.WorkingBytes(request.elements[i]);
  }
  return now;
}

uint64_t FlushBuffer(const JobHolding& job, const JobState& state) {
  return job.durable && state.hbm > 0 ? job.flush_buffer_bytes_missing : 0;
}

// Bytes that a job gains if it drops all its working copies in DRAM.
uint64_t Droppable(const JobHolding& job, const JobState& state) {
  return job.pull.has_value() ? state.working - std::min(state.working, job.pull->bytes()) : 0;
}

// `bytes` in proportion to `part` of `whole`.
uint64_t Share(uint64_t bytes, uint64_t part, uint64_t whole) {
  return static_cast<uint64_t>(static_cast<unsigned __int128>(bytes) * part / std::max(whole, uint64_t{1}));
}

// The jobs of a server and its budgets, planned by one choice after the other.
class Budgets {
 public:
  Budgets(const TierBytes& budget, const TierBytes& used, absl::Span<const JobHolding> jobs)
      : budget_(budget), jobs_(jobs), fixed_(used) {
    for (const JobHolding& job : jobs) {
      requests_.push_back(RequestOf(job));
      states_.push_back(AllState(job));
      all_ += states_.back();
      const TierBytes now = Movable(requests_.back());
      for (const TierKind tier : {TierKind::kHbm, TierKind::kDram, TierKind::kNvme}) {
        // Durable state has its place on NVMe wherever it lives.
        if (tier != TierKind::kNvme || !job.durable) fixed_[tier] -= std::min(fixed_[tier], now[tier]);
      }
    }
  }

  std::vector<Choice> choices() const {
    // The first request with a machine stands for all: they differ in their chunks, not in what can be chosen.
    for (PlanRequest request : requests_) {
      request.free.hbm = budget_.hbm;
      if (request.shape.machine != nullptr) return Choices(request);
    }
    return {Choice()};
  }
  absl::StatusOr<std::vector<Plan>> By(const Choice& choice);
  double CostOf(absl::Span<const Plan> plans) const {
    double cost = 0;
    for (size_t i = 0; i < plans.size(); ++i) cost += storage::CostOf(requests_[i], plans[i]);
    return cost;
  }

 private:
  const TierBytes budget_;
  const absl::Span<const JobHolding> jobs_;
  TierBytes fixed_;  // what does not move
  std::vector<PlanRequest> requests_;
  std::vector<uint64_t> states_;  // all state of each job
  uint64_t all_ = 0;
};

absl::StatusOr<std::vector<Plan>> Budgets::By(const Choice& choice) {
  TierBytes fixed = fixed_;
  if (budget_.hbm < fixed.hbm) return Short(TierKind::kHbm, budget_.hbm, fixed.hbm, "the tier's scratch memory");
  std::vector<JobState> states;
  uint64_t before = 0, taken = 0;  // state of the jobs so far, and their usage of the tier
  uint64_t host = 0, staging = 0, droppable = 0;
  for (size_t i = 0; i < jobs_.size(); ++i) {
    before += states_[i];
    // The next job gets the part of the share that a job's chunks leave free.
    const uint64_t room = Share(budget_.hbm - fixed.hbm, before, all_) - taken;
    const JobState& state = states.emplace_back(GiveHbm(&requests_[i], choice, room));
    taken += state.hbm;
    fixed.dram += state.leaving + FlushBuffer(jobs_[i], state);
    host += state.host;
    if (state.host > 0) staging += jobs_[i].staging_bytes_missing - FlushBuffer(jobs_[i], state);
    droppable += Droppable(jobs_[i], state);
  }
  if (budget_.nvme < fixed.nvme) {
    return Short(TierKind::kNvme, budget_.nvme, fixed.nvme, "gradient logs, durable versions and pinned copies");
  }
  uint64_t nvme = budget_.nvme - fixed.nvme;
  const bool fits = fixed.dram <= budget_.dram && host <= budget_.dram - fixed.dram;
  if (!fits) fixed.dram += staging;
  const uint64_t dram = budget_.dram - std::min(budget_.dram, fixed.dram);
  const uint64_t drop = fixed.dram - std::min(budget_.dram, fixed.dram);
  if (drop > droppable) {
    return Short(TierKind::kDram, budget_.dram, fixed.dram - droppable,
                 "slices in flight, pinned copies, buffers and working copies that stay");
  }
  std::vector<Plan> plans;
  uint64_t copies = 0, dropped = 0;
  before = taken = 0;
  for (size_t i = 0; i < jobs_.size(); ++i) {
    before += states[i].host;
    const uint64_t share = fits ? states[i].host : Share(dram, before, host) - taken;
    copies += Droppable(jobs_[i], states[i]);
    const uint64_t less = Share(drop, copies, droppable) - dropped;
    dropped += less;
    // Working copies are taken already, and buffers for NVMe state are counted by Arrange.
    requests_[i].free.dram = share + jobs_[i].staging_bytes_missing + states[i].working - less;
    requests_[i].free.nvme = jobs_[i].durable ? states_[i] : nvme;
    Candidate candidate = Arrange(requests_[i], choice);
    if (!candidate.fits()) {
      return model::Error(absl::StatusCode::kResourceExhausted, model::kBudget,
                          absl::StrCat("job '", jobs_[i].name, "': ", candidate.shortage));
    }
    Predict(requests_[i], &candidate.plan);
    // State beyond the share lies in the room of the job's own staging, which the job then does not take.
    taken += std::min(candidate.plan.state.dram, share);
    if (!jobs_[i].durable) nvme -= candidate.plan.state.nvme;
    plans.push_back(std::move(candidate.plan));
  }
  return plans;
}

// The same places for all jobs?
bool Same(absl::Span<const Plan> a, const std::vector<Plan>* b) {
  return b != nullptr &&
         std::equal(a.begin(), a.end(), b->begin(), b->end(), [](const Plan& x, const Plan& y) { return x.SameAs(y); });
}

}  // namespace

absl::StatusOr<std::vector<Plan>> PlanBudgets(const TierBytes& budget, const TierBytes& used,
                                              absl::Span<const JobHolding> jobs) {
  Budgets budgets(budget, used, jobs);
  absl::Status refused;
  CheapestTwo<std::vector<Plan>> two;
  for (const Choice& choice : budgets.choices()) {
    absl::StatusOr<std::vector<Plan>> plans = budgets.By(choice);
    if (!plans.ok()) {
      if (refused.ok()) refused = plans.status();
      continue;
    }
    if (jobs.empty()) return plans;
    if (Same(*plans, two.best()) || Same(*plans, two.second())) continue;
    const double cost = budgets.CostOf(*plans);
    two.Offer(*std::move(plans), cost);
  }
  if (two.best() == nullptr) return refused;
  std::vector<Plan>& best = *two.best();
  for (size_t i = 0; two.second() != nullptr && i < best.size(); ++i) {
    const Plan& second = (*two.second())[i];
    if (second.prediction.has_value() && !second.SameAs(best[i])) {
      best[i].runner_up = {second.choice, *second.prediction};
    }
  }
  return std::move(best);
}

}  // namespace ballast::storage
