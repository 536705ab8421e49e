// The bits of a test's training: initial values, gradients of each step, and whether two groups hold the same.
#pragma once

#include <cstdint>

#include "ballast/tests/services/trainer_group.h"

namespace ballast::services {

float Initial(uint32_t tensor, uint64_t element);
// Exact in bf16, different everywhere.
Fill GradientOf(int64_t step);
// All state and working copies of `version`, tensor by tensor.
void ExpectSame(TrainerGroup& group, TrainerGroup& other, int64_t version);

}  // namespace ballast::services
