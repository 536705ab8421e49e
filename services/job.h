// One job on one server: its step machine under one lock, what was pushed for the step in flight, its chunks, and the
// thread that applies decided steps to them.
//
// Requests come on any thread. The machine answers, refuses, or lets them wait; who waits is evaluated again whenever
// the machine's state moved or the chunk it needs got there. Payloads are copied and norms computed outside the lock.
// The job's own thread does what blocks: catalog writes, taking space for new chunks, pins, and updates, in the order
// they were decided. So a pin at version N lies between the updates N and N + 1 by construction.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/synchronization/mutex.h"
#include "ballast/kernels/thread_pool.h"
#include "ballast/services/counters.h"
#include "ballast/services/deadlines.h"
#include "ballast/services/executor.h"
#include "ballast/services/intake.h"
#include "ballast/services/state_server.h"
#include "ballast/services/step/step_machine.h"
#include "ballast/services/step_log.h"
#include "ballast/services/waiting.h"
#include "ballast/storage/catalog/catalog.h"
#include "ballast/storage/chunk_store.h"
#include "ballast/storage/tier/tiers.h"

namespace ballast::services {

// What the jobs of a server share. All outlive every job.
struct JobSurroundings {
  std::string server_id;
  storage::Catalog* catalog = nullptr;
  storage::Tiers* tiers = nullptr;
  kernels::ThreadPool* compute = nullptr;
  Executor* executor = nullptr;
  Deadlines* deadlines = nullptr;
  ServerCounters* counters = nullptr;
  // Held while a job compares its plan with what is free and takes it.
  absl::Mutex* planning = nullptr;
  WaitingBounds waiting;
};

// A chunk of the job that lives on this server. Guarded by the job's lock.
struct HeldChunk {
  HeldChunk(std::shared_ptr<ProvisionalMemory> memory, uint64_t store_index, uint64_t elements, kernels::Dtype gradient)
      : store_index(store_index), elements(elements), intake(std::move(memory), elements, gradient) {}

  const uint64_t store_index;
  const uint64_t elements;
  model::Chunk layout;
  std::optional<int64_t> version;  // none before its first Open
  int64_t first_version = 0;       // that of its registration: there is none before
  bool next_started = false;       // the update to version + 1 is at work: reads of `version` may see it
  int updates_pending = 0;         // decided and not yet done: the intake's gradient is theirs
  Intake intake;
  Waiting::Queue pulls;
  std::map<uint64_t, Waiting::Queue> pushes;  // by the slice's first element: a place has one writer at a time
};

class Job : public std::enable_shared_from_this<Job>, private StepHost {
 public:
  static std::shared_ptr<Job> Make(const std::string& name, const JobSurroundings& surroundings);
  ~Job() override;

  // After a restart, before any other call.
  absl::Status Replay(const PromiseRecord& promise);

  // As StateServer's.
  void GetJob(Reply<v1::GetJobResponse> reply);
  void Fence(const v1::FenceRequest& request, absl::Time deadline, Reply<v1::FenceResponse> reply);
  void Open(const v1::OpenRequest& request, absl::Time deadline, Reply<v1::OpenResponse> reply);
  void Norm(const v1::NormRequest& request, Reply<v1::NormResponse> reply);
  void Seal(const v1::SealRequest& request, absl::Time deadline, Reply<v1::SealResponse> reply);
  void Commit(const v1::CommitRequest& request, Reply<v1::CommitResponse> reply);
  void Pin(const v1::PinRequest& request, absl::Time deadline, Reply<v1::PinResponse> reply);
  void Unpin(const v1::UnpinRequest& request, Reply<v1::UnpinResponse> reply);
  void Push(const v1::PushRequest& header, absl::Span<const std::byte> payload, absl::Time deadline,
            Reply<v1::PushResponse> reply);
  void Pull(const v1::PullRequest& request, absl::Time deadline, StateServer::Allocate allocate, Reply<uint32_t> reply);

  v1::JobStatus Status() const;
  v1::Epoch promised() const;

  // Refuses all that waits and all that comes with `status`, finishes the update at work, drops those behind it.
  // Blocks.
  void Stop(const absl::Status& status);

 private:
  struct StepWork;
  struct Opening;
  struct PullPlan;

  Job(const std::string& name, const JobSurroundings& surroundings, std::function<void(uint64_t)> expire);

  // StepHost.
  uint64_t Append(const StepRecord& record) override;
  void Sync(uint64_t lsn) override;
  v1::ChunkNorm Norm(uint64_t chunk, absl::string_view gradient_presence) override;
  void Apply(const v1::PreparedRecord& prepared, const v1::Decision& decision) override;
  void Opened(const model::EpochPlan& plan) override;

  // Runs `body` under the lock, then Settle, then the replies: here, or (for the job's thread) on the executor.
  void Locked(absl::FunctionRef<void(Replies*)> body) ABSL_LOCKS_EXCLUDED(mu_);
  void LockedOnStage(absl::FunctionRef<void(Replies*)> body) ABSL_LOCKS_EXCLUDED(mu_);
  // Reports syncs to the machine and evaluates what waits for it, until nothing moves.
  void Settle(Replies* replies) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Expire(uint64_t id);
  // Why the job takes no requests: stopped, or failed. OK if it does.
  absl::Status Refusal() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Fail(const absl::Status& cause, absl::string_view remedy, Replies* replies) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  v1::GetJobResponse Describe() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // A request of `bytes` that the machine may let wait. `what`: for the deadline's message.
  template <typename Response>
  void Ask(uint64_t bytes, std::function<Outcome<Response>()> evaluate, absl::Time deadline, const std::string& what,
           Reply<Response> reply);

  Outcome<v1::OpenResponse> TryOpen(const v1::OpenRequest& request) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // `waiting_for`: which pin the request waits for, 0 before it began or found one.
  Outcome<v1::PinResponse> TryPin(int64_t version, uint64_t* waiting_for) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  bool TryPush(const v1::PushRequest& header, absl::Span<const std::byte> payload, const Reply<v1::PushResponse>& reply,
               Replies* replies) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Receive(const v1::PushRequest& header, absl::Span<const std::byte> payload,
               const std::shared_ptr<HeldChunk>& chunk, const Intake::Receipt& receipt,
               const Reply<v1::PushResponse>& reply) ABSL_LOCKS_EXCLUDED(mu_);
  void WakePushes(HeldChunk* chunk, Replies* replies) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  std::shared_ptr<HeldChunk> FindSliceChunk(const v1::PushRequest& header, uint32_t* slice) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  absl::StatusOr<PullPlan> PlanPull(const v1::PullRequest& request) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  enum class Copy { kCurrent, kPinned, kNotYet };
  // Where `version` of a chunk can be read. FAILED_PRECONDITION (VERSION_GONE).
  absl::StatusOr<Copy> Locate(const HeldChunk& chunk, int64_t version) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Read(PullPlan plan, Copy copy, const StateServer::Allocate& allocate, const Reply<uint32_t>& reply)
      ABSL_LOCKS_EXCLUDED(mu_);

  // On the job's thread.
  void PrepareOpen(const v1::OpenRequest& request);
  absl::Status TakeChunks(const v1::OpenRequest& request, std::vector<std::shared_ptr<HeldChunk>>* chunks);
  absl::Status AddChunks(const kernels::OptimizerSpec& optimizer, const std::vector<uint64_t>& elements, bool dry_run,
                         std::vector<std::shared_ptr<HeldChunk>>* added);
  void RunStep(StepWork* work);
  void NoteCommitted(int64_t step);
  absl::Status RunUpdates(storage::ChunkStore* store, StepWork* work);
  // False if there is none.
  bool GiveUpOldestPin(storage::ChunkStore* store, const absl::Status& cause);
  void RunPin(int64_t version, uint64_t pin);
  void RunUnpin(int64_t version);

  const std::string name_;
  const JobSurroundings around_;

  mutable absl::Mutex mu_;
  StepLog log_ ABSL_GUARDED_BY(mu_);
  std::unique_ptr<StepMachine> machine_ ABSL_GUARDED_BY(mu_);
  absl::Status stopped_ ABSL_GUARDED_BY(mu_);
  absl::Status failure_ ABSL_GUARDED_BY(mu_);
  std::unique_ptr<Opening> opening_ ABSL_GUARDED_BY(mu_);

  std::shared_ptr<const model::EpochPlan> plan_ ABSL_GUARDED_BY(mu_);
  std::shared_ptr<storage::ChunkStore> store_ ABSL_GUARDED_BY(mu_);  // made by the job's thread
  std::shared_ptr<ProvisionalMemory> memory_ ABSL_GUARDED_BY(mu_);
  std::vector<std::shared_ptr<HeldChunk>> chunks_ ABSL_GUARDED_BY(mu_);  // in registration order
  std::vector<std::shared_ptr<HeldChunk>> spares_ ABSL_GUARDED_BY(mu_);  // taken for an Open that was then refused
  absl::flat_hash_map<uint64_t, std::shared_ptr<HeldChunk>> by_index_ ABSL_GUARDED_BY(mu_);
  std::vector<uint64_t> tensor_steps_ ABSL_GUARDED_BY(mu_);  // t of torch's optimizers, per tensor

  struct PinState {
    uint64_t id = 0;  // from 1: tells it from one of the same version that was unpinned
    std::vector<uint64_t> tensor_steps;
    absl::Status status;
    bool ready = false;
  };
  std::map<int64_t, PinState> pins_ ABSL_GUARDED_BY(mu_);
  uint64_t last_pin_ ABSL_GUARDED_BY(mu_) = 0;

  // Something happened that a request in machine_queue_ may have waited for. Not set by slices: a seal that waits for
  // the last of thousands must not be evaluated for each.
  bool moved_ ABSL_GUARDED_BY(mu_) = false;
  int updates_queued_ ABSL_GUARDED_BY(mu_) = 0;
  absl::Time last_decision_ ABSL_GUARDED_BY(mu_) = absl::InfinitePast();
  Waiting::Queue machine_queue_ ABSL_GUARDED_BY(mu_);
  Waiting waiting_ ABSL_GUARDED_BY(mu_);
  bool said_unwritten_ = false;      // of the job's thread
  std::unique_ptr<Executor> stage_;  // the job's thread; its tasks borrow the job
};

}  // namespace ballast::services
