// New budgets for a server that runs: what they mean for each job is planned, then all of it happens or nothing.
#pragma once

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "ballast/services/job.h"
#include "ballast/storage/tier/tiers.h"
#include "ballast/v1/admin_service.pb.h"

namespace ballast::services {

// The tiers have the new budgets when it returns; the jobs' chunks follow between steps. RESOURCE_EXHAUSTED (BUDGET)
// with numbers if they are below what does not move, else as Tiers::SetBudget; then nothing has changed.
// Threads: any; blocks on `planning`, which an Open may hold while it takes space.
absl::StatusOr<v1::SetBudgetResponse> ChangeBudgets(const v1::SetBudgetRequest& request,
                                                    absl::Span<const std::shared_ptr<Job>> jobs, storage::Tiers* tiers,
                                                    absl::Mutex* planning);

}  // namespace ballast::services
