// Names by which people choose what a job fixes. INVALID_ARGUMENT (BAD_CONFIG) that lists all, for any other.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "ballast/kernels/optimizer.h"
#include "ballast/v1/types.pb.h"

namespace ballast::model {

absl::StatusOr<kernels::OptimizerKind> OptimizerNamed(const std::string& name);  // adamw, adam, sgd, adagrad, lion
absl::StatusOr<kernels::MomentFormat> MomentsNamed(const std::string& name);     // f32, bf16, i8, f8
absl::StatusOr<kernels::Dtype> DtypeNamed(const std::string& name);              // f32, bf16, f16
absl::StatusOr<v1::Durability> DurabilityNamed(const std::string& name);         // step, every-K, none

}  // namespace ballast::model
