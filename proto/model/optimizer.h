// A job's optimizer and dtypes: from the spec on the wire to what the kernels take, alike on clients and servers.
#pragma once

#include "absl/status/statusor.h"
#include "ballast/kernels/optimizer.h"
#include "ballast/v1/types.pb.h"

namespace ballast::model {

// UNIMPLEMENTED (UNSUPPORTED) for an optimizer that is not elementwise or not known, INVALID_ARGUMENT (BAD_DTYPE,
// BAD_SPEC) for a dtype or an option that it does not have: each with what would be accepted.
absl::StatusOr<kernels::OptimizerSpec> OptimizerOf(const v1::JobSpec& spec);

// The reverse: sets optimizer, dtypes, moment format and options of `spec`.
void SetOptimizer(const kernels::OptimizerSpec& optimizer, v1::JobSpec* spec);

kernels::Hyper HyperOf(const v1::GroupHyper& group);

// "adamw with amsgrad, i8 moments, bf16 gradients, f16 working parameters": for messages.
std::string Show(const kernels::OptimizerSpec& optimizer);

}  // namespace ballast::model
