// New budgets for a running server: first every job's moves are planned, then all budgets change or none does.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "ballast/services/job_state/move_gate.h"
#include "ballast/storage/tier/tiers.h"
#include "ballast/v1/admin_service.pb.h"

namespace ballast::services {

class Job;

// On return the tiers have the new budgets; the jobs' chunks follow between steps. RESOURCE_EXHAUSTED (BUDGET), with
// numbers, if a budget is below what cannot move; otherwise the errors of Tiers::SetBudget. On an error nothing has
// changed.
// `jobs`: called under the lock, once no chunk moves; a job that is dropped before must not stay until then.
// Threads: any; blocks until no chunk moves, and on `planning`, which an Open may hold while taking space.
absl::StatusOr<v1::SetBudgetResponse> ChangeBudgets(
    const v1::SetBudgetRequest& request, absl::FunctionRef<std::map<std::string, std::shared_ptr<Job>>()> jobs,
    storage::Tiers* tiers, MoveGate* moving, absl::Mutex* planning);

}  // namespace ballast::services
