// Makes a job's spec from the user's options, and compares it with the spec of an existing job.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "ballast/client/session_types.h"
#include "ballast/v1/state_service.pb.h"

namespace ballast::client {

// The spec of a new job as the user gave it.
v1::JobSpec MakeSpec(const SessionOptions& options, const std::vector<TensorSpec>& tensors);
v1::TensorSpec ToProto(const TensorSpec& tensor);
// What messages say of the tensor, as text, without its name.
std::string Show(const v1::TensorSpec& tensor);

// Of a tensor: who computes its updates, as text.
const char* Who(v1::Assist assist);

// INVALID_ARGUMENT (BAD_SPEC).
absl::Status BadSpec(absl::string_view message);

// OK if `given` (one registration) has `job`'s optimizer and names exactly its live tensors, all alike. BAD_SPEC names
// the first difference. If only the names differ: TENSORS_DIFFER, with all differing names in the details.
absl::Status CheckSameSpec(const v1::JobSpec& given, const v1::JobSpec& job);

}  // namespace ballast::client
