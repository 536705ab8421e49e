// A job on a server: its step machine under one lock, the slices pushed for the step in flight, its chunks, and the
// thread that applies decided steps to them.
//
// Requests come on any thread. The machine answers, refuses, or lets them wait; a waiting request is evaluated again
// whenever the machine moves or its chunk reaches the version. Payloads are copied and norms computed outside the lock.
// The job's own thread does the blocking work in the order of decisions: catalog writes, taking space for new chunks,
// pins, and updates. So a pin at version N lies between the updates N and N + 1 by construction.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/synchronization/mutex.h"
#include "ballast/kernels/thread_pool.h"
#include "ballast/proto/model/lent_memory.h"
#include "ballast/services/durability/journal.h"
#include "ballast/services/foundation/counters.h"
#include "ballast/services/foundation/deadlines.h"
#include "ballast/services/foundation/executor.h"
#include "ballast/services/foundation/foundation.h"
#include "ballast/services/foundation/reply.h"
#include "ballast/services/foundation/waiting.h"
#include "ballast/services/records/job_entry.h"
#include "ballast/services/records/promise_log.h"
#include "ballast/services/slices/intake.h"
#include "ballast/services/slices/lent_memory.h"
#include "ballast/services/step/step_machine.h"
#include "ballast/storage/catalog/catalog.h"
#include "ballast/storage/placement/rebalance.h"
#include "ballast/storage/store/chunk_store.h"
#include "ballast/storage/tier/tiers.h"
#include "ballast/v1/admin_service.pb.h"
#include "ballast/v1/state_service.pb.h"

namespace ballast::services {

// Shared by the jobs of a server. All of it outlives every job.
struct JobSurroundings {
  std::string server_id;
  storage::Catalog* catalog = nullptr;
  storage::Tiers* tiers = nullptr;
  Foundation* foundation = nullptr;
  kernels::ThreadPool* compute = nullptr;
  Executor* executor = nullptr;
  Deadlines* deadlines = nullptr;
  ServerCounters* counters = nullptr;
  // Held while a job plans with the free space and takes it.
  absl::Mutex* planning = nullptr;
  const storage::MachineProfile* machine = nullptr;  // null: plans predict no times
  bool working_copies = true;
  WaitingBounds waiting;
};

// A chunk of the job on this server. Guarded by the job's lock.
struct HeldChunk {
  HeldChunk(std::shared_ptr<SliceMemory> memory, uint64_t store_index, uint64_t id, uint64_t elements,
            kernels::Dtype gradient, bool logged)
      : store_index(store_index),
        id(id),
        elements(elements),
        logged(logged),
        intake(std::move(memory), elements, gradient, logged) {}

  const uint64_t store_index;
  const uint64_t id;  // index in the layout of the Open that took the chunk
  const uint64_t elements;
  const bool logged;  // updates read its slices back from the log wherever Intake::Logs
  model::Chunk layout;
  std::optional<int64_t> version;  // none before its first Open
  int64_t changed = -1;            // the last transaction that changed it; -1: none
  int64_t first_version = 0;       // version of its registration; the chunk has no earlier version
  bool next_started = false;       // the update to version + 1 is running: reads of `version` may see its writes
  int updates_pending = 0;         // decided but unfinished: the intake's gradient is theirs
  Intake intake;
  Waiting::Queue pulls;
  std::map<uint64_t, Waiting::Queue> pushes;  // by first element of the slice: a place has a single writer at a time
};

// Deletes the gradient log of a job that could not be recovered.
absl::Status RemoveLog(storage::Tiers& tiers, const std::string& job);

class Job : public std::enable_shared_from_this<Job>, private StepHost {
 public:
  static std::shared_ptr<Job> Make(const std::string& name, const JobSurroundings& surroundings);
  ~Job() override;

  // After a restart, before any other call: takes back the promise that the catalog kept.
  absl::Status Replay(const PromiseRecord& promise);
  // As Replay, for a job with durability `step`: brings its chunks and its step machine back to where they were.
  // Blocks, and logs its progress. DATA_LOSS if durable data cannot be read. Chunks may then have been flushed at the
  // versions replayed so far; nothing else has changed, and the log stays.
  absl::Status Recover(const JobEntry& entry);
  // After all jobs of the server have recovered: makes room in the log for new records, if need be by extending the log
  // from budget that is still free. Blocks.
  absl::Status EndRecovery();
  // As Replay, for a job with durability every-K that had state: takes back its pins; the rest of the state is lost
  // (every_k.cc). DATA_LOSS if the catalog's entries do not suffice; RESOURCE_EXHAUSTED.
  absl::Status ComeBack(const JobEntry& entry);

  // As the methods of StateServer.
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
  void Pull(const v1::PullRequest& request, absl::Time deadline, Allocate allocate, Reply<uint32_t> reply);
  absl::StatusOr<std::unique_ptr<model::Loan>> Lend(const model::LoanRequest& request);
  void AwaitApplied(int64_t version, std::optional<uint32_t> unit, absl::Time deadline,
                    Reply<v1::CommitResponse> reply);

  v1::JobStatus Status() const;
  // The job's state that may move, for planning new budgets; none if nothing may. Call while holding the planning lock.
  std::optional<storage::JobHolding> Holding() const;
  // Moves chunks, between steps, to where `plan` puts them, and counts them in `answer`. Replaces the moves of an
  // earlier call.
  void MoveTo(const storage::Plan& plan, v1::JobMoves* answer);
  v1::Epoch promised() const;

  // Refuses waiting and new requests with `status`, finishes the running update, drops the updates queued behind.
  // Blocks.
  void Stop(const absl::Status& status);
  // RemoveJournal deletes the log: of a dropped job after Stop, or of a job that has accepted no Open. No request may
  // append meanwhile. Discard frees a dropped job's extents; call after Stop, once the catalog has forgotten them.
  absl::Status RemoveJournal();
  void Discard();
  // After Stop: bytes of the NVMe budget that the log holds until it is removed.
  uint64_t journal_bytes() const { return journal_bytes_; }

 private:
  struct StepWork;
  struct Opening;
  struct PullPlan;
  struct Replaying;
  struct Moves;

  Job(const std::string& name, const JobSurroundings& surroundings, std::function<void(uint64_t)> expire);

  // StepHost.
  uint64_t Append(const StepRecord& record) override;
  void Sync(uint64_t lsn) override;
  v1::ChunkNorm Norm(uint64_t chunk, absl::string_view gradient_presence) override;
  void Apply(const v1::PreparedRecord& prepared, const v1::Decision& decision) override;
  void Opened(const model::EpochPlan& plan) override;
  void PinDue(int64_t version) override;
  void PinChanged(const v1::PinnedVersion& pin) override;

  // Run `body`, then Settle, under the lock, then the replies: Locked on the calling thread, LockedOnStage (for the
  // job's thread) on the executor.
  void Locked(absl::FunctionRef<void(Replies*)> body) ABSL_LOCKS_EXCLUDED(mu_);
  void LockedOnStage(absl::FunctionRef<void(Replies*)> body) ABSL_LOCKS_EXCLUDED(mu_);
  // Reports syncs to the machine and evaluates the requests in machine_queue_, until nothing moves.
  void Settle(Replies* replies) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Expire(uint64_t id);
  // Why the job takes no requests: stopped, or failed. OK if it takes them.
  absl::Status Refusal() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Fail(const absl::Status& cause, absl::string_view remedy, Replies* replies) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Advice for the operator after a disk error.
  std::string Remedy() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  v1::GetJobResponse Describe() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // Submits a request of `bytes` bytes that may have to wait. `what`: named in the message if the deadline passes.
  template <typename Response>
  void Ask(uint64_t bytes, std::function<Outcome<Response>()> evaluate, absl::Time deadline, const std::string& what,
           Reply<Response> reply);

  Outcome<v1::OpenResponse> TryOpen(const v1::OpenRequest& request) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // `waiting_for`: id of the pin that the request waits for; 0 until the request has begun or found a pin.
  Outcome<v1::PinResponse> TryPin(int64_t version, uint64_t* waiting_for) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // UNAVAILABLE (BUSY) while some chunk is ahead of the last decided step. After a restart chunks may show a step whose
  // decision the crash lost; such a version is not committed.
  absl::Status CheckNoneAhead() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Durable pins (durable_pins.cc). `waiting_for`: the pinning that the request waits for; null before.
  struct Pinning {
    bool done = false;
    absl::Status status;
  };
  // Reads and verifies a pin as a whole, once per epoch, before its restore may be prepared. False while the reading
  // goes on.
  absl::StatusOr<bool> CheckedPin(const v1::SealRequest& request) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void RunPinCheck(int64_t version);
  void PinDurably(const v1::PinRequest& request, absl::Time deadline, Reply<v1::PinResponse> reply);
  void UnpinDurably(const v1::UnpinRequest& request, Reply<v1::UnpinResponse> reply);
  Outcome<v1::PinResponse> TryPinDurably(const v1::PinRequest& request, std::shared_ptr<Pinning>* waiting_for)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Posts a durable pin of the machine's current version.
  std::shared_ptr<Pinning> BeginPin(bool automatic) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // For a request that asks for an automatic pin: posts work that takes space for the pin outside the automatic pins'
  // budget.
  std::shared_ptr<Pinning> BeginAdoption(int64_t version) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  Outcome<v1::UnpinResponse> TryUnpinDurably(int64_t version) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  bool TryPush(const v1::PushRequest& header, absl::Span<const std::byte> payload, const Reply<v1::PushResponse>& reply,
               Replies* replies) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Receive(const v1::PushRequest& header, absl::Span<const std::byte> payload,
               const std::shared_ptr<HeldChunk>& chunk, Intake::Receipt receipt, const Reply<v1::PushResponse>& reply)
      ABSL_LOCKS_EXCLUDED(mu_);
  // False if the slice must wait for memory: the chunk's pushes are woken once logged slices or applied steps have
  // given back buffers.
  bool TakesBuffer(const std::shared_ptr<HeldChunk>& chunk, uint32_t slice, v1::SliceKind kind)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // One of buffers_returning_ is free again: wakes pushes that wait for memory.
  void BufferReturned(Replies* replies) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void WakePushes(HeldChunk* chunk, Replies* replies) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  std::shared_ptr<HeldChunk> FindSliceChunk(const v1::PushRequest& header, uint32_t* slice) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // Lent memory (lending.cc).
  friend class JobLoan;
  struct LentSlices;
  absl::Status CheckLoan(const model::LoanRequest& request) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status BeginLend(LentSlices* slices) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void ComputeLentNorms(LentSlices* slices);
  absl::Status EndLend(const LentSlices& slices) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void EndLoan(const std::shared_ptr<LentMemory>& lent) ABSL_LOCKS_EXCLUDED(mu_);
  // The memory lent for this decided step; null if there is none.
  std::shared_ptr<LentMemory> TakeLent(const v1::PreparedRecord& prepared) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void TakeBackLent(const LentMemory& lent, Replies* replies) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  absl::StatusOr<PullPlan> PlanPull(const v1::PullRequest& request) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  enum class Copy { kCurrent, kPinned, kNotYet };
  // Where `version` of a chunk can be read. FAILED_PRECONDITION (VERSION_GONE).
  absl::StatusOr<Copy> Locate(const HeldChunk& chunk, int64_t version) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Read(PullPlan plan, Copy copy, const Allocate& allocate, const Reply<uint32_t>& reply) ABSL_LOCKS_EXCLUDED(mu_);

  // Appends the machine's record to the journal as well.
  void Journalise(const StepRecord& record, uint64_t lsn) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void NoteAttempt(int64_t step, uint64_t attempt) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Is the slice's attempt too old to be prepared? No log keeps the slice then: its rank drops the attempt, too.
  bool IsSuperseded(const v1::PushRequest& header) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Makes room in the journal for `records` records with `bytes` of bodies, and for a slice's payload. Call before a
  // request that may append so much. OK without a journal.
  absl::Status MakeJournalRoom(uint64_t records, uint64_t bytes, uint64_t payload_bytes = 0)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Room in the journal that a slice may need besides its payload.
  struct RecordNeeds {
    uint64_t records = 0;
    uint64_t bytes = 0;
  };
  // Posts a flush of all chunks, so that the log can be cut; at most one is pending at a time.
  void PostFlush() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  RecordNeeds NeedsOfSlice() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // False if the log is full: chunks are then being flushed so that the log can be cut. `logged`: the slice leaves
  // memory.
  bool TakesSlice(uint64_t payload_bytes, bool logged) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // `durable`: a gradient log (durability `step`), not a spill.
  void StartJournal(std::unique_ptr<storage::GradientLog> log, bool durable) ABSL_LOCKS_EXCLUDED(mu_);
  // On the journal's thread: something became durable, or failed.
  void JournalProgressed();

  // On the job's thread.
  std::string journal_path() const;
  std::string spill_path() const;
  // Chooses chunks to flush with this step, so that the log does not run full: marks the step's own updates, and puts
  // further chunks into `others`.
  void MarkFlushes(storage::ChunkStore* store, StepWork* work, std::vector<uint64_t>* others);
  absl::Status Flush(storage::ChunkStore* store, absl::Span<const uint64_t> chunks, int64_t version);
  // Syncs and records flushed versions once the log has room for no more than the next step.
  absl::Status HardenForCut(storage::ChunkStore* store);
  void CutJournal(const storage::ChunkStore& store, int64_t version);
  void FlushAll();
  void PrepareOpen(const v1::OpenRequest& request);
  absl::Status TakeChunks(const v1::OpenRequest& request, std::vector<std::shared_ptr<HeldChunk>>* chunks);
  struct NewChunks;
  // Makes or extends the log, or the spill, for these chunks. RESOURCE_EXHAUSTED.
  absl::Status EnsureJournal(const NewChunks& wanted);
  absl::Status EnsureJournalWithoutChunks(const NewChunks& wanted);
  absl::Status EnsureSpill(const model::EpochPlan& plan, absl::Span<const std::shared_ptr<HeldChunk>> chunks,
                           NewChunks wanted);
  // `segment_bytes`: the existing journal's; 0 if there is none.
  static JournalSize JournalSizeOf(const NewChunks& wanted, uint64_t segment_bytes);
  std::shared_ptr<storage::ChunkStore> MakeStore(const NewChunks& wanted) const;
  // Bytes of memory per element for slices that are not read back from the log; 0 where they are lent.
  uint64_t SliceBytesPerElement(const NewChunks& wanted) const;
  // For chunks whose slices are read back from the log (reading_back.cc): takes from `buffer_bytes`, the memory for
  // these slices, the buffer that updates read into; the rest is for pushes.
  absl::Status TakeReadBack(const NewChunks& wanted, uint64_t buffer_bytes) ABSL_LOCKS_EXCLUDED(mu_);
  // Reserves memory for the gradients of chunks that several slices share in this epoch's tiling. Moves state to NVMe
  // if there is no room. RESOURCE_EXHAUSTED (BUDGET).
  absl::Status TakeSharedGradients(const model::EpochPlan& plan, absl::Span<const std::shared_ptr<HeldChunk>> chunks)
      ABSL_LOCKS_EXCLUDED(mu_);
  absl::StatusOr<bool> MoveOneDown(storage::ChunkStore* store);
  // Before updates run: memory for the slices that they read from the log.
  absl::Status PrepareReadBack(StepWork* work) ABSL_LOCKS_EXCLUDED(mu_);
  storage::PlanRequest PlanOf(const NewChunks& wanted, const storage::ChunkStore& store,
                              const std::vector<storage::ChunkToAdd>& missing, const storage::TierBytes& returned);
  // Logs the plan, or keeps it for a dry run's answer.
  void NotePlan(const storage::Plan& plan, const storage::PlanRequest& request, bool dry_run);
  // The extent that an earlier run left of the chunk; given out only once.
  std::optional<storage::DurableChunk> TakeDurable(uint64_t id);
  // Adds what new chunks need to the least DRAM in the catalog. On the job's thread.
  void NoteLeastDram(uint64_t more);
  absl::Status AddChunks(const NewChunks& wanted, std::vector<std::shared_ptr<HeldChunk>>* added);
  // Takes on `life`, found in `whose`. DATA_LOSS (DIVERGED) if the catalog names a different life.
  absl::Status CheckLife(const JobEntry& entry, uint64_t life, absl::string_view whose);
  absl::Status ExtendForRestart();
  absl::Status ReplayRecord(const StepRecord& record, const storage::PayloadPlace& payload, Replaying* replaying);
  absl::Status ReplayOpen(const v1::OpenRequest& open, const StepRecord& record);
  // After the first snapshot: DATA_LOSS if a chunk's durable version misses a change from before the snapshot.
  absl::Status CheckChanged(const v1::LogSnapshot& snapshot) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // After a replay: DATA_LOSS (DIVERGED) if the server had applied a later step than the log ends with.
  absl::Status CheckLogReaches(const JobEntry& entry) const ABSL_LOCKS_EXCLUDED(mu_);
  // DATA_LOSS (DIVERGED) if replay needs a slice of the chunk, or a pin to restore, that is missing.
  absl::Status CheckHeld(const HeldChunk& chunk, const v1::PreparedRecord& prepared) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Use of slices in the log. kDecided: the update reads them from the log where it can. kPrepared: a slice that cannot
  // be read refuses the job. kPushed: a slice that cannot be read is forgotten, and its rank pushes it again.
  enum class SliceUse { kDecided, kPrepared, kPushed };
  absl::Status LoadSlices(uint64_t attempt, int64_t step, SliceUse use, Replaying* replaying);
  struct SliceLoad;
  absl::Status FindLoad(int64_t step, SliceLoad* load) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status BeginLoad(SliceLoad* load, Replaying* replaying);
  absl::Status ReadSlices(SliceUse use, std::vector<SliceLoad>* loads, Replaying* replaying);
  void RunStep(StepWork* work);
  void NoteCommitted(int64_t step);
  absl::Status RunUpdates(storage::ChunkStore* store, StepWork* work, const storage::BlockFile* log);
  storage::StepShape ShapeOf(const storage::ChunkStore& store) const ABSL_LOCKS_EXCLUDED(mu_);
  // Lets the job's thread go on with moves, if there are any.
  void ResumeMoves() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void MoveSome();
  absl::Status MoveBatch(const std::shared_ptr<Moves>& moves, storage::TierKind to);
  void EndBatch(const std::shared_ptr<Moves>& moves, bool progress, const absl::Status& status);
  // False if there is no pin to give up.
  bool GiveUpOldestPin(storage::ChunkStore* store, const absl::Status& cause);
  void RunPin(int64_t version, uint64_t pin);
  void RunUnpin(int64_t version);
  void RunPinDurably(const v1::PinnedVersion& pin, const std::shared_ptr<Pinning>& pinning);
  void RunUnpinDurably(int64_t version);
  void RunAdoption(int64_t version, const std::shared_ptr<Pinning>& pinning);
  // Writes who wants the pin (the server, a request, or both) into its entry of the catalog.
  absl::Status RewritePin(const v1::PinnedVersion& wanted);
  // Bytes of NVMe budget to set aside for a new chunk's automatic pins, less what they have on the disk already.
  uint64_t AsideBytes(uint64_t id, uint64_t state_bytes) const;
  void RememberPins(absl::Span<const v1::PinnedVersion> pins);
  // In recovery, after an Open has brought `chunks`: gives the store their states that durable pins keep.
  absl::Status TakeBackPins(absl::Span<const std::shared_ptr<HeldChunk>> chunks);

  const std::string name_;
  const JobSurroundings around_;

  mutable absl::Mutex mu_;
  PromiseLog log_ ABSL_GUARDED_BY(mu_);
  std::unique_ptr<StepMachine> machine_ ABSL_GUARDED_BY(mu_);
  absl::Status stopped_ ABSL_GUARDED_BY(mu_);
  absl::Status failure_ ABSL_GUARDED_BY(mu_);
  std::unique_ptr<Opening> opening_ ABSL_GUARDED_BY(mu_);

  std::shared_ptr<const model::EpochPlan> plan_ ABSL_GUARDED_BY(mu_);
  std::shared_ptr<storage::ChunkStore> store_ ABSL_GUARDED_BY(mu_);         // made by the job's thread
  std::optional<storage::StepPrediction> prediction_ ABSL_GUARDED_BY(mu_);  // by the newest plan
  std::shared_ptr<SliceMemory> memory_ ABSL_GUARDED_BY(mu_);
  // From memory_, if some chunk is logged: updates read slices back into this buffer.
  std::shared_ptr<SliceMemory::Buffer> read_back_ ABSL_GUARDED_BY(mu_);
  double read_back_share_ ABSL_GUARDED_BY(mu_) = 0;  // share of the gradients that are read back in this epoch
  // Buffers of logged slices until the log has them, and of decided steps until they are applied.
  uint64_t buffers_returning_ ABSL_GUARDED_BY(mu_) = 0;
  std::deque<std::shared_ptr<HeldChunk>> short_of_buffers_ ABSL_GUARDED_BY(mu_);  // their pushes wait for buffers
  std::vector<std::shared_ptr<HeldChunk>> chunks_ ABSL_GUARDED_BY(mu_);           // in registration order
  std::vector<std::shared_ptr<HeldChunk>> spares_ ABSL_GUARDED_BY(mu_);  // taken for an Open that was then refused
  absl::flat_hash_map<uint64_t, std::shared_ptr<HeldChunk>> by_index_ ABSL_GUARDED_BY(mu_);

  bool durable_ ABSL_GUARDED_BY(mu_) = false;              // durability `step`
  std::shared_ptr<Journal> journal_ ABSL_GUARDED_BY(mu_);  // null: neither a log nor a spill
  uint64_t before_journal_lsn_ ABSL_GUARDED_BY(mu_) = 0;   // records up to here are in the catalog, not in journal_
  struct Arrived {
    HeldChunk* chunk = nullptr;
    const Intake::Receipt* receipt = nullptr;
    uint64_t bytes = 0;
    bool logged = false;  // the record was appended
  };
  Arrived arrived_ ABSL_GUARDED_BY(mu_);  // the slice whose record the machine may append
  std::pair<int64_t, uint64_t> logged_attempt_ ABSL_GUARDED_BY(mu_) = {-1, 0};  // the highest step and attempt
  uint64_t norm_bytes_max_ ABSL_GUARDED_BY(mu_) = 0;                            // of the norms in a prepared record
  uint64_t sealed_bytes_max_ ABSL_GUARDED_BY(mu_) = 0;                          // of the accepted seals in this epoch
  uint64_t step_bytes_ ABSL_GUARDED_BY(mu_) = 0;                                // of a step's gradients in the journal
  bool waits_for_cut_ ABSL_GUARDED_BY(mu_) = false;
  bool flush_posted_ ABSL_GUARDED_BY(mu_) = false;
  std::shared_ptr<StepWork> replayed_ ABSL_GUARDED_BY(mu_);  // from Apply, while recovering
  bool recovering_ ABSL_GUARDED_BY(mu_) = false;
  uint64_t life_ = 0;                                         // job's thread only
  uint64_t journal_bytes_ = 0;                                // of the NVMe budget; job's thread only
  v1::OpenResponse planned_;                                  // answer to a dry run; job's thread only
  uint64_t least_dram_ = 0;                                   // as in the catalog's entry; job's thread only
  int64_t applied_ = -1;                                      // the last step run; job's thread only
  std::map<uint64_t, storage::DurableChunk> durable_chunks_;  // not yet taken back; recovering thread only
  struct PinnedChunk {
    int64_t version = -1;
    storage::DurableChunk kept;
    bool automatic = false;  // for the server alone: no request asked for the pin
  };
  std::map<uint64_t, std::vector<PinnedChunk>> pinned_chunks_;  // by chunk; likewise

  struct PinState {
    uint64_t id = 0;  // from 1; a version pinned again gets a new id
    std::vector<uint64_t> tensor_steps;
    absl::Status status;
    bool ready = false;
  };
  std::map<int64_t, PinState> pins_ ABSL_GUARDED_BY(mu_);
  uint64_t last_pin_ ABSL_GUARDED_BY(mu_) = 0;
  // Durable pins being made, and versions being unpinned; the machine knows the existing pins.
  std::map<int64_t, std::shared_ptr<Pinning>> pinning_ ABSL_GUARDED_BY(mu_);
  std::set<int64_t> unpinning_ ABSL_GUARDED_BY(mu_);
  // By version, the newest verification of a pin whose restore was sealed.
  struct PinCheck {
    v1::Epoch epoch;  // for which the result counts
    bool done = false;
    absl::Status status;
  };
  std::map<int64_t, PinCheck> pin_checks_ ABSL_GUARDED_BY(mu_);

  std::shared_ptr<LentMemory> lent_ ABSL_GUARDED_BY(mu_);  // for the step in flight; null: nothing
  int64_t updated_ ABSL_GUARDED_BY(mu_) = -1;              // the last step that all chunks show

  std::shared_ptr<Moves> moves_ ABSL_GUARDED_BY(mu_);  // null: no chunk has to move
  uint64_t chunks_moved_ ABSL_GUARDED_BY(mu_) = 0;

  // Something happened for which a request in machine_queue_ may have waited. Slices do not set the flag: a seal that
  // waits for the last of thousands must not be evaluated at each.
  bool moved_ ABSL_GUARDED_BY(mu_) = false;
  int updates_queued_ ABSL_GUARDED_BY(mu_) = 0;
  absl::Time last_decision_ ABSL_GUARDED_BY(mu_) = absl::InfinitePast();
  Waiting::Queue machine_queue_ ABSL_GUARDED_BY(mu_);
  Waiting waiting_ ABSL_GUARDED_BY(mu_);
  bool said_unwritten_ = false;      // job's thread only
  std::unique_ptr<Executor> stage_;  // the job's thread; its tasks borrow the job
};

}  // namespace ballast::services
