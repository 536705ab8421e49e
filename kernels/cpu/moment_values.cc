// ReadMoment and WriteMoment: moments as fp32 values, whatever their format. Codes are made by an update's own
// functions (moments-inl.h).
#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>

#include "ballast/kernels/cpu/highway_targets.h"
#include "ballast/kernels/ieee_mode.h"
#include "ballast/kernels/optimizer.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ballast/kernels/cpu/moment_values.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h, which includes this file once per target.
#include "ballast/kernels/cpu/formats-inl.h"
#include "ballast/kernels/cpu/lanes-inl.h"
#include "ballast/kernels/cpu/moments-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ballast::kernels::HWY_NAMESPACE {

namespace {

template <MomentFormat kFormat, bool kFirst>
void ReadBlock(const MomentBlock& m, float* HWY_RESTRICT to) {
  const F scale = L::Set(m.scale == nullptr ? 1.0f : *m.scale);
  for (size_t i = 0; i < kBlock; i += L::kWidth) {
    const F value = LoadMoment<kFormat, kFirst>(m, scale, i);
    L::Store(L::OneNan(kFormat == MomentFormat::kF8 && !kFirst ? L::Mul(value, value) : value), to + i);
  }
}

template <bool kFirst>
void ReadBlock(MomentFormat format, const MomentBlock& m, float* to) {
  switch (format) {
    case MomentFormat::kF32:
      return ReadBlock<MomentFormat::kF32, kFirst>(m, to);
    case MomentFormat::kBf16:
      return ReadBlock<MomentFormat::kBf16, kFirst>(m, to);
    case MomentFormat::kI8:
      return ReadBlock<MomentFormat::kI8, kFirst>(m, to);
    case MomentFormat::kF8:
      return ReadBlock<MomentFormat::kF8, kFirst>(m, to);
  }
}

}  // namespace

void ReadMomentLoop(const OptimizerSpec& spec, int index, const MomentSpan& moment, absl::Span<float> to) {
  const bool first = !IsSecondMoment(spec, index), scaled = MomentScaleBytes(spec.moments, 1) != 0;
  for (uint64_t begin = 0; begin < to.size(); begin += kBlock) {
    const uint64_t n = std::min<uint64_t>(kBlock, to.size() - begin);
    HWY_ALIGN std::byte values[kBlock * sizeof(float)] = {};
    HWY_ALIGN float wide[kBlock];
    std::memcpy(values, moment.values + MomentBytes(spec.moments, begin), MomentBytes(spec.moments, n));
    const MomentBlock block{.values = values,
                            .scale = scaled ? moment.scales + begin / kBlock : nullptr,
                            .element = 0,
                            .number = 0,
                            .wide = reinterpret_cast<float*>(values),
                            .largest_bits = 0};
    first ? ReadBlock<true>(spec.moments, block, wide) : ReadBlock<false>(spec.moments, block, wide);
    std::memcpy(to.data() + begin, wide, n * sizeof(float));
  }
}

namespace {

void StoreStochastic(const MomentBlock& m, const RandomKey& key) {
  HWY_ALIGN uint16_t random[kBlock];
  RandomBlock(key, m, random);
  for (size_t i = 0; i < kBlock; i += 2 * L::kWidth) StoreRounded(m, random, i);
}

template <bool kFirst>
void WriteBlock(MomentFormat format, const RandomKey& key, const MomentBlock& m) {
  switch (format) {
    case MomentFormat::kF32:
      std::memcpy(m.values, m.wide, kBlock * sizeof(float));
      return;
    case MomentFormat::kBf16:
      return StoreStochastic(m, key);
    case MomentFormat::kI8:
      return StoreCodes<Codec<MomentFormat::kI8, kFirst>>(m);
    case MomentFormat::kF8:
      return StoreCodes<Codec<MomentFormat::kF8, kFirst>>(m);
  }
}

// Bits of the magnitude from which a block's scale is made: the largest. The signed dynamic map has 1 and no -1: if the
// largest value is negative, the block was read with its most negative code, so dividing by this code's value gives the
// old scale, and the old codes, again.
uint32_t LargestBits(MomentFormat format, bool first, const float* wide) {
  U largest = L::SetU(0);
  for (size_t i = 0; i < kBlock; i += L::kWidth) largest = L::MaxU(largest, Magnitude<L>(L::Bits(L::Load(wide + i))));
  const uint32_t bits = L::MaxOfLanes(largest);
  if (format != MomentFormat::kI8 || !first) return bits;
  const float magnitude = std::bit_cast<float>(bits);
  if (std::find(wide, wide + kBlock, -magnitude) == wide + kBlock || magnitude == 0) return bits;
  constexpr float kMostNegative = 255 * kSignedMap.value_factor[7] + kSignedMap.value_offset[7];
  return std::bit_cast<uint32_t>(magnitude / kMostNegative);
}

}  // namespace

void WriteMomentLoop(const OptimizerSpec& spec, int index, const RandomKey& key, absl::Span<const float> from,
                     const MomentSpan& moment) {
  const bool first = !IsSecondMoment(spec, index), scaled = MomentScaleBytes(spec.moments, 1) != 0;
  const bool roots = spec.moments == MomentFormat::kF8 && !first;
  for (uint64_t begin = 0; begin < from.size(); begin += kBlock) {
    const uint64_t n = std::min<uint64_t>(kBlock, from.size() - begin);
    HWY_ALIGN float wide[kBlock] = {};
    HWY_ALIGN std::byte values[kBlock * sizeof(float)];
    std::memcpy(wide, from.data() + begin, n * sizeof(float));
    for (size_t i = 0; roots && i < kBlock; i += L::kWidth) L::Store(L::Sqrt(L::Load(wide + i)), wide + i);
    const MomentBlock block{.values = values,
                            .scale = scaled ? moment.scales + begin / kBlock : nullptr,
                            .element = key.first_element + begin,
                            .number = static_cast<uint32_t>(index),
                            .wide = wide,
                            .largest_bits = LargestBits(spec.moments, first, wide)};
    first ? WriteBlock<true>(spec.moments, key, block) : WriteBlock<false>(spec.moments, key, block);
    std::memcpy(moment.values + MomentBytes(spec.moments, begin), values, MomentBytes(spec.moments, n));
  }
}

}  // namespace ballast::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ballast::kernels {
HWY_EXPORT(ReadMomentLoop);
HWY_EXPORT(WriteMomentLoop);

void ReadMoment(const OptimizerSpec& spec, int index, const MomentSpan& moment, absl::Span<float> to) {
  if (index < 0 || index >= MomentCount(spec)) std::abort();  // a caller's bug
  const IeeeMode mode;
  HWY_DYNAMIC_DISPATCH(ReadMomentLoop)(spec, index, moment, to);
}

void WriteMoment(const OptimizerSpec& spec, int index, const RandomKey& key, absl::Span<const float> from,
                 const MomentSpan& moment) {
  if (index < 0 || index >= MomentCount(spec)) std::abort();  // a caller's bug
  const IeeeMode mode;
  HWY_DYNAMIC_DISPATCH(WriteMomentLoop)(spec, index, key, from, moment);
}

}  // namespace ballast::kernels
#endif
