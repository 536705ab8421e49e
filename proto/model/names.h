// Names by which users choose properties fixed for a job, and the rule for names of jobs. An unknown name is
// INVALID_ARGUMENT (BAD_CONFIG), with a list of all names.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "ballast/kernels/optimizer.h"
#include "ballast/v1/types.pb.h"

namespace ballast::model {

absl::StatusOr<kernels::OptimizerKind> OptimizerNamed(const std::string& name);  // adamw, adam, sgd, adagrad, lion
absl::StatusOr<kernels::MomentFormat> MomentsNamed(const std::string& name);     // f32, bf16, i8, f8
absl::StatusOr<kernels::MasterFormat> MasterNamed(const std::string& name);      // f32, remainder, lent
absl::StatusOr<kernels::Dtype> DtypeNamed(const std::string& name);              // f32, bf16, f16
absl::StatusOr<v1::Durability> DurabilityNamed(const std::string& name);         // step, every-K, none

// The same rule for clients and servers: job names are written into file names, metrics and commands.
inline constexpr char kJobNameRule[] = "1 to 128 letters, digits, '.', '_' or '-'";
bool IsJobName(absl::string_view name);
// INVALID_ARGUMENT (BAD_SPEC) unless IsJobName.
absl::Status CheckJobName(absl::string_view name);

}  // namespace ballast::model
