#include "ballast/services/server/operator_calls.h"

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"

namespace ballast::services {

OperatorCalls::OperatorCalls(std::unique_ptr<Executor> threads, int under_way_max, Executor* answers,
                             Deadlines* deadlines, const WaitingBounds& bounds)
    : threads_(std::move(threads)), under_way_max_(under_way_max) {
  const auto self = std::make_shared<std::weak_ptr<State>>();
  state_ = std::make_shared<State>(deadlines, bounds, [self, answers](uint64_t id) {
    const std::shared_ptr<State> state = self->lock();
    if (state == nullptr) return;
    Replies replies;
    {
      absl::MutexLock lock(&state->mu);
      state->waiting.Expire(id, &replies);
    }
    for (auto& reply : replies) answers->Post(std::move(reply));
  });
  *self = state_;
}

void OperatorCalls::Stop(const absl::Status& status) {
  Replies replies;
  {
    absl::MutexLock lock(&state_->mu);
    if (state_->stopped.ok()) state_->stopped = status;
    state_->waiting.RefuseAll(state_->stopped, &replies);
  }
  Run(std::move(replies));
}

absl::Status OperatorCalls::Refusal() const {
  if (!state_->stopped.ok()) return state_->stopped;
  if (state_->under_way < under_way_max_) return absl::OkStatus();
  return model::Error(
      absl::StatusCode::kUnavailable, model::kBusy,
      absl::StrCat(state_->under_way, " drops or new budgets are under way, the most at a time; a disk may ",
                   "hang. Send the request again"));
}

}  // namespace ballast::services
