// One job on one server: its step machine under one lock, what was pushed for the step in flight, its chunks, and the
// thread that applies decided steps to them.
//
// Requests come on any thread. The machine answers, refuses, or lets them wait; who waits is evaluated again whenever
// the machine's state moved or the chunk it needs got there. Payloads are copied and norms computed outside the lock.
// The job's own thread does what blocks: catalog writes, taking space for new chunks, pins, and updates, in the order
// they were decided. So a pin at version N lies between the updates N and N + 1 by construction.
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
#include "ballast/services/catalog_entry.h"
#include "ballast/services/counters.h"
#include "ballast/services/deadlines.h"
#include "ballast/services/executor.h"
#include "ballast/services/foundation.h"
#include "ballast/services/intake.h"
#include "ballast/services/journal.h"
#include "ballast/services/lent_memory.h"
#include "ballast/services/state_server.h"
#include "ballast/services/step/step_machine.h"
#include "ballast/services/step_log.h"
#include "ballast/services/waiting.h"
#include "ballast/storage/catalog/catalog.h"
#include "ballast/storage/chunk_store.h"
#include "ballast/storage/placement/rebalance.h"
#include "ballast/storage/tier/tiers.h"

namespace ballast::services {

// What the jobs of a server share. All outlive every job.
struct JobSurroundings {
  std::string server_id;
  storage::Catalog* catalog = nullptr;
  storage::Tiers* tiers = nullptr;
  Foundation* foundation = nullptr;
  kernels::ThreadPool* compute = nullptr;
  Executor* executor = nullptr;
  Deadlines* deadlines = nullptr;
  ServerCounters* counters = nullptr;
  // Held while a job compares its plan with what is free and takes it.
  absl::Mutex* planning = nullptr;
  const storage::MachineProfile* machine = nullptr;  // null: plans predict no times
  bool working_copies = true;
  WaitingBounds waiting;
};

// A chunk of the job that lives on this server. Guarded by the job's lock.
struct HeldChunk {
  HeldChunk(std::shared_ptr<ProvisionalMemory> memory, uint64_t store_index, uint64_t id, uint64_t elements,
            kernels::Dtype gradient, bool logged)
      : store_index(store_index),
        id(id),
        elements(elements),
        logged(logged),
        intake(std::move(memory), elements, gradient, logged) {}

  const uint64_t store_index;
  const uint64_t id;  // index in the layout that it was taken for
  const uint64_t elements;
  const bool logged;  // its slices are read back from the log, as far as they can be
  model::Chunk layout;
  std::optional<int64_t> version;  // none before its first Open
  int64_t changed = -1;            // the last transaction that changed it; -1: none
  int64_t first_version = 0;       // that of its registration: there is none before
  bool next_started = false;       // the update to version + 1 is at work: reads of `version` may see it
  int updates_pending = 0;         // decided and not yet done: the intake's gradient is theirs
  Intake intake;
  Waiting::Queue pulls;
  std::map<uint64_t, Waiting::Queue> pushes;  // by the slice's first element: a place has one writer at a time
};

// The same for a job that could not be recovered.
absl::Status RemoveLog(storage::Tiers& tiers, const std::string& job);

class Job : public std::enable_shared_from_this<Job>, private StepHost {
 public:
  // Of files that are there while a spill is made.
  static constexpr char kSpillPrefix[] = "spill-";
  static std::shared_ptr<Job> Make(const std::string& name, const JobSurroundings& surroundings);
  ~Job() override;

  // After a restart, before any other call: what the catalog kept of the job.
  absl::Status Replay(const PromiseRecord& promise);
  // As Replay, of a job with durability `step`: brings its chunks and its step machine back to where they were. Blocks,
  // and says how far it is. DATA_LOSS if something that was durable cannot be read: what was replayed
  // until then may have been flushed to newer versions, nothing else is changed, and the log stays.
  absl::Status Recover(const CatalogEntry& entry);
  // After Recover, once all jobs of the server have what they had: makes room in the log for what comes, also by budget
  // that is free then. Blocks.
  absl::Status EndRecovery();
  // As Replay, of a job with durability every-K that had state: takes back its pins, and knows no more than these
  // (every_k.cc). DATA_LOSS if the catalog does not do for that; RESOURCE_EXHAUSTED.
  absl::Status ComeBack(const CatalogEntry& entry);

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
  absl::StatusOr<std::unique_ptr<model::Loan>> Lend(const model::LoanRequest& request);
  void AwaitApplied(int64_t version, std::optional<uint32_t> unit, absl::Time deadline,
                    Reply<v1::CommitResponse> reply);

  v1::JobStatus Status() const;
  // For new budgets, while the planning lock is held: what the job holds that may move; none if nothing.
  std::optional<storage::JobHolding> Holding() const;
  // Its chunks go where `target` wants them, between steps; what an earlier call wanted counts no more.
  void MoveTo(const storage::Plan& plan, v1::JobMoves* answer);
  v1::Epoch promised() const;

  // Refuses all that waits and all that comes with `status`, finishes the update at work, drops those behind it.
  // Blocks.
  void Stop(const absl::Status& status);
  // Deletes the log of a job that is dropped, or that no Open was accepted for. Not while a request may append.
  // After Stop, for a job that is dropped: the former; and, once the catalog has forgotten them, frees its
  // extents.
  absl::Status RemoveJournal();
  void Discard();
  // After Stop: of the NVMe budget, that its log holds until that is removed.
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

  // Runs `body` under the lock, then Settle, then the replies: here, or (for the job's thread) on the executor.
  void Locked(absl::FunctionRef<void(Replies*)> body) ABSL_LOCKS_EXCLUDED(mu_);
  void LockedOnStage(absl::FunctionRef<void(Replies*)> body) ABSL_LOCKS_EXCLUDED(mu_);
  // Reports syncs to the machine and evaluates what waits for it, until nothing moves.
  void Settle(Replies* replies) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Expire(uint64_t id);
  // Why the job takes no requests: stopped, or failed. OK if it does.
  absl::Status Refusal() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Fail(const absl::Status& cause, absl::string_view remedy, Replies* replies) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // What to do after an error of the disk.
  std::string Remedy() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  v1::GetJobResponse Describe() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // A request of `bytes` that the machine may let wait. `what`: for the deadline's message.
  template <typename Response>
  void Ask(uint64_t bytes, std::function<Outcome<Response>()> evaluate, absl::Time deadline, const std::string& what,
           Reply<Response> reply);

  Outcome<v1::OpenResponse> TryOpen(const v1::OpenRequest& request) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // `waiting_for`: which pin the request waits for, 0 before it began or found one.
  Outcome<v1::PinResponse> TryPin(int64_t version, uint64_t* waiting_for) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // After a restart chunks may show a step whose decision a crash lost: what is there is no committed version.
  // UNAVAILABLE (BUSY).
  absl::Status CheckNoneAhead() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Durable pins (durable_pins.cc). `waiting_for`: the pinning that the request waits for, null before.
  struct Pinning {
    bool done = false;
    absl::Status status;
  };
  // Before a restore may be prepared: all that the pin keeps is read once in each epoch. False: that takes a while yet.
  absl::StatusOr<bool> CheckedPin(const v1::SealRequest& request) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void RunPinCheck(int64_t version);
  void PinDurably(const v1::PinRequest& request, absl::Time deadline, Reply<v1::PinResponse> reply);
  void UnpinDurably(const v1::UnpinRequest& request, Reply<v1::UnpinResponse> reply);
  Outcome<v1::PinResponse> TryPinDurably(const v1::PinRequest& request, std::shared_ptr<Pinning>* waiting_for)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Posts the pin of the machine's version.
  std::shared_ptr<Pinning> BeginPin(bool automatic) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Who asks for an automatic pin takes space of his own for it.
  std::shared_ptr<Pinning> BeginAdoption(int64_t version) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  Outcome<v1::UnpinResponse> TryUnpinDurably(int64_t version) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  bool TryPush(const v1::PushRequest& header, absl::Span<const std::byte> payload, const Reply<v1::PushResponse>& reply,
               Replies* replies) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Receive(const v1::PushRequest& header, absl::Span<const std::byte> payload,
               const std::shared_ptr<HeldChunk>& chunk, Intake::Receipt receipt, const Reply<v1::PushResponse>& reply)
      ABSL_LOCKS_EXCLUDED(mu_);
  // False: the chunk's pushes are woken when slices on their way to the log have given back memory for this one.
  bool TakesBuffer(const std::shared_ptr<HeldChunk>& chunk, uint32_t slice, v1::SliceKind kind)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // One of buffers_returning_ is there again.
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
  // What is lent for this step, which is decided.
  std::shared_ptr<LentMemory> TakeLent(const v1::PreparedRecord& prepared) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void TakeBackLent(const LentMemory& lent, Replies* replies) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  absl::StatusOr<PullPlan> PlanPull(const v1::PullRequest& request) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  enum class Copy { kCurrent, kPinned, kNotYet };
  // Where `version` of a chunk can be read. FAILED_PRECONDITION (VERSION_GONE).
  absl::StatusOr<Copy> Locate(const HeldChunk& chunk, int64_t version) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Read(PullPlan plan, Copy copy, const StateServer::Allocate& allocate, const Reply<uint32_t>& reply)
      ABSL_LOCKS_EXCLUDED(mu_);

  // What the machine appends goes to the journal too.
  void Journalise(const StepRecord& record, uint64_t lsn) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void NoteAttempt(int64_t step, uint64_t attempt) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Is the slice of an attempt that cannot be prepared any more? Then a log keeps none of it: its rank will drop it
  // too.
  bool IsSuperseded(const v1::PushRequest& header) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Before a request that may append so much besides a slice; OK without a journal.
  absl::Status MakeJournalRoom(uint64_t records, uint64_t bytes, uint64_t payload_bytes = 0)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // What a slice may bring to the journal besides its payload.
  struct RecordNeeds {
    uint64_t records = 0;
    uint64_t bytes = 0;
  };
  // All chunks to the disk, so that the log can be cut; once at a time.
  void PostFlush() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  RecordNeeds NeedsOfSlice() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // False: the log is full, and chunks are being flushed so that it can be cut. `logged`: the slice leaves memory.
  bool TakesSlice(uint64_t payload_bytes, bool logged) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // `durable`: of durability `step`, not a spill.
  void StartJournal(std::unique_ptr<storage::GradientLog> log, bool durable) ABSL_LOCKS_EXCLUDED(mu_);
  // On the journal's thread: something became durable, or failed.
  void JournalProgressed();

  // On the job's thread.
  std::string journal_path() const;
  std::string spill_path() const;
  // Chunks whose state should go to the disk with this step, so that the log does not run full.
  void MarkFlushes(storage::ChunkStore* store, StepWork* work, std::vector<uint64_t>* others);
  absl::Status Flush(storage::ChunkStore* store, absl::Span<const uint64_t> chunks, int64_t version);
  // What was flushed is recorded at the latest when the log has no more room than for the next step.
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
  // `segment_bytes`: of the journal that there is; 0 if there is none.
  static JournalSize JournalSizeOf(const NewChunks& wanted, uint64_t segment_bytes);
  std::shared_ptr<storage::ChunkStore> MakeStore(const NewChunks& wanted) const;
  // What slices take of memory that is not read back from the log: nothing where they are lent.
  uint64_t SliceBytesPerElement(const NewChunks& wanted) const;
  // Memory of chunks whose slices are read back from the log (reading_back.cc). Of `buffer_bytes` for their slices,
  // what updates read into; the rest is for pushes.
  absl::Status TakeReadBack(const NewChunks& wanted, uint64_t buffer_bytes) ABSL_LOCKS_EXCLUDED(mu_);
  // What this epoch's tiling needs besides: gradients of chunks that its ranks share. Moves state to NVMe if there is
  // no room. RESOURCE_EXHAUSTED (BUDGET).
  absl::Status TakeSharedGradients(const model::EpochPlan& plan, absl::Span<const std::shared_ptr<HeldChunk>> chunks)
      ABSL_LOCKS_EXCLUDED(mu_);
  absl::StatusOr<bool> MoveOneDown(storage::ChunkStore* store);
  // Before updates run: memory for what they have in the log.
  absl::Status PrepareReadBack(StepWork* work) ABSL_LOCKS_EXCLUDED(mu_);
  storage::PlanRequest PlanOf(const NewChunks& wanted, const storage::ChunkStore& store,
                              const std::vector<storage::ChunkToAdd>& missing, const storage::TierBytes& returned);
  // Logs it, or keeps it for the dry run's answer.
  void NotePlan(const storage::Plan& plan, const storage::PlanRequest& request, bool dry_run);
  // What an earlier run left of the chunk, once.
  std::optional<storage::DurableChunk> TakeDurable(uint64_t id);
  // Of chunks that were added; on the job's thread.
  void NoteLeastDram(uint64_t more);
  absl::Status AddChunks(const NewChunks& wanted, std::vector<std::shared_ptr<HeldChunk>>* added);
  // Takes on `life`, which `whose` has. DATA_LOSS (DIVERGED) if the catalog speaks of another.
  absl::Status CheckLife(const CatalogEntry& entry, uint64_t life, absl::string_view whose);
  absl::Status ExtendForRestart();
  absl::Status ReplayRecord(const StepRecord& record, const storage::PayloadPlace& payload, Replaying* replaying);
  absl::Status ReplayOpen(const v1::OpenRequest& open, const StepRecord& record);
  // After the first snapshot: a chunk whose durable version misses a change that came before it. DATA_LOSS.
  absl::Status CheckChanged(const v1::LogSnapshot& snapshot) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // After a replay: DATA_LOSS (DIVERGED) if the server had applied more than the log has.
  absl::Status CheckLogReaches(const CatalogEntry& entry) const ABSL_LOCKS_EXCLUDED(mu_);
  // Some of what the step changes here, and that replay needs, is not held. DATA_LOSS (DIVERGED).
  absl::Status CheckHeld(const HeldChunk& chunk, const v1::PreparedRecord& prepared) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Slices in the log, of a step that is decided: the update reads them where it can / prepared: whoever lacks the
  // bytes of one is refused / neither: what cannot be read is pushed again.
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
  // False if there is none.
  bool GiveUpOldestPin(storage::ChunkStore* store, const absl::Status& cause);
  void RunPin(int64_t version, uint64_t pin);
  void RunUnpin(int64_t version);
  void RunPinDurably(const v1::PinnedVersion& pin, const std::shared_ptr<Pinning>& pinning);
  void RunUnpinDurably(int64_t version);
  void RunAdoption(int64_t version, const std::shared_ptr<Pinning>& pinning);
  // Who wants the pin, into its entry of the catalog.
  absl::Status RewritePin(const v1::PinnedVersion& wanted);
  // Of NVMe budget, what automatic pins of a chunk that is added need besides what they have on the disk.
  uint64_t AsideBytes(uint64_t id, uint64_t state_bytes) const;
  void RememberPins(absl::Span<const v1::PinnedVersion> pins);
  // In recovery: chunks that an Open just brought are what older pins keep states of.
  absl::Status TakeBackPins(absl::Span<const std::shared_ptr<HeldChunk>> chunks);

  const std::string name_;
  const JobSurroundings around_;

  mutable absl::Mutex mu_;
  StepLog log_ ABSL_GUARDED_BY(mu_);
  std::unique_ptr<StepMachine> machine_ ABSL_GUARDED_BY(mu_);
  absl::Status stopped_ ABSL_GUARDED_BY(mu_);
  absl::Status failure_ ABSL_GUARDED_BY(mu_);
  std::unique_ptr<Opening> opening_ ABSL_GUARDED_BY(mu_);

  std::shared_ptr<const model::EpochPlan> plan_ ABSL_GUARDED_BY(mu_);
  std::shared_ptr<storage::ChunkStore> store_ ABSL_GUARDED_BY(mu_);         // made by the job's thread
  std::optional<storage::StepPrediction> prediction_ ABSL_GUARDED_BY(mu_);  // by the newest plan
  std::shared_ptr<ProvisionalMemory> memory_ ABSL_GUARDED_BY(mu_);
  // Of memory_, if some chunk is logged: where updates read slices back.
  std::shared_ptr<ProvisionalMemory::Buffer> read_back_ ABSL_GUARDED_BY(mu_);
  double read_back_share_ ABSL_GUARDED_BY(mu_) = 0;  // of the gradients, what is read back in this epoch
  // Held by logged slices until the log has them, and by decided steps until they are applied.
  uint64_t buffers_returning_ ABSL_GUARDED_BY(mu_) = 0;
  std::deque<std::shared_ptr<HeldChunk>> short_of_buffers_ ABSL_GUARDED_BY(mu_);  // their pushes wait for those
  std::vector<std::shared_ptr<HeldChunk>> chunks_ ABSL_GUARDED_BY(mu_);           // in registration order
  std::vector<std::shared_ptr<HeldChunk>> spares_ ABSL_GUARDED_BY(mu_);  // taken for an Open that was then refused
  absl::flat_hash_map<uint64_t, std::shared_ptr<HeldChunk>> by_index_ ABSL_GUARDED_BY(mu_);

  bool durable_ ABSL_GUARDED_BY(mu_) = false;              // durability `step`
  std::shared_ptr<Journal> journal_ ABSL_GUARDED_BY(mu_);  // null: neither a log nor a spill
  uint64_t before_journal_lsn_ ABSL_GUARDED_BY(mu_) = 0;   // promises up to here came before it: the catalog has them
  struct Arrived {
    HeldChunk* chunk = nullptr;
    const Intake::Receipt* receipt = nullptr;
    uint64_t bytes = 0;
    bool logged = false;  // it was appended
  };
  Arrived arrived_ ABSL_GUARDED_BY(mu_);  // the slice whose record the machine may append
  std::pair<int64_t, uint64_t> logged_attempt_ ABSL_GUARDED_BY(mu_) = {-1, 0};  // the highest: step and attempt
  uint64_t norm_bytes_max_ ABSL_GUARDED_BY(mu_) = 0;                            // of a prepared record's norms
  uint64_t sealed_bytes_max_ ABSL_GUARDED_BY(mu_) = 0;  // of seals in this epoch that were taken
  uint64_t step_bytes_ ABSL_GUARDED_BY(mu_) = 0;        // that a step's gradients take in the journal
  bool waits_for_cut_ ABSL_GUARDED_BY(mu_) = false;
  bool flush_posted_ ABSL_GUARDED_BY(mu_) = false;
  std::shared_ptr<StepWork> replayed_ ABSL_GUARDED_BY(mu_);  // what Apply asked for while recovering
  bool recovering_ ABSL_GUARDED_BY(mu_) = false;
  uint64_t life_ = 0;                                         // of the job's thread
  uint64_t journal_bytes_ = 0;                                // of the NVMe budget; of the job's thread
  v1::OpenResponse planned_;                                  // of a dry run; of the job's thread
  uint64_t least_dram_ = 0;                                   // as in the catalog's entry; of the job's thread
  int64_t applied_ = -1;                                      // the last step run; of the job's thread
  std::map<uint64_t, storage::DurableChunk> durable_chunks_;  // not yet taken back; of the recovering thread
  struct PinnedChunk {
    int64_t version = -1;
    storage::DurableChunk kept;
    bool automatic = false;  // and nobody asked for it
  };
  std::map<uint64_t, std::vector<PinnedChunk>> pinned_chunks_;  // by chunk, not yet taken back; the same

  struct PinState {
    uint64_t id = 0;  // from 1: tells it from one of the same version that was unpinned
    std::vector<uint64_t> tensor_steps;
    absl::Status status;
    bool ready = false;
  };
  std::map<int64_t, PinState> pins_ ABSL_GUARDED_BY(mu_);
  uint64_t last_pin_ ABSL_GUARDED_BY(mu_) = 0;
  // Durable pins on their way, and those on their way out; the machine knows those that are there.
  std::map<int64_t, std::shared_ptr<Pinning>> pinning_ ABSL_GUARDED_BY(mu_);
  std::set<int64_t> unpinning_ ABSL_GUARDED_BY(mu_);
  // By version, the newest reading of a pin whose restore was sealed.
  struct PinCheck {
    v1::Epoch epoch;  // that it counts for
    bool done = false;
    absl::Status status;
  };
  std::map<int64_t, PinCheck> pin_checks_ ABSL_GUARDED_BY(mu_);

  std::shared_ptr<LentMemory> lent_ ABSL_GUARDED_BY(mu_);  // for the step in flight; null: nothing
  int64_t updated_ ABSL_GUARDED_BY(mu_) = -1;              // the last step that all chunks show

  std::shared_ptr<Moves> moves_ ABSL_GUARDED_BY(mu_);  // null: every chunk is where it should be
  uint64_t chunks_moved_ ABSL_GUARDED_BY(mu_) = 0;

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
