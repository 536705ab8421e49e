// The job as a reader sees it: its servers, its plan by the newest Open, and its newest version.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "ballast/client/group/members.h"
#include "ballast/client/group/sight.h"
#include "ballast/client/transport.h"
#include "ballast/client/transport/router.h"
#include "ballast/kernels/optimizer.h"
#include "ballast/proto/model/epoch_plan.h"

namespace ballast::client {

class JobView {
 public:
  // How long a reader waits for a server whose chunks are on others too.
  static constexpr absl::Duration kPatience = absl::Seconds(5);

  // Borrows `router`, and brings its servers into the job's order.
  JobView(Router* router, std::string job) : router_(router), job_(std::move(job)), members_(router) {}

  // Asks who the servers are, and which of them a registry names for the job.
  absl::Status Meet(absl::Time deadline);
  // By the last Meet, the job's servers may change while it trains: who does not answer may have been replaced.
  bool may_change() const { return may_change_; }
  // Transports to the servers that the job has now, by its key. Errors: the registry's; FAILED_PRECONDITION (KEY_LOST).
  absl::StatusOr<std::vector<std::unique_ptr<Transport>>> ConnectAnew(absl::Time deadline) const;
  // Asks all servers, and follows their newest Open. Returns the highest decided version. FAILED_PRECONDITION
  // (NOT_OPEN): a group is opening the job just now. Of a job whose servers may change, a server that does not answer
  // within kPatience, or has not what it had, is left out if others have its chunks; and after the first Look the
  // servers stay as they are: STALE_EPOCH if the group has gone on since, perhaps to others.
  absl::StatusOr<int64_t> Look(absl::Time deadline);
  // Whether the group has gone on since the first Look, or a server is lost, so that what was taken may be gone.
  bool HasMoved(absl::Time deadline) const;
  // As KeptVersion's, at the last Look.
  uint64_t life() const { return life_; }
  // FAILED_PRECONDITION (VERSION_GONE) if the job has another life by now. Its name then came back, and perhaps the
  // number of a version, with other values.
  absl::Status CheckLife(uint64_t life, absl::Time deadline) const;

  // Null before the first Look.
  const std::shared_ptr<const model::EpochPlan>& plan() const { return plan_; }
  const kernels::OptimizerSpec& optimizer() const { return optimizer_; }

 private:
  absl::StatusOr<Sight> Ask(bool with_open, absl::Time deadline) const;
  bool IsOfPlan(const Sight& sight) const;
  absl::Status Follow(Sight* sight, absl::Time deadline);
  absl::Status CheckReadable(const Sight& sight) const;
  absl::Status Missing() const;

  Router* const router_;
  const std::string job_;
  Members members_;
  std::shared_ptr<const model::EpochPlan> plan_;
  kernels::OptimizerSpec optimizer_;
  uint64_t life_ = 0;
  bool may_change_ = false;
};

}  // namespace ballast::client
