// State that is brought in from elsewhere: masters and moments of whole tensors, with their step counts.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ballast/client/session/core.h"

namespace ballast::client {

// Steps::CommitState.
absl::StatusOr<StepReport> CommitState(SessionCore& core, Content array, absl::Span<const TensorState> tensors,
                                       const std::string& blob);

}  // namespace ballast::client
