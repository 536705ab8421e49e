// The floating-point formats of the data path as raw bits, one element at a time. These functions define the bits of
// every vector and GPU kernel, and serve processors without vectors.
//
// Narrowing rounds to nearest even by integer arithmetic (and one exact-grid fp32 addition for subnormals), so neither
// flags nor instruction sets matter. Widening is exact. Callable from CUDA (constexpr).
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

namespace ballast::kernels {

// kE4m3, kE5m2: OCP 8-bit Floating Point Specification 1.0 (2023); overflow of e4m3, which has no Inf, gives NaN, as in
// torch.float8_e4m3fn.
// kE4m3Blocks: blocks of kE4m3Block elements. Each block has e4m3 codes and then an fp32 scale; an element is its
// code's value times the scale (kernels.h: FromF32). An element alone has no size in bytes; an array begins at a block.
enum class Dtype : uint8_t { kF32, kBf16, kF16, kE4m3, kE5m2, kE4m3Blocks };

inline constexpr uint64_t kE4m3Block = 256;
inline constexpr uint64_t kE4m3BlockBytes = kE4m3Block + sizeof(float);
// The largest magnitude in a block becomes e4m3's largest.
inline constexpr float kE4m3Largest = 448;

// 0 for kE4m3Blocks: see BytesOf.
constexpr size_t ElementBytes(Dtype dtype) {
  switch (dtype) {
    case Dtype::kF32:
      return 4;
    case Dtype::kBf16:
    case Dtype::kF16:
      return 2;
    case Dtype::kE4m3:
    case Dtype::kE5m2:
      return 1;
    case Dtype::kE4m3Blocks:
      return 0;
  }
  return 0;
}

// Bytes of the first `n` elements of an array. For kE4m3Blocks these are whole blocks, because a block's scale is
// behind its codes.
constexpr uint64_t BytesOf(Dtype dtype, uint64_t n) {
  if (dtype != Dtype::kE4m3Blocks) return n * ElementBytes(dtype);
  return (n + kE4m3Block - 1) / kE4m3Block * kE4m3BlockBytes;
}
// Elements of the array can only be addressed from multiples of this many on.
constexpr uint64_t GrainOf(Dtype dtype) { return dtype == Dtype::kE4m3Blocks ? kE4m3Block : 1; }

using bf16 = uint16_t;  // bits, not a value

constexpr float FromBf16(bf16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x) << 16); }

// NaN stays NaN (made quiet, sign and upper payload kept); overflow rounds to Inf; denormals are kept.
constexpr bf16 ToBf16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<bf16>((bits >> 16) | 0x40u);
  return static_cast<bf16>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// The geometry of a format with fewer exponent bits than fp32. kBiasShift: added to (subtracted from) the exponent
// field. A subnormal is a multiple of the format's smallest value: adding kMagic, whose ulp is the smallest value,
// rounds to a multiple.
template <unsigned kExponentBits, unsigned kMantissaBits, unsigned kBias = (1u << (kExponentBits - 1)) - 1>
struct SmallFloat {
  static constexpr unsigned kShift = 23 - kMantissaBits;
  static constexpr uint32_t kBiasShift = (127 - kBias) << 23;
  static constexpr uint32_t kNormalMin = (128 - kBias) << 23;       // fp32 bits of the smallest normal value
  static constexpr uint32_t kMagic = (128 - kBias + kShift) << 23;  // fp32 bits
  static constexpr uint32_t kMagnitude = (1u << (kExponentBits + kMantissaBits)) - 1;
  static constexpr uint32_t kHalf = (1u << (kShift - 1)) - 1;

  // Rounded magnitude bits of a value whose fp32 bits without sign are `bits`. For a value beyond the format, the
  // result is beyond kMagnitude or a special code of the format.
  static constexpr uint32_t Narrow(uint32_t bits) {
    if (bits < kNormalMin)
      return std::bit_cast<uint32_t>(std::bit_cast<float>(bits) + std::bit_cast<float>(kMagic)) - kMagic;
    return (bits + kHalf + ((bits >> kShift) & 1u) - kBiasShift) >> kShift;
  }
  // fp32 bits of a magnitude; treats all exponents as ordinary.
  static constexpr uint32_t Widen(uint32_t magnitude) {
    const uint32_t bits = magnitude << kShift;
    if (bits < (1u << 23)) {
      return std::bit_cast<uint32_t>(std::bit_cast<float>(bits | kNormalMin) - std::bit_cast<float>(kNormalMin));
    }
    return bits + kBiasShift;
  }
};

using F16Format = SmallFloat<5, 10>;
using E4m3Format = SmallFloat<4, 3>;
using E5m2Format = SmallFloat<5, 2>;

constexpr float FromF16(uint16_t x) {
  const uint32_t sign = static_cast<uint32_t>(x & 0x8000u) << 16, magnitude = x & 0x7fffu;
  if (magnitude < 0x7c00u) return std::bit_cast<float>(sign | F16Format::Widen(magnitude));
  const uint32_t quiet = magnitude > 0x7c00u ? 0x400000u : 0u;
  return std::bit_cast<float>(sign | 0x7f800000u | quiet | (magnitude & 0x3ffu) << 13);
}

// Like VCVTPS2PH: NaN is made quiet and keeps sign and upper payload.
constexpr uint16_t ToF16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x), magnitude = bits & 0x7fffffffu;
  const auto sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | (magnitude >> 13 & 0x3ffu));
  const uint32_t narrow = F16Format::Narrow(magnitude);
  return static_cast<uint16_t>(sign | (narrow < 0x7c00u ? narrow : 0x7c00u));
}

constexpr float FromE4m3(uint8_t x) {
  const uint32_t sign = static_cast<uint32_t>(x & 0x80u) << 24, magnitude = x & 0x7fu;
  return std::bit_cast<float>(sign | (magnitude == 0x7fu ? 0x7fc00000u : E4m3Format::Widen(magnitude)));
}

constexpr uint8_t ToE4m3(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t narrow = E4m3Format::Narrow(bits & 0x7fffffffu);
  return static_cast<uint8_t>((bits >> 24 & 0x80u) | (narrow < 0x7fu ? narrow : 0x7fu));
}

constexpr float FromE5m2(uint8_t x) {
  const uint32_t sign = static_cast<uint32_t>(x & 0x80u) << 24, magnitude = x & 0x7fu;
  if (magnitude < 0x7cu) return std::bit_cast<float>(sign | E5m2Format::Widen(magnitude));
  return std::bit_cast<float>(sign | (magnitude == 0x7cu ? 0x7f800000u : 0x7fc00000u));
}

constexpr uint8_t ToE5m2(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x), magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint8_t>((bits >> 24 & 0x80u) | 0x7fu);
  const uint32_t narrow = E5m2Format::Narrow(magnitude);
  return static_cast<uint8_t>((bits >> 24 & 0x80u) | (narrow < 0x7cu ? narrow : 0x7cu));
}

}  // namespace ballast::kernels
