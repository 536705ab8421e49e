// Update() in blocks of kMomentBlock elements. The rule runs over fp32. Moments in another format are decoded as the
// rule reads them, and coded when the block is done. bf16 gradients are widened, and bf16 working parameters narrowed,
// within the rule's loop; other dtypes before and after the loop, through the first-level cache. With fp32 moments and
// bf16 ends, several blocks are one run of the loop.
#include "ballast/kernels/optimizer.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>

#include "ballast/kernels/cpu/highway_targets.h"
#include "ballast/kernels/ieee_mode.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ballast/kernels/cpu/optimizer.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h, which includes this file once per target.
#include "ballast/kernels/cpu/formats-inl.h"
#include "ballast/kernels/cpu/lanes-inl.h"
#include "ballast/kernels/cpu/moments-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ballast::kernels::HWY_NAMESPACE {
namespace {

// A lambda whose every call is inlined: compilers would not inline large lambdas by themselves.
#define BALLAST_INLINE_LAMBDA HWY_ATTR __attribute__((always_inline))

#define BALLAST_LANES HWY_INLINE
#include "ballast/kernels/optimizer_math.inc"
#undef BALLAST_LANES

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
        eps(L::Set(c.eps)),
        start(L::Set(c.start)) {}
  F factor, weight_decay, keep, keep1, take1, keep2, take2, step_size, root_scale, eps, start;
};

// ---- gradient in, working parameters out

template <Dtype kDtype>
void WidenBlock(const std::byte* from, float* HWY_RESTRICT to) {
  for (size_t i = 0; i < kBlock; i += L::kWidth) L::Store(LoadAs<L, kDtype>(from, i), to + i);
}

template <Dtype kDtype>
void NarrowBlock(const float* HWY_RESTRICT from, std::byte* to) {
  constexpr size_t kWidth = L::kWidth;
  for (size_t i = 0; i < kBlock; i += 4 * kWidth) {
    StoreFourAs<L, kDtype, StoreOptions{.one_nan = true}>(L::Load(from + i), L::Load(from + i + kWidth),
                                                          L::Load(from + i + 2 * kWidth),
                                                          L::Load(from + i + 3 * kWidth), to, i);
  }
}

// ---- the rule

// Formats of a block's gradient and working parameters. In most jobs both are bf16: the rule then reads and writes bf16
// itself, so that the conversion fills the time in which the rule waits for divisions and roots.
enum class Ends { kF32, kBf16, kBf16Stream };

using BlockRule = void (*)(const Coefficients& c, const RandomKey& key, size_t n, const std::byte* gradient, float* p,
                           MomentBlock* moments, std::byte* working);

// A block; of what is bf16 and fp32 throughout several, since nothing ends with a block there.
constexpr size_t kRunBlocks = 16;
constexpr bool RunsOn(MomentFormat format, Ends ends) { return format == MomentFormat::kF32 && ends != Ends::kF32; }

// Whether a NaN among the rule's outputs is always one in p too.
constexpr bool NanReachesParameter(Rule rule) { return rule != Rule::kLion; }

// kEnds = kF32: the gradient has been widened, and `working` is not written. n: kBlock, or a multiple if RunsOn.
template <Rule kRule, MomentFormat kFormat, Ends kEnds>
void RuleBlock(const Coefficients& coefficients, const RandomKey& key, size_t n, const std::byte* HWY_RESTRICT gradient,
               float* HWY_RESTRICT p, MomentBlock* moments, std::byte* HWY_RESTRICT working) {
  const size_t count = RunsOn(kFormat, kEnds) ? n : kBlock;
  constexpr Dtype kGradient = kEnds == Ends::kF32 ? Dtype::kF32 : Dtype::kBf16;
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
  U seen = L::SetU(0);  // the largest magnitude, by integers: above Inf's it is a NaN
  const auto step = [&](size_t i) BALLAST_INLINE_LAMBDA {
    F pi = L::Load(p + i), ai = pi, bi = pi, xi = pi;
    if constexpr (kMoments > 0) ai = LoadMoment<kFormat, !IsSecondMoment(kRule, 0)>(a, scale[0], i);
    if constexpr (kMoments > 1) bi = LoadMoment<kFormat, false>(b, scale[1], i);
    if constexpr (kMoments > 2) xi = LoadMoment<kFormat, false>(x, scale[2], i);
    Step<kRule, kRoots, L>(c, LoadAs<L, kGradient>(gradient, i), pi, ai, bi, xi);
    L::Store(pi, p + i);
    if constexpr (kMoments > 0) L::Store(ai, a.wide + i);
    if constexpr (kMoments > 1) L::Store(bi, b.wide + i);
    if constexpr (kMoments > 2) L::Store(xi, x.wide + i);
    seen = L::MaxU(seen, Magnitude<L>(L::Bits(pi)));
    if constexpr (!NanReachesParameter(kRule)) seen = L::MaxU(seen, Magnitude<L>(L::Bits(ai)));
    if constexpr (kBlockwise && kMoments > 0) largest[0] = L::MaxU(largest[0], Magnitude<L>(L::Bits(ai)));
    if constexpr (kBlockwise && kMoments > 1) largest[1] = L::MaxU(largest[1], Magnitude<L>(L::Bits(bi)));
    if constexpr (kBlockwise && kMoments > 2) largest[2] = L::MaxU(largest[2], Magnitude<L>(L::Bits(xi)));
    return pi;
  };
  const auto narrow = [=](F first, F second, size_t i) BALLAST_INLINE_LAMBDA {
    if constexpr (kEnds != Ends::kF32) {
      L::template Store16x2<kEnds == Ends::kBf16Stream>(NarrowBf16OneNan<L>(first), NarrowBf16OneNan<L>(second),
                                                        reinterpret_cast<uint16_t*>(working) + i);
    }
  };
  constexpr size_t kStep = 2 * L::kWidth;
  for (size_t i = 0; i < count; i += kStep) {
    if constexpr (kFormat == MomentFormat::kF32) {
      L::PrefetchAhead<kStep>(p + i);
      if constexpr (kMoments > 0) L::PrefetchAhead<kStep>(a.wide + i);
      if constexpr (kMoments > 1) L::PrefetchAhead<kStep>(b.wide + i);
      if constexpr (kMoments > 2) L::PrefetchAhead<kStep>(x.wide + i);
    }
    const F first = step(i), second = step(i + L::kWidth);
    narrow(first, second, i);
  }
  if (L::MaxOfLanes(seen) > 0x7f800000u) {
    // Rare, and not the loop's to look after: every NaN becomes the one NaN.
    for (float* array : {p, a.wide, b.wide, x.wide}) {
      for (size_t i = 0; array != nullptr && i < count; i += L::kWidth)
        L::Store(L::OneNan(L::Load(array + i)), array + i);
    }
    for (size_t i = 0; i < count; i += kStep) narrow(L::Load(p + i), L::Load(p + i + L::kWidth), i);
  }
  for (int k = 0; k < kMoments; ++k) {
    // A block with any NaN is stored as NaN.
    moments[k].largest_bits = kBlockwise ? L::MaxOfLanes(largest[k]) : 0;
    if constexpr (kFormat == MomentFormat::kBf16) StoreStochastic(moments[k], key);
    if constexpr (kBlockwise) {
      IsSecondMoment(kRule, k) ? StoreCodes<Codec<kFormat, false>>(moments[k])
                               : StoreCodes<Codec<kFormat, true>>(moments[k]);
    }
  }
}

template <Ends kEnds, Rule kRule>
BlockRule BlockRuleOf(MomentFormat format) {
  switch (format) {
    case MomentFormat::kF32:
      return RuleBlock<kRule, MomentFormat::kF32, kEnds>;
    case MomentFormat::kBf16:
      return RuleBlock<kRule, MomentFormat::kBf16, kEnds>;
    case MomentFormat::kI8:
      return RuleBlock<kRule, MomentFormat::kI8, kEnds>;
    case MomentFormat::kF8:
      return RuleBlock<kRule, MomentFormat::kF8, kEnds>;
  }
  return nullptr;
}

template <Ends kEnds>
BlockRule BlockRuleOf(Rule rule, MomentFormat format) {
  switch (rule) {
    case Rule::kAdamw:
      return BlockRuleOf<kEnds, Rule::kAdamw>(format);
    case Rule::kAdamwAmsgrad:
      return BlockRuleOf<kEnds, Rule::kAdamwAmsgrad>(format);
    case Rule::kAdam:
      return BlockRuleOf<kEnds, Rule::kAdam>(format);
    case Rule::kAdamAmsgrad:
      return BlockRuleOf<kEnds, Rule::kAdamAmsgrad>(format);
    case Rule::kSgd:
      return BlockRuleOf<kEnds, Rule::kSgd>(format);
    case Rule::kSgdMomentum:
      return BlockRuleOf<kEnds, Rule::kSgdMomentum>(format);
    case Rule::kSgdNesterov:
      return BlockRuleOf<kEnds, Rule::kSgdNesterov>(format);
    case Rule::kAdagrad:
      return BlockRuleOf<kEnds, Rule::kAdagrad>(format);
    case Rule::kLion:
      return BlockRuleOf<kEnds, Rule::kLion>(format);
  }
  return nullptr;
}

struct Pass {
  OptimizerSpec spec;
  Coefficients coefficients;
  RandomKey key;
  int moments;
  BlockRule wide;            // dtypes other than bf16
  BlockRule bf16, streamed;  // both bf16; `streamed` past the caches

  // Elements that Block takes at once.
  size_t RunMax() const {
    const bool both = spec.gradient == Dtype::kBf16 && spec.working == Dtype::kBf16;
    return RunsOn(spec.moments, both ? Ends::kBf16 : Ends::kF32) ? kRunBlocks * kBlock : kBlock;
  }

  // n: kBlock, or a multiple up to RunMax; the first is `element` of its unit.
  void Block(size_t n, const std::byte* gradient, float* master, const MomentSpan* moment, std::byte* working,
             uint64_t element) const {
    HWY_ALIGN float wide_moments[kMomentsMax][kBlock];
    MomentBlock block[kMomentsMax];
    for (int i = 0; i < moments; ++i) {
      float* in_place = reinterpret_cast<float*>(moment[i].values);
      block[i] = {.values = moment[i].values,
                  .scale = moment[i].scales,
                  .element = element,
                  .number = static_cast<uint32_t>(i),
                  .wide = spec.moments == MomentFormat::kF32 ? in_place : wide_moments[i],
                  .largest_bits = 0};
    }
    if (spec.gradient == Dtype::kBf16 && spec.working == Dtype::kBf16) {
      const bool aligned = reinterpret_cast<uintptr_t>(working) % 64 == 0;
      return (aligned ? streamed : bf16)(coefficients, key, n, gradient, master, block, working);
    }
    HWY_ALIGN float widened[kBlock];
    const std::byte* g = spec.gradient == Dtype::kF32 ? gradient : reinterpret_cast<const std::byte*>(widened);
    if (spec.gradient == Dtype::kBf16) WidenBlock<Dtype::kBf16>(gradient, widened);
    if (spec.gradient == Dtype::kF16) WidenBlock<Dtype::kF16>(gradient, widened);
    wide(coefficients, key, n, g, master, block, working);
    if (spec.master == MasterFormat::kLent) return;
    switch (spec.working) {
      case Dtype::kF32:
        return NarrowBlock<Dtype::kF32>(master, working);
      case Dtype::kF16:
        return NarrowBlock<Dtype::kF16>(master, working);
      default:
        return NarrowBlock<Dtype::kBf16>(master, working);
    }
  }
};

// Copies the last, short block into a whole block, so that all elements take the same path.
void ShortBlock(const Pass& pass, const UpdateSpan& span, const MomentSpan* moment, uint64_t begin) {
  const uint64_t n = span.n - begin, width = MomentBytes(pass.spec.moments, 1);
  const uint64_t gradient_bytes = ElementBytes(pass.spec.gradient), working_bytes = ElementBytes(pass.spec.working);
  alignas(64) std::byte gradient[kBlock * sizeof(float)] = {};
  alignas(64) std::byte working_memory[kBlock * sizeof(float) + 4];
  std::byte* const working = working_memory + 4;  // not aligned for stores past the caches
  alignas(64) std::byte values[kMomentsMax][kBlock * sizeof(float)] = {};
  alignas(64) float master[kBlock] = {};
  MomentSpan whole[kMomentsMax];
  std::memcpy(gradient, span.gradient + begin * gradient_bytes, n * gradient_bytes);
  std::memcpy(master, span.master + begin, n * sizeof(float));
  for (int i = 0; i < pass.moments; ++i) {
    std::memcpy(values[i], moment[i].values, n * width);
    whole[i] = {.values = values[i], .scales = moment[i].scales};
  }
  pass.Block(kBlock, gradient, master, whole, working, pass.key.first_element + begin);
  std::memcpy(span.master + begin, master, n * sizeof(float));
  if (pass.spec.master != MasterFormat::kLent)
    std::memcpy(span.working + begin * working_bytes, working, n * working_bytes);
  for (int i = 0; i < pass.moments; ++i) std::memcpy(moment[i].values, values[i], n * width);
}

}  // namespace

void UpdateLoop(const OptimizerSpec& spec, const Coefficients& c, const RandomKey& key, const UpdateSpan& span) {
  const Rule rule = RuleOf(spec, c);
  const Pass pass{.spec = spec,
                  .coefficients = c,
                  .key = key,
                  .moments = MomentCount(spec),
                  .wide = BlockRuleOf<Ends::kF32>(rule, spec.moments),
                  .bf16 = BlockRuleOf<Ends::kBf16>(rule, spec.moments),
                  .streamed = BlockRuleOf<Ends::kBf16Stream>(rule, spec.moments)};
  const uint64_t gradient_bytes = ElementBytes(spec.gradient), working_bytes = ElementBytes(spec.working);
  for (uint64_t begin = 0, n = 0; begin < span.n; begin += n) {
    n = std::min<uint64_t>(pass.RunMax(), (span.n - begin) / kBlock * kBlock);
    MomentSpan moment[kMomentsMax];
    for (int i = 0; i < pass.moments; ++i) {
      moment[i].values = span.moments[static_cast<size_t>(i)].values + MomentBytes(spec.moments, begin);
      float* scales = span.moments[static_cast<size_t>(i)].scales;
      moment[i].scales = scales == nullptr ? nullptr : scales + begin / kBlock;
    }
    if (n == 0) {
      ShortBlock(pass, span, moment, begin);
      break;
    }
    pass.Block(n, span.gradient + begin * gradient_bytes, span.master + begin, moment,
               spec.master == MasterFormat::kLent ? nullptr : span.working + begin * working_bytes,
               key.first_element + begin);
  }
  L::FlushStream();
}

// ---- moments out

template <MomentFormat kFormat, bool kFirst>
void ReadBlock(const MomentBlock& m, float* HWY_RESTRICT to) {
  const F scale = L::Set(m.scale == nullptr ? 1.0f : *m.scale);
  for (size_t i = 0; i < kBlock; i += L::kWidth) {
    const F value = LoadMoment<kFormat, kFirst>(m, scale, i);
    L::Store(L::OneNan(kFormat == MomentFormat::kF8 && !kFirst ? L::Mul(value, value) : value), to + i);
  }
}

template <bool kFirst>
void ReadBlock(MomentFormat format, const MomentBlock& m, float* to) {
  switch (format) {
    case MomentFormat::kF32:
      return ReadBlock<MomentFormat::kF32, kFirst>(m, to);
    case MomentFormat::kBf16:
      return ReadBlock<MomentFormat::kBf16, kFirst>(m, to);
    case MomentFormat::kI8:
      return ReadBlock<MomentFormat::kI8, kFirst>(m, to);
    case MomentFormat::kF8:
      return ReadBlock<MomentFormat::kF8, kFirst>(m, to);
  }
}

void ReadMomentLoop(const OptimizerSpec& spec, int index, const MomentSpan& moment, absl::Span<float> to) {
  const bool first = !IsSecondMoment(spec, index), scaled = MomentScaleBytes(spec.moments, 1) != 0;
  for (uint64_t begin = 0; begin < to.size(); begin += kBlock) {
    const uint64_t n = std::min<uint64_t>(kBlock, to.size() - begin);
    HWY_ALIGN std::byte values[kBlock * sizeof(float)] = {};
    HWY_ALIGN float wide[kBlock];
    std::memcpy(values, moment.values + MomentBytes(spec.moments, begin), MomentBytes(spec.moments, n));
    const MomentBlock block{.values = values,
                            .scale = scaled ? moment.scales + begin / kBlock : nullptr,
                            .element = 0,
                            .number = 0,
                            .wide = reinterpret_cast<float*>(values),
                            .largest_bits = 0};
    first ? ReadBlock<true>(spec.moments, block, wide) : ReadBlock<false>(spec.moments, block, wide);
    std::memcpy(to.data() + begin, wide, n * sizeof(float));
  }
}

// ---- moments in

template <bool kFirst>
void WriteBlock(MomentFormat format, const RandomKey& key, const MomentBlock& m) {
  switch (format) {
    case MomentFormat::kF32:
      std::memcpy(m.values, m.wide, kBlock * sizeof(float));
      return;
    case MomentFormat::kBf16:
      return StoreStochastic(m, key);
    case MomentFormat::kI8:
      return StoreCodes<Codec<MomentFormat::kI8, kFirst>>(m);
    case MomentFormat::kF8:
      return StoreCodes<Codec<MomentFormat::kF8, kFirst>>(m);
  }
}

// Bits of the magnitude from which a block's scale is made: the largest. The signed dynamic map has 1 and no -1: if the
// largest value is negative, the block was read with its most negative code, so dividing by this code's value gives the
// old scale, and the old codes, again.
uint32_t LargestBits(MomentFormat format, bool first, const float* wide) {
  U largest = L::SetU(0);
  for (size_t i = 0; i < kBlock; i += L::kWidth) largest = L::MaxU(largest, Magnitude<L>(L::Bits(L::Load(wide + i))));
  const uint32_t bits = L::MaxOfLanes(largest);
  if (format != MomentFormat::kI8 || !first) return bits;
  const float magnitude = std::bit_cast<float>(bits);
  if (std::find(wide, wide + kBlock, -magnitude) == wide + kBlock || magnitude == 0) return bits;
  constexpr float kMostNegative = 255 * kSignedMap.value_factor[7] + kSignedMap.value_offset[7];
  return std::bit_cast<uint32_t>(magnitude / kMostNegative);
}

void WriteMomentLoop(const OptimizerSpec& spec, int index, const RandomKey& key, absl::Span<const float> from,
                     const MomentSpan& moment) {
  const bool first = !IsSecondMoment(spec, index), scaled = MomentScaleBytes(spec.moments, 1) != 0;
  const bool roots = spec.moments == MomentFormat::kF8 && !first;
  for (uint64_t begin = 0; begin < from.size(); begin += kBlock) {
    const uint64_t n = std::min<uint64_t>(kBlock, from.size() - begin);
    HWY_ALIGN float wide[kBlock] = {};
    HWY_ALIGN std::byte values[kBlock * sizeof(float)];
    std::memcpy(wide, from.data() + begin, n * sizeof(float));
    for (size_t i = 0; roots && i < kBlock; i += L::kWidth) L::Store(L::Sqrt(L::Load(wide + i)), wide + i);
    const MomentBlock block{.values = values,
                            .scale = scaled ? moment.scales + begin / kBlock : nullptr,
                            .element = key.first_element + begin,
                            .number = static_cast<uint32_t>(index),
                            .wide = wide,
                            .largest_bits = LargestBits(spec.moments, first, wide)};
    first ? WriteBlock<true>(spec.moments, key, block) : WriteBlock<false>(spec.moments, key, block);
    std::memcpy(moment.values + MomentBytes(spec.moments, begin), values, MomentBytes(spec.moments, n));
  }
}

}  // namespace ballast::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ballast::kernels {
HWY_EXPORT(UpdateLoop);
HWY_EXPORT(ReadMomentLoop);
HWY_EXPORT(WriteMomentLoop);

void Update(const OptimizerSpec& spec, const Coefficients& c, const RandomKey& key, const UpdateSpan& span) {
  if (!Unsupported(spec).empty()) std::abort();  // a caller's bug, which would write beyond the arrays
  const IeeeMode mode;
  HWY_DYNAMIC_DISPATCH(UpdateLoop)(spec, c, key, span);
}

void ReadMoment(const OptimizerSpec& spec, int index, const MomentSpan& moment, absl::Span<float> to) {
  if (index < 0 || index >= MomentCount(spec)) std::abort();  // a caller's bug
  const IeeeMode mode;
  HWY_DYNAMIC_DISPATCH(ReadMomentLoop)(spec, index, moment, to);
}

void WriteMoment(const OptimizerSpec& spec, int index, const RandomKey& key, absl::Span<const float> from,
                 const MomentSpan& moment) {
  if (index < 0 || index >= MomentCount(spec)) std::abort();  // a caller's bug
  const IeeeMode mode;
  HWY_DYNAMIC_DISPATCH(WriteMomentLoop)(spec, index, key, from, moment);
}

}  // namespace ballast::kernels
#endif
