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

inline void Adamw(const AdamwCoefficients& c, bf16 gradient, float* master, float* moment1, float* moment2,
                  bf16* working) {
  const float g = c.factor * FromBf16(gradient);
  const float m = std::fma(c.one_minus_beta1, g - *moment1, *moment1);
  const float v = std::fma(c.one_minus_beta2 * g, g, c.beta2 * *moment2);
  const float p = *master * c.decay - c.step_size * (m / (std::sqrt(v) / c.sqrt_bias2 + c.eps));
  *master = OneNan(p);
  *moment1 = OneNan(m);
  *moment2 = OneNan(v);
  *working = ToBf16(*master);
}

inline void AddInto(float addend, float* sum) { *sum = OneNan(*sum + addend); }

}  // namespace ballast::kernels::scalar
