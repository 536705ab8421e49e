// Blockwise int8 and int4.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>

#include "ballast/kernels/cpu/gradient_dtype.h"
#include "ballast/kernels/cpu/highway_targets.h"
#include "ballast/kernels/ieee_mode.h"
#include "ballast/kernels/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ballast/kernels/cpu/quantize.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h, which includes this file once per target.
#include "ballast/kernels/cpu/formats-inl.h"
#include "ballast/kernels/cpu/lanes-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ballast::kernels::HWY_NAMESPACE {
namespace {

using L = Lanes;
using F = L::F;
using U = L::U;

constexpr size_t kBlock = kQuantBlock;

// x in [-2^22, 2^22] to the nearest integer, even on a tie, in two's complement.
constexpr float kRoundMagic = 0x1.8p23f;

template <QuantFormat kFormat>
constexpr uint32_t kMask = kFormat == QuantFormat::kInt8 ? 0xff : 0xf;

// ---- bf16, the usual dtype: a lane of 32 bits has two neighbours, of which each becomes an fp32 by a shift or a mask,
// and as many bits of codes. Nothing is permuted but for packing.

HWY_INLINE U EvenOf(U pair) { return L::ShiftLeft<16>(pair); }
HWY_INLINE U OddOf(U pair) { return L::And(pair, L::SetU(0xffff0000u)); }

template <QuantFormat kFormat, bool kStream>
void QuantizeBf16Block(const std::byte* x, uint8_t* quantized, float* scale) {
  constexpr float kLargest = kFormat == QuantFormat::kInt8 ? 127 : 7;
  constexpr size_t kPairs = kBlock / 2;
  const U magnitude = L::SetU(0x7fff0000u);
  U even_largest = L::SetU(0), odd_largest = even_largest;
  for (size_t i = 0; i < kPairs; i += L::kWidth) {
    const U pair = L::Load32(x + 4 * i);
    even_largest = L::MaxU(even_largest, L::And(EvenOf(pair), magnitude));
    odd_largest = L::MaxU(odd_largest, L::And(pair, magnitude));
  }
  const BlockScale s = ScaleOf(L::MaxOfLanes(L::MaxU(even_largest, odd_largest)), kLargest);
  *scale = s.scale;
  if (s.inverse == 0) {
    std::memset(quantized, 0, QuantBytes(kFormat, kBlock));
    return;
  }
  const F inverse = L::Set(s.inverse), magic = L::Set(kRoundMagic);
  const U mask = L::SetU(kMask<kFormat>);
  // The codes of the pairs from i on: 16 or 8 bits a lane.
  const auto codes = [&](size_t i) HWY_ATTR __attribute__((always_inline)) {
    const U pair = L::Load32(x + 4 * i);
    const U even = L::And(L::Bits(L::Fma(L::FromBits(EvenOf(pair)), inverse, magic)), mask);
    const U odd = L::And(L::Bits(L::Fma(L::FromBits(OddOf(pair)), inverse, magic)), mask);
    return L::Or(even, kFormat == QuantFormat::kInt8 ? L::ShiftLeft<8>(odd) : L::ShiftLeft<4>(odd));
  };
  if constexpr (kFormat == QuantFormat::kInt8) {
    auto* const to = reinterpret_cast<uint16_t*>(quantized);
    for (size_t i = 0; i < kPairs; i += 2 * L::kWidth) {
      L::template Store16x2<kStream>(codes(i), codes(i + L::kWidth), to + i);
    }
  } else {
    for (size_t i = 0; i < kPairs; i += 4 * L::kWidth) {
      L::Store8x4<kStream>(codes(i), codes(i + L::kWidth), codes(i + 2 * L::kWidth), codes(i + 3 * L::kWidth),
                           quantized + i);
    }
  }
}

// REQUIRES: `scale` is finite, so that no value is NaN.
template <QuantFormat kFormat, bool kStream>
void DequantizeBf16Block(const uint8_t* quantized, float scale, std::byte* x) {
  constexpr bool kIsInt8 = kFormat == QuantFormat::kInt8;
  const F factor = L::Set(scale);
  const U one = L::SetU(1), half = L::SetU(0x7fff);
  // Rounded; the bf16 is the upper half.
  const auto rounded = [&](U code) HWY_ATTR __attribute__((always_inline)) {
    const U bits = L::Bits(L::Mul(L::FloatOfSigned(code), factor));
    return L::AddU(bits, L::AddU(L::And(L::ShiftRight<16>(bits), one), half));
  };
  for (size_t i = 0; i < kBlock / 2; i += L::kWidth) {
    U even, odd;
    if constexpr (kIsInt8) {
      const U two = L::Load16(reinterpret_cast<const uint16_t*>(quantized) + i);
      even = L::ShiftRightSigned<24>(L::ShiftLeft<24>(two)), odd = L::ShiftRightSigned<24>(L::ShiftLeft<16>(two));
    } else {
      const U two = L::Load8(quantized + i);
      even = L::ShiftRightSigned<28>(L::ShiftLeft<28>(two)), odd = L::ShiftRightSigned<28>(L::ShiftLeft<24>(two));
    }
    L::template Store32<kStream>(L::Or(OddOf(rounded(odd)), L::ShiftRight<16>(rounded(even))), x + 4 * i);
  }
}

// ---- other dtypes

// Bytes with an element each become half as many with two.
void Pack(const uint8_t* from, uint8_t* to) {
  const auto pair = [from](size_t i) HWY_ATTR {
    const U two = L::Load16(reinterpret_cast<const uint16_t*>(from) + i);
    return L::Or(L::And(two, L::SetU(0x0f)), L::And(L::ShiftRight<4>(two), L::SetU(0xf0)));
  };
  for (size_t i = 0; i < kBlock / 2; i += 4 * L::kWidth) {
    L::Store8x4(pair(i), pair(i + L::kWidth), pair(i + 2 * L::kWidth), pair(i + 3 * L::kWidth), to + i);
  }
}

void Unpack(const uint8_t* from, uint8_t* to) {
  for (size_t i = 0; i < kBlock / 2; i += L::kWidth) {
    const U two = L::Load8(from + i);
    const U apart = L::Or(L::And(two, L::SetU(0x0f)), L::ShiftLeft<4>(L::And(two, L::SetU(0xf0))));
    L::Store16(apart, reinterpret_cast<uint16_t*>(to) + i);
  }
}

template <QuantFormat kFormat, Dtype kDtype>
void QuantizeBlock(const std::byte* x, uint8_t* quantized, float* scale) {
  constexpr float kLargest = kFormat == QuantFormat::kInt8 ? 127 : 7;
  HWY_ALIGN float wide[kBlock];
  U largest = L::SetU(0);
  for (size_t i = 0; i < kBlock; i += L::kWidth) {
    const F value = LoadAs<L, kDtype>(x, i);
    if constexpr (kDtype != Dtype::kF32) L::Store(value, wide + i);
    largest = L::MaxU(largest, Magnitude<L>(L::Bits(value)));
  }
  const float* values = kDtype == Dtype::kF32 ? reinterpret_cast<const float*>(x) : wide;
  const BlockScale s = ScaleOf(L::MaxOfLanes(largest), kLargest);
  *scale = s.scale;
  if (s.inverse == 0) {
    std::memset(quantized, 0, QuantBytes(kFormat, kBlock));
    return;
  }
  const F inverse = L::Set(s.inverse), magic = L::Set(kRoundMagic);
  const U mask = L::SetU(kMask<kFormat>);
  const auto code = [&](size_t i) HWY_ATTR __attribute__((always_inline)) {
    return L::And(L::Bits(L::Fma(L::Load(values + i), inverse, magic)), mask);
  };
  HWY_ALIGN uint8_t unpacked[kBlock];
  uint8_t* const to = kFormat == QuantFormat::kInt8 ? quantized : unpacked;
  for (size_t i = 0; i < kBlock; i += 4 * L::kWidth) {
    L::Store8x4(code(i), code(i + L::kWidth), code(i + 2 * L::kWidth), code(i + 3 * L::kWidth), to + i);
  }
  if constexpr (kFormat == QuantFormat::kInt4) Pack(unpacked, quantized);
}

template <QuantFormat kFormat, Dtype kDtype>
void DequantizeBlock(const uint8_t* quantized, float scale, std::byte* x) {
  HWY_ALIGN uint8_t unpacked[kBlock];
  if constexpr (kFormat == QuantFormat::kInt4) Unpack(quantized, unpacked);
  const uint8_t* const from = kFormat == QuantFormat::kInt8 ? quantized : unpacked;
  constexpr uint32_t kSign = (kMask<kFormat> + 1) / 2;
  const U sign = L::SetU(kSign);
  const F offset = L::Set(kSign), factor = L::Set(scale);
  const auto value = [&](size_t i) HWY_ATTR __attribute__((always_inline)) {
    return L::OneNan(L::Mul(L::Sub(L::FloatOf(L::Xor(L::Load8(from + i), sign)), offset), factor));
  };
  for (size_t i = 0; i < kBlock; i += 4 * L::kWidth) {
    StoreFourAs<L, kDtype, StoreOptions{.one_nan = true}>(value(i), value(i + L::kWidth), value(i + 2 * L::kWidth),
                                                          value(i + 3 * L::kWidth), x, i);
  }
}

template <QuantFormat kFormat, Dtype kDtype, bool kStream>
void QuantizeAs(const std::byte* x, uint8_t* quantized, float* scale) {
  if constexpr (kDtype == Dtype::kBf16) {
    QuantizeBf16Block<kFormat, kStream>(x, quantized, scale);
  } else {
    QuantizeBlock<kFormat, kDtype>(x, quantized, scale);
  }
}

template <QuantFormat kFormat, Dtype kDtype, bool kStream>
void DequantizeAs(const uint8_t* quantized, float scale, std::byte* x) {
  if (kDtype == Dtype::kBf16 && std::isfinite(scale)) {
    DequantizeBf16Block<kFormat, kStream>(quantized, scale, x);
  } else {
    DequantizeBlock<kFormat, kDtype>(quantized, scale, x);
  }
}

template <QuantFormat kFormat, Dtype kDtype>
void QuantizeAll(const std::byte* x, uint64_t n, uint8_t* quantized, float* scales) {
  constexpr size_t kBytes = ElementBytes(kDtype);
  const bool stream = Streams(quantized, QuantBytes(kFormat, n));
  uint64_t begin = 0;
  for (; begin + kBlock <= n; begin += kBlock) {
    uint8_t* const to = quantized + QuantBytes(kFormat, begin);
    stream ? QuantizeAs<kFormat, kDtype, true>(x + begin * kBytes, to, scales + begin / kBlock)
           : QuantizeAs<kFormat, kDtype, false>(x + begin * kBytes, to, scales + begin / kBlock);
  }
  if (stream) L::FlushStream();
  if (begin == n) return;
  alignas(64) std::byte last[kBlock * kBytes] = {};
  uint8_t codes[kBlock];
  std::memcpy(last, x + begin * kBytes, (n - begin) * kBytes);
  QuantizeAs<kFormat, kDtype, false>(last, codes, scales + begin / kBlock);
  std::memcpy(quantized + QuantBytes(kFormat, begin), codes, QuantBytes(kFormat, n - begin));
}

template <QuantFormat kFormat, Dtype kDtype>
void DequantizeAll(const uint8_t* quantized, const float* scales, uint64_t n, std::byte* x) {
  constexpr size_t kBytes = ElementBytes(kDtype);
  const bool stream = Streams(x, n * kBytes);
  uint64_t begin = 0;
  for (; begin + kBlock <= n; begin += kBlock) {
    const uint8_t* const from = quantized + QuantBytes(kFormat, begin);
    stream ? DequantizeAs<kFormat, kDtype, true>(from, scales[begin / kBlock], x + begin * kBytes)
           : DequantizeAs<kFormat, kDtype, false>(from, scales[begin / kBlock], x + begin * kBytes);
  }
  if (stream) L::FlushStream();
  if (begin == n) return;
  alignas(64) std::byte last[kBlock * kBytes];
  uint8_t codes[kBlock] = {};
  std::memcpy(codes, quantized + QuantBytes(kFormat, begin), QuantBytes(kFormat, n - begin));
  DequantizeAs<kFormat, kDtype, false>(codes, scales[begin / kBlock], last);
  std::memcpy(x + begin * kBytes, last, (n - begin) * kBytes);
}

template <QuantFormat kFormat>
void QuantizeFormat(Dtype dtype, const std::byte* x, uint64_t n, uint8_t* quantized, float* scales) {
  if (dtype == Dtype::kF32) return QuantizeAll<kFormat, Dtype::kF32>(x, n, quantized, scales);
  if (dtype == Dtype::kBf16) return QuantizeAll<kFormat, Dtype::kBf16>(x, n, quantized, scales);
  QuantizeAll<kFormat, Dtype::kF16>(x, n, quantized, scales);
}

template <QuantFormat kFormat>
void DequantizeFormat(const uint8_t* quantized, const float* scales, uint64_t n, Dtype dtype, std::byte* x) {
  if (dtype == Dtype::kF32) return DequantizeAll<kFormat, Dtype::kF32>(quantized, scales, n, x);
  if (dtype == Dtype::kBf16) return DequantizeAll<kFormat, Dtype::kBf16>(quantized, scales, n, x);
  DequantizeAll<kFormat, Dtype::kF16>(quantized, scales, n, x);
}

}  // namespace

void QuantizeLoop(QuantFormat format, Dtype dtype, const std::byte* x, uint64_t n, std::byte* quantized,
                  float* scales) {
  auto* codes = reinterpret_cast<uint8_t*>(quantized);
  format == QuantFormat::kInt8 ? QuantizeFormat<QuantFormat::kInt8>(dtype, x, n, codes, scales)
                               : QuantizeFormat<QuantFormat::kInt4>(dtype, x, n, codes, scales);
}

void DequantizeLoop(QuantFormat format, const std::byte* quantized, const float* scales, uint64_t n, Dtype dtype,
                    std::byte* x) {
  const auto* codes = reinterpret_cast<const uint8_t*>(quantized);
  format == QuantFormat::kInt8 ? DequantizeFormat<QuantFormat::kInt8>(codes, scales, n, dtype, x)
                               : DequantizeFormat<QuantFormat::kInt4>(codes, scales, n, dtype, x);
}

}  // namespace ballast::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ballast::kernels {
HWY_EXPORT(QuantizeLoop);
HWY_EXPORT(DequantizeLoop);

void Quantize(QuantFormat format, Dtype dtype, const std::byte* x, uint64_t n, std::byte* quantized, float* scales) {
  RequireGradientDtype(dtype);
  const IeeeMode mode;
  HWY_DYNAMIC_DISPATCH(QuantizeLoop)(format, dtype, x, n, quantized, scales);
}

void Dequantize(QuantFormat format, const std::byte* quantized, const float* scales, uint64_t n, Dtype dtype,
                std::byte* x) {
  RequireGradientDtype(dtype);
  const IeeeMode mode;
  HWY_DYNAMIC_DISPATCH(DequantizeLoop)(format, quantized, scales, n, dtype, x);
}

}  // namespace ballast::kernels
#endif
