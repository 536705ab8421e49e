// Update() on the GPU: a warp takes a block of moments; a lane's eight elements have one counter of Philox.
#include <cuda_runtime.h>

#include "absl/algorithm/container.h"
#include "ballast/kernels/cuda/cuda_kernels.h"
#include "ballast/kernels/cuda/elements.cuh"
#include "ballast/kernels/cuda/launch.cuh"
#include "ballast/kernels/dynamic_map.h"
#include "ballast/kernels/moment_formats.h"
#include "ballast/kernels/philox.h"

namespace ballast::kernels::cuda {
namespace {

#define BALLAST_LANES __device__ inline
#include "ballast/kernels/optimizer_math.inc"
#undef BALLAST_LANES

static_assert(kMomentBlock == kBlock);

// Every rounding spelled out.
struct DeviceLanes {
  using F = float;
  static __device__ F Add(F a, F b) { return __fadd_rn(a, b); }
  static __device__ F Sub(F a, F b) { return __fsub_rn(a, b); }
  static __device__ F Mul(F a, F b) { return __fmul_rn(a, b); }
  static __device__ F Div(F a, F b) { return __fdiv_rn(a, b); }
  static __device__ F Fma(F a, F b, F c) { return __fmaf_rn(a, b, c); }
  static __device__ F NegFma(F a, F b, F c) { return __fmaf_rn(-a, b, c); }
  static __device__ F Sqrt(F a) { return __fsqrt_rn(a); }
  static __device__ F Max(F a, F b) { return a > b || a != a ? a : b; }
  static __device__ F Sign(F a) { return a > 0 ? 1.0f : a < 0 ? -1.0f : a; }
};

// ---- moments

__device__ const DynamicMap<true> kDeviceSignedMap;
__device__ const DynamicMap<false> kDeviceUnsignedMap;

template <bool kFirst>
__device__ const DynamicMap<kFirst>& MapOf() {
  if constexpr (kFirst) {
    return kDeviceSignedMap;
  } else {
    return kDeviceUnsignedMap;
  }
}

template <MomentFormat kFormat, bool kFirst>
__device__ float ValueOf(uint32_t code) {
  if constexpr (kFormat == MomentFormat::kI8) {
    const DynamicMap<kFirst>& map = MapOf<kFirst>();
    const uint32_t magnitude = !kFirst ? code : code == map.kTop ? map.kTop : code & 0x7fu;
    const float h = static_cast<float>((kFirst ? 2 * magnitude : magnitude) + 1);
    const uint32_t decade = min((__float_as_uint(h) >> 23) - 127u, static_cast<uint32_t>(map.kDecades));
    const float linear = __fmaf_rn(h, map.value_factor[decade], map.value_offset[decade]);
    const float value = linear < 1.0f ? linear : 1.0f;
    return kFirst && code > map.kTop ? -value : value;
  } else if constexpr (kFirst) {
    const float value = F8First::Value(code & F8First::kCodeMax);
    return code >= 0x80u ? -value : value;
  } else {
    return F8Root::Value(code);
  }
}

template <MomentFormat kFormat, bool kFirst>
__device__ uint32_t CodeOf(float moment, float inverse) {
  const uint32_t sign = __float_as_uint(moment) >> 31;
  if constexpr (kFormat == MomentFormat::kI8) {
    const DynamicMap<kFirst>& map = MapOf<kFirst>();
    const float x = __fmul_rn(moment, inverse), magnitude = fabsf(x);
    if (x > map.top_threshold) return map.kTop;
    int decade = 0;
    for (int i = 0; i < map.kDecades; ++i) decade += magnitude > map.threshold[i] ? 1 : 0;
    const float linear = __fmaf_rn(magnitude, map.code_factor[decade], map.code_offset[decade]);
    const float bounded = linear < map.code_max[decade] ? linear : map.code_max[decade];
    const uint32_t code = static_cast<uint32_t>(__float2uint_rn(bounded));
    return kFirst && code != 0 ? code | sign << 7 : code;
  } else if constexpr (kFirst) {
    return F8First::Code(__fmaf_rn(fabsf(moment), inverse, F8First::kOffset)) | sign << 7;
  } else {
    return max(F8Root::Code(__fmaf_rn(moment, inverse, F8Root::kOffset)), 1u);
  }
}

template <MomentFormat kFormat, bool kFirst>
__device__ void LoadMoment(const MomentSpan& m, uint64_t block, uint64_t i, unsigned count, float (&x)[kEach]) {
  if constexpr (kFormat == MomentFormat::kF32) return LoadAs(Dtype::kF32, m.values, i, count, x);
  if constexpr (kFormat == MomentFormat::kBf16) return LoadAs(Dtype::kBf16, m.values, i, count, x);
  if constexpr (kFormat == MomentFormat::kI8 || kFormat == MomentFormat::kF8) {
    uint32_t code[kEach];
    LoadRaw<1>(m.values, i, count, code);
    const float scale = m.scales[block];
#pragma unroll
    for (unsigned k = 0; k < kEach; ++k) x[k] = k < count ? __fmul_rn(ValueOf<kFormat, kFirst>(code[k]), scale) : 0;
  }
}

// All lanes of the warp, those without elements too.
template <MomentFormat kFormat, bool kFirst>
__device__ void StoreMoment(const RandomKey& key, uint32_t number, float (&x)[kEach], const MomentSpan& m,
                            uint64_t block, uint64_t i, unsigned count) {
  uint32_t raw[kEach];
  if constexpr (kFormat == MomentFormat::kF32) {
#pragma unroll
    for (unsigned k = 0; k < kEach; ++k) x[k] = OneNan(x[k]);
    StoreAs(Dtype::kF32, x, m.values, i, count);
  } else if constexpr (kFormat == MomentFormat::kBf16) {
    const uint64_t group = (key.first_element + i) / kEach;
    const PhiloxBits bits = Philox({{static_cast<uint32_t>(group), static_cast<uint32_t>(group >> 32),
                                     static_cast<uint32_t>(key.step), key.unit << 2 | number}},
                                   static_cast<uint32_t>(key.seed), static_cast<uint32_t>(key.seed >> 32));
#pragma unroll
    for (unsigned k = 0; k < kEach; ++k) {
      raw[k] = (__float_as_uint(OneNan(x[k])) + (bits.word[k / 2] >> (k % 2 * 16) & 0xffffu)) >> 16;
    }
    StoreRaw<2>(raw, m.values, i, count);
  } else {
    constexpr float kLargest = kFormat == MomentFormat::kI8 ? 1.0f : kFirst ? F8First::kLargest : F8Root::kLargest;
    uint32_t largest = 0;
#pragma unroll
    for (unsigned k = 0; k < kEach; ++k) largest = max(largest, k < count ? __float_as_uint(x[k]) & 0x7fffffffu : 0u);
    largest = __reduce_max_sync(0xffffffffu, largest);
    float scale = __fmul_rn(__uint_as_float(largest), 1 / kLargest);
    const bool finite = largest < 0x7f800000u, zero = !finite || __float_as_uint(scale) < 0x00800000u;
    if (zero) scale = finite ? 0.0f : __uint_as_float(kNanBits);
    const float inverse = zero ? 0.0f : __fdiv_rn(1.0f, scale);
#pragma unroll
    for (unsigned k = 0; k < kEach; ++k) raw[k] = zero ? 0 : CodeOf<kFormat, kFirst>(x[k], inverse);
    StoreRaw<1>(raw, m.values, i, count);
    if (threadIdx.x % kWarp == 0) m.scales[block] = scale;
  }
}

template <Rule kRule, MomentFormat kFormat>
__device__ void UpdateBlock(Dtype gradient, Dtype working, const UpdatePart& part, uint64_t block, uint64_t i,
                            unsigned count) {
  constexpr int kMoments = MomentsOf(kRule);
  constexpr bool kFirst = !IsSecondMoment(kRule, 0);
  const UpdateSpan& span = part.span;
  auto* master = reinterpret_cast<std::byte*>(span.master);
  float g[kEach], p[kEach], a[kEach] = {}, b[kEach] = {}, x[kEach] = {};
  LoadAs(gradient, span.gradient, i, count, g);
  LoadAs(Dtype::kF32, master, i, count, p);
  if constexpr (kMoments > 0) LoadMoment<kFormat, kFirst>(span.moments[0], block, i, count, a);
  if constexpr (kMoments > 1) LoadMoment<kFormat, false>(span.moments[1], block, i, count, b);
  if constexpr (kMoments > 2) LoadMoment<kFormat, false>(span.moments[2], block, i, count, x);
#pragma unroll
  for (unsigned k = 0; k < kEach; ++k) {
    Step<kRule, kFormat == MomentFormat::kF8, DeviceLanes>(part.coefficients, g[k], p[k], a[k], b[k], x[k]);
    p[k] = OneNan(p[k]);
  }
  StoreAs(Dtype::kF32, p, master, i, count);
  StoreAs(working, p, span.working, i, count);
  // The scale is stored when all lanes have loaded it: the reduction of the largest value lies between.
  if constexpr (kMoments > 0) StoreMoment<kFormat, kFirst>(part.key, 0, a, span.moments[0], block, i, count);
  if constexpr (kMoments > 1) StoreMoment<kFormat, false>(part.key, 1, b, span.moments[1], block, i, count);
  if constexpr (kMoments > 2) StoreMoment<kFormat, false>(part.key, 2, x, span.moments[2], block, i, count);
}

// A launch of one part finds everything at fixed places of its parameters, a launch of several searches for the part of
// each block: a lane compares the block with the end of one part.
template <Rule kRule, MomentFormat kFormat, unsigned kParts>
__global__ void __launch_bounds__(kThreads) UpdateKernel(const __grid_constant__ UpdateTable<kParts> table) {
  if constexpr (kParts == 1) {
    ForBlocks(table.parts[0].span.n, [&](uint64_t block, uint64_t i, unsigned count) {
      UpdateBlock<kRule, kFormat>(table.gradient, table.working, table.parts[0], block, i, count);
    });
  } else {
    static_assert(kParts < kWarp);
    const unsigned lane = threadIdx.x % kWarp;
    const uint32_t end = table.ends[min(lane, kParts - 1)];
    ForBlocks(table.ends[kParts - 1] * kBlock, [&](uint64_t block, uint64_t, unsigned) {
      const unsigned before = __popc(__ballot_sync(0xffffffffu, lane < kParts && end <= block));
      const UpdatePart& part = table.parts[before];
      if (before > 0) block -= table.ends[before - 1];
      const uint64_t i = LaneAt(block);
      UpdateBlock<kRule, kFormat>(table.gradient, table.working, part, block, i, LaneCount(part.span.n, i));
    });
  }
}

// Launches the update of parts with one rule.
template <Rule kRule, MomentFormat kFormat, unsigned kParts>
absl::Status LaunchParts(const OptimizerSpec& spec, absl::Span<const UpdatePart> parts, CUstream_st* stream) {
  UpdateTable<kParts> table{.gradient = spec.gradient, .working = spec.working, .ends = {}, .parts = {}};
  uint64_t blocks = 0;
  for (size_t k = 0; k < kParts; ++k) {
    if (k < parts.size()) {
      table.parts[k] = parts[k];
      blocks += (parts[k].span.n + kBlock - 1) / kBlock;
    }
    table.ends[k] = static_cast<uint32_t>(blocks);
  }
  return Launch("Update", UpdateKernel<kRule, kFormat, kParts>, GridOf(blocks * kWarp), kThreads, stream, table);
}

using Launcher = absl::Status (*)(const OptimizerSpec&, absl::Span<const UpdatePart>, CUstream_st*);

template <Rule kRule, MomentFormat kFormat>
Launcher LauncherOf(bool single) {
  return single ? LaunchParts<kRule, kFormat, 1> : LaunchParts<kRule, kFormat, kUpdatePartsMax>;
}

template <Rule kRule>
Launcher LauncherOf(MomentFormat format, bool single) {
  switch (format) {
    case MomentFormat::kF32:
      return LauncherOf<kRule, MomentFormat::kF32>(single);
    case MomentFormat::kBf16:
      return LauncherOf<kRule, MomentFormat::kBf16>(single);
    case MomentFormat::kI8:
      return LauncherOf<kRule, MomentFormat::kI8>(single);
    case MomentFormat::kF8:
      return LauncherOf<kRule, MomentFormat::kF8>(single);
  }
  return nullptr;
}

Launcher LauncherOf(Rule rule, MomentFormat format, bool single) {
  switch (rule) {
    case Rule::kAdamw:
      return LauncherOf<Rule::kAdamw>(format, single);
    case Rule::kAdamwAmsgrad:
      return LauncherOf<Rule::kAdamwAmsgrad>(format, single);
    case Rule::kAdam:
      return LauncherOf<Rule::kAdam>(format, single);
    case Rule::kAdamAmsgrad:
      return LauncherOf<Rule::kAdamAmsgrad>(format, single);
    case Rule::kSgd:
      return LauncherOf<Rule::kSgd>(format, single);
    case Rule::kSgdMomentum:
      return LauncherOf<Rule::kSgdMomentum>(format, single);
    case Rule::kSgdNesterov:
      return LauncherOf<Rule::kSgdNesterov>(format, single);
    case Rule::kAdagrad:
      return LauncherOf<Rule::kAdagrad>(format, single);
    case Rule::kLion:
      return LauncherOf<Rule::kLion>(format, single);
  }
  return nullptr;
}

}  // namespace

absl::StatusOr<uint64_t> Update(const OptimizerSpec& spec, absl::Span<const UpdatePart> parts, CUstream_st* stream) {
  uint64_t launches = 0;
  for (size_t first = 0, next = 0; first < parts.size(); first = next) {
    const Rule rule = RuleOf(spec, parts[first].coefficients);
    for (next = first + 1; next < parts.size() && next - first < kUpdatePartsMax; ++next) {
      if (RuleOf(spec, parts[next].coefficients) != rule) break;
    }
    const absl::Span<const UpdatePart> together = parts.subspan(first, next - first);
    if (absl::c_all_of(together, [](const UpdatePart& part) { return part.span.n == 0; })) continue;
    const absl::Status launched = LauncherOf(rule, spec.moments, together.size() == 1)(spec, together, stream);
    if (!launched.ok()) return launched;
    ++launches;
  }
  return launches;
}

}  // namespace ballast::kernels::cuda
