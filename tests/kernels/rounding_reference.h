// Reference for rounding to a small float format, computed in double: the nearest multiple of the format's spacing at
// the value's magnitude.
#pragma once

#include <cmath>

#include "ballast/kernels/float_formats.h"

namespace ballast::kernels {

struct FormatLimits {
  int mantissa_bits;
  int exponent_min;  // of the smallest normal value
  double largest;    // finite
  bool has_inf;      // otherwise overflow gives NaN
};

constexpr FormatLimits LimitsOf(Dtype dtype) {
  switch (dtype) {
    case Dtype::kBf16:
      return {7, -126, 0x1.fep127, true};
    case Dtype::kF16:
      return {10, -14, 65504, true};
    case Dtype::kE4m3:
      return {3, -6, 448, false};
    default:
      return {2, -14, 57344, true};
  }
}

// Rounds `x` to nearest, ties to even; NaN if `x` overflows a format without Inf. REQUIRES: `x` is not a NaN.
inline double RoundedTo(Dtype dtype, float x) {
  const FormatLimits limits = LimitsOf(dtype);
  if (x == 0) return x;
  double rounded = x;
  if (std::isfinite(x)) {
    const int exponent = std::max(std::ilogb(static_cast<double>(x)), limits.exponent_min) - limits.mantissa_bits;
    rounded = std::ldexp(std::nearbyint(std::ldexp(static_cast<double>(x), -exponent)), exponent);
  }
  if (std::fabs(rounded) <= limits.largest) return rounded;
  return limits.has_inf ? std::copysign(HUGE_VAL, x) : NAN;
}

// Converts one element, by the definitions in float_formats.h.
inline uint32_t NarrowOne(Dtype dtype, float x) {
  switch (dtype) {
    case Dtype::kBf16:
      return ToBf16(x);
    case Dtype::kF16:
      return ToF16(x);
    case Dtype::kE4m3:
      return ToE4m3(x);
    default:
      return ToE5m2(x);
  }
}

inline float WidenOne(Dtype dtype, uint32_t x) {
  switch (dtype) {
    case Dtype::kBf16:
      return FromBf16(static_cast<bf16>(x));
    case Dtype::kF16:
      return FromF16(static_cast<uint16_t>(x));
    case Dtype::kE4m3:
      return FromE4m3(static_cast<uint8_t>(x));
    default:
      return FromE5m2(static_cast<uint8_t>(x));
  }
}

// True if the format rounds x correctly, NaNs included.
inline bool RoundsRight(Dtype dtype, float x) {
  const float got = WidenOne(dtype, NarrowOne(dtype, x));
  if (std::isnan(x)) return std::isnan(got) && std::signbit(got) == std::signbit(x);
  const double expected = RoundedTo(dtype, x);
  if (std::isnan(expected)) return std::isnan(got);
  return static_cast<double>(got) == expected && std::signbit(got) == std::signbit(x);
}

inline constexpr Dtype kSmallDtypes[] = {Dtype::kBf16, Dtype::kF16, Dtype::kE4m3, Dtype::kE5m2};

}  // namespace ballast::kernels
