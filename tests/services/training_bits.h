// The bits of a test's training: initial values, gradients of each step, and a comparison of two groups.
#pragma once

#include <cstdint>

#include "ballast/tests/services/trainer_group.h"

namespace ballast::services {

float Initial(uint32_t tensor, uint64_t element);
// Exact in bf16. Values differ between neighbouring elements, tensors and steps.
Fill GradientOf(int64_t step);
// Expects equal state and working copies of `version` in both groups, tensor by tensor.
void ExpectSame(TrainerGroup& group, TrainerGroup& other, int64_t version);

}  // namespace ballast::services
