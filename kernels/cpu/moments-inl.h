// Moments of a block, read and written in their format. Compiled once per instruction set.
#if defined(BALLAST_KERNELS_CPU_MOMENTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BALLAST_KERNELS_CPU_MOMENTS_INL_H_
#undef BALLAST_KERNELS_CPU_MOMENTS_INL_H_
#else
#define BALLAST_KERNELS_CPU_MOMENTS_INL_H_
#endif

#include <cstring>
#include <utility>

#include "ballast/kernels/cpu/dynamic_map_vectors.h"
#include "ballast/kernels/cpu/formats-inl.h"
#include "ballast/kernels/cpu/lanes-inl.h"
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
  static constexpr const DynamicMapVectors<kFirst>& vectors() {
    if constexpr (kFirst) {
      return kSignedMapVectors;
    } else {
      return kUnsignedMapVectors;
    }
  }
  static constexpr const Map& map() { return vectors().kMap; }

  static HWY_INLINE U Encode(F moment, F inverse) {
    const F x = L::Mul(moment, inverse);
    const U bits = L::Bits(x);
    const F magnitude = L::FromBits(Magnitude<L>(bits));
    if constexpr (L::kLooksUp32) return EncodeByBinade(x, magnitude);
    U decade = L::SetU(0);
    for (const float threshold : map().threshold) {
      decade = L::AddWhereGreater(decade, L::SetU(1), magnitude, L::Set(threshold));
    }
    const F linear =
        L::Fma(magnitude, L::LookupMod8(map().code_factor, decade), L::LookupMod8(map().code_offset, decade));
    U code = L::Round(L::MinF(linear, L::LookupMod8(map().code_max, decade)));
    if constexpr (kFirst) code = IsZero(code, code, L::Or(code, L::ShiftLeft<7>(L::ShiftRight<31>(bits))));
    return L::SelectGreater(x, L::Set(map().top_threshold), L::SetU(Map::kTop), code);
  }

  static HWY_INLINE F Decode(U code) {
    U place = code, sign = L::SetU(0);
    if constexpr (kFirst) {
      const U negative = L::SelectLess(L::SetU(Map::kTop), code, L::SetU(0x80), sign);
      place = L::SubU(code, negative);
      sign = L::ShiftLeft<24>(negative);
    }
    const F k = L::FloatOf(place);
    const F h = kFirst ? L::Fma(k, L::Set(2), L::Set(1)) : L::Add(k, L::Set(1));
    const U exponent = L::ShiftRight<23>(L::Bits(h));
    const F line =
        L::Fma(h, L::LookupMod8(vectors().value_factor, exponent), L::LookupMod8(vectors().value_offset, exponent));
    const F value = L::MinF(line, L::Set(1));
    if constexpr (!kFirst) return value;
    return L::FromBits(L::Or(L::Bits(value), sign));
  }

 private:
  // The same codes; that of a negative number that rounds to -1 is 256, which Store8x4 makes 255.
  template <class Lane = L>
  static HWY_INLINE U EncodeByBinade(F x, F magnitude) {
    const DynamicMapVectors<kFirst>& v = vectors();
    const U bits = L::MaxU(L::Bits(magnitude), L::SetU(v.kLeastBits));
    const U carry = Lane::Lookup32(v.carry, L::ShiftRight<23>(bits));
    const U segment = L::ShiftRight<23>(L::AddU(bits, carry));
    const F linear = L::Fma(magnitude, Lane::Lookup32(v.code_factor, segment), Lane::Lookup32(v.code_offset, segment));
    const U code = L::Round(L::MinF(linear, Lane::Lookup32(v.code_max, segment)));
    if constexpr (!kFirst) return code;
    return L::AddWhereGreater(code, L::SetU(0x80), L::Set(-map().threshold[0]), x);
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
  const auto code = [&](size_t i) HWY_ATTR { return BlockCodec::Encode(L::Load(m.wide + i), inverse); };
  for (size_t i = 0; i < kBlock; i += 4 * L::kWidth) {
    L::Store8x4(code(i), code(i + L::kWidth), code(i + 2 * L::kWidth), code(i + 3 * L::kWidth), codes + i);
  }
}

// ---- random bits of bf16 moments

// Philox, with a counter (x0, x1, x2, x3) in each lane of 64 bits. The words' upper halves are not part of them, and
// may hold anything.
HWY_INLINE void PhiloxRound(uint32_t key0, uint32_t key1, L::W& x0, L::W& x1, L::W& x2, L::W& x3) {
  const L::W a = L::MulLowW(x0, L::SetW(kPhiloxMultiplier0)), b = L::MulLowW(x2, L::SetW(kPhiloxMultiplier1));
  x0 = L::Xor3W(L::HighW(b), x1, L::SetW(key0));
  x2 = L::Xor3W(L::HighW(a), x3, L::SetW(key1));
  x1 = b;
  x3 = a;
}

template <size_t... kRound>
HWY_INLINE void PhiloxRounds(uint64_t seed, std::index_sequence<kRound...>, L::W& x0, L::W& x1, L::W& x2, L::W& x3) {
  const auto key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  (PhiloxRound(key0 + static_cast<uint32_t>(kRound) * kPhiloxWeyl0, key1 + static_cast<uint32_t>(kRound) * kPhiloxWeyl1,
               x0, x1, x2, x3),
   ...);
}

// Computes the 16 random bits of each element of the moment's block.
HWY_INLINE void RandomBlock(const RandomKey& key, const MomentBlock& m, uint16_t* HWY_RESTRICT to) {
  constexpr size_t kPerCounter = 8;
  const uint64_t group = m.element / kPerCounter;
  for (size_t i = 0; i < kBlock / kPerCounter; i += L::kWideWidth) {
    L::W x0 = L::AddW(L::OrderW(), L::SetW(static_cast<uint32_t>(group) + static_cast<uint32_t>(i)));
    L::W x1 = L::SetW(group >> 32), x2 = L::SetW(static_cast<uint32_t>(key.step));
    L::W x3 = L::SetW(key.unit << 2 | m.number);
    PhiloxRounds(key.seed, std::make_index_sequence<kPhiloxRounds>(), x0, x1, x2, x3);
    L::StoreWordsW(x0, x1, x2, x3, to + i * kPerCounter);
  }
}

// Stores the moment's elements i ... i + 2 * kWidth - 1.
HWY_INLINE void StoreRounded(const MomentBlock& m, const uint16_t* HWY_RESTRICT random, size_t i) {
  // The sum carries into the kept bits at random; the 16 low bits are then cut off. Inf and the one NaN have zeros
  // there and never carry.
  const auto rounded = [&](size_t at) HWY_ATTR {
    return L::ShiftRight<16>(L::AddU(L::Bits(L::Load(m.wide + at)), L::Load16(random + at)));
  };
  L::Store16x2<false>(rounded(i), rounded(i + L::kWidth), reinterpret_cast<uint16_t*>(m.values) + i);
}

}  // namespace
}  // namespace ballast::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
