// How a session trains: it sends gradients and values to the servers, and a step makes a version of them. A part of
// Session: session.h says how to use the parts, on which threads, and which errors end a session.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "ballast/client/session_types.h"

namespace ballast::client {

struct SessionCore;

class Steps {
 public:
  // COLLECTIVE. Transaction 0, or the values of newly registered tensors. Calls `fill` for every such tensor that this
  // rank owns a part of, with the part's first element (in the tensor) and the fp32 values to fill. `blob`: as in Step;
  // if empty, the last step's blob again.
  absl::Status Initialise(
      absl::FunctionRef<void(absl::string_view tensor, uint64_t first, absl::Span<float> values)> fill,
      const std::string& blob = {});

  // Pushes this rank's part of the unit's gradient, already reduced over ranks: the owned ranges, concatenated. Copies
  // the elements, and waits while too many bytes are in flight; with `admitted` it does not wait, but returns a
  // function that does. A unit may be pushed once per attempt. `absent`: tensors of the unit without a gradient here;
  // the elements given for them must be zero. Frozen tensors are always absent, whatever is given for them. The 16-bit
  // overload takes the raw bits of the job's 16-bit gradient dtype (bf16 or fp16). BAD_DTYPE: the overload's width is
  // not that of the job's gradient dtype.
  absl::Status Push(uint32_t unit, absl::Span<const bf16> gradient, absl::Span<const std::string> absent = {},
                    Waiter* admitted = nullptr);
  absl::Status Push(uint32_t unit, absl::Span<const float> gradient, absl::Span<const std::string> absent = {},
                    Waiter* admitted = nullptr);
  // Pushes the same in ascending runs, without a copy. Elements in no run are zero; no run lies in an absent tensor.
  // Without `owner` the caller keeps the memory until Step or Drop has returned OK, ReturnGradients has returned, or
  // the session is gone. `owner` keeps the memory alive, so the caller need not, and `keep` says for how long.
  // kUntilCopied: the session drops `owner` as soon as the servers have the elements, and cannot send them again after
  // that. If a server loses them before the step is decided, the session ends (STATE_LOST).
  // kUntilApplied: the session keeps `owner` until Step or Drop has returned OK, or the session is gone. A server in
  // this process keeps it until it has applied the step, or knows that no group can decide the step. ReturnGradients
  // does not end that: a later group may decide and apply a step whose outcome is not known. Do not write to the memory
  // until `owner` is dropped. If a server finds a change, it fails the job, but it cannot find every change
  // (model::LentGradients). `owner` is dropped on any thread: its destructor must neither block nor call the session.
  absl::Status PushBorrowed(uint32_t unit, std::vector<GradientRun> runs, absl::Span<const std::string> absent = {},
                            const std::shared_ptr<const void>& owner = nullptr, Keep keep = Keep::kUntilCopied,
                            Waiter* admitted = nullptr);
  // After a failed Step: gives borrowed gradients back to the caller, except those with kUntilApplied, which stay lent
  // until their `owner` is dropped. Drop must come before another Step.
  void ReturnGradients();

  // COLLECTIVE. Norm of all pushed gradients, before scaling.
  absl::StatusOr<double> Norm();
  // COLLECTIVE. Forgets all pushes since the last step; ends a loan.
  absl::Status Drop();
  // COLLECTIVE. Seals and decides. Tensors that no rank pushed stay as they are. If only some ranks pushed a tensor,
  // the other ranks contribute zeros. On OK the step is decided: all servers will apply it, whichever process dies
  // next. With durability `every-K` or `none`, a server that dies can still lose it.
  absl::StatusOr<StepReport> Step(const StepOptions& options);
  // COLLECTIVE. A rank that cannot take part in the step calls this in place of Step. No rank makes the step, and all
  // ranks get the error `why`.
  absl::Status RefuseStep(const absl::Status& why);

  // COLLECTIVE among the ranks that have a part of the tensor. Gives new master values of the whole tensor, or of
  // `runs`. `runs` must cover at least this rank's part. The next Step applies the values before its gradients; or
  // CommitValues applies them.
  absl::Status Write(absl::string_view tensor, absl::Span<const float> values,
                     absl::Span<const model::BoxRun> runs = {});
  // Whether Write has given the tensor values that no step has taken yet.
  bool written(uint32_t tensor) const;
  // COLLECTIVE. Makes a transaction of the written values alone. It seals the blobs of the last step again, as
  // Initialise does.
  absl::StatusOr<StepReport> CommitValues();
  // COLLECTIVE, between steps, with no push or write pending. Makes a transaction that loads one array of state: the
  // masters of `tensors` (working parameters are rounded from them), or one of their moments. It also sets the tensors'
  // step counts, which all ranks must pass alike. Values must be finite, and at least 0 for second moments. The rest of
  // the tensors' state stays. `blob`: as in Step. A whole state takes a call per array; until the last call, each blob
  // should say that the state is incomplete.
  absl::StatusOr<StepReport> CommitState(Content array, absl::Span<const TensorState> tensors, const std::string& blob);

 protected:
  explicit Steps(SessionCore* core) : core_(core) {}
  ~Steps() = default;

 private:
  SessionCore* core_;
};

}  // namespace ballast::client
