// A job's optimizer and dtypes: converts the spec on the wire to the kernels' spec, alike on clients and servers.
#pragma once

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "ballast/kernels/optimizer.h"
#include "ballast/v1/types.pb.h"

namespace ballast::model {

// UNIMPLEMENTED (UNSUPPORTED) for an unknown optimizer or one that is not elementwise; INVALID_ARGUMENT (BAD_DTYPE,
// BAD_SPEC) for a dtype or option that the optimizer lacks. The message lists accepted choices.
absl::StatusOr<kernels::OptimizerSpec> OptimizerOf(const v1::JobSpec& spec);

// The reverse of OptimizerOf: sets optimizer, dtypes, formats and options of `spec`.
void SetOptimizer(const kernels::OptimizerSpec& optimizer, v1::JobSpec* spec);

kernels::Hyper HyperOf(const v1::GroupHyper& group);

// From the names that users write. INVALID_ARGUMENT (BAD_CONFIG) for an unknown name, with a list of all names.
// adamw, adam, sgd, adagrad, lion, ademamix, adamw_schedule_free
absl::StatusOr<kernels::OptimizerKind> OptimizerNamed(const std::string& name);
absl::StatusOr<kernels::MomentFormat> MomentsNamed(const std::string& name);  // f32, bf16, i8, f8
absl::StatusOr<kernels::MasterFormat> MasterNamed(const std::string& name);   // f32, remainder, lent
absl::StatusOr<kernels::Dtype> DtypeNamed(const std::string& name);           // f32, bf16, f16, f8
// The reverse; "unknown" for a value without a name.
absl::string_view NameOf(kernels::OptimizerKind kind);
absl::string_view NameOf(kernels::MomentFormat format);
absl::string_view NameOf(kernels::MasterFormat format);
absl::string_view NameOf(kernels::Dtype dtype);

// "adamw with amsgrad, i8 moments, bf16 gradients, f16 working parameters": for messages.
std::string Show(const kernels::OptimizerSpec& optimizer);

}  // namespace ballast::model
