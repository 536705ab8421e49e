// A model's tensors that stay in the trainer: gradients are read from, and updated parameters written to, its own
// memory, tensor by tensor (use (b) of session.h, or (c) where it can).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ballast/client/session.h"
#include "ballast/kernels/float_formats.h"

namespace ballast::client {

// What this rank has of each tensor.
enum class Local {
  kWhole,  // all of it: one rank, or ranks whose reduced gradients are equal (DDP). With Split::kEven or kRows
  kRows,   // its rows, as torch.chunk along dimension 0 gives them (FSDP2's Shard(0)). With Split::kRows
};

// One tensor's local elements, end to end in row-major order. Dtypes: kF32, kBf16, kF16; where they are not the job's,
// elements are rounded to nearest even, or widened.
struct TensorMemory {
  const std::byte* gradient = nullptr;  // null: no gradient in this step
  kernels::Dtype gradient_dtype = kernels::Dtype::kF32;
  std::byte* parameter = nullptr;  // null only for a rank without a row of it
  kernels::Dtype parameter_dtype = kernels::Dtype::kF32;
};

struct TensorsReport {
  StepReport step;
  // Gradients given / until the step was decided / until parameters had it.
  double push_seconds = 0;
  double seal_seconds = 0;
  double pull_seconds = 0;
};

// Spans of TensorMemory hold an entry per tensor, in the order of `names`; the memory is borrowed until return.
// Where the session takes loans nothing is copied but what has another dtype than the job's, by way of memory kept
// here. Threads: the session's.
class Tensors {
 public:
  // Borrows `session`. `names`: each of the job's live tensors once. NOT_FOUND (UNKNOWN_TENSOR); INVALID_ARGUMENT
  // (BAD_SPEC) for one that is missing or comes twice. After Session::Register others are Made.
  static absl::StatusOr<Tensors> Make(Session* session, const std::vector<std::string>& names, Local local);

  // Elements of tensor `index` that this rank has.
  uint64_t local_elements(size_t index) const { return local_elements_[index]; }

  // COLLECTIVE. Session::Initialise with the parameters' values; unchanged until it returns.
  absl::Status Initialise(absl::Span<const TensorMemory> memory);
  // COLLECTIVE. Session::Step with the gradients that there are; unless it is skipped, parameters become the new
  // version's. An error before the step is sealed is all ranks', which drop what was pushed: it may be made again.
  // `ready`: called, where parameters become new ones, as soon as those of a unit are, with their indices, which it
  // borrows; the unit's gradients are not read any more then. May be empty.
  using Ready = std::function<void(absl::Span<const size_t>)>;
  absl::StatusOr<TensorsReport> Step(absl::Span<const TensorMemory> memory, const StepOptions& options,
                                     const Ready& ready = {});
  // Whether PushEarly has anything to do: gradients that are lent (takes_gradients) are not pushed.
  bool pushes_gradients() const { return !session_->takes_gradients(); }
  // Units of the session, by the indices of their tensors.
  size_t unit_count() const { return units_.size(); }
  const std::vector<size_t>& TensorsOf(size_t unit) const { return units_[unit].tensors; }
  // What Step would push of this unit, ahead of it; Step passes the unit over. `gradients`: an entry per
  // TensorsOf(unit), whose parameters are not looked at; the memory stays, unchanged, until Step or Drop has returned
  // OK.
  absl::Status PushEarly(size_t unit, absl::Span<const TensorMemory> gradients);
  // COLLECTIVE. Session::Drop, of what was pushed early.
  absl::Status Drop();
  // COLLECTIVE. Session::CommitState: of the tensors `which` (indices into names), local fp32 elements of each.
  absl::StatusOr<StepReport> CommitState(Content array, absl::Span<const size_t> which,
                                         absl::Span<const float* const> values, absl::Span<const uint64_t> steps,
                                         const std::string& blob);
  // COLLECTIVE. Parameters at the session's version, waiting for their updates. DDP's ranks gather what others own.
  absl::Status Pull(absl::Span<const TensorMemory> memory, const Ready& ready = {});

 private:
  // A run of a tensor's elements within the rank's owned ranges of its unit, or within the whole unit.
  struct Run {
    size_t tensor = 0;   // index into names
    uint64_t local = 0;  // first element, of the local ones
    uint64_t at = 0;     // first element, of the owned ranges laid end to end or of the unit
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
  absl::Status PushValues(absl::Span<const TensorMemory> memory);
  // Gives the session the step's gradients, and where parameters go if it takes that.
  absl::Status Give(absl::Span<const TensorMemory> memory);
  // Takes back what was lent, of a step that is decided.
  absl::Status TakeBack(absl::Span<const TensorMemory> memory, bool skipped, const Ready& ready);
  // Parameters that were lent in the job's dtype, to the trainer's own.
  void Widen(const Unit& unit, absl::Span<const TensorMemory> memory);
  absl::Status Push(absl::Span<const TensorMemory> memory);
  absl::Status PushUnit(const Unit& unit, absl::Span<const TensorMemory> memory);
  void Scatter(const std::vector<Run>& runs, absl::Span<const std::byte> from,
               absl::Span<const TensorMemory> memory) const;

  Session* session_;
  Local local_;
  std::vector<std::string> names_;
  std::vector<uint64_t> local_elements_;
  std::vector<uint64_t> local_begins_;  // of the local elements' first, in its tensor
  std::vector<Unit> units_;
  // Of a tensor that is lent from memory of this kind, because its own has another dtype.
  struct Converted {
    std::vector<std::byte> gradient;
    std::vector<std::byte> parameter;
    bool lent = false;  // `parameter` in this step
  };
  std::vector<uint32_t> indices_;  // by tensor, the session's
  uint32_t tensor_count_ = 0;      // the session's
  std::vector<Converted> converted_;
  std::vector<std::byte> buffer_;  // of one unit
  std::vector<float> wide_;        // for conversions
};

}  // namespace ballast::client
