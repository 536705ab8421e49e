// Gradients and weights come as fp32, bf16 or fp16.
#pragma once

#include <cstdlib>

#include "ballast/kernels/float_formats.h"

namespace ballast::kernels {

// Another dtype is a caller's bug, whose element size would be taken wrong: ends the process.
inline void RequireGradientDtype(Dtype dtype) {
  if (dtype != Dtype::kF32 && dtype != Dtype::kBf16 && dtype != Dtype::kF16) std::abort();
}

}  // namespace ballast::kernels
