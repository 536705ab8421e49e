// Update() in blocks of kMomentBlock elements that stay in the first-level cache: gradient and moments are widened to
// fp32, the rule runs over fp32, moments and working parameters are narrowed. fp32 moments are used where they lie.
#include "ballast/kernels/optimizer.h"

#include <algorithm>
#include <cstring>

#include "ballast/kernels/cpu/highway_targets.h"
#include "ballast/kernels/dynamic_map.h"
#include "ballast/kernels/moment_formats.h"
#include "ballast/kernels/philox.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ballast/kernels/cpu/optimizer.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h, which includes this file once per target.
#include "ballast/kernels/cpu/lanes-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ballast::kernels::HWY_NAMESPACE {
namespace {

#define BALLAST_LANES HWY_INLINE
#include "ballast/kernels/optimizer_math.inc"
#undef BALLAST_LANES

constexpr size_t kBlock = kMomentBlock;
using L = Lanes;
using F = L::F;
using U = L::U;

struct Broadcast {
  explicit Broadcast(const Coefficients& c)
      : factor(L::Set(c.factor)),
        weight_decay(L::Set(c.weight_decay)),
        keep(L::Set(c.keep)),
        keep1(L::Set(c.keep1)),
        take1(L::Set(c.take1)),
        keep2(L::Set(c.keep2)),
        take2(L::Set(c.take2)),
        step_size(L::Set(c.step_size)),
        root_scale(L::Set(c.root_scale)),
        eps(L::Set(c.eps)) {}
  F factor, weight_decay, keep, keep1, take1, keep2, take2, step_size, root_scale, eps;
};

// ---- gradient in, working parameters out

template <Dtype kDtype>
HWY_INLINE F LoadAs(const std::byte* from, size_t i) {
  if constexpr (kDtype == Dtype::kF32) return L::Load(reinterpret_cast<const float*>(from) + i);
  if constexpr (kDtype == Dtype::kBf16) return WidenBf16<L>(L::Load16(reinterpret_cast<const uint16_t*>(from) + i));
  if constexpr (kDtype == Dtype::kF16) return L::F16Load(reinterpret_cast<const uint16_t*>(from) + i);
}

// OneNan has been applied. kStream: past the caches, for what is not read again soon.
template <Dtype kDtype, bool kStream>
HWY_INLINE void StoreAs(F x, std::byte* to, size_t i) {
  if constexpr (kDtype == Dtype::kF32) L::Store(x, reinterpret_cast<float*>(to) + i);
  if constexpr (kDtype == Dtype::kF16) L::F16Store(x, reinterpret_cast<uint16_t*>(to) + i);
  if constexpr (kDtype == Dtype::kBf16 && kStream) L::Stream16(NarrowBf16<L>(x), reinterpret_cast<uint16_t*>(to) + i);
  if constexpr (kDtype == Dtype::kBf16 && !kStream) L::Store16(NarrowBf16<L>(x), reinterpret_cast<uint16_t*>(to) + i);
}

template <Dtype kDtype>
void WidenBlock(const std::byte* from, float* HWY_RESTRICT to) {
  for (size_t i = 0; i < kBlock; i += L::kWidth) L::Store(LoadAs<kDtype>(from, i), to + i);
}

template <Dtype kDtype, bool kStream>
void NarrowBlock(const float* HWY_RESTRICT from, std::byte* to) {
  for (size_t i = 0; i < kBlock; i += L::kWidth) StoreAs<kDtype, kStream>(L::Load(from + i), to, i);
}

// ---- moments

HWY_INLINE U Magnitude(U bits) { return L::And(bits, L::SetU(0x7fffffffu)); }
HWY_INLINE U IsZero(U a, U yes, U no) { return L::SelectLess(a, L::SetU(1), yes, no); }

// A code of one byte for x / scale, whose magnitude is at most kLargest; kFirst: with sign. Encode(x, 1 / scale).
template <MomentFormat kFormat, bool kFirst>
struct Codec;

template <bool kFirst>
struct Codec<MomentFormat::kF8, kFirst> {
  using Format = std::conditional_t<kFirst, F8First, F8Root>;
  static constexpr float kLargest = Format::kLargest;

  static HWY_INLINE U Encode(F x, F inverse) {
    const F magnitude = kFirst ? L::FromBits(Magnitude(L::Bits(x))) : x;
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
    const F magnitude = L::FromBits(Magnitude(bits));
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

// The scale of a block whose largest magnitude has these fp32 bits, and its inverse; 0 where the block becomes zeros.
struct BlockScale {
  float scale, inverse;
};
BlockScale ScaleOf(uint32_t largest_bits, float format_largest) {
  if (largest_bits >= 0x7f800000u) return {std::bit_cast<float>(kNanBits), 0};
  const float scale = std::bit_cast<float>(largest_bits) * (1 / format_largest);
  if (std::bit_cast<uint32_t>(scale) < 0x00800000u) return {0, 0};
  return {scale, 1 / scale};
}

// One moment of one block: where it lies, and for all formats but fp32 its new values until they are stored.
struct MomentBlock {
  std::byte* values;
  float* scale;
  uint64_t element;       // of the block's first, in its unit
  uint32_t number;        // of the moment
  float* wide;            // kBlock
  uint32_t largest_bits;  // of `wide`, by integers: the same in any order, and NaN beats Inf
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

template <class Codec>
void StoreCodes(const MomentBlock& m) {
  const BlockScale s = ScaleOf(m.largest_bits, Codec::kLargest);
  auto* codes = reinterpret_cast<uint8_t*>(m.values);
  *m.scale = s.scale;
  if (s.inverse == 0) {
    std::memset(codes, 0, kBlock);
    return;
  }
  const F inverse = L::Set(s.inverse);
  const auto code = [&m, inverse](size_t i) HWY_ATTR { return Codec::Encode(L::Load(m.wide + i), inverse); };
  for (size_t i = 0; i < kBlock; i += 4 * L::kWidth) {
    L::Store8x4(code(i), code(i + L::kWidth), code(i + 2 * L::kWidth), code(i + 3 * L::kWidth), codes + i);
  }
}

// The 16 random bits of each element of the block that begins at `element` of its unit.
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
    // What is cut off below is what may carry. Inf and the one NaN have nothing there.
    L::Store16(L::ShiftRight<16>(L::AddU(L::Bits(L::Load(m.wide + i)), L::Load16(random + i))), to + i);
  }
}

// ---- the rule

using BlockRule = void (*)(const Coefficients& c, const RandomKey& key, const float* gradient, float* p,
                           MomentBlock* moments);

template <Rule kRule, MomentFormat kFormat>
void RuleBlock(const Coefficients& coefficients, const RandomKey& key, const float* HWY_RESTRICT gradient,
               float* HWY_RESTRICT p, MomentBlock* moments) {
  constexpr int kMoments = MomentsOf(kRule);
  constexpr bool kRoots = kFormat == MomentFormat::kF8;
  constexpr bool kBlockwise = kFormat == MomentFormat::kF8 || kFormat == MomentFormat::kI8;
  const Broadcast c(coefficients);
  // Copies, so that nothing stored below can change them.
  MomentBlock a = {}, b = {}, x = {};
  F scale[kMomentsMax] = {c.eps, c.eps, c.eps};
  U largest[kMomentsMax] = {L::SetU(0), L::SetU(0), L::SetU(0)};
  if constexpr (kMoments > 0) a = moments[0];
  if constexpr (kMoments > 1) b = moments[1];
  if constexpr (kMoments > 2) x = moments[2];
  for (int k = 0; kBlockwise && k < kMoments; ++k) scale[k] = L::Set(*moments[k].scale);
  for (size_t i = 0; i < kBlock; i += L::kWidth) {
    F pi = L::Load(p + i), ai = pi, bi = pi, xi = pi;
    if constexpr (kMoments > 0) ai = LoadMoment<kFormat, !IsSecondMoment(kRule, 0)>(a, scale[0], i);
    if constexpr (kMoments > 1) bi = LoadMoment<kFormat, false>(b, scale[1], i);
    if constexpr (kMoments > 2) xi = LoadMoment<kFormat, false>(x, scale[2], i);
    Step<kRule, kRoots, L>(c, L::Load(gradient + i), pi, ai, bi, xi);
    L::Store(L::OneNan(pi), p + i);
    if constexpr (kMoments > 0) L::Store(kBlockwise ? ai : L::OneNan(ai), a.wide + i);
    if constexpr (kMoments > 1) L::Store(kBlockwise ? bi : L::OneNan(bi), b.wide + i);
    if constexpr (kMoments > 2) L::Store(kBlockwise ? xi : L::OneNan(xi), x.wide + i);
    // A block with a NaN is stored as one, whichever it is.
    if constexpr (kBlockwise && kMoments > 0) largest[0] = L::MaxU(largest[0], Magnitude(L::Bits(ai)));
    if constexpr (kBlockwise && kMoments > 1) largest[1] = L::MaxU(largest[1], Magnitude(L::Bits(bi)));
    if constexpr (kBlockwise && kMoments > 2) largest[2] = L::MaxU(largest[2], Magnitude(L::Bits(xi)));
  }
  for (int k = 0; k < kMoments; ++k) {
    moments[k].largest_bits = kBlockwise ? L::MaxOfLanes(largest[k]) : 0;
    if constexpr (kFormat == MomentFormat::kBf16) StoreStochastic(moments[k], key);
    if constexpr (kBlockwise) {
      IsSecondMoment(kRule, k) ? StoreCodes<Codec<kFormat, false>>(moments[k])
                               : StoreCodes<Codec<kFormat, true>>(moments[k]);
    }
  }
}

template <Rule kRule>
BlockRule BlockRuleOf(MomentFormat format) {
  switch (format) {
    case MomentFormat::kF32:
      return RuleBlock<kRule, MomentFormat::kF32>;
    case MomentFormat::kBf16:
      return RuleBlock<kRule, MomentFormat::kBf16>;
    case MomentFormat::kI8:
      return RuleBlock<kRule, MomentFormat::kI8>;
    case MomentFormat::kF8:
      return RuleBlock<kRule, MomentFormat::kF8>;
  }
  return nullptr;
}

BlockRule BlockRuleOf(Rule rule, MomentFormat format) {
  switch (rule) {
    case Rule::kAdamw:
      return BlockRuleOf<Rule::kAdamw>(format);
    case Rule::kAdamwAmsgrad:
      return BlockRuleOf<Rule::kAdamwAmsgrad>(format);
    case Rule::kAdam:
      return BlockRuleOf<Rule::kAdam>(format);
    case Rule::kAdamAmsgrad:
      return BlockRuleOf<Rule::kAdamAmsgrad>(format);
    case Rule::kSgd:
      return BlockRuleOf<Rule::kSgd>(format);
    case Rule::kSgdMomentum:
      return BlockRuleOf<Rule::kSgdMomentum>(format);
    case Rule::kSgdNesterov:
      return BlockRuleOf<Rule::kSgdNesterov>(format);
    case Rule::kAdagrad:
      return BlockRuleOf<Rule::kAdagrad>(format);
    case Rule::kLion:
      return BlockRuleOf<Rule::kLion>(format);
  }
  return nullptr;
}

struct Pass {
  OptimizerSpec spec;
  Coefficients coefficients;
  RandomKey key;
  int moments;
  BlockRule rule;

  // A whole block, which begins at `element` of its unit.
  void Block(const std::byte* gradient, float* master, const MomentSpan* moment, std::byte* working,
             uint64_t element) const {
    HWY_ALIGN float wide[kMomentsMax + 1][kBlock];
    MomentBlock block[kMomentsMax];
    for (int i = 0; i < moments; ++i) {
      float* in_place = reinterpret_cast<float*>(moment[i].values);
      block[i] = {.values = moment[i].values,
                  .scale = moment[i].scales,
                  .element = element,
                  .number = static_cast<uint32_t>(i),
                  .wide = spec.moments == MomentFormat::kF32 ? in_place : wide[i],
                  .largest_bits = 0};
    }
    const float* g = reinterpret_cast<const float*>(gradient);
    if (spec.gradient != Dtype::kF32) g = wide[kMomentsMax];
    if (spec.gradient == Dtype::kBf16) WidenBlock<Dtype::kBf16>(gradient, wide[kMomentsMax]);
    if (spec.gradient == Dtype::kF16) WidenBlock<Dtype::kF16>(gradient, wide[kMomentsMax]);
    rule(coefficients, key, g, master, block);
    switch (spec.working) {
      case Dtype::kF32:
        return NarrowBlock<Dtype::kF32, false>(master, working);
      case Dtype::kF16:
        return NarrowBlock<Dtype::kF16, false>(master, working);
      default:
        if (reinterpret_cast<uintptr_t>(working) % 64 == 0) return NarrowBlock<Dtype::kBf16, true>(master, working);
        return NarrowBlock<Dtype::kBf16, false>(master, working);
    }
  }
};

// The last, short block goes through a whole one, so that there is one path for all elements.
void ShortBlock(const Pass& pass, const UpdateSpan& span, const MomentSpan* moment, uint64_t begin) {
  const uint64_t n = span.n - begin, width = MomentBytes(pass.spec.moments, 1);
  const uint64_t gradient_bytes = ElementBytes(pass.spec.gradient), working_bytes = ElementBytes(pass.spec.working);
  alignas(64) std::byte gradient[kBlock * sizeof(float)] = {}, working[kBlock * sizeof(float)];
  alignas(64) std::byte values[kMomentsMax][kBlock * sizeof(float)] = {};
  alignas(64) float master[kBlock] = {};
  MomentSpan whole[kMomentsMax];
  std::memcpy(gradient, span.gradient + begin * gradient_bytes, n * gradient_bytes);
  std::memcpy(master, span.master + begin, n * sizeof(float));
  for (int i = 0; i < pass.moments; ++i) {
    std::memcpy(values[i], moment[i].values, n * width);
    whole[i] = {.values = values[i], .scales = moment[i].scales};
  }
  pass.Block(gradient, master, whole, working, pass.key.first_element + begin);
  std::memcpy(span.master + begin, master, n * sizeof(float));
  std::memcpy(span.working + begin * working_bytes, working, n * working_bytes);
  for (int i = 0; i < pass.moments; ++i) std::memcpy(moment[i].values, values[i], n * width);
}

}  // namespace

void UpdateLoop(const OptimizerSpec& spec, const Coefficients& c, const RandomKey& key, const UpdateSpan& span) {
  const Pass pass{.spec = spec,
                  .coefficients = c,
                  .key = key,
                  .moments = MomentCount(spec),
                  .rule = BlockRuleOf(RuleOf(spec), spec.moments)};
  const uint64_t gradient_bytes = ElementBytes(spec.gradient), working_bytes = ElementBytes(spec.working);
  for (uint64_t begin = 0; begin < span.n; begin += kBlock) {
    MomentSpan moment[kMomentsMax];
    for (int i = 0; i < pass.moments; ++i) {
      moment[i].values = span.moments[static_cast<size_t>(i)].values + MomentBytes(spec.moments, begin);
      float* scales = span.moments[static_cast<size_t>(i)].scales;
      moment[i].scales = scales == nullptr ? nullptr : scales + begin / kBlock;
    }
    if (span.n - begin < kBlock) {
      ShortBlock(pass, span, moment, begin);
    } else {
      pass.Block(span.gradient + begin * gradient_bytes, span.master + begin, moment,
                 span.working + begin * working_bytes, key.first_element + begin);
    }
  }
  L::FlushStream();
}

}  // namespace ballast::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ballast::kernels {
HWY_EXPORT(UpdateLoop);

void Update(const OptimizerSpec& spec, const Coefficients& c, const RandomKey& key, const UpdateSpan& span) {
  HWY_DYNAMIC_DISPATCH(UpdateLoop)(spec, c, key, span);
}

}  // namespace ballast::kernels
#endif
