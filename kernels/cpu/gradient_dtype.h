// Gradients and weights come as fp32, bf16 or fp16.
#pragma once

#include <cstdlib>

#include "ballast/kernels/float_formats.h"

namespace ballast::kernels {

// Ends the process for any other dtype: a caller's bug, because the element size would be wrong.
inline void RequireGradientDtype(Dtype dtype) {
  if (dtype != Dtype::kF32 && dtype != Dtype::kBf16 && dtype != Dtype::kF16) std::abort();
}

}  // namespace ballast::kernels
