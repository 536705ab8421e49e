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
#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "ballast/proto/model/epoch_plan.h"
#include "ballast/services/counters/job_counters.h"
#include "ballast/services/foundation/caller.h"
#include "ballast/services/foundation/executor.h"
#include "ballast/services/foundation/reply.h"
#include "ballast/services/foundation/waiting.h"
#include "ballast/services/job/held_chunk.h"
#include "ballast/services/job/job_mutex.h"
#include "ballast/services/job/surroundings.h"
#include "ballast/services/records/promise_log.h"
#include "ballast/services/slices/lent_memory.h"
#include "ballast/services/step/step_machine.h"
#include "ballast/storage/store/chunk_store.h"
#include "ballast/v1/state_service.pb.h"

namespace ballast::services {

// After a failed write the catalog takes no more writes.
inline constexpr char kCatalogRemedy[] =
    "The server's catalog takes no more writes: look after the data directory's disk (is it full?), then restart the "
    "server";

// Bound of a small record in the log: a promise, or the fixed part of a prepared step.
inline constexpr uint64_t kSmallRecordBytesMax = 4096;

absl::Status DeadlinePassed(const std::string& what);

class JobCore {
 public:
  // Borrows `host`. `expire`: as for Waiting.
  JobCore(const std::string& name, const JobSurroundings& surroundings, StepHost* host,
          std::function<void(uint64_t)> expire);
  ~JobCore();  // as JoinThreads

  // Run `body`, then Settle, under the lock, then the replies: Locked on the calling thread; LockedOnWorker, for
  // threads that must not run replies, on the server's threads for answers. Enter, for threads that all jobs share, on
  // the calling thread if the lock comes free soon, else on a thread of the job's own: a job that keeps its lock keeps
  // nobody else's call. `body` lives until it has run.
  void Enter(std::function<void(Replies*)> body) ABSL_LOCKS_EXCLUDED(job_lock);
  void Locked(absl::FunctionRef<void(Replies*)> body) ABSL_LOCKS_EXCLUDED(job_lock);
  // Runs `look` under the lock, for a question that may go unanswered; false, and nothing ran, if the lock stays taken.
  bool TryLook(absl::FunctionRef<void()> look) const ABSL_LOCKS_EXCLUDED(job_lock);
  void LockedOnWorker(absl::FunctionRef<void(Replies*)> body) ABSL_LOCKS_EXCLUDED(job_lock);
  // A request's deadline has passed, or its client is gone. The replies run on the server's threads for answers.
  void Expire(uint64_t id);
  // Why the job takes no requests: stopped, or failed. OK if it takes them.
  absl::Status Refusal() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // Ends work that may take minutes, as storage::Interrupt: an error once the job takes no requests any more, or the
  // server ends while it starts.
  absl::Status Interrupted() const ABSL_LOCKS_EXCLUDED(job_lock);
  // JobSurroundings::may_grow, for bytes of one tier. Takes locks of the server's.
  absl::Status MayGrow(storage::TierKind tier, uint64_t bytes, std::shared_ptr<void>* lease) const
      ABSL_LOCKS_EXCLUDED(job_lock);
  void Fail(const absl::Status& cause, absl::string_view remedy, Replies* replies)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // Advice for the operator after a disk error.
  std::string Remedy() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // Without `open`: `plan` has it.
  v1::GetJobResponse Describe() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // UNAVAILABLE (BUSY) while some chunk is ahead of the last decided step. After a restart chunks may show a step whose
  // decision the crash lost; such a version is not committed.
  absl::Status CheckNoneAhead() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // The chunk of a slice, and the slice's index in the plan. Null if this server has no such slice.
  std::shared_ptr<HeldChunk> FindSlice(const v1::PushRequest& header, uint32_t* slice) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void WakePushes(HeldChunk* chunk, Replies* replies) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);

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

  const std::unique_ptr<StepMachine> machine ABSL_PT_GUARDED_BY(job_lock);
  PromiseLog promises ABSL_GUARDED_BY(job_lock);
  // The log has made all records up to here durable. Without a log: all, since the catalog keeps what must be kept.
  uint64_t journalled_lsn ABSL_GUARDED_BY(job_lock) = ~uint64_t{0};
  // A restart brings all of the state back: there is a gradient log.
  bool recoverable ABSL_GUARDED_BY(job_lock) = false;
  bool recovering ABSL_GUARDED_BY(job_lock) = false;
  absl::Status stopped ABSL_GUARDED_BY(job_lock);
  absl::Status failure ABSL_GUARDED_BY(job_lock);

  std::shared_ptr<const model::EpochPlan> plan ABSL_GUARDED_BY(job_lock);
  std::shared_ptr<storage::ChunkStore> store ABSL_GUARDED_BY(job_lock);      // made by the worker
  std::vector<std::shared_ptr<HeldChunk>> chunks ABSL_GUARDED_BY(job_lock);  // in registration order
  absl::flat_hash_map<uint64_t, std::shared_ptr<HeldChunk>> by_index ABSL_GUARDED_BY(job_lock);
  std::shared_ptr<LentMemory> lent ABSL_GUARDED_BY(job_lock);  // for the step in flight; null: nothing

  // Something happened for which a request in machine_queue may have waited. Slices do not set the flag: a seal that
  // waits for the last of thousands must not be evaluated at each.
  bool moved ABSL_GUARDED_BY(job_lock) = false;
  Waiting::Queue machine_queue ABSL_GUARDED_BY(job_lock);
  Waiting waiting ABSL_GUARDED_BY(job_lock);

  // Tasks borrow the job.
  const std::unique_ptr<Executor> worker;
  const std::unique_ptr<Executor> clerk;
  // The whole job: a reply that uses the job keeps it alive.
  std::weak_ptr<const void> owner;

 private:
  // Reports syncs to the machine and evaluates the requests in machine_queue, until nothing moves.
  void Settle(Replies* replies) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void WritePromise(const PromiseLog::Durable& record);
  bool PostToDoor(const std::function<void(Replies*)>& body) ABSL_LOCKS_EXCLUDED(door_mu_);

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
  waiter.expire = [reply, what](Replies* replies) {
    replies->push_back([reply, what] { reply(DeadlinePassed(what)); });
  };
  waiter.refuse = [reply](const absl::Status& status, Replies* replies) {
    replies->push_back([reply, status] { reply(status); });
  };
  Enter([this, waiter = std::move(waiter)](Replies* replies) mutable {
    mu.AssertHeld();
    waiting.Submit(std::move(waiter), &machine_queue, replies);
  });
}

}  // namespace ballast::services
