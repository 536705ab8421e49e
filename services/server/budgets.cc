#include "ballast/services/server/budgets.h"

#include <spdlog/spdlog.h>

#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/services/job/job.h"
#include "ballast/services/space/prediction.h"
#include "ballast/storage/placement/rebalance.h"

namespace ballast::services {

absl::StatusOr<v1::SetBudgetResponse> ChangeBudgets(
    const v1::SetBudgetRequest& request, absl::FunctionRef<std::map<std::string, std::shared_ptr<Job>>()> jobs,
    storage::Tiers* tiers, MoveGate* moving, absl::Mutex* planning) {
  std::map<std::string, std::shared_ptr<Job>> by_name;  // ends after the locks: a dropped job may end with it
  const MoveGate::KeptShut no_moves(moving);
  absl::MutexLock lock(planning);
  storage::TierBytes budget = tiers->budget();
  if (request.has_hbm_bytes()) budget.hbm = request.hbm_bytes();
  if (request.has_dram_bytes()) budget.dram = request.dram_bytes();
  if (request.has_nvme_bytes()) budget.nvme = request.nvme_bytes();
  std::vector<std::shared_ptr<Job>> movable;
  std::vector<storage::JobHolding> holdings;
  by_name = jobs();
  for (const auto& [name, job] : by_name) {
    std::optional<storage::JobHolding> holding = job->Holding();
    if (!holding.has_value()) continue;
    movable.push_back(job);
    holdings.push_back(*std::move(holding));
  }
  BALLAST_ASSIGN_OR_RETURN(const std::vector<storage::Plan> plans,
                           storage::PlanBudgets(budget, tiers->used(), holdings));
  BALLAST_RETURN_IF_ERROR(tiers->SetBudget(budget));
  spdlog::info("budgets are now hbm {}, dram {}, nvme {} bytes", budget.hbm, budget.dram, budget.nvme);
  v1::SetBudgetResponse response;
  for (size_t i = 0; i < movable.size(); ++i) {
    v1::JobMoves* moves = response.add_jobs();
    moves->set_job(holdings[i].name);
    movable[i]->MoveTo(plans[i], moves);
    moves->set_plan(plans[i].Explain());
    if (plans[i].prediction.has_value()) *moves->mutable_prediction() = PredictionMessage(*plans[i].prediction);
  }
  return response;
}

}  // namespace ballast::services
