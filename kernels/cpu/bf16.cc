// Conversions between bf16 and fp32, and the fp32 sum.
#include <cstddef>

#include "ballast/kernels/cpu/highway_targets.h"
#include "ballast/kernels/cpu/scalar.h"
#include "ballast/kernels/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ballast/kernels/cpu/bf16.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h, which includes this file once per target.
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ballast::kernels {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// By integers: Highway's own conversion may use VCVTNEPS2BF16, which flushes denormals.
void RoundLoop(const float* HWY_RESTRICT from, bf16* HWY_RESTRICT to, size_t n) {
  size_t i = 0;
#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
  const hn::ScalableTag<float> df;
  const hn::RebindToUnsigned<decltype(df)> du;
  const hn::RebindToSigned<decltype(df)> di;
  const hn::Rebind<uint16_t, decltype(df)> dh;
  const auto one = hn::Set(du, 1u), half = hn::Set(du, 0x7fffu), quiet = hn::Set(du, 0x40u);
  const size_t lanes = hn::Lanes(df);
  for (; i + lanes <= n; i += lanes) {
    const auto x = hn::LoadU(df, from + i);
    const auto bits = hn::BitCast(du, x);
    const auto upper = hn::ShiftRight<16>(bits);
    const auto rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(half, hn::And(upper, one))));
    const auto result = hn::IfThenElse(hn::RebindMask(du, hn::IsNaN(x)), hn::Or(upper, quiet), rounded);
    hn::StoreU(hn::DemoteTo(dh, hn::BitCast(di, result)), dh, to + i);
  }
#endif
  for (; i < n; ++i) to[i] = ToBf16(from[i]);
}

void WidenLoop(const bf16* HWY_RESTRICT from, float* HWY_RESTRICT to, size_t n) {
  size_t i = 0;
#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
  const hn::ScalableTag<float> df;
  const hn::RebindToUnsigned<decltype(df)> du;
  const hn::Rebind<uint16_t, decltype(df)> dh;
  const size_t lanes = hn::Lanes(df);
  for (; i + lanes <= n; i += lanes) {
    const auto bits = hn::ShiftLeft<16>(hn::PromoteTo(du, hn::LoadU(dh, from + i)));
    hn::StoreU(hn::BitCast(df, bits), df, to + i);
  }
#endif
  for (; i < n; ++i) to[i] = FromBf16(from[i]);
}

void AddLoop(const float* HWY_RESTRICT addend, float* HWY_RESTRICT sum, size_t n) {
  size_t i = 0;
#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128
  const hn::ScalableTag<float> df;
  const hn::RebindToUnsigned<decltype(df)> du;
  const auto nan = hn::BitCast(df, hn::Set(du, scalar::kNanBits));
  const size_t lanes = hn::Lanes(df);
  for (; i + lanes <= n; i += lanes) {
    const auto x = hn::Add(hn::LoadU(df, sum + i), hn::LoadU(df, addend + i));
    hn::StoreU(hn::IfThenElse(hn::IsNaN(x), nan, x), df, sum + i);
  }
#endif
  for (; i < n; ++i) scalar::AddInto(addend[i], sum + i);
}

const char* IsaName() { return hwy::TargetName(HWY_TARGET); }

}  // namespace HWY_NAMESPACE
}  // namespace ballast::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ballast::kernels {
HWY_EXPORT(RoundLoop);
HWY_EXPORT(WidenLoop);
HWY_EXPORT(AddLoop);
HWY_EXPORT(IsaName);

void Bf16FromF32(absl::Span<const float> from, absl::Span<bf16> to) {
  HWY_DYNAMIC_DISPATCH(RoundLoop)(from.data(), to.data(), from.size());
}

void F32FromBf16(absl::Span<const bf16> from, absl::Span<float> to) {
  HWY_DYNAMIC_DISPATCH(WidenLoop)(from.data(), to.data(), from.size());
}

void AddInto(absl::Span<const float> addend, absl::Span<float> sum) {
  HWY_DYNAMIC_DISPATCH(AddLoop)(addend.data(), sum.data(), addend.size());
}

const char* ActiveIsa() { return HWY_DYNAMIC_DISPATCH(IsaName)(); }

}  // namespace ballast::kernels
#endif
