#include <cmath>
#include <cstddef>

#include "ballast/kernels/cpu/gradient_dtype.h"
#include "ballast/kernels/cpu/highway_targets.h"
#include "ballast/kernels/cpu/norm_tree.h"
#include "ballast/kernels/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ballast/kernels/cpu/squared_norm.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h, which includes this file once per target.
#include "hwy/cache_control.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ballast::kernels {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// The square of a float is exact in fp64, so fused or not, each addition is the only rounding.

template <Dtype kDtype>
float ElementAs(const std::byte* from, size_t i) {
  if constexpr (kDtype == Dtype::kF32) return reinterpret_cast<const float*>(from)[i];
  const uint16_t half = reinterpret_cast<const uint16_t*>(from)[i];
  return kDtype == Dtype::kBf16 ? FromBf16(half) : FromF16(half);
}

#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128

// kLeaves whole leaves side by side: one leaf's additions wait for each other.
template <Dtype kDtype, class D>
HWY_INLINE hn::Vec<D> LoadFloats(D df, const std::byte* from, size_t i) {
  if constexpr (kDtype == Dtype::kF32) {
    return hn::LoadU(df, reinterpret_cast<const float*>(from) + i);
  } else if constexpr (kDtype == Dtype::kBf16) {
    const hn::Rebind<uint16_t, D> dh;
    const hn::Rebind<uint32_t, D> du;
    const auto half = hn::LoadU(dh, reinterpret_cast<const uint16_t*>(from) + i);
    return hn::BitCast(df, hn::ShiftLeft<16>(hn::PromoteTo(du, half)));
  } else {
    const hn::Rebind<hwy::float16_t, D> dh;
    return hn::PromoteTo(df, hn::LoadU(dh, reinterpret_cast<const hwy::float16_t*>(from) + i));
  }
}

template <Dtype kDtype, size_t kLeaves>
HWY_ATTR void AddLeaves(const std::byte* HWY_RESTRICT gradient, size_t begin, NormTree* tree) {
  const hn::CappedTag<double, kNormLanes> dd;
  const hn::Rebind<float, decltype(dd)> df;
  constexpr size_t kWidth = hn::MaxLanes(dd);
  constexpr size_t kVectors = kNormLanes / kWidth;
  hn::Vec<decltype(dd)> sum[kLeaves][kVectors];
  for (size_t leaf = 0; leaf < kLeaves; ++leaf) {
    for (size_t v = 0; v < kVectors; ++v) sum[leaf][v] = hn::Zero(dd);
  }
  // The leaves are four streams to the processor, too many for its own prefetcher: ask for what comes next, one after
  // the other.
  constexpr size_t kLine = 64, kAhead = 8192;
  constexpr size_t kStepBytes = kLeaves * kNormLanes * ElementBytes(kDtype);
  const std::byte* ahead = gradient + begin * ElementBytes(kDtype) + kAhead;
  for (size_t i = 0; i < kNormLeafElements; i += kNormLanes) {
    for (size_t byte = 0; byte < kStepBytes; byte += kLine) hwy::Prefetch(ahead + byte);
    ahead += kStepBytes;
    for (size_t leaf = 0; leaf < kLeaves; ++leaf) {
      for (size_t v = 0; v < kVectors; ++v) {
        const size_t at = begin + leaf * kNormLeafElements + i + v * kWidth;
        const auto x = hn::PromoteTo(dd, LoadFloats<kDtype>(df, gradient, at));
        sum[leaf][v] = hn::MulAdd(x, x, sum[leaf][v]);
      }
    }
  }
  for (size_t leaf = 0; leaf < kLeaves; ++leaf) {
    double lane[kNormLanes];
    for (size_t v = 0; v < kVectors; ++v) hn::StoreU(sum[leaf][v], dd, lane + v * kWidth);
    tree->Add(SumLanes(lane));
  }
}
#endif

template <Dtype kDtype>
double NormOf(const std::byte* HWY_RESTRICT gradient, size_t n) {
  NormTree tree;
  size_t i = 0;
#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
  constexpr size_t kLeaves = 4;
  for (; i + kLeaves * kNormLeafElements <= n; i += kLeaves * kNormLeafElements) {
    AddLeaves<kDtype, kLeaves>(gradient, i, &tree);
  }
  for (; i + kNormLeafElements <= n; i += kNormLeafElements) AddLeaves<kDtype, 1>(gradient, i, &tree);
#endif
  while (i < n) {
    const size_t end = n - i < kNormLeafElements ? n : i + kNormLeafElements;
    double lane[kNormLanes] = {};
    for (size_t k = 0; i < end; ++i, ++k) {
      const double x = ElementAs<kDtype>(gradient, i);
      lane[k % kNormLanes] += x * x;
    }
    tree.Add(SumLanes(lane));
  }
  return tree.Total();
}

double NormLoop(Dtype dtype, const std::byte* gradient, size_t n) {
  if (dtype == Dtype::kF32) return NormOf<Dtype::kF32>(gradient, n);
  return dtype == Dtype::kBf16 ? NormOf<Dtype::kBf16>(gradient, n) : NormOf<Dtype::kF16>(gradient, n);
}

}  // namespace HWY_NAMESPACE
}  // namespace ballast::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ballast::kernels {
HWY_EXPORT(NormLoop);

NormResult SquaredNorm(Dtype dtype, const std::byte* gradient, uint64_t n) {
  RequireGradientDtype(dtype);
  const double total = HWY_DYNAMIC_DISPATCH(NormLoop)(dtype, gradient, n);
  // Squares of finite floats stay below 2^256: 2^700 of them would not overflow fp64, so only Inf or NaN make it so.
  if (!std::isfinite(total)) return {.squared_norm = 0, .finite = false};
  return {.squared_norm = total, .finite = true};
}

NormResult SquaredNorm(absl::Span<const bf16> gradient) {
  return SquaredNorm(Dtype::kBf16, reinterpret_cast<const std::byte*>(gradient.data()), gradient.size());
}

}  // namespace ballast::kernels
#endif
