// Moments of a block, read and written in their format. Compiled once per instruction set.
#if defined(BALLAST_KERNELS_CPU_MOMENTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BALLAST_KERNELS_CPU_MOMENTS_INL_H_
#undef BALLAST_KERNELS_CPU_MOMENTS_INL_H_
#else
#define BALLAST_KERNELS_CPU_MOMENTS_INL_H_
#endif

#include <cstring>

#include "ballast/kernels/cpu/formats-inl.h"
#include "ballast/kernels/cpu/lanes-inl.h"
#include "ballast/kernels/dynamic_map.h"
#include "ballast/kernels/moment_formats.h"
#include "ballast/kernels/optimizer.h"
#include "ballast/kernels/philox.h"

HWY_BEFORE_NAMESPACE();
namespace ballast::kernels::HWY_NAMESPACE {
namespace {

constexpr size_t kBlock = kMomentBlock;
using L = Lanes;
using F = L::F;
using U = L::U;

HWY_INLINE U IsZero(U a, U yes, U no) { return L::SelectLess(a, L::SetU(1), yes, no); }

// One-byte codes of x / scale, with magnitudes up to kLargest; kFirst: with sign. Encode(x, 1 / scale).
template <MomentFormat kFormat, bool kFirst>
struct Codec;

template <bool kFirst>
struct Codec<MomentFormat::kF8, kFirst> {
  using Format = std::conditional_t<kFirst, F8First, F8Root>;
  static constexpr float kLargest = Format::kLargest;

  static HWY_INLINE U Encode(F x, F inverse) {
    const F magnitude = kFirst ? L::FromBits(Magnitude<L>(L::Bits(x))) : x;
    const U bits = L::Bits(L::Fma(magnitude, inverse, L::Set(Format::kOffset)));
    const U code = L::ShiftRight<Format::kShift>(L::AddU(bits, L::SetU(Format::kHalf - Format::kOffsetBits)));
    if constexpr (!kFirst) return L::MaxU(code, L::SetU(1));
    return L::Or(code, L::And(L::ShiftRight<24>(L::Bits(x)), L::SetU(0x80)));
  }
  static HWY_INLINE F Decode(U code) {
    const U magnitude = kFirst ? L::And(code, L::SetU(Format::kCodeMax)) : code;
    const U bits = L::AddU(L::ShiftLeft<Format::kShift>(magnitude), L::SetU(Format::kOffsetBits));
    const F value = L::Sub(L::FromBits(bits), L::Set(Format::kOffset));
    if constexpr (!kFirst) return value;
    return L::FromBits(L::Or(L::Bits(value), L::And(L::ShiftLeft<24>(code), L::SetU(0x80000000u))));
  }
};

template <bool kFirst>
struct Codec<MomentFormat::kI8, kFirst> {
  using Map = DynamicMap<kFirst>;
  static constexpr float kLargest = 1;
  static constexpr const Map& map() {
    if constexpr (kFirst) {
      return kSignedMap;
    } else {
      return kUnsignedMap;
    }
  }

  static HWY_INLINE U Encode(F moment, F inverse) {
    const F x = L::Mul(moment, inverse);
    const U bits = L::Bits(x);
    const F magnitude = L::FromBits(Magnitude<L>(bits));
    U decade = L::SetU(0);
    for (const float threshold : map().threshold) decade = L::AddU(decade, L::IsGreater(magnitude, L::Set(threshold)));
    const F linear = L::Fma(magnitude, L::Lookup8(map().code_factor, decade), L::Lookup8(map().code_offset, decade));
    U code = L::Round(L::MinF(linear, L::Lookup8(map().code_max, decade)));
    if constexpr (kFirst) code = IsZero(code, code, L::Or(code, L::ShiftLeft<7>(L::ShiftRight<31>(bits))));
    return IsZero(L::IsGreater(x, L::Set(map().top_threshold)), code, L::SetU(Map::kTop));
  }
  static HWY_INLINE F Decode(U code) {
    U magnitude = code, h = code, sign = L::SetU(0);
    if constexpr (kFirst) {
      const U top = L::SetU(Map::kTop);
      magnitude = IsZero(L::Xor(code, top), top, L::And(code, L::SetU(0x7f)));
      sign = L::SelectLess(top, code, L::SetU(0x80000000u), sign);
      h = L::AddU(magnitude, magnitude);
    }
    const F hf = L::FloatOf(L::AddU(h, L::SetU(1)));
    const U decade = L::MinU(L::SubU(L::ShiftRight<23>(L::Bits(hf)), L::SetU(127)), L::SetU(Map::kDecades));
    const F value = L::Fma(hf, L::Lookup8(map().value_factor, decade), L::Lookup8(map().value_offset, decade));
    return L::FromBits(L::Or(L::Bits(L::MinF(value, L::Set(1))), sign));
  }
};

// One moment of one block: its place, and for all formats but fp32 its new values until they are stored.
struct MomentBlock {
  std::byte* values;
  float* scale;
  uint64_t element;       // the block's first element, in its unit
  uint32_t number;        // the moment's number
  float* wide;            // kBlock values; fp32 moments: the values themselves, of a whole run
  uint32_t largest_bits;  // largest bits in `wide`, compared as integers: the same in any order, and NaN beats Inf
};

template <MomentFormat kFormat, bool kFirst>
HWY_INLINE F LoadMoment(const MomentBlock& m, F scale, size_t i) {
  if constexpr (kFormat == MomentFormat::kF32) return L::Load(m.wide + i);
  if constexpr (kFormat == MomentFormat::kBf16)
    return WidenBf16<L>(L::Load16(reinterpret_cast<const uint16_t*>(m.values) + i));
  if constexpr (kFormat == MomentFormat::kI8 || kFormat == MomentFormat::kF8) {
    return L::Mul(Codec<kFormat, kFirst>::Decode(L::Load8(reinterpret_cast<const uint8_t*>(m.values) + i)), scale);
  }
}

template <class BlockCodec>
void StoreCodes(const MomentBlock& m) {
  const BlockScale s = ScaleOf(m.largest_bits, BlockCodec::kLargest);
  auto* codes = reinterpret_cast<uint8_t*>(m.values);
  *m.scale = s.scale;
  if (s.inverse == 0) {
    std::memset(codes, 0, kBlock);
    return;
  }
  const F inverse = L::Set(s.inverse);
  const auto code = [&m, inverse](size_t i) HWY_ATTR { return BlockCodec::Encode(L::Load(m.wide + i), inverse); };
  for (size_t i = 0; i < kBlock; i += 4 * L::kWidth) {
    L::Store8x4(code(i), code(i + L::kWidth), code(i + 2 * L::kWidth), code(i + 3 * L::kWidth), codes + i);
  }
}

// Computes the 16 random bits of each element of the block that begins at `element` of its unit.
void RandomBlock(const RandomKey& key, uint64_t element, uint32_t moment, uint16_t* HWY_RESTRICT to) {
  constexpr size_t kPerCounter = 8;
  const uint64_t group = element / kPerCounter;
  for (size_t i = 0; i < kBlock / kPerCounter; i += L::kWidth) {
    U x0 = L::Iota(static_cast<uint32_t>(group) + static_cast<uint32_t>(i));
    U x1 = L::SetU(static_cast<uint32_t>(group >> 32));
    U x2 = L::SetU(static_cast<uint32_t>(key.step));
    U x3 = L::SetU(key.unit << 2 | moment);
    uint32_t key0 = static_cast<uint32_t>(key.seed), key1 = static_cast<uint32_t>(key.seed >> 32);
    for (int round = 0; round < kPhiloxRounds; ++round) {
      U a_high, a_low, b_high, b_low;
      L::MulWide(x0, kPhiloxMultiplier0, &a_high, &a_low);
      L::MulWide(x2, kPhiloxMultiplier1, &b_high, &b_low);
      x0 = L::Xor(L::Xor(b_high, x1), L::SetU(key0));
      x2 = L::Xor(L::Xor(a_high, x3), L::SetU(key1));
      x1 = b_low;
      x3 = a_low;
      key0 += kPhiloxWeyl0;
      key1 += kPhiloxWeyl1;
    }
    L::StoreInterleaved(x0, x1, x2, x3, to + i * kPerCounter);
  }
}

void StoreStochastic(const MomentBlock& m, const RandomKey& key) {
  HWY_ALIGN uint16_t random[kBlock];
  RandomBlock(key, m.element, m.number, random);
  auto* to = reinterpret_cast<uint16_t*>(m.values);
  for (size_t i = 0; i < kBlock; i += L::kWidth) {
    // The sum carries into the kept bits at random; the 16 low bits are then cut off. Inf and the one NaN have zeros
    // there and never carry.
    L::Store16(L::ShiftRight<16>(L::AddU(L::Bits(L::Load(m.wide + i)), L::Load16(random + i))), to + i);
  }
}

}  // namespace
}  // namespace ballast::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
