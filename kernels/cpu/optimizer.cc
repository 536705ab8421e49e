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
#include "ballast/kernels/cpu/rule-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ballast::kernels::HWY_NAMESPACE {
namespace {

// A lambda whose every call is inlined: compilers would not inline large lambdas by themselves.
#define BALLAST_INLINE_LAMBDA HWY_ATTR __attribute__((always_inline))

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

// kEnds = kF32: the gradient has been widened, and `working` is not written. n: kBlock, or a multiple if RunsOn.
template <Rule kRule, MomentFormat kFormat, Ends kEnds>
void RuleBlock(const Coefficients& coefficients, const RandomKey& key, size_t n, const std::byte* HWY_RESTRICT gradient,
               float* HWY_RESTRICT p, MomentBlock* moments, std::byte* HWY_RESTRICT working) {
  const size_t count = RunsOn(kFormat, kEnds) ? n : kBlock;
  constexpr Dtype kGradient = kEnds == Ends::kF32 ? Dtype::kF32 : Dtype::kBf16;
  constexpr int kMoments = MomentsOf(kRule);
  constexpr bool kRoots = kFormat == MomentFormat::kF8;
  constexpr bool kBlockwise = Blockwise(kFormat);
  const Broadcast c(coefficients);
  // Copies, so that nothing stored below can change them.
  const MomentBlock a = moments[0], b = moments[1], x = moments[2];
  L::Uniform scale[kMomentsMax] = {c.eps, c.eps, c.eps};
  U largest_a = L::SetU(0), largest_b = largest_a, largest_x = largest_a;
  for (int k = 0; kBlockwise && k < kMoments; ++k) scale[k] = L::SetUniform(*moments[k].scale);
  U seen = L::SetU(0);  // the largest magnitude, by integers: above Inf's it is a NaN
  const auto step = [&](size_t i) BALLAST_INLINE_LAMBDA {
    F pi = L::Load(p + i), ai = pi, bi = pi, xi = pi;
    LoadMoments<kRule, kFormat>(a, b, x, scale, i, ai, bi, xi);
    Step<kRule, kRoots, L>(c, LoadAs<L, kGradient>(gradient, i), pi, ai, bi, xi);
    L::Store(pi, p + i);
    StoreMoments<kRule>(ai, bi, xi, a, b, x, i);
    seen = L::MaxU(seen, Magnitude<L>(L::Bits(pi)));
    if constexpr (!NanReachesParameter(kRule)) seen = L::MaxU(seen, Magnitude<L>(L::Bits(ai)));
    KeepLargest<kRule, kFormat>(ai, bi, xi, largest_a, largest_b, largest_x);
    return pi;
  };
  HWY_ALIGN uint16_t random[kFormat == MomentFormat::kBf16 ? kMomentsMax : 1][kBlock];
  const auto narrow = [=](F first, F second, size_t i) BALLAST_INLINE_LAMBDA {
    if constexpr (kEnds != Ends::kF32) {
      L::template Store16x2<kEnds == Ends::kBf16Stream>(NarrowBf16OneNan<L>(first), NarrowBf16OneNan<L>(second),
                                                        reinterpret_cast<uint16_t*>(working) + i);
    }
  };
  RandomBlocks<kRule, kFormat>(key, moments, random);
  constexpr size_t kStep = 2 * L::kWidth;
  for (size_t i = 0; i < count; i += kStep) {
    Prefetch<kRule, kFormat, kStep>(p, a, b, x, i);
    const F first = step(i), second = step(i + L::kWidth);
    narrow(first, second, i);
    RoundMoments<kRule, kFormat>(a, b, x, random, i);
  }
  if (L::MaxOfLanes(seen) > 0x7f800000u) {  // rare, and not the loop's to look after
    StoreOneNan(p, count);
    for (int k = 0; k < kMoments; ++k) StoreOneNan(moments[k].wide, count);
    for (size_t i = 0; i < count; i += kStep) {
      narrow(L::Load(p + i), L::Load(p + i + L::kWidth), i);
      RoundMoments<kRule, kFormat>(a, b, x, random, i);
    }
  }
  CodeMoments<kRule, kFormat>(largest_a, largest_b, largest_x, moments);
}

template <Ends kEnds, Rule kRule>
BlockRule BlockRuleOf(MomentFormat format) {
  switch (format) {
    case MomentFormat::kF32:
      return RuleBlock<kRule, MomentFormat::kF32, kEnds>;
    case MomentFormat::kBf16:
      if constexpr (TakesBf16(kRule)) return RuleBlock<kRule, MomentFormat::kBf16, kEnds>;
      return nullptr;
    case MomentFormat::kI8:
      if constexpr (TakesEightBits(kRule)) return RuleBlock<kRule, MomentFormat::kI8, kEnds>;
      return nullptr;
    case MomentFormat::kF8:
      if constexpr (TakesEightBits(kRule)) return RuleBlock<kRule, MomentFormat::kF8, kEnds>;
      return nullptr;
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
    case Rule::kAdemamix:
      return BlockRuleOf<kEnds, Rule::kAdemamix>(format);
    case Rule::kScheduleFree:
      return BlockRuleOf<kEnds, Rule::kScheduleFree>(format);
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
    MomentBlock block[kMomentsMax] = {};
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
      case Dtype::kE4m3Blocks:
        return EncodeE4m3Block<L>(master, working);
      default:
        return NarrowBlock<Dtype::kBf16>(master, working);
    }
  }
};

// Copies the last, short block into a whole block, so that all elements take the same path.
void ShortBlock(const Pass& pass, const UpdateSpan& span, const MomentSpan* moment, uint64_t begin) {
  const uint64_t n = span.n - begin, width = MomentBytes(pass.spec.moments, 1);
  const uint64_t gradient_bytes = ElementBytes(pass.spec.gradient);
  const Dtype dtype = pass.spec.working;
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
  if (dtype == Dtype::kE4m3Blocks) {  // whose scale is of the span's elements alone
    std::fill(master + n, master + kBlock, 0.0f);
    EncodeE4m3Block<L>(master, working);
  }
  if (pass.spec.master != MasterFormat::kLent)
    std::memcpy(span.working + BytesOf(dtype, begin), working, BytesOf(dtype, n));
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
  const uint64_t gradient_bytes = ElementBytes(spec.gradient);
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
               spec.master == MasterFormat::kLent ? nullptr : span.working + BytesOf(spec.working, begin),
               key.first_element + begin);
  }
  L::FlushStream();
}

}  // namespace ballast::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ballast::kernels {
HWY_EXPORT(UpdateLoop);

void Update(const OptimizerSpec& spec, const Coefficients& c, const RandomKey& key, const UpdateSpan& span) {
  if (!Unsupported(spec).empty()) std::abort();  // a caller's bug, which would write beyond the arrays
  const IeeeMode mode;
  HWY_DYNAMIC_DISPATCH(UpdateLoop)(spec, c, key, span);
}

}  // namespace ballast::kernels
#endif
