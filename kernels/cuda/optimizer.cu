// Update() on the GPU: a warp takes a block of moments; a lane's eight elements have one counter of Philox.
#include <cuda_runtime.h>

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
__global__ void __launch_bounds__(kThreads)
    UpdateKernel(Coefficients c, RandomKey key, Dtype gradient, Dtype working, UpdateSpan span) {
  constexpr int kMoments = MomentsOf(kRule);
  constexpr bool kFirst = !IsSecondMoment(kRule, 0);
  auto* master = reinterpret_cast<std::byte*>(span.master);
  ForBlocks(span.n, [&](uint64_t block, uint64_t i, unsigned count) {
    float g[kEach], p[kEach], a[kEach] = {}, b[kEach] = {}, x[kEach] = {};
    LoadAs(gradient, span.gradient, i, count, g);
    LoadAs(Dtype::kF32, master, i, count, p);
    if constexpr (kMoments > 0) LoadMoment<kFormat, kFirst>(span.moments[0], block, i, count, a);
    if constexpr (kMoments > 1) LoadMoment<kFormat, false>(span.moments[1], block, i, count, b);
    if constexpr (kMoments > 2) LoadMoment<kFormat, false>(span.moments[2], block, i, count, x);
#pragma unroll
    for (unsigned k = 0; k < kEach; ++k) {
      Step<kRule, kFormat == MomentFormat::kF8, DeviceLanes>(c, g[k], p[k], a[k], b[k], x[k]);
      p[k] = OneNan(p[k]);
    }
    StoreAs(Dtype::kF32, p, master, i, count);
    StoreAs(working, p, span.working, i, count);
    // The scale is stored when all lanes have loaded it: the reduction of the largest value lies between.
    if constexpr (kMoments > 0) StoreMoment<kFormat, kFirst>(key, 0, a, span.moments[0], block, i, count);
    if constexpr (kMoments > 1) StoreMoment<kFormat, false>(key, 1, b, span.moments[1], block, i, count);
    if constexpr (kMoments > 2) StoreMoment<kFormat, false>(key, 2, x, span.moments[2], block, i, count);
  });
}

using Kernel = void (*)(Coefficients, RandomKey, Dtype, Dtype, UpdateSpan);

template <Rule kRule>
Kernel KernelOf(MomentFormat format) {
  switch (format) {
    case MomentFormat::kF32:
      return UpdateKernel<kRule, MomentFormat::kF32>;
    case MomentFormat::kBf16:
      return UpdateKernel<kRule, MomentFormat::kBf16>;
    case MomentFormat::kI8:
      return UpdateKernel<kRule, MomentFormat::kI8>;
    case MomentFormat::kF8:
      return UpdateKernel<kRule, MomentFormat::kF8>;
  }
  return nullptr;
}

Kernel KernelOf(Rule rule, MomentFormat format) {
  switch (rule) {
    case Rule::kAdamw:
      return KernelOf<Rule::kAdamw>(format);
    case Rule::kAdamwAmsgrad:
      return KernelOf<Rule::kAdamwAmsgrad>(format);
    case Rule::kAdam:
      return KernelOf<Rule::kAdam>(format);
    case Rule::kAdamAmsgrad:
      return KernelOf<Rule::kAdamAmsgrad>(format);
    case Rule::kSgd:
      return KernelOf<Rule::kSgd>(format);
    case Rule::kSgdMomentum:
      return KernelOf<Rule::kSgdMomentum>(format);
    case Rule::kSgdNesterov:
      return KernelOf<Rule::kSgdNesterov>(format);
    case Rule::kAdagrad:
      return KernelOf<Rule::kAdagrad>(format);
    case Rule::kLion:
      return KernelOf<Rule::kLion>(format);
  }
  return nullptr;
}

}  // namespace

absl::Status Update(const OptimizerSpec& spec, const Coefficients& c, const RandomKey& key, const UpdateSpan& span,
                    CUstream_st* stream) {
  if (span.n == 0) return absl::OkStatus();
  const uint64_t threads = (span.n + kBlock - 1) / kBlock * kWarp;
  return Launch("Update", KernelOf(RuleOf(spec, c), spec.moments), GridOf(threads), kThreads, stream, c, key,
                spec.gradient, spec.working, span);
}

}  // namespace ballast::kernels::cuda
