// The plainest possible Update(): one element after the other, no vectors, no blocks but the scales'.
#pragma once

#include "ballast/kernels/optimizer.h"

namespace ballast::kernels {

// As Update().
void ReferenceUpdate(const OptimizerSpec& spec, const Coefficients& c, const RandomKey& key, const UpdateSpan& span);

}  // namespace ballast::kernels
