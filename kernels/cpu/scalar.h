// One element of each kernel: the scalar path, and the remainders of the vector paths.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "ballast/kernels/kernels.h"

namespace ballast::kernels::scalar {

inline constexpr uint32_t kNanBits = 0x7fc00000u;

// Processors differ in the sign and payload of the NaN they make or pass on; stored NaNs must not.
inline float OneNan(float x) { return std::isnan(x) ? std::bit_cast<float>(kNanBits) : x; }

inline void AddInto(float addend, float* sum) { *sum = OneNan(*sum + addend); }

}  // namespace ballast::kernels::scalar
