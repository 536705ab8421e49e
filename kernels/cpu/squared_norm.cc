#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>
#include <type_traits>

#include "ballast/kernels/cpu/gradient_dtype.h"
#include "ballast/kernels/cpu/highway_targets.h"
#include "ballast/kernels/ieee_mode.h"
#include "ballast/kernels/kernels.h"
#include "ballast/kernels/norm_tree.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ballast/kernels/cpu/squared_norm.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h, which includes this file once per target.
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ballast::kernels {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// The square of a float is exact in fp64, so fused or not, each addition is the only rounding.

// A span is read in four places by turns of so many elements: processors fetch ahead within a page, so one place alone
// waits for memory at every page. Places are up to so many leaves apart.
constexpr size_t kStreams = 4;
constexpr size_t kTurnElements = 128;
constexpr size_t kStreamLeavesMax = 64;

#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128

// As wide as the doubles of a leaf's lanes can use, at most eight of them.
using Doubles = hn::CappedTag<double, 8>;
using Words = hn::RebindToUnsigned<Doubles>;
constexpr size_t kDoubles = hn::MaxLanes(Doubles());
constexpr size_t kSums = kNormLanes / kDoubles;

// A leaf's sums between turns: sum `i` of the loop, and the largest magnitudes.
struct LeafSums {
  HWY_ALIGN double sums[kNormLanes] = {};
  HWY_ALIGN uint32_t largest[2 * kDoubles] = {};
};

// bf16 and fp16. Widening and its permutation bound the loop (AVX2, Zen 3). So magnitudes are shifted to the place of a
// double's exponent and mantissa instead. The results, also zeros and denormals, are too small by 2^896, the difference
// of the exponents' biases; multiplying by 2^896 is exact. Inf and NaN come out finite and are detected apart.
constexpr double kRebias = 0x1p896;

// How elements of a dtype are added to sums. What is added to is named and no field: compilers keep arrays in memory,
// and SVE's vectors may be neither field nor element.
template <Dtype kDtype>
struct Squares {
  using Part = std::conditional_t<kDtype == Dtype::kBf16, uint16_t, uint32_t>;
  using Parts = hn::Repartition<Part, Doubles>;
  using Sum = hn::Vec<Doubles>;
  using Word = hn::Vec<Words>;
  using Largest = hn::Vec<Parts>;

  static HWY_INLINE Sum Load(const LeafSums& leaf, size_t number) {
    return hn::Load(Doubles(), leaf.sums + number * kDoubles);
  }
  static HWY_INLINE void Store(Sum sum, size_t number, LeafSums* leaf) {
    hn::Store(sum, Doubles(), leaf->sums + number * kDoubles);
  }
  static HWY_INLINE Largest LoadLargest(const LeafSums& leaf) {
    return hn::Load(Parts(), reinterpret_cast<const Part*>(leaf.largest));
  }
  static HWY_INLINE void StoreLargest(Largest largest, LeafSums* leaf) {
    if constexpr (kDtype == Dtype::kF32) return;
    hn::Store(largest, Parts(), reinterpret_cast<Part*>(leaf->largest));
  }

  // 4 x kDoubles neighbouring elements.
  static HWY_INLINE void Add(const std::byte* from, size_t i, Sum& a, Sum& b, Sum& c, Sum& d, Largest& largest) {
    if constexpr (kDtype == Dtype::kF32) {
      const float* const at = reinterpret_cast<const float*>(from) + i;
      AddSquare(at, a);
      AddSquare(at + kDoubles, b);
      AddSquare(at + 2 * kDoubles, c);
      AddSquare(at + 3 * kDoubles, d);
    } else if constexpr (kDtype == Dtype::kBf16) {
      const auto halves = hn::LoadU(Parts(), reinterpret_cast<const Part*>(from) + i);
      const Word x = Look(halves, largest);
      constexpr uint64_t kMask = uint64_t{0x7fff} << 45;
      AddSquare<kMask>(hn::ShiftLeft<45>(x), a);
      AddSquare<kMask>(hn::ShiftLeft<29>(x), b);
      AddSquare<kMask>(hn::ShiftLeft<13>(x), c);
      AddSquare<kMask>(hn::ShiftRight<3>(x), d);
    } else {
      AddTwo(LoadF16(from, i, largest), a, b);
      AddTwo(LoadF16(from, i + 2 * kDoubles, largest), c, d);
    }
  }
  // Inf and NaN of fp32 reach the sums.
  static HWY_INLINE bool IsFinite(const LeafSums& leaf) {
    if constexpr (kDtype == Dtype::kF32) return true;
    // Signed, which magnitudes can be and every instruction set compares.
    const hn::RebindToSigned<Parts> ds;
    const auto most = hn::Set(ds, static_cast<hn::TFromD<decltype(ds)>>(kDtype == Dtype::kBf16 ? 0x7f7f : 0x7f7fffff));
    return hn::AllFalse(ds, hn::Gt(hn::BitCast(ds, LoadLargest(leaf)), most));
  }
  // Element `at` of sum `number`: its place among the leaf's lanes.
  static HWY_INLINE size_t Lane(size_t number, size_t at) {
    constexpr size_t kApart = kDtype == Dtype::kBf16 ? 4 : kDtype == Dtype::kF16 ? 2 : 1;  // elements in a word
    return number / kApart * kApart * kDoubles + number % kApart + at * kApart;
  }

 private:
  static HWY_INLINE Word LoadF16(const std::byte* from, size_t i, Largest& largest) {
    const hn::Repartition<float, Doubles> df;
    const hn::Rebind<hwy::float16_t, decltype(df)> dh;
    return Look(hn::PromoteTo(df, hn::LoadU(dh, reinterpret_cast<const hwy::float16_t*>(from) + i)), largest);
  }
  // Notes the largest magnitude.
  template <class V>
  static HWY_INLINE Word Look(V x, Largest& largest) {
    constexpr auto kMagnitude = static_cast<Part>(kDtype == Dtype::kBf16 ? 0x7fffu : 0x7fffffffu);
    const auto parts = hn::BitCast(Parts(), x);
    largest = hn::Max(largest, hn::And(parts, hn::Set(Parts(), kMagnitude)));
    return hn::BitCast(Words(), parts);
  }
  static HWY_INLINE void AddTwo(Word x, Sum& even, Sum& odd) {
    constexpr uint64_t kMask = uint64_t{0x7fffffff} << 29;
    AddSquare<kMask>(hn::ShiftLeft<29>(x), even);
    AddSquare<kMask>(hn::ShiftRight<3>(x), odd);
  }
  template <uint64_t kMask>
  static HWY_INLINE void AddSquare(Word shifted, Sum& sum) {
    const Doubles dd;
    const auto x = hn::Mul(hn::BitCast(dd, hn::And(shifted, hn::Set(Words(), kMask))), hn::Set(dd, kRebias));
    sum = hn::MulAdd(x, x, sum);
  }
  // fp32: a load that widens is a load and two instructions.
  static HWY_INLINE void AddSquare(const float* from, Sum& sum) {
    const Doubles dd;
    const auto x = hn::PromoteTo(dd, hn::LoadU(hn::Rebind<float, Doubles>(), from));
    sum = hn::MulAdd(x, x, sum);
  }
};

// Elements `begin` ... `end` of a leaf.
template <Dtype kDtype>
HWY_INLINE void AddTurn(const std::byte* HWY_RESTRICT from, size_t begin, size_t end, LeafSums* HWY_RESTRICT leaf) {
  using S = Squares<kDtype>;
  // Eight sums at a time, because the additions of one sum wait for each other.
  for (size_t first = 0; first < kSums; first += 8) {
    auto a = S::Load(*leaf, first), b = S::Load(*leaf, first + 1), c = S::Load(*leaf, first + 2);
    auto d = S::Load(*leaf, first + 3);
    const size_t more = kSums > 4 ? first + 4 : first;
    auto e = S::Load(*leaf, more), f = S::Load(*leaf, more + 1), g = S::Load(*leaf, more + 2);
    auto h = S::Load(*leaf, more + 3);
    auto largest = S::LoadLargest(*leaf), largest_of_more = largest;
    for (size_t i = begin + first * kDoubles; i < end; i += kNormLanes) {
      S::Add(from, i, a, b, c, d, largest);
      if constexpr (kSums > 4) S::Add(from, i + 4 * kDoubles, e, f, g, h, largest_of_more);
    }
    S::Store(a, first, leaf), S::Store(b, first + 1, leaf), S::Store(c, first + 2, leaf), S::Store(d, first + 3, leaf);
    if constexpr (kSums > 4) {
      S::Store(e, more, leaf), S::Store(f, more + 1, leaf), S::Store(g, more + 2, leaf), S::Store(h, more + 3, leaf);
    }
    S::StoreLargest(hn::Max(largest, largest_of_more), leaf);
  }
}

template <Dtype kDtype>
double TotalOf(const LeafSums& leaf) {
  if (!Squares<kDtype>::IsFinite(leaf)) return std::numeric_limits<double>::infinity();
  double lane[kNormLanes];
  for (size_t number = 0; number < kSums; ++number) {
    for (size_t at = 0; at < kDoubles; ++at)
      lane[Squares<kDtype>::Lane(number, at)] = leaf.sums[number * kDoubles + at];
  }
  return SumLanes(lane);
}

// The totals of a leaf of each stream: the streams begin `apart` bytes apart, and take turns.
template <Dtype kDtype, size_t kStreams>
HWY_ATTR void Leaves(const std::byte* HWY_RESTRICT from, size_t apart, double* const (&totals)[kStreams]) {
  constexpr size_t kTurn = kStreams > 1 ? kTurnElements : kNormLeafElements;
  LeafSums leaf[kStreams];
  for (size_t i = 0; i < kNormLeafElements; i += kTurn) {
    for (size_t stream = 0; stream < kStreams; ++stream)
      AddTurn<kDtype>(from + stream * apart, i, i + kTurn, &leaf[stream]);
  }
  for (size_t stream = 0; stream < kStreams; ++stream) *totals[stream] = TotalOf<kDtype>(leaf[stream]);
}

#else

template <Dtype kDtype>
float ElementAs(const std::byte* from, size_t i) {
  if constexpr (kDtype == Dtype::kF32) return reinterpret_cast<const float*>(from)[i];
  const uint16_t half = reinterpret_cast<const uint16_t*>(from)[i];
  return kDtype == Dtype::kBf16 ? FromBf16(half) : FromF16(half);
}

template <Dtype kDtype, size_t kStreams>
void Leaves(const std::byte* from, size_t apart, double* const (&totals)[kStreams]) {
  for (size_t stream = 0; stream < kStreams; ++stream, from += apart) {
    double lane[kNormLanes] = {};
    for (size_t i = 0; i < kNormLeafElements; ++i) {
      const double x = ElementAs<kDtype>(from, i);
      lane[i % kNormLanes] += x * x;
    }
    *totals[stream] = SumLanes(lane);
  }
}

#endif

template <Dtype kDtype>
double NormOf(const std::byte* HWY_RESTRICT gradient, size_t n) {
  constexpr size_t kLeafBytes = kNormLeafElements * ElementBytes(kDtype);
  NormTree tree;
  while (n >= kStreams * kNormLeafElements) {
    double total[kStreams][kStreamLeavesMax];
    const size_t leaves = std::min(n / kNormLeafElements / kStreams, kStreamLeavesMax);
    for (size_t i = 0; i < leaves; ++i) {
      double* const totals[kStreams] = {&total[0][i], &total[1][i], &total[2][i], &total[3][i]};
      Leaves<kDtype, kStreams>(gradient + i * kLeafBytes, leaves * kLeafBytes, totals);
    }
    for (const auto& stream : total) std::for_each_n(stream, leaves, [&tree](double leaf) { tree.Add(leaf); });
    n -= kStreams * leaves * kNormLeafElements;
    gradient += kStreams * leaves * kLeafBytes;
  }
  alignas(64) std::byte last[kLeafBytes];
  while (n > 0) {
    const size_t taken = std::min(n, kNormLeafElements);
    const std::byte* from = gradient;
    if (taken < kNormLeafElements) {
      // Zeros add nothing to a lane.
      std::memset(last, 0, kLeafBytes);
      std::memcpy(last, gradient, taken * ElementBytes(kDtype));
      from = last;
    }
    double leaf = 0;
    Leaves<kDtype, 1>(from, 0, {&leaf});
    tree.Add(leaf);
    n -= taken;
    gradient += kLeafBytes;
  }
  return tree.Total();
}

double NormLoop(Dtype dtype, const std::byte* gradient, size_t n) {
  if (dtype == Dtype::kF32) return NormOf<Dtype::kF32>(gradient, n);
  return dtype == Dtype::kBf16 ? NormOf<Dtype::kBf16>(gradient, n) : NormOf<Dtype::kF16>(gradient, n);
}

}  // namespace HWY_NAMESPACE
}  // namespace ballast::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ballast::kernels {
HWY_EXPORT(NormLoop);

NormResult SquaredNorm(Dtype dtype, const std::byte* gradient, uint64_t n) {
  RequireGradientDtype(dtype);
  const IeeeMode mode;
  const double total = HWY_DYNAMIC_DISPATCH(NormLoop)(dtype, gradient, n);
  // Squares of finite floats stay below 2^256: 2^700 of them would not overflow fp64, so only Inf or NaN make it so.
  if (!std::isfinite(total)) return {.squared_norm = 0, .finite = false};
  return {.squared_norm = total, .finite = true};
}

NormResult SquaredNorm(absl::Span<const bf16> gradient) {
  return SquaredNorm(Dtype::kBf16, reinterpret_cast<const std::byte*>(gradient.data()), gradient.size());
}

}  // namespace ballast::kernels
#endif
