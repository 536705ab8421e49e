// A model's tensors that stay in the trainer. Gradients are read from the trainer's own memory, and updated parameters
// written to it, tensor by tensor (way (b) of session.h; way (c) of loans.h where possible).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ballast/client/session.h"
#include "ballast/kernels/float_formats.h"
#include "ballast/proto/model/placement.h"

namespace ballast::client {

// One tensor's local elements: the part that this rank has (Session::Held), in row-major order. Dtypes: kF32, kBf16,
// kF16; where a dtype is not the job's, elements are rounded to nearest even, or widened.
struct TensorMemory {
  const std::byte* gradient = nullptr;  // null: no gradient in this step
  kernels::Dtype gradient_dtype = kernels::Dtype::kF32;
  // Null if this rank has no element of the tensor, or if the parameter lives on the servers alone. Step and Pull then
  // write no parameter.
  std::byte* parameter = nullptr;
  kernels::Dtype parameter_dtype = kernels::Dtype::kF32;
};

struct TensorsReport {
  StepReport step;
  // Seconds until gradients were given / the step was decided / parameters were updated.
  double push_seconds = 0;
  double seal_seconds = 0;
  double pull_seconds = 0;
};

// Spans of TensorMemory hold an entry per tensor, in the order of `names`; the memory is borrowed until return. Where
// the session takes loans, a lent tensor is copied only if its dtype or its order of elements is not the job's. The
// copy is kept here. Threads: the session's.
class Tensors {
 public:
  // Borrows `session`. `names`: every live tensor of which this rank has a part, once each. Tensors of which it has no
  // part may be named too. NOT_FOUND (UNKNOWN_TENSOR); INVALID_ARGUMENT (BAD_SPEC) for a missing or doubled name. After
  // Session::Register, Make a new object.
  static absl::StatusOr<Tensors> Make(Session* session, const std::vector<std::string>& names);

  const std::vector<std::string>& names() const { return names_; }
  // Elements of tensor `index` that this rank has.
  uint64_t local_elements(size_t index) const { return parts_[index].elements; }

  // COLLECTIVE. Session::Initialise with the parameters' values, which must not change until return. `source`: called
  // with the index of a tensor whose parameter is null; returns its values, in memory that lasts until the next call.
  // It may be called more than once for a tensor, and may throw.
  using Source = std::function<TensorMemory(size_t)>;
  absl::Status Initialise(absl::Span<const TensorMemory> memory, const Source& source = {},
                          const std::string& blob = {});
  // COLLECTIVE. Session::Step with the gradients given. Unless the step is skipped, parameters become the new
  // version's. An error before the seal reaches all ranks, and all drop their pushes: the step may be made again.
  // `ready` may be empty. If parameters change, Step calls it as soon as a unit's tensors have their new values, with
  // their indices (borrowed). From then on Step does not read the unit's gradients.
  using Ready = std::function<void(absl::Span<const size_t>)>;
  absl::StatusOr<TensorsReport> Step(absl::Span<const TensorMemory> memory, const StepOptions& options,
                                     const Ready& ready = {});
  // Whether PushEarly does anything: lent gradients (takes_gradients) are not pushed.
  bool pushes_gradients() const { return !session_->takes_gradients(); }
  // Units of the session, by the indices of their tensors.
  size_t unit_count() const { return units_.size(); }
  const std::vector<size_t>& TensorsOf(size_t unit) const { return units_[unit].tensors; }
  // Pushes this unit's gradients before Step, which then skips the unit. `gradients`: an entry per TensorsOf(unit);
  // parameters are ignored. The memory must stay unchanged until Step or Drop has returned OK. If `owner` keeps the
  // memory, it must stay only until the session drops the owner (see Session::PushBorrowed). `admitted`: as
  // Session::Push's.
  absl::Status PushEarly(size_t unit, absl::Span<const TensorMemory> gradients,
                         const std::shared_ptr<const void>& owner = nullptr, Waiter* admitted = nullptr);
  // COLLECTIVE. Session::Drop of early pushes.
  absl::Status Drop();
  // COLLECTIVE. Session::CommitState of the tensors `which` (indices into names), with the local fp32 elements of each.
  absl::StatusOr<StepReport> CommitState(Content array, absl::Span<const size_t> which,
                                         absl::Span<const float* const> values, absl::Span<const uint64_t> steps,
                                         const std::string& blob);
  // Reads the local elements of tensor `index` at the session's version.
  absl::Status Read(size_t index, Content content, absl::Span<float> to);
  // COLLECTIVE among the ranks that have a part of the tensor. Session::Write of the local elements.
  absl::Status Write(size_t index, absl::Span<const float> values);
  // COLLECTIVE. Waits for updates, then fetches parameters at the session's version. If parameters are their own
  // masters (Session::lends_masters), there is nothing to fetch. With Split::kEven ranks gather the parts of all ranks;
  // otherwise each rank pulls its own. In addition to the parameters it needs the session's `inflight_bytes_max` of
  // memory, or one unit's if that is more.
  absl::Status Pull(absl::Span<const TensorMemory> memory, const Ready& ready = {});
  // Starts pulling some tensors, by index, at the session's version. `boxes`: the part of each tensor to pull; if
  // empty, this rank's parts. `to`: for each, memory for that part in the job's working dtype, borrowed until all
  // returned pulls were awaited. Never blocks. With kE4m3Blocks the memory is for all blocks that have elements of the
  // part (PullBytes), so the part may begin amid the first block. A part that is several runs of the tensor is then
  // UNIMPLEMENTED (UNSUPPORTED).
  absl::StatusOr<std::vector<PendingPull>> StartPull(absl::Span<const size_t> which, absl::Span<std::byte* const> to,
                                                     absl::Span<const model::Box> boxes = {});
  // Bytes that StartPull writes for this rank's part of tensor `index`.
  uint64_t PullBytes(size_t index) const;

 private:
  // The part of a tensor that this rank has.
  struct Part {
    uint32_t index = 0;  // the session's
    bool is_frozen = false;
    uint64_t begin = 0;  // of the tensor, in its unit
    uint64_t elements = 0;
    std::vector<model::BoxRun> runs;
    bool in_order() const { return runs.size() <= 1; }  // here as on the servers
  };
  // A run of a tensor's elements that lie together here and in the unit.
  struct Run {
    size_t tensor = 0;   // index into names
    uint64_t local = 0;  // first element, among the local elements
    uint64_t at = 0;     // first element, in the owned ranges laid end to end, in a fetch, or in the unit
    uint64_t count = 0;
  };
  // Elements of a unit that are pulled together.
  struct Fetch {
    UnitRange range;
    std::vector<Run> runs;
  };
  struct Unit {
    uint32_t index = 0;  // the session's
    uint64_t elements = 0;
    bool pushed = false;  // early, in this attempt
    std::vector<size_t> tensors;
    std::vector<std::string> lacking;  // tensors of the unit that this rank did not name
    std::vector<Run> owned;
    std::vector<Run> whole;      // if gathered
    std::vector<Fetch> fetches;  // else
    uint64_t fetched_bytes = 0;
  };
  struct Fetching;

  explicit Tensors(Session* session);
  // Adds the unit's tensors, by offset.
  void Place(Unit* unit);
  // BAD_REQUEST after a Register.
  absl::Status CheckCurrent() const;
  // BAD_REQUEST for a gradient of a frozen tensor.
  absl::Status CheckGradients(absl::Span<const TensorMemory> memory) const;
  // UNIMPLEMENTED (UNSUPPORTED) for parameters in the trainer's memory in a job of coded ones.
  absl::Status CheckParameters(absl::Span<const TensorMemory> memory) const;
  absl::Status LendValues(absl::Span<const TensorMemory> memory, const std::string& blob);
  absl::Status PushValues(absl::Span<const TensorMemory> memory, const Source& source, const std::string& blob);
  // Gives the session the step's gradients, and the places for parameters if the session takes loans.
  absl::Status Give(absl::Span<const TensorMemory> memory);
  // The memory lent for tensor `i`; the session's own, where servers want another dtype or order.
  const std::byte* LentGradient(size_t i, const TensorMemory& from);
  absl::StatusOr<std::byte*> LentParameter(size_t i, const TensorMemory& from);
  // Ends the loan of a decided step.
  absl::Status TakeBack(absl::Span<const TensorMemory> memory, bool skipped, const Ready& ready);
  // Brings a whole tensor's local elements into the servers' order and dtype.
  void ToServers(const Part& part, const std::byte* from, kernels::Dtype from_dtype, std::byte* to,
                 kernels::Dtype to_dtype);
  // Brings lent parameters from the servers' order and dtype to the trainer's own.
  void Widen(const Unit& unit, absl::Span<const TensorMemory> memory);
  absl::Status Push(absl::Span<const TensorMemory> memory);
  absl::Status PushUnit(const Unit& unit, absl::Span<const TensorMemory> memory,
                        const std::shared_ptr<const void>& owner = nullptr, Waiter* admitted = nullptr);
  // The unit's gradients in the job's dtype, for the owned ranges laid end to end. Elements without a gradient are
  // not written.
  void ConvertGradients(const Unit& unit, absl::Span<const TensorMemory> memory, absl::Span<std::byte> to);
  void Scatter(const std::vector<Run>& runs, absl::Span<const std::byte> from,
               absl::Span<const TensorMemory> memory) const;
  absl::Status Gather(absl::Span<const TensorMemory> memory, const Ready& ready);
  absl::StatusOr<Fetching> StartFetching(const Unit& unit, absl::Span<const TensorMemory> memory);
  absl::Status Finish(Fetching* fetching, absl::Span<const TensorMemory> memory);

  Session* session_;
  bool gathers_;  // every rank has every tensor whole, and pulls a part
  std::vector<std::string> names_;
  std::vector<Part> parts_;  // by tensor
  std::vector<Unit> units_;
  // Memory lent in place of a tensor's own, because the tensor has another dtype or another order of elements.
  struct Converted {
    std::vector<std::byte> gradient;
    std::vector<std::byte> parameter;
    bool lent = false;  // `parameter` is lent in this step
  };
  uint32_t tensor_count_ = 0;  // the session's
  std::vector<Converted> converted_;
  std::vector<std::byte> buffer_;  // of one unit
  std::vector<float> wide_;        // for conversions
};

}  // namespace ballast::client
