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

// The sums of 4 x kDoubles neighbouring elements. Named, not an array: compilers keep arrays in memory.
template <Dtype kDtype>
class FourSums {
 public:
  using Sum = hn::Vec<Doubles>;

  HWY_INLINE FourSums(const LeafSums& leaf, size_t first)
      : a_(Load(leaf, first)),
        b_(Load(leaf, first + 1)),
        c_(Load(leaf, first + 2)),
        d_(Load(leaf, first + 3)),
        largest_(hn::Load(Parts(), reinterpret_cast<const Part*>(leaf.largest))) {}

  HWY_INLINE void Add(const std::byte* from, size_t i) {
    if constexpr (kDtype == Dtype::kBf16) {
      const auto x = Load16(reinterpret_cast<const uint16_t*>(from) + i);
      constexpr uint64_t kMask = uint64_t{0x7fff} << 45;
      AddSquare<kMask>(hn::ShiftLeft<45>(x), a_);
      AddSquare<kMask>(hn::ShiftLeft<29>(x), b_);
      AddSquare<kMask>(hn::ShiftLeft<13>(x), c_);
      AddSquare<kMask>(hn::ShiftRight<3>(x), d_);
    } else {
      AddTwo(LoadF16(from, i), a_, b_);
      AddTwo(LoadF16(from, i + 2 * kDoubles), c_, d_);
    }
  }
  HWY_INLINE void Store(size_t first, LeafSums* leaf) const {
    StoreSum(a_, first, leaf);
    StoreSum(b_, first + 1, leaf);
    StoreSum(c_, first + 2, leaf);
    StoreSum(d_, first + 3, leaf);
    auto* const largest = reinterpret_cast<Part*>(leaf->largest);
    hn::Store(hn::Max(largest_, hn::Load(Parts(), largest)), Parts(), largest);
  }
  static HWY_INLINE bool IsFinite(const LeafSums& leaf) {
    // Signed, which magnitudes can be and every instruction set compares.
    const hn::RebindToSigned<Parts> ds;
    const auto most = hn::Set(ds, static_cast<hn::TFromD<decltype(ds)>>(kDtype == Dtype::kBf16 ? 0x7f7f : 0x7f7fffff));
    const auto largest = hn::Load(Parts(), reinterpret_cast<const Part*>(leaf.largest));
    return hn::AllFalse(ds, hn::Gt(hn::BitCast(ds, largest), most));
  }
  // Element `at` of sum `number`: its place among the leaf's lanes.
  static HWY_INLINE size_t Lane(size_t number, size_t at) {
    constexpr size_t kApart = kDtype == Dtype::kBf16 ? 4 : 2;  // elements in a word
    return number / kApart * kApart * kDoubles + number % kApart + at * kApart;
  }

 private:
  using Part = std::conditional_t<kDtype == Dtype::kBf16, uint16_t, uint32_t>;
  using Parts = hn::Repartition<Part, Doubles>;
  using Word = hn::Vec<Words>;

  static HWY_INLINE Sum Load(const LeafSums& leaf, size_t number) {
    return hn::Load(Doubles(), leaf.sums + number * kDoubles);
  }
  static HWY_INLINE void StoreSum(Sum sum, size_t number, LeafSums* leaf) {
    hn::Store(sum, Doubles(), leaf->sums + number * kDoubles);
  }
  HWY_INLINE Word Load16(const uint16_t* from) { return Look(hn::LoadU(hn::Repartition<uint16_t, Doubles>(), from)); }
  HWY_INLINE Word LoadF16(const std::byte* from, size_t i) {
    const hn::Repartition<float, Doubles> df;
    const hn::Rebind<hwy::float16_t, decltype(df)> dh;
    return Look(hn::PromoteTo(df, hn::LoadU(dh, reinterpret_cast<const hwy::float16_t*>(from) + i)));
  }
  // Notes the largest magnitude.
  template <class V>
  HWY_INLINE Word Look(V x) {
    constexpr auto kMagnitude = static_cast<Part>(kDtype == Dtype::kBf16 ? 0x7fffu : 0x7fffffffu);
    const auto parts = hn::BitCast(Parts(), x);
    largest_ = hn::Max(largest_, hn::And(parts, hn::Set(Parts(), kMagnitude)));
    return hn::BitCast(Words(), parts);
  }
  HWY_INLINE void AddTwo(Word x, Sum& even, Sum& odd) {
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

  Sum a_, b_, c_, d_;
  hn::Vec<Parts> largest_;
};

// fp32: a load that widens is a load and two instructions. Inf and NaN reach the sums.
template <>
class FourSums<Dtype::kF32> {
 public:
  using Sum = hn::Vec<Doubles>;

  HWY_INLINE FourSums(const LeafSums& leaf, size_t first)
      : a_(hn::Load(Doubles(), leaf.sums + first * kDoubles)),
        b_(hn::Load(Doubles(), leaf.sums + (first + 1) * kDoubles)),
        c_(hn::Load(Doubles(), leaf.sums + (first + 2) * kDoubles)),
        d_(hn::Load(Doubles(), leaf.sums + (first + 3) * kDoubles)) {}

  HWY_INLINE void Add(const std::byte* from, size_t i) {
    const float* const at = reinterpret_cast<const float*>(from) + i;
    AddSquare(at, a_);
    AddSquare(at + kDoubles, b_);
    AddSquare(at + 2 * kDoubles, c_);
    AddSquare(at + 3 * kDoubles, d_);
  }
  HWY_INLINE void Store(size_t first, LeafSums* leaf) const {
    hn::Store(a_, Doubles(), leaf->sums + first * kDoubles);
    hn::Store(b_, Doubles(), leaf->sums + (first + 1) * kDoubles);
    hn::Store(c_, Doubles(), leaf->sums + (first + 2) * kDoubles);
    hn::Store(d_, Doubles(), leaf->sums + (first + 3) * kDoubles);
  }
  static HWY_INLINE bool IsFinite(const LeafSums&) { return true; }
  static HWY_INLINE size_t Lane(size_t number, size_t at) { return number * kDoubles + at; }

 private:
  static HWY_INLINE void AddSquare(const float* from, Sum& sum) {
    const Doubles dd;
    const auto x = hn::PromoteTo(dd, hn::LoadU(hn::Rebind<float, Doubles>(), from));
    sum = hn::MulAdd(x, x, sum);
  }

  Sum a_, b_, c_, d_;
};

// Elements `begin` ... `end` of a leaf.
template <Dtype kDtype>
HWY_INLINE void AddTurn(const std::byte* HWY_RESTRICT from, size_t begin, size_t end, LeafSums* HWY_RESTRICT leaf) {
  // Eight sums at a time, because the additions of one sum wait for each other.
  for (size_t first = 0; first < kSums; first += 8) {
    FourSums<kDtype> sums(*leaf, first);
    FourSums<kDtype> more(*leaf, kSums > 4 ? first + 4 : first);
    for (size_t i = begin + first * kDoubles; i < end; i += kNormLanes) {
      sums.Add(from, i);
      if constexpr (kSums > 4) more.Add(from, i + 4 * kDoubles);
    }
    sums.Store(first, leaf);
    if constexpr (kSums > 4) more.Store(first + 4, leaf);
  }
}

template <Dtype kDtype>
double TotalOf(const LeafSums& leaf) {
  if (!FourSums<kDtype>::IsFinite(leaf)) return std::numeric_limits<double>::infinity();
  double lane[kNormLanes];
  for (size_t number = 0; number < kSums; ++number) {
    for (size_t at = 0; at < kDoubles; ++at)
      lane[FourSums<kDtype>::Lane(number, at)] = leaf.sums[number * kDoubles + at];
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
