// An fp32 cut into its bf16 and the bits that the bf16 lacks.
#include <cstddef>
#include <cstring>

#include "ballast/kernels/cpu/highway_targets.h"
#include "ballast/kernels/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ballast/kernels/cpu/remainder.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h, which includes this file once per target.
#include "ballast/kernels/cpu/formats-inl.h"
#include "ballast/kernels/cpu/lanes-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ballast::kernels::HWY_NAMESPACE {
namespace {

using L = Lanes;
using U = L::U;

// Carries of this many elements are a word. Every vector's width divides it.
constexpr size_t kGroup = 32;

// Rounding adds the carry to the upper half: 1 in the half's last place, or the quiet bit of a NaN.
constexpr int kQuietBit = 6;

HWY_INLINE U CarryOf(U bits) {
  const U one = L::SetU(1), upper = L::ShiftRight<16>(bits), lower = L::And(bits, L::SetU(0xffff));
  const U rounded_up = L::ShiftRight<16>(L::AddU(lower, L::AddU(L::SetU(0x7fff), L::And(upper, one))));
  const U made_quiet = L::Xor(L::And(L::ShiftRight<kQuietBit>(upper), one), one);
  return L::SelectLess(L::SetU(0x7f800000u), Magnitude<L>(bits), made_quiet, rounded_up);
}

HWY_INLINE void SplitGroup(const float* x, uint16_t* low, uint8_t* carries) {
  uint32_t word = 0;
  for (size_t i = 0; i < kGroup; i += 2 * L::kWidth) {
    const U a = L::Bits(L::Load(x + i)), b = L::Bits(L::Load(x + i + L::kWidth)), lower = L::SetU(0xffff);
    L::Store16x2<false>(L::And(a, lower), L::And(b, lower), low + i);
    word |= L::LowestBits(CarryOf(a)) << i | L::LowestBits(CarryOf(b)) << (i + L::kWidth);
  }
  std::memcpy(carries, &word, sizeof(word));
}

HWY_INLINE void JoinGroup(const uint16_t* upper, const uint16_t* low, const uint8_t* carries, float* x) {
  uint32_t word;
  std::memcpy(&word, carries, sizeof(word));
  for (size_t i = 0; i < kGroup; i += L::kWidth) {
    const U rounded = L::Load16(upper + i), carry = L::FromLowestBits(word >> i);
    const U added =
        L::SelectLess(L::SetU(0x7f80), L::And(rounded, L::SetU(0x7fff)), L::ShiftLeft<kQuietBit>(carry), carry);
    L::Store(L::FromBits(L::Or(L::ShiftLeft<16>(L::SubU(rounded, added)), L::Load16(low + i))), x + i);
  }
}

}  // namespace

void SplitF32Loop(const float* x, size_t n, uint16_t* low, uint8_t* carries) {
  size_t i = 0;
  for (; i + kGroup <= n; i += kGroup) SplitGroup(x + i, low + i, carries + i / 8);
  if (i == n) return;
  float last[kGroup] = {};
  uint16_t last_low[kGroup];
  uint8_t last_carries[kGroup / 8];
  std::memcpy(last, x + i, (n - i) * sizeof(float));
  SplitGroup(last, last_low, last_carries);
  std::memcpy(low + i, last_low, (n - i) * sizeof(uint16_t));
  std::memcpy(carries + i / 8, last_carries, CarryBytes(n - i));
}

void JoinF32Loop(const uint16_t* upper, const uint16_t* low, const uint8_t* carries, size_t n, float* x) {
  size_t i = 0;
  for (; i + kGroup <= n; i += kGroup) JoinGroup(upper + i, low + i, carries + i / 8, x + i);
  if (i == n) return;
  float last[kGroup];
  uint16_t last_upper[kGroup] = {}, last_low[kGroup] = {};
  uint8_t last_carries[kGroup / 8] = {};
  std::memcpy(last_upper, upper + i, (n - i) * sizeof(uint16_t));
  std::memcpy(last_low, low + i, (n - i) * sizeof(uint16_t));
  std::memcpy(last_carries, carries + i / 8, CarryBytes(n - i));
  JoinGroup(last_upper, last_low, last_carries, last);
  std::memcpy(x + i, last, (n - i) * sizeof(float));
}

}  // namespace ballast::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ballast::kernels {
HWY_EXPORT(SplitF32Loop);
HWY_EXPORT(JoinF32Loop);

void SplitF32(absl::Span<const float> from, uint16_t* low, uint8_t* carries) {
  HWY_DYNAMIC_DISPATCH(SplitF32Loop)(from.data(), from.size(), low, carries);
}

void JoinF32(const bf16* rounded, const uint16_t* low, const uint8_t* carries, absl::Span<float> to) {
  HWY_DYNAMIC_DISPATCH(JoinF32Loop)(rounded, low, carries, to.size(), to.data());
}

}  // namespace ballast::kernels
#endif
