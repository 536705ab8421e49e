// The code of a block of a moment in kF8: x / scale in a byte, with scale = the block's largest magnitude times fp32(1
// / L), where L is the format's largest value. The code holds the exponent and mantissa bits of the fp32 number |x /
// scale| + 2^-15, rounded to nearest (halves upwards). This gives sixteen binades, the lowest evenly spaced down to
// zero; coding takes one FMA, one addition and one shift.
//
// A block with an Inf or a NaN gets the scale NaN and is NaN as a whole; a block whose scale would be below 2^-126 is
// zero.
#pragma once

#include <bit>
#include <cstdint>

namespace ballast::kernels {

template <unsigned kMantissaBits>
struct F8Magnitude {
  static constexpr unsigned kShift = 23 - kMantissaBits;
  static constexpr float kOffset = 0x1p-15f;
  static constexpr uint32_t kOffsetBits = (127u - 15u) << 23;
  static constexpr uint32_t kHalf = 1u << (kShift - 1);
  static constexpr uint32_t kCodeMax = (16u << kMantissaBits) - 1;
  static constexpr float kLargest = 2.0f - 1.0f / (1u << kMantissaBits) - kOffset;

  // sum: fma(|x|, 1 / scale, kOffset)
  static constexpr uint32_t Code(float sum) { return (std::bit_cast<uint32_t>(sum) + (kHalf - kOffsetBits)) >> kShift; }
  static constexpr float Value(uint32_t code) { return std::bit_cast<float>((code << kShift) + kOffsetBits) - kOffset; }
};

// A first moment: a sign, then e4m3. The smallest value above 0 is 2^-18.
using F8First = F8Magnitude<3>;

// A second moment v as its root, e4m4. The root's range is the first moment's; v itself would need twice the exponents,
// and where v vanished before m, the update m / (sqrt(v) + eps) would burst. For the same reason no root is stored as 0
// in a block that has a scale, but as 2^-19 at least, code 1.
using F8Root = F8Magnitude<4>;

}  // namespace ballast::kernels
