// A step's header says which tensors the step changes, how, and by which rule. This file checks headers, and computes
// the hash by which all members know that they mean the same step.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "ballast/proto/model/epoch_plan.h"
#include "ballast/v1/state_service.pb.h"

namespace ballast::model {

// SHA-256 over W, tiling, step, attempt, header bits, blobs, the spec's digest and the protocol version, field by field
// in a fixed order (doubles as their bits). 32 bytes.
std::string PlanHash(const EpochPlan& plan, int64_t step, uint64_t attempt, const v1::StepHeader& header,
                     absl::Span<const std::string> blobs);

// Live tensors that were registered at `version`: they hold no values before transaction version + 1.
std::vector<uint32_t> TensorsWithoutValues(const EpochPlan& plan, int64_t version);

// INVALID_ARGUMENT if the size of `bitmap` does not match the plan's tensors, or `bitmap` has a replaced tensor.
absl::Status CheckPresence(const EpochPlan& plan, absl::string_view bitmap, absl::string_view name);

// INVALID_ARGUMENT if `header` does not fit the plan and `step`, or the blobs do not fit either:
// - wrong group count or bitmaps; hyper-parameters or scale not finite (the scale also in fp32); negative max_norm;
// - blobs over 64 KiB in all, or not one per rank (a RESTORE has the restored version's blobs);
// - a VALUES step without values, or of a moment that the optimizer lacks;
// - tensors without values (registered at version step - 1) whose masters this step does not give;
// - step counts for some tensors only;
// - a RESTORE of a version not older than `step`, or with slices.
absl::Status CheckHeader(const EpochPlan& plan, int64_t step, const v1::StepHeader& header,
                         absl::Span<const std::string> blobs);
// The same for a seal without blobs: checks only the header.
absl::Status CheckHeader(const EpochPlan& plan, int64_t step, const v1::StepHeader& header);

}  // namespace ballast::model
