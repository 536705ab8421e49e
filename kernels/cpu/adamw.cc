#include <cstddef>

#include "ballast/kernels/cpu/highway_targets.h"
#include "ballast/kernels/cpu/scalar.h"
#include "ballast/kernels/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ballast/kernels/cpu/adamw.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h, which includes this file once per target.
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ballast::kernels {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

void AdamwLoop(const AdamwCoefficients& c, const bf16* HWY_RESTRICT gradient, float* HWY_RESTRICT master,
               float* HWY_RESTRICT moment1, float* HWY_RESTRICT moment2, bf16* HWY_RESTRICT working, size_t n) {
  size_t i = 0;
#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
  const hn::ScalableTag<float> df;
  const hn::RebindToUnsigned<decltype(df)> du;
  const hn::RebindToSigned<decltype(df)> di;
  const hn::Rebind<uint16_t, decltype(df)> dh;
  const auto factor = hn::Set(df, c.factor), decay = hn::Set(df, c.decay);
  const auto one_minus_beta1 = hn::Set(df, c.one_minus_beta1), beta2 = hn::Set(df, c.beta2);
  const auto one_minus_beta2 = hn::Set(df, c.one_minus_beta2), step_size = hn::Set(df, c.step_size);
  const auto sqrt_bias2 = hn::Set(df, c.sqrt_bias2), eps = hn::Set(df, c.eps);
  const auto nan = hn::BitCast(df, hn::Set(du, scalar::kNanBits));
  const auto one = hn::Set(du, 1u), half = hn::Set(du, 0x7fffu);
  const size_t lanes = hn::Lanes(df);
  for (; i + lanes <= n; i += lanes) {
    const auto bits = hn::PromoteTo(du, hn::LoadU(dh, gradient + i));
    const auto g = hn::Mul(factor, hn::BitCast(df, hn::ShiftLeft<16>(bits)));
    auto m = hn::LoadU(df, moment1 + i);
    m = hn::MulAdd(one_minus_beta1, hn::Sub(g, m), m);
    auto v = hn::LoadU(df, moment2 + i);
    v = hn::MulAdd(hn::Mul(one_minus_beta2, g), g, hn::Mul(beta2, v));
    const auto denominator = hn::Add(hn::Div(hn::Sqrt(v), sqrt_bias2), eps);
    auto p = hn::Mul(hn::LoadU(df, master + i), decay);
    p = hn::Sub(p, hn::Mul(step_size, hn::Div(m, denominator)));
    p = hn::IfThenElse(hn::IsNaN(p), nan, p);
    hn::StoreU(p, df, master + i);
    hn::StoreU(hn::IfThenElse(hn::IsNaN(m), nan, m), df, moment1 + i);
    hn::StoreU(hn::IfThenElse(hn::IsNaN(v), nan, v), df, moment2 + i);
    // No NaN but `nan` is left, which rounds to itself.
    const auto w = hn::BitCast(du, p);
    const auto rounded = hn::ShiftRight<16>(hn::Add(w, hn::Add(half, hn::And(hn::ShiftRight<16>(w), one))));
    hn::StoreU(hn::DemoteTo(dh, hn::BitCast(di, rounded)), dh, working + i);
  }
#endif
  for (; i < n; ++i) {
    scalar::Adamw(c, gradient[i], master + i, moment1 + i, moment2 + i, working + i);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace ballast::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ballast::kernels {
HWY_EXPORT(AdamwLoop);

void Adamw(const AdamwCoefficients& c, absl::Span<const bf16> gradient, absl::Span<float> master,
           absl::Span<float> moment1, absl::Span<float> moment2, absl::Span<bf16> working) {
  HWY_DYNAMIC_DISPATCH(AdamwLoop)
  (c, gradient.data(), master.data(), moment1.data(), moment2.data(), working.data(), gradient.size());
}

}  // namespace ballast::kernels
#endif
