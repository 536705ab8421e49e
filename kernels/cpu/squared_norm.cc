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

#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128

// As wide as the doubles of a leaf's lanes can use, at most eight of them.
using Doubles = hn::CappedTag<double, 8>;
using Words = hn::RebindToUnsigned<Doubles>;
constexpr size_t kDoubles = hn::MaxLanes(Doubles());
constexpr size_t kSums = kNormLanes / kDoubles;

// Widening and its permutation bound the loop (AVX2, Zen 3). So magnitudes are shifted to the place of a double's
// exponent and mantissa instead. The results, also zeros and denormals, are too small by 2^896, the difference of the
// exponents' biases; multiplying by 2^896 is exact. Inf and NaN come out finite and are detected apart.
constexpr double kRebias = 0x1p896;

// The sums of 4 x kDoubles neighbouring elements. Named, not an array: compilers keep arrays in memory.
template <Dtype kDtype>
class FourSums {
 public:
  using Sum = hn::Vec<Doubles>;

  HWY_INLINE FourSums() : a_(hn::Zero(Doubles())), b_(a_), c_(a_), d_(a_), largest_(hn::Zero(Parts())) {}

  HWY_INLINE void Add(const std::byte* from, size_t i) {
    if constexpr (kDtype == Dtype::kBf16) {
      const auto x = Load16(reinterpret_cast<const uint16_t*>(from) + i);
      constexpr uint64_t kMask = uint64_t{0x7fff} << 45;
      AddSquare<kMask>(hn::ShiftLeft<45>(x), a_);
      AddSquare<kMask>(hn::ShiftLeft<29>(x), b_);
      AddSquare<kMask>(hn::ShiftLeft<13>(x), c_);
      AddSquare<kMask>(hn::ShiftRight<3>(x), d_);
    } else {
      AddTwo(LoadFloats(from, i), a_, b_);
      AddTwo(LoadFloats(from, i + 2 * kDoubles), c_, d_);
    }
  }
  // Sums `first` ... `first` + 3 of a leaf; returns whether all was finite.
  HWY_INLINE bool Store(size_t first, double* lane) const {
    StoreOne(a_, first, lane);
    StoreOne(b_, first + 1, lane);
    StoreOne(c_, first + 2, lane);
    StoreOne(d_, first + 3, lane);
    // Signed, which magnitudes can be and every instruction set compares.
    const hn::RebindToSigned<Parts> ds;
    const auto most = hn::Set(ds, static_cast<hn::TFromD<decltype(ds)>>(kDtype == Dtype::kBf16 ? 0x7f7f : 0x7f7fffff));
    return hn::AllFalse(ds, hn::Gt(hn::BitCast(ds, largest_), most));
  }

 private:
  using Part = std::conditional_t<kDtype == Dtype::kBf16, uint16_t, uint32_t>;
  using Parts = hn::Repartition<Part, Doubles>;
  using Word = hn::Vec<Words>;

  HWY_INLINE Word Load16(const uint16_t* from) { return Look(hn::LoadU(hn::Repartition<uint16_t, Doubles>(), from)); }
  HWY_INLINE Word LoadFloats(const std::byte* from, size_t i) {
    const hn::Repartition<float, Doubles> df;
    if constexpr (kDtype == Dtype::kF32) {
      return Look(hn::LoadU(df, reinterpret_cast<const float*>(from) + i));
    } else {
      const hn::Rebind<hwy::float16_t, decltype(df)> dh;
      return Look(hn::PromoteTo(df, hn::LoadU(dh, reinterpret_cast<const hwy::float16_t*>(from) + i)));
    }
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
  // Element `at` of sum `number` to its place among the leaf's lanes.
  static HWY_INLINE void StoreOne(Sum sum, size_t number, double* lane) {
    HWY_ALIGN double part[kDoubles];
    hn::Store(sum, Doubles(), part);
    constexpr size_t kApart = kDtype == Dtype::kBf16 ? 4 : 2;  // elements in a word
    const size_t first = number / kApart * kApart * kDoubles + number % kApart;
    for (size_t at = 0; at < kDoubles; ++at) lane[first + at * kApart] = part[at];
  }

  Sum a_, b_, c_, d_;
  hn::Vec<Parts> largest_;
};

template <Dtype kDtype>
HWY_ATTR double Leaf(const std::byte* HWY_RESTRICT from) {
  double lane[kNormLanes];
  bool finite = true;
  // Eight sums at a time, because the additions of one sum wait for each other.
  for (size_t first = 0; first < kSums; first += 8) {
    FourSums<kDtype> sums, more;
    for (size_t i = first * kDoubles; i < kNormLeafElements; i += kNormLanes) {
      sums.Add(from, i);
      if constexpr (kSums > 4) more.Add(from, i + 4 * kDoubles);
    }
    finite = sums.Store(first, lane) && finite;
    if constexpr (kSums > 4) finite = more.Store(first + 4, lane) && finite;
  }
  return finite ? SumLanes(lane) : std::numeric_limits<double>::infinity();
}

#else

template <Dtype kDtype>
float ElementAs(const std::byte* from, size_t i) {
  if constexpr (kDtype == Dtype::kF32) return reinterpret_cast<const float*>(from)[i];
  const uint16_t half = reinterpret_cast<const uint16_t*>(from)[i];
  return kDtype == Dtype::kBf16 ? FromBf16(half) : FromF16(half);
}

template <Dtype kDtype>
double Leaf(const std::byte* from) {
  double lane[kNormLanes] = {};
  for (size_t i = 0; i < kNormLeafElements; ++i) {
    const double x = ElementAs<kDtype>(from, i);
    lane[i % kNormLanes] += x * x;
  }
  return SumLanes(lane);
}

#endif

template <Dtype kDtype>
double NormOf(const std::byte* HWY_RESTRICT gradient, size_t n) {
  constexpr size_t kLeafBytes = kNormLeafElements * ElementBytes(kDtype);
  NormTree tree;
  for (; n >= kNormLeafElements; n -= kNormLeafElements, gradient += kLeafBytes) tree.Add(Leaf<kDtype>(gradient));
  if (n > 0) {
    // Zeros add nothing to a lane.
    alignas(64) std::byte last[kLeafBytes] = {};
    std::memcpy(last, gradient, n * ElementBytes(kDtype));
    tree.Add(Leaf<kDtype>(last));
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
