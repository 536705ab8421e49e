// A trainer's seat at the state servers: one rank of one group training one job.
//
// Two shapes of use, which may be mixed by unit:
//  (a) Parameters live on the servers only (ZeRO-3/Infinity): Prefetch(unit) ahead of use, Acquire(unit) all-gathers
//  it,
//      dropping the lease frees it.
//  (b) The trainer keeps its 16-bit parameters (ZeRO-1/2/Offload): Push per unit as backward produces gradients, Step,
//      then PullOwned(unit) for the updated ranges.
//
// Everything pushed is provisional until Step(): before it, ask for norms, choose a scale, or Drop(). A tensor that no
// rank pushes is left alone by the step, its step count included: so frozen tensors are simply never pushed.
//
// Threads: one thread at a time per session. Calls marked COLLECTIVE must be made by all ranks in the same order.
// Errors: carry a reason (model::ReasonOf). After STALE_EPOCH, RANK_MISSING or DATA_LOSS the session is finished: exit,
// start the group again with resume = auto. Nothing decided is lost by that. Fork: not supported after Open (gRPC):
// calls in a forked child return FAILED_PRECONDITION.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "ballast/client/collective/collective.h"
#include "ballast/client/transport.h"
#include "ballast/kernels/optimizer.h"

namespace ballast::client {

using bf16 = uint16_t;  // bits of a bfloat16

// A tensor of the model. Tensors of one unit are gathered together (usually a layer).
struct TensorSpec {
  std::string name;
  std::string unit;
  std::vector<uint64_t> shape;
  uint32_t group = 0;                // parameter group: which hyper-parameters apply
  std::vector<std::string> aliases;  // other names of the same tensor (tied weights)
  // Of its working parameters: the job's, which unspecified means; any other is refused as BAD_DTYPE.
  v1::Dtype dtype = v1::DTYPE_UNSPECIFIED;
};

// What to do when the job exists already, or does not.
enum class Resume {
  kNever,  // an existing job is an error
  kAuto,   // continue it if it exists, else create it
  kMust,   // a missing job is an error
};

// How units are divided among ranks. A property of the session, not of the job: it may differ on resume.
enum class Split {
  kEven,  // each unit in world_size runs of about equal size, whatever the tensors (FSDP1's flat parameter)
  kRows,  // each tensor in runs of rows, as torch.chunk along dimension 0 (FSDP2's Shard(0)): a range per tensor
};

struct SessionOptions {
  std::string job;
  Resume resume = Resume::kNever;
  uint32_t group_count = 1;
  uint64_t chunk_elements = uint64_t{1} << 20;  // only for a new job
  // Optimizer, dtypes of gradients and working parameters, format of the moments: a property of the job, so that
  // another one is refused on resume (BAD_SPEC). The default: AdamW, bf16, bf16, fp32.
  kernels::OptimizerSpec optimizer;
  uint64_t seed = 0;  // of the stochastic rounding of bf16 moments; only for a new job, which keeps it
  // What a decided step survives; only for a new job, which keeps it. `step`: servers write every gradient to a log on
  // their disks before they prepare a step, so that servers and trainers may be killed at any moment; it needs an NVMe
  // budget for the log and for the state. `every-K`: servers pin every `pin_interval`-th version on their disks
  // instead; when a server ends without having been asked to, the next group that opens the job gets the newest version
  // that all have (restored_version); needs an NVMe budget for that version twice besides the state, and all tensors
  // named when the job is created. `none`: a server that ends takes the job's state with it.
  v1::Durability durability = v1::DURABILITY_STEP;
  uint64_t pin_interval = 0;   // every-K's K, at least 1; 0 with any other
  Split split = Split::kEven;  // the same on all ranks
  // How long servers may take for a call, or for a step once all ranks have come, their updates included; so it bounds
  // PinDurably and Restore, which write, and read, all state. How long
  // ranks wait for each other is the collective's timeout.
  absl::Duration step_timeout = absl::Seconds(120);
  // How long Open waits for servers that are down. One that is at work, writing a large job's log, is waited for as
  // long as it takes. The collective's timeout must be longer: other ranks wait meanwhile.
  absl::Duration open_timeout = absl::Seconds(30);
  // Bound on pushed and pulled bytes on their way.
  uint64_t inflight_bytes_max = uint64_t{64} << 20;
  // Called with a line to show when a wait exceeds two seconds: what is waited for. May be empty.
  std::function<void(const std::string&)> progress;
  // Asked twice a second, on another thread, while servers are waited for: true ends the session, and the call that
  // waits, or Open, returns CANCELLED. What it was about may have happened. May be empty.
  std::function<bool()> interrupted;
};

// Hyper-parameters of a parameter group for one step, with torch.optim's meaning and AdamW's defaults.
struct GroupHyper {
  double learning_rate = 1e-3;
  double beta1 = 0.9;  // SGD: the momentum, if the optimizer has its buffer
  double beta2 = 0.999;
  double epsilon = 1e-8;
  double weight_decay = 0.01;
  // Refused where the optimizer does not have them.
  double dampening = 0;            // SGD with momentum
  double learning_rate_decay = 0;  // Adagrad
  double initial_accumulator = 0;  // Adagrad: what its sum holds before a tensor's first update
  bool maximize = false;
};

// torch.optim's defaults of each optimizer; Lion's are its paper's.
GroupHyper DefaultHyper(kernels::OptimizerKind kind);

struct StepOptions {
  std::vector<GroupHyper> groups;  // group_count entries; the same on all ranks
  double gradient_scale = 1;       // pushed gradients are multiplied by this; the same on all ranks
  double max_norm = 0;             // clip the scaled global norm to this; 0 = no clipping
  std::string blob;  // this rank's data cursor, RNG...: comes back on resume. 64 KiB for all ranks together
};

struct StepReport {
  int64_t version = 0;
  bool skipped = false;  // some gradient was Inf or NaN: nothing was updated, on any server
  double norm = 0;       // global norm of scaled gradients, before clipping
};

// Seconds and bytes since Open.
struct SessionStats {
  double pull_seconds = 0;    // blocked on pulls
  double gather_seconds = 0;  // in all-gathers
  double push_seconds = 0;    // blocked on pushes
  double seal_seconds = 0;    // in Step: exchange, seal, decide
  uint64_t pulled_bytes = 0;
  uint64_t pushed_bytes = 0;
  uint64_t gathered_bytes = 0;
};

// What to read of a tensor. AdamW and Adam have the moments m, v and with amsgrad the largest v; SGD with momentum its
// buffer; Adagrad v; Lion m.
enum class Content { kWorking, kMaster, kMoment1, kMoment2, kMoment3 };

// Of one tensor, what CommitState writes.
struct TensorState {
  std::string tensor;
  // From element `first` of the tensor on: at least what this rank owns of it. Borrowed until return.
  absl::Span<const float> values;
  uint64_t first = 0;
  uint64_t steps = 0;  // updates that the tensor counts as having had
};

// Elements [begin, end) of a unit's flat space.
struct UnitRange {
  uint64_t begin = 0;
  uint64_t end = 0;
};

// Some elements of this rank's part of a unit's gradient.
struct GradientRun {
  uint64_t begin = 0;  // in its owned ranges, laid end to end
  absl::Span<const std::byte> elements;
};

class Session;

// All of a unit's working parameters, gathered. Frees its buffer when dropped. Valid until the session ends.
class UnitLease {
 public:
  UnitLease() = default;
  UnitLease(UnitLease&& other) noexcept;
  UnitLease& operator=(UnitLease&& other) noexcept;
  ~UnitLease();
  // The unit's flat space in the job's working dtype, padding included; tensors at Session::Locate(name).begin.
  absl::Span<const std::byte> bytes() const { return bytes_; }
  // The same as elements: bits of bf16 or fp16, or fp32. The wrong one of the two ends the process, with a word.
  absl::Span<const bf16> parameters() const;
  absl::Span<const float> parameters_f32() const;

 private:
  friend class Session;
  UnitLease(Session* session, void* buffer, absl::Span<const std::byte> bytes, uint64_t element_bytes);
  Session* session_ = nullptr;
  void* buffer_ = nullptr;
  absl::Span<const std::byte> bytes_;
  uint64_t element_bytes_ = 0;
};

class Session {
 public:
  // COLLECTIVE. Fences the job with a new epoch, settles whatever an earlier group left undecided, and opens it for
  // this group; the world size may differ from the earlier group's. `tensors`: the same on all ranks, and on resume the
  // same as the job's (new ones are refused here: Register adds them). Owns the transports (one per server, the same
  // order on all ranks); borrows `collective`. Errors: JOB_EXISTS (names never, auto, must), JOB_MISSING, BAD_SPEC
  // (says which tensor differs), BUDGET, SERVER_DOWN, RANK_MISSING, STATE_LOST.
  static absl::StatusOr<std::unique_ptr<Session>> Open(const SessionOptions& options,
                                                       const std::vector<TensorSpec>& tensors,
                                                       std::vector<std::unique_ptr<Transport>> servers,
                                                       Collective* collective);
  // A gRPC transport per "host:port".
  static absl::StatusOr<std::unique_ptr<Session>> Connect(const SessionOptions& options,
                                                          const std::vector<TensorSpec>& tensors,
                                                          const std::vector<std::string>& servers,
                                                          Collective* collective);
  ~Session();

  // The last decided step; -1: the job is new, Initialise comes first.
  int64_t version() const;
  // Some tensors have no values yet (a new job's, or registered and not initialised before a restart): Initialise comes
  // before the next step.
  bool needs_values() const;
  // After a resume or a Restore: the blobs sealed with the version that was found or restored, by rank of the group
  // that sealed it.
  const std::vector<std::string>& resumed_blobs() const;
  // Of a job with durability every-K, if Open found that servers had lost what came after it: the version whose state,
  // step counts and blobs the session got; version() is the number of the transaction that brought them back. -1 else.
  int64_t restored_version() const;
  int rank() const;
  int world_size() const;
  // The job's.
  const kernels::OptimizerSpec& optimizer() const;

  // Where things lie.
  uint32_t unit_count() const;
  absl::StatusOr<uint32_t> FindUnit(absl::string_view name) const;
  uint64_t unit_elements(uint32_t unit) const;
  struct Location {
    uint32_t unit = 0;
    uint64_t begin = 0;
    uint64_t end = 0;
  };
  absl::StatusOr<Location> Locate(absl::string_view tensor) const;  // name or alias
  // This rank's ranges of a unit, by offset; RangesOf: any rank's.
  const std::vector<UnitRange>& owned(uint32_t unit) const;
  const std::vector<UnitRange>& RangesOf(int rank, uint32_t unit) const;
  uint64_t owned_elements(uint32_t unit) const;

  // COLLECTIVE. Transaction 0, or the values of tensors just registered: `fill` is called for every such tensor that
  // this rank owns a part of, with the part's first element (in the tensor) and the fp32 values to fill.
  absl::Status Initialise(
      absl::FunctionRef<void(absl::string_view tensor, uint64_t first, absl::Span<float> values)> fill);

  // (a) Starts pulling this rank's share of `unit` at version(). Never blocks; a no-op if under way.
  void Prefetch(uint32_t unit);
  // COLLECTIVE. The whole unit at version(), all-gathered.
  absl::StatusOr<UnitLease> Acquire(uint32_t unit);
  // The whole unit at version(), pulled by this rank alone: for units that some ranks skip (experts).
  absl::StatusOr<UnitLease> AcquireWhole(uint32_t unit);
  // (b) The own ranges at version(), concatenated, into `to` (owned_elements(unit) long), whose elements are as wide as
  // the working dtype's: BAD_DTYPE.
  absl::Status PullOwned(uint32_t unit, absl::Span<bf16> to);
  absl::Status PullOwned(uint32_t unit, absl::Span<float> to);

  // This rank's part of the unit's gradient, its owned ranges concatenated, already reduced over ranks. Copied; returns
  // when the copy is made and in-flight bytes allow. A unit may be pushed once per attempt. `absent`: tensors of the
  // unit without a gradient here; the elements given for them must be zero. 16-bit elements are bits of the job's
  // gradient dtype; BAD_DTYPE if it is as wide as the other overload's.
  absl::Status Push(uint32_t unit, absl::Span<const bf16> gradient, absl::Span<const std::string> absent = {});
  absl::Status Push(uint32_t unit, absl::Span<const float> gradient, absl::Span<const std::string> absent = {});
  // The same in runs, ascending; what lies in none is zero, and none lies in an absent tensor. They are not copied:
  // they must stay until Step or Drop has returned OK, or ReturnGradients, or the session is gone.
  absl::Status PushBorrowed(uint32_t unit, std::vector<GradientRun> runs, absl::Span<const std::string> absent = {});
  // After a Step that failed: what was borrowed is the caller's again, and Drop comes before another Step.
  void ReturnGradients();
  // One of several contributions to the unit's gradient: summed here in fp32, in call order, rounded to the gradient
  // dtype and pushed once by the next collective call on the step (Norm, TensorNorm, Step).
  absl::Status Accumulate(uint32_t unit, absl::Span<const float> gradient, absl::Span<const std::string> absent = {});

  // (c) With one rank and one server in this process that keeps no working copies: nothing is copied. The step reads
  // gradients and initial values from, and writes parameters to, the trainer's memory, which must stay, gradients and
  // values unchanged, until AwaitApplied or Drop has returned, or the session is gone.
  bool takes_loans() const;
  bool takes_gradients() const;  // and these and values, too: Lend says when not
  // Index of a tensor among those that Lend takes.
  absl::StatusOr<uint32_t> TensorIndex(absl::string_view tensor) const;
  uint32_t tensor_count() const;
  // Of the job's live tensors, in the order of registration.
  std::vector<std::string> tensor_names() const;
  // In Push's stead, before Step: an entry per TensorIndex. Gradients of all tensors that have one, or none: with
  // durability `step` they go to a log, so they are pushed (UNSUPPORTED). Parameters of a tensor that is not updated
  // stay as they are. What was written is lent with them: nothing may be written until the loan's end.
  // Before Initialise: values of all tensors that need them, in the place of `fill`, which is not called.
  absl::Status Lend(std::vector<model::LentTensor> tensors);
  bool needs_values(uint32_t tensor) const;
  // Has Write given the tensor values that no step has taken yet?
  bool written(uint32_t tensor) const;
  // After Step, before AwaitApplied. Blocks until the unit's lent parameters are at version(); the loan goes on.
  absl::Status AwaitUnit(uint32_t unit);
  // After Step. Blocks until lent parameters are at version(), then ends the loan, whatever it returns: after an error
  // some may be, or be amid their update. FAILED_PRECONDITION before Step: the loan goes on.
  absl::Status AwaitApplied();

  // COLLECTIVE. Norm of all that was pushed (unscaled) / of one tensor.
  absl::StatusOr<double> Norm();
  absl::StatusOr<double> TensorNorm(absl::string_view tensor);
  // COLLECTIVE. Forgets all pushes since the last step; ends a loan.
  absl::Status Drop();
  // COLLECTIVE. Seals and decides. Tensors that no rank pushed are left alone; where only some ranks did, the others
  // count zeros. On OK the step is decided: it will be applied on all servers whatever dies next (as far as the job's
  // durability keeps servers' memory).
  absl::StatusOr<StepReport> Step(const StepOptions& options);
  // COLLECTIVE, in Step's stead where this rank cannot take part: no rank's Step is made, and all get `why`, an error.
  absl::Status RefuseStep(const absl::Status& why);

  // COLLECTIVE. New master values for a whole tensor (every rank passes all of them), applied by the next Step before
  // its gradients, or by CommitValues.
  absl::Status Write(absl::string_view tensor, absl::Span<const float> values);
  // COLLECTIVE. A transaction of written values alone. Like Initialise it seals the blobs of the last step again.
  absl::StatusOr<StepReport> CommitValues();
  // COLLECTIVE, between steps, nothing pushed or written. A transaction of its own: of these tensors (and step counts;
  // the same on all ranks) the masters, with the working parameters that they round to, or a moment become the values
  // given, which are finite, and at least 0 where they are second moments. What else there is of them stays. `blob`: as
  // Step's. State from elsewhere comes in so, array by array: all blobs but the last should tell that it is not there
  // in whole.
  absl::StatusOr<StepReport> CommitState(Content array, absl::Span<const TensorState> tensors, const std::string& blob);

  // Any one rank. Pin keeps version() readable, by all ranks, while training goes on; Unpin gives its space back.
  absl::Status Pin();
  absl::Status Unpin(int64_t version);
  // Any one rank; of a job with durability `step` or `every-K`. PinDurably keeps version() on the disks of all servers
  // until UnpinDurably, whatever dies: for Restore; Read needs Pin. Training waits while what is not on the disks at
  // this version is written; step_timeout bounds that. BUDGET, with what is short: no server keeps it. After any other
  // error some servers may: call it again before the next step, or the next group's Open gives up what not all have.
  absl::Status PinDurably();
  absl::Status UnpinDurably(int64_t version);
  // Versions that all servers have pinned durably, ascending; those that servers pinned by themselves may go with any
  // step.
  absl::StatusOr<std::vector<int64_t>> DurablePins();
  // COLLECTIVE, between steps, nothing pushed or written. The next transaction: all state and step counts become those
  // of a version that is pinned durably, and resumed_blobs() its blobs. version() goes up by one, as with any
  // transaction: no number ever names two states. With durability every-K that is lost again, as any other step, until
  // servers pin a version behind it: pin what must stay. Servers read the pin and write all state; step_timeout bounds
  // that. Before anything is touched: VERSION_GONE, a server does not have it; BAD_SPEC, tensors got their first values
  // since. ABORTED: this group's epoch is over, its version stands or was restored.
  absl::StatusOr<StepReport> Restore(int64_t version);
  // A whole tensor at `version`: the current one, or a pinned one. Working values are widened to fp32.
  absl::Status Read(absl::string_view tensor, Content content, int64_t version, absl::Span<float> to);
  // Optimizer step count t of a tensor at `version`: the current one, or one that this rank pinned.
  absl::StatusOr<uint64_t> TensorSteps(absl::string_view tensor, int64_t version);

  // COLLECTIVE, between steps, nothing pushed. Adds tensors (new units, or further tensors of known units; a tensor
  // registered under its old name replaces it) by a fence; Initialise gives them values before the next step.
  absl::Status Register(const std::vector<TensorSpec>& tensors);

  SessionStats stats() const;

 private:
  friend class UnitLease;
  struct Impl;
  explicit Session(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace ballast::client
