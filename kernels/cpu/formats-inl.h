// The formats of float_formats.h over lanes. Compiled once per instruction set.
#if defined(BALLAST_KERNELS_CPU_FORMATS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BALLAST_KERNELS_CPU_FORMATS_INL_H_
#undef BALLAST_KERNELS_CPU_FORMATS_INL_H_
#else
#define BALLAST_KERNELS_CPU_FORMATS_INL_H_
#endif

#include <cstring>

#include "ballast/kernels/cpu/lanes-inl.h"
#include "ballast/kernels/float_formats.h"

HWY_BEFORE_NAMESPACE();
namespace ballast::kernels::HWY_NAMESPACE {

template <class L>
HWY_INLINE typename L::U Magnitude(typename L::U bits) {
  return L::And(bits, L::SetU(0x7fffffffu));
}

template <class L>
HWY_INLINE typename L::F WidenBf16(typename L::U x) {
  return L::FromBits(L::template ShiftLeft<16>(x));
}

// The caller has applied L::OneNan. So the only NaN is 0x7fc00000, which this rounding leaves as it is.
template <class L>
HWY_INLINE typename L::U NarrowBf16OneNan(typename L::F x) {
  const typename L::U bits = L::Bits(x);
  const typename L::U odd = L::And(L::template ShiftRight<16>(bits), L::SetU(1));
  return L::template ShiftRight<16>(L::AddU(bits, L::AddU(odd, L::SetU(0x7fff))));
}

template <class L>
HWY_INLINE typename L::U NarrowBf16(typename L::F x) {
  const typename L::U bits = L::Bits(x);
  const typename L::U quiet = L::Or(L::template ShiftRight<16>(bits), L::SetU(0x40));
  return L::SelectLess(L::SetU(0x7f800000u), Magnitude<L>(bits), quiet, NarrowBf16OneNan<L>(x));
}

// As SmallFloat::Narrow and SmallFloat::Widen, for a vector.
template <class Format, class L>
HWY_INLINE typename L::U NarrowMagnitude(typename L::U bits) {
  using U = typename L::U;
  const U magic = L::SetU(Format::kMagic);
  const U subnormal = L::SubU(L::Bits(L::Add(L::FromBits(bits), L::FromBits(magic))), magic);
  const U odd = L::And(L::template ShiftRight<Format::kShift>(bits), L::SetU(1));
  const U normal =
      L::template ShiftRight<Format::kShift>(L::AddU(L::AddU(bits, odd), L::SetU(Format::kHalf - Format::kBiasShift)));
  return L::SelectLess(bits, L::SetU(Format::kNormalMin), subnormal, normal);
}

template <class Format, class L>
HWY_INLINE typename L::U WidenMagnitude(typename L::U magnitude) {
  using U = typename L::U;
  const U bits = L::template ShiftLeft<Format::kShift>(magnitude), least = L::SetU(Format::kNormalMin);
  const U subnormal = L::Bits(L::Sub(L::FromBits(L::Or(bits, least)), L::FromBits(least)));
  return L::SelectLess(bits, L::SetU(1u << 23), subnormal, L::AddU(bits, L::SetU(Format::kBiasShift)));
}

template <class L>
HWY_INLINE typename L::U NarrowE4m3(typename L::F x) {
  const typename L::U bits = L::Bits(x);
  const typename L::U code = L::MinU(NarrowMagnitude<E4m3Format, L>(Magnitude<L>(bits)), L::SetU(0x7f));
  return L::Or(code, L::And(L::template ShiftRight<24>(bits), L::SetU(0x80)));
}

template <class L>
HWY_INLINE typename L::U NarrowE5m2(typename L::F x) {
  const typename L::U bits = L::Bits(x), magnitude = Magnitude<L>(bits);
  const typename L::U code = L::MinU(NarrowMagnitude<E5m2Format, L>(magnitude), L::SetU(0x7c));
  const typename L::U one_nan = L::SelectLess(L::SetU(0x7f800000u), magnitude, L::SetU(0x7f), code);
  return L::Or(one_nan, L::And(L::template ShiftRight<24>(bits), L::SetU(0x80)));
}

template <class L>
HWY_INLINE typename L::F WidenE4m3(typename L::U x) {
  const typename L::U magnitude = L::And(x, L::SetU(0x7f)), sign = L::template ShiftLeft<24>(L::And(x, L::SetU(0x80)));
  const typename L::U value = WidenMagnitude<E4m3Format, L>(magnitude);
  return L::FromBits(L::Or(sign, L::SelectLess(magnitude, L::SetU(0x7f), value, L::SetU(0x7fc00000u))));
}

template <class L>
HWY_INLINE typename L::F WidenE5m2(typename L::U x) {
  const typename L::U magnitude = L::And(x, L::SetU(0x7f)), sign = L::template ShiftLeft<24>(L::And(x, L::SetU(0x80)));
  const typename L::U special = L::SelectLess(magnitude, L::SetU(0x7d), L::SetU(0x7f800000u), L::SetU(0x7fc00000u));
  const typename L::U value = WidenMagnitude<E5m2Format, L>(magnitude);
  return L::FromBits(L::Or(sign, L::SelectLess(magnitude, L::SetU(0x7c), value, special)));
}

// Loads elements of an array, from element i on.
template <class L, Dtype kDtype>
HWY_INLINE typename L::F LoadAs(const std::byte* from, size_t i) {
  const auto* halves = reinterpret_cast<const uint16_t*>(from) + i;
  const auto* bytes = reinterpret_cast<const uint8_t*>(from) + i;
  if constexpr (kDtype == Dtype::kF32) return L::Load(reinterpret_cast<const float*>(from) + i);
  if constexpr (kDtype == Dtype::kBf16) return WidenBf16<L>(L::Load16(halves));
  if constexpr (kDtype == Dtype::kF16) return L::F16Load(halves);
  if constexpr (kDtype == Dtype::kE4m3) return WidenE4m3<L>(L::Load8(bytes));
  if constexpr (kDtype == Dtype::kE5m2) return WidenE5m2<L>(L::Load8(bytes));
}

// stream: bypass the caches, for data that is not read again soon; `to` is 64-byte aligned. one_nan: the caller has
// applied L::OneNan.
struct StoreOptions {
  bool stream = false;
  bool one_nan = false;
};

// Stores four vectors, from element i on.
template <class L, Dtype kDtype, StoreOptions kOptions>
HWY_INLINE void StoreFourAs(typename L::F a, typename L::F b, typename L::F c, typename L::F d, std::byte* to,
                            size_t i) {
  constexpr size_t kWidth = L::kWidth;
  auto* floats = reinterpret_cast<float*>(to) + i;
  auto* halves = reinterpret_cast<uint16_t*>(to) + i;
  auto* bytes = reinterpret_cast<uint8_t*>(to) + i;
  if constexpr (kDtype == Dtype::kF32) {
    const auto store = [floats](typename L::F x, size_t k) HWY_ATTR {
      kOptions.stream ? L::Stream(x, floats + k * kWidth) : L::Store(x, floats + k * kWidth);
    };
    store(a, 0), store(b, 1), store(c, 2), store(d, 3);
  }
  if constexpr (kDtype == Dtype::kBf16) {
    const auto narrow = [](typename L::F x)
                            HWY_ATTR { return kOptions.one_nan ? NarrowBf16OneNan<L>(x) : NarrowBf16<L>(x); };
    L::template Store16x2<kOptions.stream>(narrow(a), narrow(b), halves);
    L::template Store16x2<kOptions.stream>(narrow(c), narrow(d), halves + 2 * kWidth);
  }
  if constexpr (kDtype == Dtype::kF16) {
    L::template F16Store2<kOptions.stream>(a, b, halves);
    L::template F16Store2<kOptions.stream>(c, d, halves + 2 * kWidth);
  }
  if constexpr (kDtype == Dtype::kE4m3) {
    L::template Store8x4<kOptions.stream>(NarrowE4m3<L>(a), NarrowE4m3<L>(b), NarrowE4m3<L>(c), NarrowE4m3<L>(d),
                                          bytes);
  }
  if constexpr (kDtype == Dtype::kE5m2) {
    L::template Store8x4<kOptions.stream>(NarrowE5m2<L>(a), NarrowE5m2<L>(b), NarrowE5m2<L>(c), NarrowE5m2<L>(d),
                                          bytes);
  }
}

// Outputs of 4 MiB or more, beyond the second-level cache, bypass the caches: they would be evicted before any read.
inline bool Streams(const void* to, size_t bytes) {
  constexpr size_t kStreamBytesMin = size_t{4} << 20;
  return bytes >= kStreamBytesMin && reinterpret_cast<uintptr_t>(to) % 64 == 0;
}

// A block's scale, for codes of x / scale with magnitudes up to `code_largest`, and its inverse. Inverse 0: all codes
// are 0. The block then reads back as zeros, or as NaN if it had an Inf or a NaN.
struct BlockScale {
  float scale, inverse;
};
inline BlockScale ScaleOf(uint32_t largest_bits, float code_largest) {
  if (largest_bits >= 0x7f800000u) return {std::bit_cast<float>(kNanBits), 0};
  const float scale = std::bit_cast<float>(largest_bits) * (1 / code_largest);
  if (std::bit_cast<uint32_t>(scale) < 0x00800000u) return {0, 0};
  return {scale, 1 / scale};
}

// A block of kE4m3Blocks.
template <class L>
HWY_INLINE void EncodeE4m3Block(const float* from, std::byte* to) {
  static_assert(kE4m3Block % (4 * L::kWidth) == 0);
  typename L::U largest = L::SetU(0);
  for (size_t i = 0; i < kE4m3Block; i += L::kWidth) {
    largest = L::MaxU(largest, Magnitude<L>(L::Bits(L::Load(from + i))));
  }
  const BlockScale s = ScaleOf(L::MaxOfLanes(largest), kE4m3Largest);
  std::memcpy(to + kE4m3Block, &s.scale, sizeof(s.scale));
  if (s.inverse == 0) {
    std::memset(to, 0, kE4m3Block);
    return;
  }
  const typename L::F inverse = L::Set(s.inverse);
  auto* const codes = reinterpret_cast<uint8_t*>(to);
  const auto code = [&](size_t i) HWY_ATTR { return NarrowE4m3<L>(L::Mul(L::Load(from + i), inverse)); };
  for (size_t i = 0; i < kE4m3Block; i += 4 * L::kWidth) {
    L::Store8x4(code(i), code(i + L::kWidth), code(i + 2 * L::kWidth), code(i + 3 * L::kWidth), codes + i);
  }
}

template <class L>
HWY_INLINE void DecodeE4m3Block(const std::byte* from, float* to) {
  float scale = 0;
  std::memcpy(&scale, from + kE4m3Block, sizeof(scale));
  const typename L::F factor = L::Set(scale);
  const auto* const codes = reinterpret_cast<const uint8_t*>(from);
  for (size_t i = 0; i < kE4m3Block; i += L::kWidth) {
    L::Store(L::OneNan(L::Mul(WidenE4m3<L>(L::Load8(codes + i)), factor)), to + i);
  }
}

}  // namespace ballast::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
