// Update() on the GPU: a warp takes a block of moments, a lane two quads of it.
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
__device__ inline uint32_t CodeOf(float moment, float inverse) {
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

// ---- a lane's share of a block

// Quads `lane` and `lane + 32` of the block's 64: each access of a warp then reads or writes whole sectors of memory.
constexpr unsigned kQuads = 2;
struct Share {
  uint64_t at[kQuads];     // first element of each quad
  unsigned count[kQuads];  // elements of each that the span has
};

// kWhole: the span has all of the block. The compiler then knows the counts, and loads without a branch.
template <bool kWhole>
__device__ inline Share ShareOf(uint64_t n, uint64_t block) {
  Share share;
#pragma unroll
  for (unsigned q = 0; q < kQuads; ++q) {
    const uint64_t i = block * kBlock + (q * kWarp + threadIdx.x % kWarp) * kQuad;
    share.at[q] = i;
    share.count[q] = kWhole ? kQuad : i >= n ? 0 : n - i < kQuad ? static_cast<unsigned>(n - i) : kQuad;
  }
  return share;
}

template <unsigned kBytes>
struct RawShare {
  RawQuad<kBytes> quad[kQuads];
};

template <unsigned kBytes>
__device__ inline RawShare<kBytes> LoadShare(const std::byte* base, const Share& share) {
  RawShare<kBytes> raw;
#pragma unroll
  for (unsigned q = 0; q < kQuads; ++q) raw.quad[q] = LoadQuad<kBytes>(base, share.at[q], share.count[q]);
  return raw;
}

template <unsigned kBytes>
__device__ inline void StoreShare(const RawShare<kBytes>& raw, std::byte* base, const Share& share) {
#pragma unroll
  for (unsigned q = 0; q < kQuads; ++q) StoreQuad(raw.quad[q], base, share.at[q], share.count[q]);
}

// Element k of a lane's eight, as bits.
template <unsigned kBytes>
__device__ inline uint32_t BitsOf(const RawShare<kBytes>& raw, unsigned k) {
  const RawQuad<kBytes>& quad = raw.quad[k / kQuad];
  const unsigned j = k % kQuad;
  if constexpr (kBytes == 4) {
    return quad.word[j];
  } else {
    constexpr unsigned kPerWord = 4 / kBytes, kBits = 8 * kBytes;
    return quad.word[j / kPerWord] >> (j % kPerWord * kBits) & ((1u << kBits) - 1);
  }
}

template <unsigned kBytes>
__device__ inline void SetBits(RawShare<kBytes>& raw, unsigned k, uint32_t bits) {
  RawQuad<kBytes>& quad = raw.quad[k / kQuad];
  constexpr unsigned kPerWord = 4 / kBytes, kBits = 8 * kBytes;
  const unsigned j = k % kQuad;
  const uint32_t placed = bits << (j % kPerWord * kBits);
  quad.word[j / kPerWord] = j % kPerWord == 0 ? placed : quad.word[j / kPerWord] | placed;
}

__device__ inline RawShare<4> RawF32(const float (&x)[kEach]) {
  RawShare<4> raw;
#pragma unroll
  for (unsigned k = 0; k < kEach; ++k) SetBits(raw, k, __float_as_uint(x[k]));
  return raw;
}

// An array of a dtype that only the launch knows. It is loaded as bits and converted later, as whatever depends on a
// load within a branch would wait for it there.
struct AnyShare {
  RawShare<4> wide;
  RawShare<2> narrow;
};

__device__ inline AnyShare LoadAny(Dtype dtype, const std::byte* base, const Share& share) {
  AnyShare any = {};
  if (dtype == Dtype::kF32) {
    any.wide = LoadShare<4>(base, share);
  } else {
    any.narrow = LoadShare<2>(base, share);
  }
  return any;
}

__device__ inline void FromAny(Dtype dtype, const AnyShare& any, float (&x)[kEach]) {
  if (dtype == Dtype::kF32) {
#pragma unroll
    for (unsigned k = 0; k < kEach; ++k) x[k] = __uint_as_float(BitsOf(any.wide, k));
  } else if (dtype == Dtype::kBf16) {
#pragma unroll
    for (unsigned k = 0; k < kEach; ++k) x[k] = __uint_as_float(BitsOf(any.narrow, k) << 16);
  } else {
#pragma unroll
    for (unsigned k = 0; k < kEach; ++k) x[k] = FromF16(static_cast<uint16_t>(BitsOf(any.narrow, k)));
  }
}

__device__ inline void StoreAny(Dtype dtype, const float (&x)[kEach], std::byte* base, const Share& share) {
  if (dtype == Dtype::kF32) return StoreShare(RawF32(x), base, share);
  RawShare<2> raw;
  const bool is_bf16 = dtype == Dtype::kBf16;
#pragma unroll
  for (unsigned k = 0; k < kEach; ++k) SetBits(raw, k, is_bf16 ? ToBf16(x[k]) : ToF16(x[k]));
  StoreShare(raw, base, share);
}

// Working parameters. All lanes of the warp, those without elements too. kE4m3Blocks: a quad is a word of the block.
__device__ inline void StoreWorking(Dtype dtype, float (&x)[kEach], std::byte* base, uint64_t block,
                                    const Share& share) {
  if (dtype != Dtype::kE4m3Blocks) return StoreAny(dtype, x, base, share);
  uint32_t largest = 0;
#pragma unroll
  for (unsigned k = 0; k < kEach; ++k) {
    if (k % kQuad >= share.count[k / kQuad]) x[k] = 0;
    largest = max(largest, __float_as_uint(x[k]) & 0x7fffffffu);
  }
  const BlockScale s = WarpScaleOf(largest, 1 / kE4m3Largest);
  const unsigned lane = threadIdx.x % kWarp;
  auto* const words = reinterpret_cast<uint32_t*>(E4m3BlockAt(base, block));
#pragma unroll
  for (unsigned q = 0; q < kQuads; ++q) words[q * kWarp + lane] = E4m3Codes(x + q * kQuad, s.inverse);
  if (lane == 0) *E4m3ScaleAt(base, block) = s.scale;
}

// ---- moments in memory

constexpr unsigned BytesOf(MomentFormat format) {
  return format == MomentFormat::kF32 ? 4 : format == MomentFormat::kBf16 ? 2 : 1;
}

// Moments as loaded: of a block in eight bits, with its scale.
template <MomentFormat kFormat>
struct RawMoment {
  RawShare<BytesOf(kFormat)> raw;
  float scale = 0;
};

template <MomentFormat kFormat>
__device__ inline RawMoment<kFormat> LoadMoment(const MomentSpan& m, uint64_t block, const Share& share) {
  RawMoment<kFormat> moment = {.raw = LoadShare<BytesOf(kFormat)>(m.values, share)};
  if constexpr (BytesOf(kFormat) == 1) moment.scale = m.scales[block];
  return moment;
}

template <MomentFormat kFormat, bool kFirst>
__device__ inline void FromRaw(const RawMoment<kFormat>& moment, const Share& share, float (&x)[kEach]) {
#pragma unroll
  for (unsigned k = 0; k < kEach; ++k) {
    const uint32_t bits = BitsOf(moment.raw, k);
    if constexpr (kFormat == MomentFormat::kF32) x[k] = __uint_as_float(bits);
    if constexpr (kFormat == MomentFormat::kBf16) x[k] = __uint_as_float(bits << 16);
    if constexpr (BytesOf(kFormat) == 1) {
      const bool there = k % kQuad < share.count[k / kQuad];
      x[k] = there ? __fmul_rn(ValueOf<kFormat, kFirst>(bits), moment.scale) : 0;
    }
  }
}

// The random bits of a lane's elements. A counter of Philox serves eight neighbours, so the lane computes those of
// elements 8 * lane ... 8 * lane + 7 of the block, and the lanes exchange them.
__device__ inline void RandomBits(const RandomKey& key, uint32_t number, uint64_t block, uint32_t (&bits)[kEach]) {
  const unsigned lane = threadIdx.x % kWarp;
  const uint64_t group = (key.first_element + block * kBlock) / kEach + lane;
  const PhiloxBits mine = Philox({{static_cast<uint32_t>(group), static_cast<uint32_t>(group >> 32),
                                   static_cast<uint32_t>(key.step), key.unit << 2 | number}},
                                 static_cast<uint32_t>(key.seed), static_cast<uint32_t>(key.seed >> 32));
  constexpr unsigned kQuadsEach = kEach / kQuad;
#pragma unroll
  for (unsigned q = 0; q < kQuads; ++q) {
    const unsigned quad = q * kWarp + lane, from = quad / kQuadsEach;
    uint32_t words[4];
#pragma unroll
    for (unsigned w = 0; w < 4; ++w) words[w] = __shfl_sync(0xffffffffu, mine.word[w], from);
    const bool upper = quad % kQuadsEach != 0;
#pragma unroll
    for (unsigned j = 0; j < kQuad; ++j) {
      const uint32_t word = upper ? words[2 + j / 2] : words[j / 2];
      bits[q * kQuad + j] = word >> (j % 2 * 16) & 0xffffu;
    }
  }
}

// All lanes of the warp, those without elements too.
template <MomentFormat kFormat, bool kFirst>
__device__ inline void StoreMoment(const RandomKey& key, uint32_t number, float (&x)[kEach], const MomentSpan& m,
                                   uint64_t block, const Share& share) {
  if constexpr (kFormat == MomentFormat::kF32) {
#pragma unroll
    for (unsigned k = 0; k < kEach; ++k) x[k] = OneNan(x[k]);
    StoreShare(RawF32(x), m.values, share);
  } else if constexpr (kFormat == MomentFormat::kBf16) {
    uint32_t random[kEach];
    RandomBits(key, number, block, random);
    RawShare<2> raw;
#pragma unroll
    for (unsigned k = 0; k < kEach; ++k) SetBits(raw, k, (__float_as_uint(OneNan(x[k])) + random[k]) >> 16);
    StoreShare(raw, m.values, share);
  } else {
    constexpr float kLargest = kFormat == MomentFormat::kI8 ? 1.0f : kFirst ? F8First::kLargest : F8Root::kLargest;
    uint32_t largest = 0;
#pragma unroll
    for (unsigned k = 0; k < kEach; ++k) {
      const bool there = k % kQuad < share.count[k / kQuad];
      largest = max(largest, there ? __float_as_uint(x[k]) & 0x7fffffffu : 0u);
    }
    largest = __reduce_max_sync(0xffffffffu, largest);
    float scale = __fmul_rn(__uint_as_float(largest), 1 / kLargest);
    const bool finite = largest < 0x7f800000u, zero = !finite || __float_as_uint(scale) < 0x00800000u;
    if (zero) scale = finite ? 0.0f : __uint_as_float(kNanBits);
    const float inverse = zero ? 0.0f : __fdiv_rn(1.0f, scale);
    RawShare<1> raw;
#pragma unroll
    for (unsigned k = 0; k < kEach; ++k) SetBits(raw, k, zero ? 0 : CodeOf<kFormat, kFirst>(x[k], inverse));
    StoreShare(raw, m.values, share);
    if (threadIdx.x % kWarp == 0) m.scales[block] = scale;
  }
}

// Loads everything before anything is used, so that all of it is on its way at once.
template <Rule kRule, MomentFormat kFormat, bool kWhole>
__device__ inline void UpdateShare(Dtype gradient, Dtype working, const UpdatePart& part, uint64_t block) {
  constexpr int kMoments = MomentsOf(kRule);
  constexpr bool kFirst = !IsSecondMoment(kRule, 0), kThirdIsFirst = !IsSecondMoment(kRule, 2);
  const UpdateSpan& span = part.span;
  const Share share = ShareOf<kWhole>(span.n, block);
  auto* master = reinterpret_cast<std::byte*>(span.master);
  const AnyShare raw_g = LoadAny(gradient, span.gradient, share);
  const RawShare<4> raw_p = LoadShare<4>(master, share);
  RawMoment<kFormat> raw_moments[3];
#pragma unroll
  for (int k = 0; k < kMoments; ++k) raw_moments[k] = LoadMoment<kFormat>(span.moments[k], block, share);
  float g[kEach], p[kEach], a[kEach] = {}, b[kEach] = {}, x[kEach] = {};
  FromAny(gradient, raw_g, g);
  if constexpr (kMoments > 0) FromRaw<kFormat, kFirst>(raw_moments[0], share, a);
  if constexpr (kMoments > 1) FromRaw<kFormat, false>(raw_moments[1], share, b);
  if constexpr (kMoments > 2) FromRaw<kFormat, kThirdIsFirst>(raw_moments[2], share, x);
#pragma unroll
  for (unsigned k = 0; k < kEach; ++k) {
    p[k] = __uint_as_float(BitsOf(raw_p, k));
    Step<kRule, kFormat == MomentFormat::kF8, DeviceLanes>(part.coefficients, g[k], p[k], a[k], b[k], x[k]);
    p[k] = OneNan(p[k]);
  }
  StoreShare(RawF32(p), master, share);
  StoreWorking(working, p, span.working, block, share);
  // The scale is stored when all lanes have loaded it: the reduction of the largest value lies between.
  if constexpr (kMoments > 0) StoreMoment<kFormat, kFirst>(part.key, 0, a, span.moments[0], block, share);
  if constexpr (kMoments > 1) StoreMoment<kFormat, false>(part.key, 1, b, span.moments[1], block, share);
  if constexpr (kMoments > 2) StoreMoment<kFormat, kThirdIsFirst>(part.key, 2, x, span.moments[2], block, share);
}

// A warp searches for the part of each of its blocks: a lane compares the block with the end of one part.
template <Rule kRule, MomentFormat kFormat>
__global__ void __launch_bounds__(kThreads, MomentsOf(kRule) > 2 ? 3 : 4)
    UpdateKernel(const __grid_constant__ UpdateTable table) {
  static_assert(kUpdatePartsMax < kWarp);
  const unsigned lane = threadIdx.x % kWarp;
  const uint32_t end = table.ends[min(lane, kUpdatePartsMax - 1)];
  ForBlocks(table.ends[kUpdatePartsMax - 1] * kBlock, [&](uint64_t block, uint64_t, unsigned) {
    const unsigned before = __popc(__ballot_sync(0xffffffffu, lane < kUpdatePartsMax && end <= block));
    const UpdatePart& part = table.parts[before];
    if (before > 0) block -= table.ends[before - 1];
    if ((block + 1) * kBlock <= part.span.n) {
      UpdateShare<kRule, kFormat, true>(table.gradient, table.working, part, block);
    } else {
      UpdateShare<kRule, kFormat, false>(table.gradient, table.working, part, block);
    }
  });
}

// Launches the update of parts with one rule.
template <Rule kRule, MomentFormat kFormat>
absl::Status LaunchParts(const OptimizerSpec& spec, absl::Span<const UpdatePart> parts, CUstream_st* stream) {
  UpdateTable table{.gradient = spec.gradient, .working = spec.working, .ends = {}, .parts = {}};
  uint64_t blocks = 0;
  for (size_t k = 0; k < kUpdatePartsMax; ++k) {
    if (k < parts.size()) {
      table.parts[k] = parts[k];
      blocks += (parts[k].span.n + kBlock - 1) / kBlock;
    }
    table.ends[k] = static_cast<uint32_t>(blocks);
  }
  return Launch("Update", UpdateKernel<kRule, kFormat>, GridOf(blocks * kWarp), kThreads, stream, table);
}

using Launcher = absl::Status (*)(const OptimizerSpec&, absl::Span<const UpdatePart>, CUstream_st*);

template <Rule kRule>
Launcher LauncherOf(MomentFormat format) {
  switch (format) {
    case MomentFormat::kF32:
      return LaunchParts<kRule, MomentFormat::kF32>;
    case MomentFormat::kBf16:
      if constexpr (TakesBf16(kRule)) return LaunchParts<kRule, MomentFormat::kBf16>;
      return nullptr;
    case MomentFormat::kI8:
      if constexpr (TakesEightBits(kRule)) return LaunchParts<kRule, MomentFormat::kI8>;
      return nullptr;
    case MomentFormat::kF8:
      if constexpr (TakesEightBits(kRule)) return LaunchParts<kRule, MomentFormat::kF8>;
      return nullptr;
  }
  return nullptr;
}

Launcher LauncherOf(Rule rule, MomentFormat format) {
  switch (rule) {
    case Rule::kAdamw:
      return LauncherOf<Rule::kAdamw>(format);
    case Rule::kAdamwAmsgrad:
      return LauncherOf<Rule::kAdamwAmsgrad>(format);
    case Rule::kAdam:
      return LauncherOf<Rule::kAdam>(format);
    case Rule::kAdamAmsgrad:
      return LauncherOf<Rule::kAdamAmsgrad>(format);
    case Rule::kSgd:
      return LauncherOf<Rule::kSgd>(format);
    case Rule::kSgdMomentum:
      return LauncherOf<Rule::kSgdMomentum>(format);
    case Rule::kSgdNesterov:
      return LauncherOf<Rule::kSgdNesterov>(format);
    case Rule::kAdagrad:
      return LauncherOf<Rule::kAdagrad>(format);
    case Rule::kLion:
      return LauncherOf<Rule::kLion>(format);
    case Rule::kAdemamix:
      return LauncherOf<Rule::kAdemamix>(format);
    case Rule::kScheduleFree:
      return LauncherOf<Rule::kScheduleFree>(format);
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
    const absl::Status launched = LauncherOf(rule, spec.moments)(spec, together, stream);
    if (!launched.ok()) return launched;
    ++launches;
  }
  return launches;
}

}  // namespace ballast::kernels::cuda
