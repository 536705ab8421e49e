// The base of all parts of a job: one lock with the fields under the lock, the waiting requests, and the job's threads.
//
// A request comes on any thread. The step machine answers, refuses, or lets the request wait; a waiting request is
// evaluated again whenever the machine moves. The *worker* does the blocking work in the order of decisions: space,
// pins, updates of chunks. So a pin at version N lies between the updates N and N + 1 by construction. The *clerk* does
// the work that needs no such order and may therefore overtake a long update: writing promises, planning Opens.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "ballast/services/counters/job_counters.h"
#include "ballast/services/job_state/held_chunk.h"
#include "ballast/services/job_state/job_mutex.h"
#include "ballast/services/job_state/job_state.h"
#include "ballast/services/job_state/leases.h"
#include "ballast/services/job_state/promise_log.h"
#include "ballast/services/job_state/surroundings.h"
#include "ballast/services/step/step_machine.h"
#include "ballast/services/threads/caller.h"
#include "ballast/services/threads/executor.h"
#include "ballast/services/threads/reply.h"
#include "ballast/services/threads/waiting.h"
#include "ballast/v1/state_service.pb.h"

namespace ballast::services {

// After a failed write the catalog takes no more writes.
inline constexpr char kCatalogRemedy[] =
    "The server's catalog takes no more writes: look after the data directory's disk (is it full?), then restart the "
    "server";

// Bound of a small record in the log: a promise, or the fixed part of a prepared step.
inline constexpr uint64_t kSmallRecordBytesMax = 4096;

class JobCore {
 public:
  // Borrows the pointers: the step machine's journal and host, and the records of the journal that the catalog keeps.
  // `expire`: as for Waiting.
  JobCore(const std::string& name, const JobSurroundings& surroundings, StepJournal* journal, PromiseLog* promises,
          StepHost* host, std::function<void(uint64_t)> expire);
  ~JobCore();  // as JoinThreads

  // Run `body`, then Settle, under the lock, then the replies: Locked on the calling thread; LockedOnWorker, for
  // threads that must not run replies, on the server's threads for answers. Enter, for threads that all jobs share, on
  // the calling thread if the lock comes free soon, else on a thread of the job's own: a job that keeps its lock keeps
  // nobody else's call. `body` lives until it has run.
  void Enter(std::function<void(Replies*)> body) ABSL_LOCKS_EXCLUDED(job_lock);
  // As Enter, for a call that comes: until its body runs, the call counts as a waiting request of `bytes` bytes. If too
  // much waits already, runs refuse(UNAVAILABLE, BUSY) in place of the body.
  void EnterAnew(uint64_t bytes, std::function<void(Replies*)> body,
                 absl::FunctionRef<void(const absl::Status&)> refuse) ABSL_LOCKS_EXCLUDED(job_lock);
  void Locked(absl::FunctionRef<void(Replies*)> body) ABSL_LOCKS_EXCLUDED(job_lock);
  // Runs `look` under the lock, for a question that may go unanswered; false, and nothing ran, if the lock stays taken.
  bool TryLook(absl::FunctionRef<void()> look) const ABSL_LOCKS_EXCLUDED(job_lock);
  void LockedOnWorker(absl::FunctionRef<void(Replies*)> body) ABSL_LOCKS_EXCLUDED(job_lock);
  // A request's deadline has passed, or its client is gone. The replies run on the server's threads for answers.
  void Expire(uint64_t id);
  // The job takes no requests from now on, for the first reason given; those that wait are refused.
  void Refuse(const absl::Status& status, Replies* replies) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // Why the job takes no requests: stopped, or failed. OK if it takes them.
  absl::Status Refusal() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  const absl::Status& failure() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) { return failure_; }
  // Ends work that may take minutes, as storage::Interrupt: an error once the job takes no requests any more, or the
  // server ends while it starts.
  absl::Status Interrupted() const ABSL_LOCKS_EXCLUDED(job_lock);
  // JobSurroundings::may_grow, for bytes of one tier. Takes locks of the server's.
  absl::Status MayGrow(storage::TierKind tier, uint64_t bytes, std::shared_ptr<void>* lease) const
      ABSL_LOCKS_EXCLUDED(job_lock);
  void Fail(const absl::Status& cause, absl::string_view remedy, Replies* replies)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // A restart brings all of the state back: there is a gradient log.
  bool recoverable() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) { return promises_->kept_elsewhere(); }
  // Advice for the operator after a disk error.
  std::string Remedy() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // Without `open`: `plan` has it.
  v1::GetJobResponse Describe() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // UNAVAILABLE (BUSY) while some chunk is ahead of the last decided step. After a restart chunks may show a step whose
  // decision the crash lost; such a version is not committed.
  absl::Status CheckNoneAhead() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // For the message of a request that waited: which leases an update waits for, how many and how old. Empty: none.
  std::string LeaseWait() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void WakePushes(HeldChunk* chunk, Replies* replies) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // Requests of the step machine, and whatever else waits for its moves. Moved: something happened for which such a
  // request may have waited, so that Settle wakes them. Slices do not move the machine: a seal that waits for the last
  // of thousands must not be evaluated at each.
  void SubmitToMachine(Waiter waiter, Replies* replies) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) {
    waiting.Submit(std::move(waiter), &machine_queue_, replies);
  }
  void WakeMachine(Replies* replies) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) { waiting.Wake(&machine_queue_, replies); }
  void Moved() ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) { moved_ = true; }
  // A higher epoch is promised: Settle wakes all pushes, which are refused now, whatever they wait for.
  void Fenced() ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) { fenced_ = true; }

  // Submits a request of `bytes` bytes that may have to wait. `what`: named in the message if the deadline passes.
  // `evaluate` runs under the lock.
  template <typename Response>
  void Ask(uint64_t bytes, std::function<Outcome<Response>()> evaluate, const CallLimit& limit, const std::string& what,
           Reply<Response> reply);

  // Runs what is queued, then ends the job's threads. Blocks.
  void JoinThreads();

  const std::string name;
  const JobSurroundings around;
  JobCounters counters;
  mutable JobMutex mu;
  const std::shared_ptr<Leases> leases = std::make_shared<Leases>();

  const std::unique_ptr<StepMachine> machine ABSL_PT_GUARDED_BY(job_lock);
  JobState state ABSL_GUARDED_BY(job_lock);
  Waiting waiting ABSL_GUARDED_BY(job_lock);

  // Tasks borrow the job.
  const std::unique_ptr<Executor> worker;
  const std::unique_ptr<Executor> clerk;
  // The whole job: a reply that uses the job keeps it alive. Set before the first request.
  void SetOwner(std::weak_ptr<const void> owner) { owner_ = std::move(owner); }
  const std::weak_ptr<const void>& owner() const { return owner_; }

 private:
  // Reports syncs to the machine and evaluates the requests of the machine, until nothing moves.
  void Settle(Replies* replies) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void WritePromise(const PromiseLog::Durable& record);
  bool PostToDoor(std::function<void(Replies*)> body, std::shared_ptr<void> place) ABSL_LOCKS_EXCLUDED(door_mu_);
  void RunAndUnlock(absl::FunctionRef<void(Replies*)> body) ABSL_UNLOCK_FUNCTION(job_lock);

  PromiseLog* const promises_ ABSL_PT_GUARDED_BY(job_lock);
  absl::Status stopped_ ABSL_GUARDED_BY(job_lock);
  absl::Status failure_ ABSL_GUARDED_BY(job_lock);
  bool moved_ ABSL_GUARDED_BY(job_lock) = false;
  bool fenced_ ABSL_GUARDED_BY(job_lock) = false;
  Waiting::Queue machine_queue_ ABSL_GUARDED_BY(job_lock);
  std::weak_ptr<const void> owner_;

  const std::shared_ptr<WaitingPlaces> places_;
  // Calls that found the lock taken. Closed before the job's other threads end.
  absl::Mutex door_mu_;
  bool door_closed_ ABSL_GUARDED_BY(door_mu_) = false;
  const std::unique_ptr<Executor> door_;
};

template <typename Response>
void JobCore::Ask(uint64_t bytes, std::function<Outcome<Response>()> evaluate, const CallLimit& limit,
                  const std::string& what, Reply<Response> reply) {
  Waiter waiter;
  waiter.bytes = bytes;
  waiter.limit = limit;
  waiter.attempt = [this, evaluate = std::move(evaluate), reply](Replies* replies) {
    mu.AssertHeld();
    const absl::Status refusal = Refusal();
    Outcome<Response> outcome = refusal.ok() ? evaluate() : Outcome<Response>(refusal);
    if (outcome.ok() && !outcome->has_value()) return false;
    if (outcome.ok()) {
      replies->push_back([reply, response = std::move(**outcome)]() mutable { reply(std::move(response)); });
    } else {
      replies->push_back([reply, status = outcome.status()] { reply(status); });
    }
    return true;
  };
  waiter.expire = [this, reply, what](Replies* replies) {
    mu.AssertHeld();
    replies->push_back([reply, status = DeadlinePassed(what + LeaseWait())] { reply(status); });
  };
  waiter.refuse = [reply](const absl::Status& status, Replies* replies) {
    replies->push_back([reply, status] { reply(status); });
  };
  EnterAnew(
      bytes,
      [this, waiter = std::move(waiter)](Replies* replies) mutable {
        mu.AssertHeld();
        SubmitToMachine(std::move(waiter), replies);
      },
      reply);
}

}  // namespace ballast::services
