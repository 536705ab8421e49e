#include "ballast/client/transactions/open_job.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "ballast/client/transport/forks.h"
#include "ballast/proto/model/optimizer.h"
#include "ballast/proto/model/step_header.h"

namespace ballast::client {

OpenJob::OpenJob(const SessionOptions& options, std::vector<std::unique_ptr<Transport>> servers, Collective* collective)
    : options_(options),
      forks_(ForkCount()),
      router_(
          std::make_unique<Router>(std::move(servers), RouterOptions{.inflight_bytes_max = options.inflight_bytes_max,
                                                                     .progress = options.progress,
                                                                     .interrupted = options.interrupted})),
      group_(collective, router_.get()) {
  seat_.job = options.job;
  seat_.router = router_.get();
  seat_.step_timeout = options.step_timeout;
  seat_.inflight_bytes_max = options.inflight_bytes_max;
}

absl::Status OpenJob::Adopt(const std::shared_ptr<const v1::OpenRequest>& open) {
  BALLAST_ASSIGN_OR_RETURN(auto plan, model::EpochPlan::Make(*open));
  BALLAST_ASSIGN_OR_RETURN(seat_.optimizer, model::OptimizerOf(open->spec()));
  open_ = open;
  const auto shared = std::make_shared<const model::EpochPlan>(std::move(plan));
  seat_.units = std::make_shared<UnitMap>(shared, group_.rank());
  Advance(open->base());
  if (router_->routes() != nullptr && router_->routes()->may_change()) {
    BALLAST_RETURN_IF_ERROR(router_->Continue(*open));  // this rank may have missed a change before
  } else {
    router_->SetRoutes(shared, options_.failover_after);
  }
  if (open->has_base_decision()) {
    // A server that restarts may need this decision again before it can go on.
    auto commit = std::make_shared<v1::CommitRequest>();
    commit->set_job(options_.job);
    *commit->mutable_decision() = open->base_decision();
    router_->SetCommit(std::move(commit));
  }
  return absl::OkStatus();
}

void OpenJob::Advance(int64_t version) {
  seat_.version = version;
  seat_.attempt = 0;
  without_values_ = model::TensorsWithoutValues(seat_.units->plan(), version);
}

bool OpenJob::forked() const { return ForkCount() != forks_; }

absl::Status OpenJob::Conclude(absl::Status status) {
  const std::string reason = model::ReasonOf(status);
  if (reason == model::kStaleEpoch || reason == model::kRankMissing || reason == model::kStateLost ||
      absl::IsDataLoss(status) || (absl::IsCancelled(status) && options_.interrupted && options_.interrupted())) {
    ended_ = status;
  }
  return status;
}

absl::Status OpenJob::Usable() const {
  if (forked()) {
    return model::Error(absl::StatusCode::kFailedPrecondition, model::kUnsupported,
                        "this process was forked from the one that opened the session; open a session after the fork");
  }
  return ended_;
}

absl::Status OpenJob::CheckReadable(uint32_t unit) const {
  BALLAST_RETURN_IF_ERROR(Usable());
  if (seat_.version < 0) return Precondition("the job is new and has no values; Initialise comes first");
  return seat_.units->CheckUnit(unit);
}

absl::Status OpenJob::CheckHasValues(uint32_t unit) const {
  BALLAST_RETURN_IF_ERROR(CheckReadable(unit));
  for (const uint32_t tensor : without_values_) {
    const model::Tensor& missing = layout().tensors()[tensor];
    if (missing.unit == unit) {
      return Precondition(absl::StrCat("tensor '", missing.name, "' has no values yet; Initialise comes first"));
    }
  }
  return absl::OkStatus();
}

}  // namespace ballast::client
