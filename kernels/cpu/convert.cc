// Conversions between fp32 and smaller formats, and fp32 sums.
#include <cstddef>
#include <cstdlib>
#include <cstring>

#include "ballast/kernels/cpu/highway_targets.h"
#include "ballast/kernels/ieee_mode.h"
#include "ballast/kernels/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ballast/kernels/cpu/convert.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h, which includes this file once per target.
#include "ballast/kernels/cpu/formats-inl.h"
#include "ballast/kernels/cpu/lanes-inl.h"
#include "hwy/cache_control.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ballast::kernels::HWY_NAMESPACE {
namespace {

using L = Lanes;
using F = L::F;
using U = L::U;

// Loops go by four vectors; what is left at the end goes through this many elements of scratch memory.
constexpr size_t kStep = 4 * L::kWidth;

// How far ahead of a stream its source is asked for: stores that pass the caches leave the processor's own prefetcher
// behind.
constexpr size_t kAheadBytes = 2048;

// to = from, where one of the two is kF32.
template <Dtype kFrom, Dtype kTo, bool kStream>
HWY_INLINE void ConvertStep(const std::byte* from, std::byte* to, size_t i) {
  StoreFourAs<L, kTo, StoreOptions{.stream = kStream}>(LoadAs<L, kFrom>(from, i), LoadAs<L, kFrom>(from, i + L::kWidth),
                                                       LoadAs<L, kFrom>(from, i + 2 * L::kWidth),
                                                       LoadAs<L, kFrom>(from, i + 3 * L::kWidth), to, i);
}

template <Dtype kFrom, Dtype kTo>
void Convert(const std::byte* HWY_RESTRICT from, std::byte* HWY_RESTRICT to, size_t n) {
  constexpr size_t kFromBytes = ElementBytes(kFrom), kToBytes = ElementBytes(kTo);
  size_t i = 0;
  if (Streams(to, n * kToBytes)) {
    for (; i + kStep <= n; i += kStep) {
      for (size_t byte = 0; byte < kStep * kFromBytes; byte += 64)
        hwy::Prefetch(from + i * kFromBytes + byte + kAheadBytes);
      ConvertStep<kFrom, kTo, true>(from, to, i);
    }
    L::FlushStream();
  }
  for (; i + kStep <= n; i += kStep) ConvertStep<kFrom, kTo, false>(from, to, i);
  if (i == n) return;
  alignas(64) std::byte last_from[kStep * kFromBytes] = {}, last_to[kStep * kToBytes];
  std::memcpy(last_from, from + i * kFromBytes, (n - i) * kFromBytes);
  ConvertStep<kFrom, kTo, false>(last_from, last_to, 0);
  std::memcpy(to + i * kToBytes, last_to, (n - i) * kToBytes);
}

template <Dtype kFrom>
void Add(const std::byte* HWY_RESTRICT addend, float* HWY_RESTRICT sum, size_t n) {
  constexpr size_t kWidth = L::kWidth;
  const auto step = [](const std::byte* from, float* to, size_t at) HWY_ATTR {
    L::Store(L::OneNan(L::Add(L::Load(to + at), LoadAs<L, kFrom>(from, at))), to + at);
  };
  size_t i = 0;
  for (; i + kWidth <= n; i += kWidth) step(addend, sum, i);
  if (i == n) return;
  constexpr size_t kBytes = ElementBytes(kFrom);
  alignas(64) std::byte last_addend[kWidth * kBytes] = {};
  alignas(64) float last_sum[kWidth] = {};
  std::memcpy(last_addend, addend + i * kBytes, (n - i) * kBytes);
  std::memcpy(last_sum, sum + i, (n - i) * sizeof(float));
  step(last_addend, last_sum, 0);
  std::memcpy(sum + i, last_sum, (n - i) * sizeof(float));
}

// A last, short block goes through memory of a whole one.
void EncodeBlocks(const float* from, std::byte* to, size_t n) {
  size_t i = 0;
  for (; i + kE4m3Block <= n; i += kE4m3Block, to += kE4m3BlockBytes) EncodeE4m3Block<L>(from + i, to);
  if (i == n) return;
  alignas(64) float last[kE4m3Block] = {};
  std::memcpy(last, from + i, (n - i) * sizeof(float));
  EncodeE4m3Block<L>(last, to);
}

void DecodeBlocks(const std::byte* from, float* to, size_t n) {
  size_t i = 0;
  for (; i + kE4m3Block <= n; i += kE4m3Block, from += kE4m3BlockBytes) DecodeE4m3Block<L>(from, to + i);
  if (i == n) return;
  alignas(64) float last[kE4m3Block];
  DecodeE4m3Block<L>(from, last);
  std::memcpy(to + i, last, (n - i) * sizeof(float));
}

}  // namespace

void FromF32Loop(const float* from_floats, Dtype dtype, std::byte* to, size_t n) {
  const auto* from = reinterpret_cast<const std::byte*>(from_floats);
  switch (dtype) {
    case Dtype::kF32:
      return Convert<Dtype::kF32, Dtype::kF32>(from, to, n);
    case Dtype::kBf16:
      return Convert<Dtype::kF32, Dtype::kBf16>(from, to, n);
    case Dtype::kF16:
      return Convert<Dtype::kF32, Dtype::kF16>(from, to, n);
    case Dtype::kE4m3:
      return Convert<Dtype::kF32, Dtype::kE4m3>(from, to, n);
    case Dtype::kE5m2:
      return Convert<Dtype::kF32, Dtype::kE5m2>(from, to, n);
    case Dtype::kE4m3Blocks:
      return EncodeBlocks(from_floats, to, n);
  }
}

void ToF32Loop(Dtype dtype, const std::byte* from, float* to_floats, size_t n) {
  auto* to = reinterpret_cast<std::byte*>(to_floats);
  switch (dtype) {
    case Dtype::kF32:
      return Convert<Dtype::kF32, Dtype::kF32>(from, to, n);
    case Dtype::kBf16:
      return Convert<Dtype::kBf16, Dtype::kF32>(from, to, n);
    case Dtype::kF16:
      return Convert<Dtype::kF16, Dtype::kF32>(from, to, n);
    case Dtype::kE4m3:
      return Convert<Dtype::kE4m3, Dtype::kF32>(from, to, n);
    case Dtype::kE5m2:
      return Convert<Dtype::kE5m2, Dtype::kF32>(from, to, n);
    case Dtype::kE4m3Blocks:
      return DecodeBlocks(from, to_floats, n);
  }
}

void AddLoop(Dtype dtype, const std::byte* addend, float* sum, size_t n) {
  switch (dtype) {
    case Dtype::kF32:
      return Add<Dtype::kF32>(addend, sum, n);
    case Dtype::kBf16:
      return Add<Dtype::kBf16>(addend, sum, n);
    case Dtype::kF16:
      return Add<Dtype::kF16>(addend, sum, n);
    case Dtype::kE4m3:
      return Add<Dtype::kE4m3>(addend, sum, n);
    case Dtype::kE5m2:
      return Add<Dtype::kE5m2>(addend, sum, n);
    case Dtype::kE4m3Blocks:
      std::abort();  // a caller's bug: no gradient has scales
  }
}

const char* IsaName() { return hwy::TargetName(HWY_TARGET); }

}  // namespace ballast::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ballast::kernels {
HWY_EXPORT(FromF32Loop);
HWY_EXPORT(ToF32Loop);
HWY_EXPORT(AddLoop);
HWY_EXPORT(IsaName);

void FromF32(absl::Span<const float> from, Dtype dtype, std::byte* to) {
  const IeeeMode mode;
  HWY_DYNAMIC_DISPATCH(FromF32Loop)(from.data(), dtype, to, from.size());
}

void ToF32(Dtype dtype, const std::byte* from, absl::Span<float> to) {
  const IeeeMode mode;
  HWY_DYNAMIC_DISPATCH(ToF32Loop)(dtype, from, to.data(), to.size());
}

void Bf16FromF32(absl::Span<const float> from, absl::Span<bf16> to) {
  FromF32(from, Dtype::kBf16, reinterpret_cast<std::byte*>(to.data()));
}

void F32FromBf16(absl::Span<const bf16> from, absl::Span<float> to) {
  ToF32(Dtype::kBf16, reinterpret_cast<const std::byte*>(from.data()), to);
}

void AddInto(Dtype dtype, const std::byte* addend, absl::Span<float> sum) {
  const IeeeMode mode;
  HWY_DYNAMIC_DISPATCH(AddLoop)(dtype, addend, sum.data(), sum.size());
}

void AddInto(absl::Span<const float> addend, absl::Span<float> sum) {
  AddInto(Dtype::kF32, reinterpret_cast<const std::byte*>(addend.data()), sum);
}

const char* ActiveIsa() { return HWY_DYNAMIC_DISPATCH(IsaName)(); }

}  // namespace ballast::kernels
#endif
