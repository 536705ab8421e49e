// Blockwise int8 and int4.
#include <algorithm>
#include <cstddef>
#include <cstring>

#include "ballast/kernels/cpu/gradient_dtype.h"
#include "ballast/kernels/cpu/highway_targets.h"
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
  const auto code = [values, inverse, magic, mask](size_t i)
                        HWY_ATTR { return L::And(L::Bits(L::Fma(L::Load(values + i), inverse, magic)), mask); };
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
  const auto value = [=](size_t i) HWY_ATTR {
    return L::OneNan(L::Mul(L::Sub(L::FloatOf(L::Xor(L::Load8(from + i), sign)), offset), factor));
  };
  for (size_t i = 0; i < kBlock; i += 4 * L::kWidth) {
    StoreFourAs<L, kDtype, StoreOptions{.one_nan = true}>(value(i), value(i + L::kWidth), value(i + 2 * L::kWidth),
                                                          value(i + 3 * L::kWidth), x, i);
  }
}

template <QuantFormat kFormat, Dtype kDtype>
void QuantizeAll(const std::byte* x, uint64_t n, uint8_t* quantized, float* scales) {
  constexpr size_t kBytes = ElementBytes(kDtype);
  for (uint64_t begin = 0; begin < n; begin += kBlock) {
    const uint64_t count = std::min<uint64_t>(kBlock, n - begin);
    uint8_t* const to = quantized + QuantBytes(kFormat, begin);
    if (count == kBlock) {
      QuantizeBlock<kFormat, kDtype>(x + begin * kBytes, to, scales + begin / kBlock);
      continue;
    }
    alignas(64) std::byte last[kBlock * kBytes] = {};
    uint8_t codes[kBlock];
    std::memcpy(last, x + begin * kBytes, count * kBytes);
    QuantizeBlock<kFormat, kDtype>(last, codes, scales + begin / kBlock);
    std::memcpy(to, codes, QuantBytes(kFormat, count));
  }
}

template <QuantFormat kFormat, Dtype kDtype>
void DequantizeAll(const uint8_t* quantized, const float* scales, uint64_t n, std::byte* x) {
  constexpr size_t kBytes = ElementBytes(kDtype);
  for (uint64_t begin = 0; begin < n; begin += kBlock) {
    const uint64_t count = std::min<uint64_t>(kBlock, n - begin);
    const uint8_t* const from = quantized + QuantBytes(kFormat, begin);
    if (count == kBlock) {
      DequantizeBlock<kFormat, kDtype>(from, scales[begin / kBlock], x + begin * kBytes);
      continue;
    }
    alignas(64) std::byte last[kBlock * kBytes];
    uint8_t codes[kBlock] = {};
    std::memcpy(codes, from, QuantBytes(kFormat, count));
    DequantizeBlock<kFormat, kDtype>(codes, scales[begin / kBlock], last);
    std::memcpy(x + begin * kBytes, last, count * kBytes);
  }
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
  HWY_DYNAMIC_DISPATCH(QuantizeLoop)(format, dtype, x, n, quantized, scales);
}

void Dequantize(QuantFormat format, const std::byte* quantized, const float* scales, uint64_t n, Dtype dtype,
                std::byte* x) {
  RequireGradientDtype(dtype);
  HWY_DYNAMIC_DISPATCH(DequantizeLoop)(format, quantized, scales, n, dtype, x);
}

}  // namespace ballast::kernels
#endif
