#include "ballast/storage/placement/placement.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "ballast/proto/base/status.h"
#include "ballast/storage/placement/candidates.h"
#include "ballast/storage/placement/plan_cost.h"

namespace ballast::storage {
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

bool Plan::SameAs(const Plan& other) const {
  return reads_back == other.reads_back && slice_bytes == other.slice_bytes &&
         std::equal(chunks.begin(), chunks.end(), other.chunks.begin(), other.chunks.end(),
                    [](const ChunkPlacement& a, const ChunkPlacement& b) {
                      return a.state == b.state && a.working == b.working;
                    });
}

uint64_t PlanRequest::TrainedElements() const {
  uint64_t trained = 0;
  for (size_t i = 0; i < elements.size(); ++i) trained += IsFrozen(i) ? 0 : elements[i];
  return trained;
}

namespace {

void ExplainTiers(const Plan& plan, std::string* text) {
  uint64_t count[kTierKinds] = {};
  for (const ChunkPlacement& chunk : plan.chunks) ++count[static_cast<int>(chunk.state)];
  std::vector<std::string> parts;
  for (const TierKind tier : {TierKind::kHbm, TierKind::kDram, TierKind::kNvme}) {
    if (count[static_cast<int>(tier)] == 0 && plan.working[tier] == 0) continue;
    parts.push_back(absl::StrCat(TierName(tier), " holds the state of ", count[static_cast<int>(tier)], " chunks (",
                                 plan.state[tier], " bytes) and ", plan.working[tier], " bytes of working copies"));
  }
  absl::StrAppend(text, "Of ", plan.chunks.size(), " chunks ", absl::StrJoin(parts, "; "), ". ");
  if (plan.state.nvme > 0) {
    absl::StrAppend(text, "What is on nvme found no room in dram, where working copies, slices of the step in flight ",
                    "and buffers for moving nvme state come before state: ", plan.choice.Describe(), ".");
  } else if (plan.state.hbm > 0 && plan.state.dram > 0) {
    absl::StrAppend(text, "What is in dram is not in hbm: ", plan.choice.Describe(), ".");
  } else if (plan.choice.hbm == HbmUse::kNone) {
    absl::StrAppend(text, "All of it fits there, and with state in hbm a step would take longer.");
  } else {
    absl::StrAppend(text, "All of it fits there, and no faster tier has room.");
  }
}

void ExplainRoundedMasters(const Plan& plan, std::string* text) {
  const auto copyless =
      std::count_if(plan.chunks.begin(), plan.chunks.end(), [](const auto& c) { return !c.working.has_value(); });
  if (copyless == 0) return;
  absl::StrAppend(text,
                  plan.choice.rounds_masters ? " State makes better use of the dram than the working copies of "
                                             : " In dram there is no room for the working copies of ",
                  copyless, " chunks: pulls of these round the masters");
  if (plan.pull.bytes() > 0) {
    absl::StrAppend(text, ", which pass through ", plan.pull.bytes(), " bytes of dram");
  }
  absl::StrAppend(text, ".");
}

void ExplainReadBack(const Plan& plan, std::string* text) {
  if (!plan.reads_back) return;
  absl::StrAppend(text,
                  plan.choice.reads_back ? " State makes better use of the dram than a step's slices: they have "
                                         : " The slices of a step do not fit beside them: they have ",
                  plan.slice_bytes, " bytes of dram until they are on the disk, and ", plan.read_back_bytes,
                  " bytes are read back from it in each step.");
}

}  // namespace

std::string Plan::Explain() const {
  std::string text;
  ExplainTiers(*this, &text);
  ExplainRoundedMasters(*this, &text);
  ExplainReadBack(*this, &text);
  if (prediction.has_value()) absl::StrAppend(&text, " ", prediction->Explain());
  if (runner_up.has_value()) {
    const StepPrediction& other = runner_up->prediction;
    absl::StrAppendFormat(&text, " The next best plan would take %.3f s, bound by %s", other.total, other.binds());
    if (other.pulls > 0) absl::StrAppendFormat(&text, ", and %.3f s for pulls", other.pulls);
    absl::StrAppend(&text, ": ", runner_up->choice.Describe(), ".");
  }
  return text;
}

absl::StatusOr<Plan> MakePlan(const PlanRequest& request) {
  CheapestTwo<Plan> plans;
  std::optional<Candidate> nearest;  // of those that do not fit
  for (const Choice& choice : Choices(request)) {
    Candidate candidate = Arrange(request, choice);
    if (!candidate.fits()) {
      if (!nearest.has_value() || candidate.missing < nearest->missing) nearest = std::move(candidate);
      continue;
    }
    const auto is = [&](const Plan* plan) { return plan != nullptr && plan->SameAs(candidate.plan); };
    if (is(plans.best()) || is(plans.second())) continue;
    Predict(request, &candidate.plan);
    const double cost = CostOf(request, candidate.plan);
    plans.Offer(std::move(candidate.plan), cost);
  }
  Plan* const best = plans.best();
  if (best == nullptr) {
    return model::Error(absl::StatusCode::kResourceExhausted, model::kBudget, nearest->shortage);
  }
  if (const Plan* const second = plans.second(); second != nullptr) {
    best->runner_up = {second->choice, *second->prediction};
  }
  return std::move(*best);
}

}  // namespace ballast::storage
