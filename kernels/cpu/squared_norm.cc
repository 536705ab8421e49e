#include <cmath>
#include <cstddef>

#include "ballast/kernels/cpu/highway_targets.h"
#include "ballast/kernels/cpu/norm_tree.h"
#include "ballast/kernels/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ballast/kernels/cpu/squared_norm.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h, which includes this file once per target.
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ballast::kernels {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// A bf16 squared is exact in fp64, so fused or not, each addition is the only rounding.
#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128

// kLeaves whole leaves side by side: one leaf's additions wait for each other.
template <size_t kLeaves>
HWY_ATTR void AddLeaves(const bf16* HWY_RESTRICT gradient, NormTree* tree) {
  const hn::CappedTag<double, kNormLanes> dd;
  const hn::Rebind<float, decltype(dd)> df;
  const hn::Rebind<uint32_t, decltype(dd)> du;
  const hn::Rebind<uint16_t, decltype(dd)> dh;
  constexpr size_t kWidth = hn::MaxLanes(dd);
  constexpr size_t kVectors = kNormLanes / kWidth;
  hn::Vec<decltype(dd)> sum[kLeaves][kVectors];
  for (size_t leaf = 0; leaf < kLeaves; ++leaf) {
    for (size_t v = 0; v < kVectors; ++v) sum[leaf][v] = hn::Zero(dd);
  }
  for (size_t i = 0; i < kNormLeafElements; i += kNormLanes) {
    for (size_t leaf = 0; leaf < kLeaves; ++leaf) {
      for (size_t v = 0; v < kVectors; ++v) {
        const auto bits = hn::PromoteTo(du, hn::LoadU(dh, gradient + leaf * kNormLeafElements + i + v * kWidth));
        const auto x = hn::PromoteTo(dd, hn::BitCast(df, hn::ShiftLeft<16>(bits)));
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

double NormLoop(const bf16* HWY_RESTRICT gradient, size_t n) {
  NormTree tree;
  size_t i = 0;
#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
  constexpr size_t kLeaves = 4;
  for (; i + kLeaves * kNormLeafElements <= n; i += kLeaves * kNormLeafElements) {
    AddLeaves<kLeaves>(gradient + i, &tree);
  }
  for (; i + kNormLeafElements <= n; i += kNormLeafElements) AddLeaves<1>(gradient + i, &tree);
#endif
  while (i < n) {
    const size_t end = n - i < kNormLeafElements ? n : i + kNormLeafElements;
    double lane[kNormLanes] = {};
    for (size_t k = 0; i < end; ++i, ++k) {
      const double x = FromBf16(gradient[i]);
      lane[k % kNormLanes] += x * x;
    }
    tree.Add(SumLanes(lane));
  }
  return tree.Total();
}

}  // namespace HWY_NAMESPACE
}  // namespace ballast::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ballast::kernels {
HWY_EXPORT(NormLoop);

NormResult SquaredNorm(absl::Span<const bf16> gradient) {
  const double total = HWY_DYNAMIC_DISPATCH(NormLoop)(gradient.data(), gradient.size());
  // Squares of finite bf16 stay below 2^256: 2^700 of them would not overflow fp64, so only Inf or NaN make it so.
  if (!std::isfinite(total)) return {.squared_norm = 0, .finite = false};
  return {.squared_norm = total, .finite = true};
}

}  // namespace ballast::kernels
#endif
