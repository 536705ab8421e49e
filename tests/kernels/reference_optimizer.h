// The plainest possible Update(): element by element, without vectors, without blocks except for the scales.
#pragma once

#include "ballast/kernels/optimizer.h"

namespace ballast::kernels {

// Same contract as Update().
void ReferenceUpdate(const OptimizerSpec& spec, const Coefficients& c, const RandomKey& key, const UpdateSpan& span);

}  // namespace ballast::kernels
