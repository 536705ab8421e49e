// bf16 as raw bits: fp32's upper half, rounded to nearest even by integer arithmetic so that every ISA gives the same
// bits.
#pragma once

#include <bit>
#include <cstdint>

namespace ballast::kernels {

using bf16 = uint16_t;  // bits, not a value

constexpr float FromBf16(bf16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x) << 16); }

// NaN stays NaN (made quiet, sign and upper payload kept); overflow rounds to Inf; denormals are kept.
constexpr bf16 ToBf16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<bf16>((bits >> 16) | 0x40u);
  return static_cast<bf16>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

}  // namespace ballast::kernels
