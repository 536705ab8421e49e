// A trainer's seat at the state servers: one rank of one group training one job.
//
// Two ways of use, which may be mixed by unit:
//  (a) Parameters live on the servers only (ZeRO-3/Infinity): Prefetch(unit) ahead of use, Acquire(unit) all-gathers
//      the unit, dropping the lease frees it.
//  (b) The trainer keeps its 16-bit parameters (ZeRO-1/2/Offload): Push per unit as backward produces gradients, Step,
//      then PullOwned(unit) for the updated ranges.
//
// Pushed gradients are provisional until Step(): before it, ask for norms, choose a scale, or Drop(). A step leaves a
// tensor alone that no rank pushes, its step count included. A tensor that is never pushed has state all the same,
// unless TensorSpec::frozen says that servers keep its value alone.
//
// Threads: one thread at a time per session. Calls marked COLLECTIVE must be made by all ranks in the same order.
// Errors: carry a reason (model::ReasonOf). After STALE_EPOCH, RANK_MISSING or DATA_LOSS the session is finished: exit
// and start the group again with resume = auto. Decided steps are not lost by that. Fork: not supported after Open
// (gRPC): calls in a forked child return FAILED_PRECONDITION.
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
#include "ballast/client/session_types.h"
#include "ballast/client/transport.h"
#include "ballast/kernels/optimizer.h"

namespace ballast::client {

class Session;
class Tally;

// All working parameters of a unit, gathered. Frees its buffer when dropped. Valid until the session ends.
class UnitLease {
 public:
  UnitLease() = default;
  UnitLease(UnitLease&& other) noexcept;
  UnitLease& operator=(UnitLease&& other) noexcept;
  ~UnitLease();
  // The unit's flat space in the job's working dtype, padding included; tensors at Session::Locate(name).begin.
  absl::Span<const std::byte> bytes() const { return bytes_; }
  // The same as elements: bits of bf16 or fp16, or fp32. Calling the function of the wrong width ends the process with
  // a message.
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

// Elements on their way to places of the caller's.
class PendingPull {
 public:
  PendingPull(PendingPull&&) noexcept = default;
  PendingPull& operator=(PendingPull&&) = delete;
  ~PendingPull() { (void)Await(); }
  // Blocks until no place is written any more. Valid while the session is. `waited`: what the caller spent in
  // Waiter()'s calls, for the session's times.
  absl::Status Await(absl::Duration waited = absl::ZeroDuration());
  // A function that blocks until no place is written any more, on any thread, beside other calls of the session. The
  // function may outlive this pull; Await does not block once the function has returned.
  std::function<void()> Waiter() const;

 private:
  friend class Session;
  PendingPull(Session* session, std::shared_ptr<Tally> tally) : session_(session), tally_(std::move(tally)) {}
  Session* session_;
  std::shared_ptr<Tally> tally_;  // null once awaited
};

class Session {
 public:
  // COLLECTIVE. Fences the job with a new epoch, settles whatever an earlier group left undecided, and opens it for
  // this group; the world size may differ from the earlier group's. `tensors`: the same on all ranks, or with
  // Split::kPlaced those that this rank has a part of; on resume all ranks' together the same as the job's (new tensors
  // are refused here: Register adds them). Owns the transports (one per server, the same
  // order on all ranks); borrows `collective`. Errors: JOB_EXISTS (names never, auto, must), JOB_MISSING, BAD_SPEC
  // (names the tensor that differs), BUDGET, SERVER_DOWN, RANK_MISSING, STATE_LOST.
  static absl::StatusOr<std::unique_ptr<Session>> Open(const SessionOptions& options,
                                                       const std::vector<TensorSpec>& tensors,
                                                       std::vector<std::unique_ptr<Transport>> servers,
                                                       Collective* collective);
  // A gRPC transport per "host:port", with SessionOptions::access.
  static absl::StatusOr<std::unique_ptr<Session>> Connect(const SessionOptions& options,
                                                          const std::vector<TensorSpec>& tensors,
                                                          const std::vector<std::string>& servers,
                                                          Collective* collective);
  ~Session();

  // The last decided step. -1: the job is new, and Initialise comes first.
  int64_t version() const;
  // OK, or the error that ended the session, which every call returns from then on.
  const absl::Status& ended() const;
  // How often Drop was called since that step; ranks whose counts differ cannot make the next one.
  uint64_t attempt() const;
  // Whether some tensors have no values yet: the job is new, or tensors were registered and not initialised before a
  // restart. Initialise must come before the next step.
  bool needs_values() const;
  // After a resume or a Restore: the blobs sealed with the version found or restored, by rank of the group that sealed
  // it.
  const std::vector<std::string>& resumed_blobs() const;
  // The version whose state, step counts and blobs the session got because Open found that servers of a job with
  // durability every-K had lost later versions; version() is then the number of the transaction that restored it. Else
  // -1.
  int64_t restored_version() const;
  int rank() const;
  int world_size() const;
  // The job's optimizer.
  const kernels::OptimizerSpec& optimizer() const;

  // Where tensors lie.
  uint32_t unit_count() const;
  absl::StatusOr<uint32_t> FindUnit(absl::string_view name) const;
  uint64_t unit_elements(uint32_t unit) const;
  struct Location {
    uint32_t unit = 0;
    uint64_t begin = 0;
    uint64_t end = 0;
  };
  absl::StatusOr<Location> Locate(absl::string_view tensor) const;  // name or alias
  // The whole tensor's shape, by TensorIndex. Valid until Register.
  const std::vector<uint64_t>& ShapeOf(uint32_t tensor) const;
  // This rank's ranges of a unit, by offset. RangesOf returns any rank's.
  const std::vector<UnitRange>& owned(uint32_t unit) const;
  const std::vector<UnitRange>& RangesOf(int rank, uint32_t unit) const;
  uint64_t owned_elements(uint32_t unit) const;
  // The part of a tensor, by TensorIndex, that this rank has; nullptr: none. A box of all of the tensor with
  // Split::kEven. Valid until Register.
  const model::Box* Held(uint32_t tensor) const;
  // The places of a box of a tensor in the order of the tensor's elements.
  std::vector<model::BoxRun> RunsOf(uint32_t tensor, const model::Box& box) const;
  Split split() const;

  // COLLECTIVE. Transaction 0, or the values of newly registered tensors. Calls `fill` for every such tensor that this
  // rank owns a part of, with the part's first element (in the tensor) and the fp32 values to fill.
  absl::Status Initialise(
      absl::FunctionRef<void(absl::string_view tensor, uint64_t first, absl::Span<float> values)> fill);

  // (a) Starts pulling this rank's share of `unit` at version(). Never blocks; a no-op if under way.
  void Prefetch(uint32_t unit);
  // COLLECTIVE. The whole unit at version(), all-gathered.
  absl::StatusOr<UnitLease> Acquire(uint32_t unit);
  // The whole unit at version(), pulled by this rank alone: for units skipped by some ranks (experts).
  absl::StatusOr<UnitLease> AcquireWhole(uint32_t unit);
  // (b) Pulls the own ranges at version(), concatenated, into `to`, owned_elements(unit) long. BAD_DTYPE if its
  // elements are not as wide as the working dtype's.
  absl::Status PullOwned(uint32_t unit, absl::Span<bf16> to);
  absl::Status PullOwned(uint32_t unit, absl::Span<float> to);
  // Starts pulling `runs` at version(), whoever owns them. The places are written until the pull was awaited.
  absl::StatusOr<PendingPull> StartPull(uint32_t unit, absl::Span<const PullRun> runs);
  uint64_t inflight_bytes_max() const;

  // Pushes this rank's part of the unit's gradient, already reduced over ranks: the owned ranges, concatenated. Copies
  // the elements; returns when the copy is made and the bytes in flight allow. A unit may be pushed once per attempt.
  // `absent`: tensors of the unit without a gradient here; the elements given for them must be zero. Frozen tensors are
  // always absent, whatever is given for them. 16-bit elements
  // are bits of the job's gradient dtype; BAD_DTYPE if that is as wide as the other overload's.
  absl::Status Push(uint32_t unit, absl::Span<const bf16> gradient, absl::Span<const std::string> absent = {});
  absl::Status Push(uint32_t unit, absl::Span<const float> gradient, absl::Span<const std::string> absent = {});
  // The same in ascending runs. Elements in no run are zero; no run lies in an absent tensor. The elements are not
  // copied: the memory must stay until Step, Drop or ReturnGradients has returned (the first two with OK), or the
  // session is gone.
  // With `owner`, which keeps the memory, nothing else must: the owner is let go once the servers have the elements.
  // They cannot be sent again then, so a server that loses them before the step is decided ends the session
  // (STATE_LOST).
  absl::Status PushBorrowed(uint32_t unit, std::vector<GradientRun> runs, absl::Span<const std::string> absent = {},
                            const std::shared_ptr<const void>& owner = nullptr);
  // After a failed Step: gives borrowed gradients back to the caller. Drop must come before another Step.
  void ReturnGradients();
  // Adds one of several contributions to the unit's gradient. The sum is made here in fp32, in call order, rounded to
  // the gradient dtype, and pushed once by the next collective call on the step (Norm, TensorNorm, Step).
  absl::Status Accumulate(uint32_t unit, absl::Span<const float> gradient, absl::Span<const std::string> absent = {});

  // (c) With one rank and one server in this process that keeps no working copies: no element is copied. The step reads
  // gradients and initial values from, and writes parameters to, the trainer's memory. The memory must stay, with
  // gradients and values unchanged, until AwaitApplied or Drop has returned, or the session is gone.
  bool takes_loans() const;
  bool takes_gradients() const;  // whether loans may include gradients and values: not with durability `step`
  // Index of a tensor in the list passed to Lend.
  absl::StatusOr<uint32_t> TensorIndex(absl::string_view tensor) const;
  uint32_t tensor_count() const;
  // How the job keeps the tensor, whatever TensorSpec::frozen said at Open. NOT_FOUND (UNKNOWN_TENSOR).
  absl::StatusOr<v1::Frozen> FrozenAs(absl::string_view tensor) const;
  // Names of the job's live tensors, in the order of registration.
  std::vector<std::string> tensor_names() const;
  // Before Step, in place of Push: an entry per TensorIndex, with gradients of all tensors that have a gradient, or of
  // none. With durability `step` gradients go to a log, so they must be pushed (UNSUPPORTED). Parameters of a tensor
  // that is not updated stay as they are. Where takes_gradients(), values given to Write are lent too: no Write until
  // the loan's end.
  // Before Initialise: values of all tensors that need them. Initialise then does not call `fill`.
  // In a job with MasterFormat::kLent parameters are their own masters, and all that is read or written of them is the
  // trainer's to read or write: a loan of a gradient has its parameter, Write is UNIMPLEMENTED (UNSUPPORTED), as are
  // reads of masters and pulls, and CommitState of masters takes step counts alone. A trainer that ends its loan of
  // a step amid Step loses the job (STATE_LOST).
  bool lends_masters() const;
  absl::Status Lend(std::vector<model::LentTensor> tensors);
  bool needs_values(uint32_t tensor) const;
  // Whether Write has given the tensor values that no step has taken yet.
  bool written(uint32_t tensor) const;
  // After Step, before AwaitApplied. Blocks until the unit's lent parameters are at version(); the loan goes on.
  absl::Status AwaitUnit(uint32_t unit);
  // After Step. Blocks until lent parameters are at version(), then ends the loan, also on an error: some parameters
  // may then be at version(), or half updated. FAILED_PRECONDITION before Step: the loan goes on.
  absl::Status AwaitApplied();

  // COLLECTIVE. Norm of all pushed gradients, or of one tensor's, before scaling.
  absl::StatusOr<double> Norm();
  absl::StatusOr<double> TensorNorm(absl::string_view tensor);
  // COLLECTIVE. Forgets all pushes since the last step; ends a loan.
  absl::Status Drop();
  // COLLECTIVE. Seals and decides. Tensors that no rank pushed are left alone; for a tensor pushed by some ranks only,
  // the rest count zeros. On OK the step is decided: all servers will apply it whatever dies next (as far as the job's
  // durability keeps servers' memory).
  absl::StatusOr<StepReport> Step(const StepOptions& options);
  // COLLECTIVE, in place of Step where this rank cannot take part: no rank makes the step, and all ranks get the error
  // `why`.
  absl::Status RefuseStep(const absl::Status& why);

  // COLLECTIVE among the ranks that have a part of the tensor. New master values of the whole tensor, or of `runs`,
  // which are at least this rank's part. The next Step applies them before its gradients; or CommitValues applies them.
  absl::Status Write(absl::string_view tensor, absl::Span<const float> values,
                     absl::Span<const model::BoxRun> runs = {});
  // COLLECTIVE. A transaction of written values alone. Like Initialise, it seals the blobs of the last step again.
  absl::StatusOr<StepReport> CommitValues();
  // COLLECTIVE, between steps, with no push or write pending. A transaction of its own that writes one array of state
  // from elsewhere: the masters (with the working parameters that they round to) or one moment of `tensors`, and their
  // step counts (the same on all ranks). Values must be finite, and at least 0 for second moments. The tensors'
  // remaining state stays. `blob`: as in Step. Bringing in a whole state takes a call per array: every blob but the
  // last should say that the state is incomplete.
  absl::StatusOr<StepReport> CommitState(Content array, absl::Span<const TensorState> tensors, const std::string& blob);

  // Called by any one rank. Pin keeps version() readable by all ranks while training goes on; Unpin frees its space.
  absl::Status Pin();
  absl::Status Unpin(int64_t version);
  // Called by any one rank, for a job with durability `step` or `every-K`. PinDurably keeps version() on the disks of
  // all servers until UnpinDurably, whatever dies: for Restore (Read needs Pin). Training waits while state not yet on
  // the disks at this version is written; step_timeout bounds that. BUDGET or DISK_FULL, with the missing amount: given
  // when any server lacks the space; the others are asked to give the version up. After any other error some servers
  // may keep it: call PinDurably again before the next step, or the next group's Open drops a version that some server
  // lacks.
  absl::Status PinDurably();
  absl::Status UnpinDurably(int64_t version);
  // Versions kept on the disk by all servers, ascending. Versions that servers pinned by themselves may go with any
  // step.
  absl::StatusOr<std::vector<KeptVersion>> DurablePins();
  // Called by any one rank. OK if all servers keep this version, and the state is the one asked for; what KeptVersion
  // does not know is not compared. Errors: BAD_SPEC, it is of another life of the job; VERSION_GONE, no server keeps
  // it, or it is of another history of this job.
  absl::Status CheckKept(const KeptVersion& wanted);
  // COLLECTIVE, between steps, with no push or write pending. The next transaction: all state and step counts become
  // those of a version kept on the disk, and resumed_blobs() its blobs. version() goes up by one, as with any
  // transaction: no number ever names two states. With durability every-K the restore, like any step, can be lost until
  // servers pin a later version: pin to be safe. Servers read the kept version and write all state; step_timeout bounds
  // that.
  // Errors before any change: CheckKept's; BAD_SPEC, tensors got their first values since.
  // ABORTED: this group's epoch is over; the state is at the old version or restored.
  absl::StatusOr<StepReport> Restore(const KeptVersion& kept);
  // Reads a whole tensor, or `runs` of a tensor, at `version`: the current or a pinned version. Working values are
  // widened to fp32.
  absl::Status Read(absl::string_view tensor, Content content, int64_t version, absl::Span<float> to,
                    absl::Span<const model::BoxRun> runs = {});
  // Optimizer step count t of a tensor at `version`: the current version or one pinned by this rank.
  absl::StatusOr<uint64_t> TensorSteps(absl::string_view tensor, int64_t version);

  // COLLECTIVE, between steps, with no push pending. Adds tensors by a fence: new units, or further tensors of known
  // units. With Split::kPlaced a rank may have none to add. A tensor registered under an old name replaces the old
  // tensor. Initialise must give values before the next step.
  absl::Status Register(const std::vector<TensorSpec>& tensors);

  SessionStats stats() const;

 private:
  friend class UnitLease;
  friend class PendingPull;
  struct Impl;
  explicit Session(std::unique_ptr<Impl> impl);
  absl::StatusOr<std::vector<model::BoxRun>> WholeRuns(absl::string_view tensor) const;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ballast::client
