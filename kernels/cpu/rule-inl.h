// The optimizers' rules over lanes, and what a loop over one block does with the block's moments. Compiled once per
// instruction set.
#if defined(BALLAST_KERNELS_CPU_RULE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef BALLAST_KERNELS_CPU_RULE_INL_H_
#undef BALLAST_KERNELS_CPU_RULE_INL_H_
#else
#define BALLAST_KERNELS_CPU_RULE_INL_H_
#endif

#include "ballast/kernels/cpu/lanes-inl.h"
#include "ballast/kernels/cpu/moments-inl.h"
#include "ballast/kernels/optimizer.h"

HWY_BEFORE_NAMESPACE();
namespace ballast::kernels::HWY_NAMESPACE {
namespace {

#define BALLAST_LANES HWY_INLINE
#include "ballast/kernels/optimizer_math.inc"
#undef BALLAST_LANES

struct Broadcast {
  explicit Broadcast(const Coefficients& c)
      : factor(L::SetUniform(c.factor)),
        weight_decay(L::SetUniform(c.weight_decay)),
        keep(L::SetUniform(c.keep)),
        keep1(L::SetUniform(c.keep1)),
        take1(L::SetUniform(c.take1)),
        keep2(L::SetUniform(c.keep2)),
        take2(L::SetUniform(c.take2)),
        take3(L::SetUniform(c.take3)),
        step_size(L::SetUniform(c.step_size)),
        root_scale(L::SetUniform(c.root_scale)),
        eps(L::SetUniform(c.eps)),
        start(L::SetUniform(c.start)) {}
  L::Uniform factor, weight_decay, keep, keep1, take1, keep2, take2, take3, step_size, root_scale, eps, start;
};

constexpr bool Blockwise(MomentFormat format) { return format == MomentFormat::kF8 || format == MomentFormat::kI8; }
// Whether a NaN among the rule's outputs is always one in p too.
constexpr bool NanReachesParameter(Rule rule) { return rule != Rule::kLion && rule != Rule::kScheduleFree; }

// The steps of the loop are functions of their own for the reader alone: all are inlined, and the machine code is that
// of one loop.
template <Rule kRule, MomentFormat kFormat>
HWY_INLINE void LoadMoments(const MomentBlock& a, const MomentBlock& b, const MomentBlock& x, const L::Uniform* scale,
                            size_t i, F& ai, F& bi, F& xi) {
  constexpr int kMoments = MomentsOf(kRule);
  if constexpr (kMoments > 0) ai = LoadMoment<kFormat, !IsSecondMoment(kRule, 0)>(a, scale[0], i);
  if constexpr (kMoments > 1) bi = LoadMoment<kFormat, false>(b, scale[1], i);
  if constexpr (kMoments > 2) xi = LoadMoment<kFormat, !IsSecondMoment(kRule, 2)>(x, scale[2], i);
}

template <Rule kRule>
HWY_INLINE void StoreMoments(F ai, F bi, F xi, const MomentBlock& a, const MomentBlock& b, const MomentBlock& x,
                             size_t i) {
  constexpr int kMoments = MomentsOf(kRule);
  if constexpr (kMoments > 0) L::Store(ai, a.wide + i);
  if constexpr (kMoments > 1) L::Store(bi, b.wide + i);
  if constexpr (kMoments > 2) L::Store(xi, x.wide + i);
}

template <Rule kRule, MomentFormat kFormat>
HWY_INLINE void KeepLargest(F ai, F bi, F xi, U& largest_a, U& largest_b, U& largest_x) {
  constexpr int kMoments = Blockwise(kFormat) ? MomentsOf(kRule) : 0;
  if constexpr (kMoments > 0) largest_a = L::MaxU(largest_a, Magnitude<L>(L::Bits(ai)));
  if constexpr (kMoments > 1) largest_b = L::MaxU(largest_b, Magnitude<L>(L::Bits(bi)));
  if constexpr (kMoments > 2) largest_x = L::MaxU(largest_x, Magnitude<L>(L::Bits(xi)));
}

// Of fp32 moments; a loop over others is bound by computing.
template <Rule kRule, MomentFormat kFormat, size_t kStep>
HWY_INLINE void Prefetch(float* p, const MomentBlock& a, const MomentBlock& b, const MomentBlock& x, size_t i) {
  if constexpr (kFormat != MomentFormat::kF32) return;
  constexpr int kMoments = MomentsOf(kRule);
  L::PrefetchAhead<kStep>(p + i);
  if constexpr (kMoments > 0) L::PrefetchAhead<kStep>(a.wide + i);
  if constexpr (kMoments > 1) L::PrefetchAhead<kStep>(b.wide + i);
  if constexpr (kMoments > 2) L::PrefetchAhead<kStep>(x.wide + i);
}

// Rounds the new values of elements i ... i + 2 * kWidth - 1 of bf16 moments.
template <Rule kRule, MomentFormat kFormat>
HWY_INLINE void RoundMoments(const MomentBlock& a, const MomentBlock& b, const MomentBlock& x,
                             const uint16_t (*random)[kBlock], size_t i) {
  constexpr int kMoments = kFormat == MomentFormat::kBf16 ? MomentsOf(kRule) : 0;
  if constexpr (kMoments > 0) StoreRounded(a, random[0], i);
  if constexpr (kMoments > 1) StoreRounded(b, random[1], i);
  if constexpr (kMoments > 2) StoreRounded(x, random[2], i);
}

// Before the loop: computes the random bits of bf16 moments.
template <Rule kRule, MomentFormat kFormat>
HWY_INLINE void RandomBlocks(const RandomKey& key, const MomentBlock* moments, uint16_t (*random)[kBlock]) {
  if constexpr (kFormat == MomentFormat::kBf16) {
    for (int k = 0; k < MomentsOf(kRule); ++k) RandomBlock(key, moments[k], random[k]);
  }
}

// After the loop: makes the codes of moments in eight bits.
template <Rule kRule, MomentFormat kFormat>
HWY_INLINE void CodeMoments(U largest_a, U largest_b, U largest_x, MomentBlock* moments) {
  if constexpr (Blockwise(kFormat)) {
    const uint32_t largest[] = {L::MaxOfLanes(largest_a), L::MaxOfLanes(largest_b), L::MaxOfLanes(largest_x)};
    for (int k = 0; k < MomentsOf(kRule); ++k) {
      moments[k].largest_bits = largest[k];  // a block with any NaN is stored as NaN
      IsSecondMoment(kRule, k) ? StoreCodes<Codec<kFormat, false>>(moments[k])
                               : StoreCodes<Codec<kFormat, true>>(moments[k]);
    }
  }
}

// Makes every NaN of an array the one NaN.
inline void StoreOneNan(float* array, size_t n) {
  for (size_t i = 0; i < n; i += L::kWidth) L::Store(L::OneNan(L::Load(array + i)), array + i);
}

}  // namespace
}  // namespace ballast::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
