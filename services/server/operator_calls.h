// Calls of operators that may wait for a disk: drops, and new budgets. The work runs on threads of its own. The call
// waits like any other: until its deadline, and while its client is there.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "ballast/services/threads/caller.h"
#include "ballast/services/threads/deadlines.h"
#include "ballast/services/threads/executor.h"
#include "ballast/services/threads/reply.h"
#include "ballast/services/threads/waiting.h"

namespace ballast::services {

// Threads: any.
class OperatorCalls {
 public:
  // At most `under_way_max` pieces of work run or wait for a thread of `threads`; further calls are BUSY. Work counts
  // until it ends, even if its caller has an answer already. `answers`: runs the replies to callers whose deadline has
  // passed. Borrows all arguments except `threads`.
  OperatorCalls(std::unique_ptr<Executor> threads, int under_way_max, Executor* answers, Deadlines* deadlines,
                const WaitingBounds& bounds);

  // Replies with the result of `work`. If the caller gives up, work that has begun goes on, and work that has not begun
  // never runs. `bytes`: the size of the request. `what`: the message names it if the deadline passes.
  template <typename Response>
  void Begin(uint64_t bytes, const CallLimit& limit, std::string what, std::function<absl::StatusOr<Response>()> work,
             Reply<Response> reply);
  // Refuses the callers that wait, and later calls. Work goes on.
  void Stop(const absl::Status& status);
  // Waits for the work. Call Stop before.
  void Join() { threads_->Join(); }

 private:
  // A deadline may pass, or a client leave, while the server ends: the callback must neither keep nor touch the rest.
  struct State {
    State(Deadlines* deadlines, const WaitingBounds& bounds, std::function<void(uint64_t)> expire)
        : waiting(deadlines, bounds, std::move(expire)) {}
    absl::Mutex mu;
    absl::Status stopped ABSL_GUARDED_BY(mu);
    int under_way ABSL_GUARDED_BY(mu) = 0;
    Waiting::Queue queue ABSL_GUARDED_BY(mu);
    Waiting waiting ABSL_GUARDED_BY(mu);
  };
  // Guarded by the state's lock.
  template <typename Response>
  struct Call {
    std::optional<absl::StatusOr<Response>> outcome;
    bool over = false;  // the caller has been refused, or has given up
  };
  absl::Status Refusal() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(state_->mu);

  const std::unique_ptr<Executor> threads_;
  const int under_way_max_;
  std::shared_ptr<State> state_;
};

template <typename Response>
void OperatorCalls::Begin(uint64_t bytes, const CallLimit& limit, std::string what,
                          std::function<absl::StatusOr<Response>()> work, Reply<Response> reply) {
  const auto call = std::make_shared<Call<Response>>();
  Waiter waiter;
  waiter.bytes = bytes;
  waiter.limit = limit;
  waiter.attempt = [call, reply](Replies* replies) {
    if (!call->outcome.has_value()) return false;
    replies->push_back([reply, outcome = *std::move(call->outcome)]() mutable { reply(std::move(outcome)); });
    return true;
  };
  waiter.expire = [call, reply, what = std::move(what)](Replies* replies) {
    call->over = true;
    replies->push_back([reply, what] { reply(DeadlinePassed(what)); });
  };
  waiter.refuse = [call, reply](const absl::Status& status, Replies* replies) {
    call->over = true;
    replies->push_back([reply, status] { reply(status); });
  };
  Replies refused;
  {
    absl::MutexLock lock(&state_->mu);
    absl::Status refusal = Refusal();
    if (refusal.ok()) refusal = threads_->Prepare();
    if (!refusal.ok()) {
      waiter.refuse(refusal, &refused);
    } else {
      state_->waiting.Submit(std::move(waiter), &state_->queue, &refused);
    }
    if (!call->over) ++state_->under_way;
  }
  if (!refused.empty()) return Run(std::move(refused));
  threads_->Post([this, call, work = std::move(work)] {
    bool over = false;
    {
      absl::MutexLock lock(&state_->mu);
      over = call->over;
    }
    absl::StatusOr<Response> outcome = over ? absl::CancelledError() : work();
    Replies replies;
    {
      absl::MutexLock lock(&state_->mu);
      --state_->under_way;
      call->outcome = std::move(outcome);
      state_->waiting.Wake(&state_->queue, &replies);
    }
    Run(std::move(replies));
  });
}

}  // namespace ballast::services
