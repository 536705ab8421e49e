// A job's optimizer and dtypes: converts the spec on the wire to the kernels' spec, alike on clients and servers.
#pragma once

#include "absl/status/statusor.h"
#include "ballast/kernels/optimizer.h"
#include "ballast/v1/types.pb.h"

namespace ballast::model {

// UNIMPLEMENTED (UNSUPPORTED) for an unknown optimizer or one that is not elementwise; INVALID_ARGUMENT (BAD_DTYPE,
// BAD_SPEC) for a dtype or option that the optimizer lacks. The message lists accepted choices.
absl::StatusOr<kernels::OptimizerSpec> OptimizerOf(const v1::JobSpec& spec);

// The reverse of OptimizerOf: sets optimizer, dtypes, formats and options of `spec`.
void SetOptimizer(const kernels::OptimizerSpec& optimizer, v1::JobSpec* spec);

kernels::Hyper HyperOf(const v1::GroupHyper& group);

// "adamw with amsgrad, i8 moments, bf16 gradients, f16 working parameters": for messages.
std::string Show(const kernels::OptimizerSpec& optimizer);

}  // namespace ballast::model
