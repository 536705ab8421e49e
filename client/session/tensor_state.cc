// State that is brought in from elsewhere, by this rank's part of each tensor.
#include "ballast/client/tensors.h"

namespace ballast::client {

absl::StatusOr<StepReport> Tensors::CommitState(Content array, absl::Span<const size_t> which,
                                                absl::Span<const float* const> values, absl::Span<const uint64_t> steps,
                                                const std::string& blob) {
  std::vector<TensorState> states;
  for (size_t i = 0; i < which.size(); ++i) {
    const size_t tensor = which[i];
    states.push_back({.tensor = names_[tensor],
                      .values = {values[i], parts_[tensor].elements},
                      .runs = parts_[tensor].runs,
                      .steps = steps[i]});
  }
  return session_->CommitState(array, states, blob);
}

}  // namespace ballast::client
