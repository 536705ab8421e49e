// The calls that `ballastctl` makes to servers.
#pragma once

#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "ballast/proto/base/access.h"
#include "ballast/services/monitoring/cluster_view.h"
#include "ballast/v1/admin_service.pb.h"
#include "ballast/v1/state_service.pb.h"

namespace ballast::services {

// How to ask a server: the time-out, and the caller's credentials.
struct Asking {
  absl::Duration timeout;
  model::Access access;
};

// Asks all servers at once. Never fails as a whole: a server that does not answer in time gets its error.
std::vector<ServerView> LookAt(const std::vector<std::string>& addresses, const Asking& asking);

// What `look` shows of a cluster. If all servers answer and something is wrong, it is called again, and what it shows
// then counts: each server answers at a moment of its own, while jobs train and their servers change, so what is really
// wrong is so twice.
ClusterView JudgeByTwoLooks(absl::FunctionRef<std::vector<ServerView>()> look);

// The last steps of `job` on a server. NOT_FOUND if the server has no such job.
absl::StatusOr<v1::JobSteps> LastSteps(const std::string& address, const std::string& job, const Asking& asking);

// `job` as a server has it, with its Open unless `without_open`.
absl::StatusOr<v1::GetJobResponse> FetchJob(const std::string& address, const std::string& job, const Asking& asking,
                                            bool without_open = false);

// Drops `job` on a server, at the epoch reported by the server. NOT_FOUND if the server has no such job.
absl::Status DropJob(const std::string& address, const std::string& job, const Asking& asking);

// Gives up a durable pin on a server, at the epoch reported by the server. NOT_FOUND if the server has no such pin.
absl::StatusOr<v1::UnpinResponse> UnpinVersion(const std::string& address, const std::string& job, int64_t version,
                                               const Asking& asking);

absl::StatusOr<v1::SetBudgetResponse> SetBudget(const std::string& address, const v1::SetBudgetRequest& request,
                                                const Asking& asking);

}  // namespace ballast::services
