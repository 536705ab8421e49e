#include "ballast/client/session/state.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ballast/kernels/ieee_mode.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/layout.h"

namespace ballast::client {
namespace {

using StateByTensor = std::map<uint32_t, const TensorState*>;

absl::Status Bad(absl::string_view reason, absl::string_view message) {
  return model::Error(absl::StatusCode::kInvalidArgument, reason, message);
}

std::vector<model::BoxRun> StateRuns(const Seat& seat, uint32_t tensor, const TensorState& state) {
  return state.runs.empty() ? WholeRuns(seat.units->layout().tensors()[tensor]) : state.runs;
}

// All that this rank owns of the tensor is given.
absl::Status CheckCovers(const Seat& seat, uint32_t tensor, const TensorState& state) {
  const uint64_t elements = seat.units->layout().tensors()[tensor].range.size();
  const std::vector<model::BoxRun> runs = StateRuns(seat, tensor, state);
  if (model::ElementsOf(runs) == state.values.size() && seat.units->Covers(tensor, runs)) return absl::OkStatus();
  return Bad(model::kBadLength, absl::StrCat("tensor '", state.tensor, "' has ", elements, " elements, ",
                                             state.values.size(), " were given, and this rank owns others"));
}

absl::Status CheckValues(const TensorState& state, bool squares) {
  const kernels::IeeeMode mode;  // else a negative denormal could pass for zero
  const auto bad = std::find_if(state.values.begin(), state.values.end(),
                                [squares](float x) { return !std::isfinite(x) || (squares && x < 0); });
  if (bad == state.values.end()) return absl::OkStatus();
  return Bad(model::kBadRequest,
             absl::StrCat("element ", bad - state.values.begin(), " of the values for tensor '", state.tensor, "' is ",
                          *bad, "; they must be finite", squares ? ", and those of a second moment at least 0" : ""));
}

absl::StatusOr<StateByTensor> ByTensor(const Seat& seat, Content array, absl::Span<const TensorState> tensors) {
  const int moment = static_cast<int>(array) - static_cast<int>(Content::kMoment1);
  const bool squares = moment >= 0 && kernels::IsSecondMoment(seat.optimizer, moment);
  StateByTensor states;
  for (const TensorState& state : tensors) {
    BALLAST_ASSIGN_OR_RETURN(const uint32_t index, seat.units->layout().FindTensor(state.tensor));
    BALLAST_RETURN_IF_ERROR(CheckCovers(seat, index, state));
    BALLAST_RETURN_IF_ERROR(CheckValues(state, squares));
    if (!states.emplace(index, &state).second) {
      return Bad(model::kBadRequest, absl::StrCat("tensor '", state.tensor, "' is given twice"));
    }
  }
  return states;
}

v1::StepHeader HeaderOf(uint32_t array, uint32_t tensor_count, const StateByTensor& states) {
  v1::StepHeader header;
  header.set_kind(v1::STEP_KIND_VALUES);
  header.set_gradient_scale(1);
  header.set_value_array(array);
  header.mutable_value_tensor_steps()->Resize(static_cast<int>(tensor_count), 0);
  std::vector<uint32_t> present;
  for (const auto& [tensor, state] : states) {
    present.push_back(tensor);
    header.set_value_tensor_steps(static_cast<int>(tensor), state->steps);
  }
  header.set_value_presence(model::MakeBitmap(tensor_count, present));
  return header;
}

// For a single rank, which is given whole tensors. `ordered`: memory for tensors in parts, in the servers' order, to be
// kept as long as the loan.
std::vector<model::LentTensor> LentOf(const Seat& seat, const StateByTensor& states,
                                      std::vector<std::vector<float>>* ordered) {
  std::vector<model::LentTensor> lent(seat.units->layout().tensors().size());
  for (const auto& [tensor, state] : states) {
    const float* values = state->values.data();
    if (const std::vector<model::BoxRun> runs = StateRuns(seat, tensor, *state); runs.size() > 1) {
      std::vector<float>& to = ordered->emplace_back(state->values.size());
      for (const model::BoxRun& run : runs) {
        std::copy_n(state->values.data() + run.in_box, run.count, to.data() + run.in_tensor);
      }
      values = to.data();
    }
    lent[tensor].value = reinterpret_cast<const std::byte*>(values);
    lent[tensor].value_dtype = kernels::Dtype::kF32;
  }
  return lent;
}

}  // namespace

absl::StatusOr<StepReport> CommitState(SessionCore& core, Content array, absl::Span<const TensorState> tensors,
                                       const std::string& blob) {
  const OpenJob& job = core.job;
  BALLAST_RETURN_IF_ERROR(job.Usable());
  absl::Status mine;
  if (!job.without_values().empty()) mine = Precondition("some tensors have no values yet; Initialise comes first");
  if (!core.gradients.empty()) mine = Precondition("gradients were pushed; Step or Drop before CommitState");
  if (!core.values.empty()) mine = Precondition("values were written; Step or CommitValues before CommitState");
  if (core.lending.active()) mine = Precondition("memory is lent; AwaitApplied or Drop before CommitState");
  if (tensors.empty() && !job.places()) mine = Precondition("no tensors to write");
  if (array == Content::kWorking) mine = Precondition("working parameters follow from the masters: write those");
  StateByTensor states;
  if (mine.ok()) {
    auto found = ByTensor(job.seat(), array, tensors);
    mine = found.status();
    if (found.ok()) states = *std::move(found);
  }
  const Values::Source source = [&](uint32_t tensor, uint64_t first, absl::Span<float> to) {
    const TensorState& state = *states.at(tensor);
    model::VisitRuns(StateRuns(job.seat(), tensor, state), first, to.size(),
                     [&](uint64_t in_box, uint64_t offset, uint64_t count) {
                       const auto part = state.values.subspan(in_box, count);
                       std::copy(part.begin(), part.end(), to.begin() + static_cast<std::ptrdiff_t>(offset));
                     });
  };
  const auto index = static_cast<uint32_t>(array) - static_cast<uint32_t>(Content::kMaster);
  std::vector<std::vector<float>> ordered;
  return core.CommitValues("CommitState", std::move(mine), HeaderOf(index, job.tensor_count(), states), blob, source,
                           [&] { return LentOf(job.seat(), states, &ordered); });
}

}  // namespace ballast::client
