// A model's tensors that stay in the trainer. Gradients are read from the trainer's own memory, and updated parameters
// written to it, tensor by tensor (use (b) of session.h; use (c) where possible).
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

namespace ballast::client {

// The part of each tensor that this rank has.
enum class Local {
  kWhole,  // the whole: one rank, or ranks whose reduced gradients are equal (DDP). With Split::kEven or kRows
  kRows,   // its rows, as torch.chunk along dimension 0 gives them (FSDP2's Shard(0)). With Split::kRows
};

// One tensor's local elements, end to end in row-major order. Dtypes: kF32, kBf16, kF16; where a dtype is not the
// job's, elements are rounded to nearest even, or widened.
struct TensorMemory {
  const std::byte* gradient = nullptr;  // null: no gradient in this step
  kernels::Dtype gradient_dtype = kernels::Dtype::kF32;
  // Null for a rank without a row of the tensor, and where the parameter lives on the servers alone: Step and Pull then
  // bring it nowhere.
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
// the session takes loans, only tensors of another dtype than the job's are copied, through memory kept here. Threads:
// the session's.
class Tensors {
 public:
  // Borrows `session`. `names`: each of the job's live tensors once. NOT_FOUND (UNKNOWN_TENSOR); INVALID_ARGUMENT
  // (BAD_SPEC) for a missing or doubled name. After Session::Register, Make a new object.
  static absl::StatusOr<Tensors> Make(Session* session, const std::vector<std::string>& names, Local local);

  // Elements of tensor `index` that this rank has.
  uint64_t local_elements(size_t index) const { return local_elements_[index]; }

  // COLLECTIVE. Session::Initialise with the parameters' values, which must not change until return. `source`: gives the
  // values of a tensor, by index, whose parameter is null, in memory that lasts until the next call; it may be asked
  // for the same tensor again, and may throw.
  using Source = std::function<TensorMemory(size_t)>;
  absl::Status Initialise(absl::Span<const TensorMemory> memory, const Source& source = {});
  // COLLECTIVE. Session::Step with the gradients given. Unless the step is skipped, parameters become the new
  // version's. An error before the seal reaches all ranks, and all drop their pushes: the step may be made again.
  // `ready` may be empty. If parameters change, it is called for a unit's tensors as soon as they have their new
  // values, with their indices (borrowed); the unit's gradients are not read any more then.
  using Ready = std::function<void(absl::Span<const size_t>)>;
  absl::StatusOr<TensorsReport> Step(absl::Span<const TensorMemory> memory, const StepOptions& options,
                                     const Ready& ready = {});
  // Whether PushEarly does anything: lent gradients (takes_gradients) are not pushed.
  bool pushes_gradients() const { return !session_->takes_gradients(); }
  // Units of the session, by the indices of their tensors.
  size_t unit_count() const { return units_.size(); }
  const std::vector<size_t>& TensorsOf(size_t unit) const { return units_[unit].tensors; }
  // Pushes this unit's gradients ahead of Step, which then passes the unit over. `gradients`: an entry per
  // TensorsOf(unit), with parameters ignored. The memory must stay unchanged until Step or Drop has returned OK; with
  // `owner`, which keeps it, until the owner is let go: see Session::PushBorrowed.
  absl::Status PushEarly(size_t unit, absl::Span<const TensorMemory> gradients,
                         const std::shared_ptr<const void>& owner = nullptr);
  // COLLECTIVE. Session::Drop of early pushes.
  absl::Status Drop();
  // COLLECTIVE. Session::CommitState of the tensors `which` (indices into names), with the local fp32 elements of each.
  absl::StatusOr<StepReport> CommitState(Content array, absl::Span<const size_t> which,
                                         absl::Span<const float* const> values, absl::Span<const uint64_t> steps,
                                         const std::string& blob);
  // COLLECTIVE. Waits for updates and fetches parameters at the session's version. DDP's ranks gather the parts of all
  // ranks.
  absl::Status Pull(absl::Span<const TensorMemory> memory, const Ready& ready = {});
  // Starts pulling this rank's parts of some tensors, by index, at the session's version. `to`: for each, room for
  // local_elements() of the job's working dtype, borrowed until every pull returned was awaited. Never blocks.
  absl::StatusOr<std::vector<PendingPull>> StartPull(absl::Span<const size_t> which, absl::Span<std::byte* const> to);

 private:
  // A run of a tensor's elements within the rank's owned ranges of its unit, or within the whole unit.
  struct Run {
    size_t tensor = 0;   // index into names
    uint64_t local = 0;  // first element, among the local elements
    uint64_t at = 0;     // first element, in the owned ranges laid end to end or in the unit
    uint64_t count = 0;
  };
  struct Unit {
    uint32_t index = 0;  // the session's
    uint64_t elements = 0;
    bool pushed = false;  // early, in this attempt
    std::vector<size_t> tensors;
    std::vector<Run> owned;
    std::vector<Run> whole;
  };

  explicit Tensors(Session* session, Local local) : session_(session), local_(local) {}
  // BAD_REQUEST after a Register.
  absl::Status CheckCurrent() const;
  absl::Status LendValues(absl::Span<const TensorMemory> memory);
  absl::Status PushValues(absl::Span<const TensorMemory> memory, const Source& source);
  // Gives the session the step's gradients, and the places for parameters if the session takes loans.
  absl::Status Give(absl::Span<const TensorMemory> memory);
  // Ends the loan of a decided step.
  absl::Status TakeBack(absl::Span<const TensorMemory> memory, bool skipped, const Ready& ready);
  // Converts parameters lent in the job's dtype to the trainer's own dtype.
  void Widen(const Unit& unit, absl::Span<const TensorMemory> memory);
  absl::Status Push(absl::Span<const TensorMemory> memory);
  absl::Status PushUnit(const Unit& unit, absl::Span<const TensorMemory> memory,
                        const std::shared_ptr<const void>& owner = nullptr);
  // The unit's gradients in the job's dtype, for the owned ranges laid end to end; zeros in place of absent ones.
  void ConvertGradients(const Unit& unit, absl::Span<const TensorMemory> memory, absl::Span<std::byte> to);
  void Scatter(const std::vector<Run>& runs, absl::Span<const std::byte> from,
               absl::Span<const TensorMemory> memory) const;

  Session* session_;
  Local local_;
  std::vector<std::string> names_;
  std::vector<uint64_t> local_elements_;
  std::vector<uint64_t> local_begins_;  // first local element of each tensor, counted in the tensor
  std::vector<Unit> units_;
  // Memory lent in place of a tensor's own, because the tensor has another dtype.
  struct Converted {
    std::vector<std::byte> gradient;
    std::vector<std::byte> parameter;
    bool lent = false;  // `parameter` is lent in this step
  };
  std::vector<uint32_t> indices_;  // by tensor, the session's
  uint32_t tensor_count_ = 0;      // the session's
  std::vector<Converted> converted_;
  std::vector<std::byte> buffer_;  // of one unit
  std::vector<float> wide_;        // for conversions
};

}  // namespace ballast::client
