#include "ballast/tests/bench/memory_loops.h"

#include <cstddef>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ballast/tests/bench/memory_loops.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h, which includes this file once per target.
#include "hwy/cache_control.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ballast::bench::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

void ThreeLoop(float* HWY_RESTRICT a, float* HWY_RESTRICT b, float* HWY_RESTRICT c, size_t n) {
  const hn::ScalableTag<float> d;
  const auto k = hn::Set(d, 0.999f);
  for (size_t i = 0; i + hn::Lanes(d) <= n; i += hn::Lanes(d)) {
    hn::StoreU(hn::Mul(hn::LoadU(d, a + i), k), d, a + i);
    hn::StoreU(hn::Mul(hn::LoadU(d, b + i), k), d, b + i);
    hn::StoreU(hn::Mul(hn::LoadU(d, c + i), k), d, c + i);
  }
}

void CopyLoop(const std::byte* HWY_RESTRICT from, std::byte* HWY_RESTRICT to, size_t bytes) {
  constexpr size_t kLine = 64, kAhead = 2048;
  const hn::ScalableTag<uint64_t> d;
  const size_t width = hn::Lanes(d) * sizeof(uint64_t);
  for (size_t i = 0; i + kLine <= bytes; i += kLine) {
    hwy::Prefetch(from + i + kAhead);
    for (size_t k = i; k < i + kLine; k += width) {
      hn::Stream(hn::LoadU(d, reinterpret_cast<const uint64_t*>(from + k)), d, reinterpret_cast<uint64_t*>(to + k));
    }
  }
  hwy::FlushStream();
}

}  // namespace ballast::bench::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ballast::bench {
HWY_EXPORT(ThreeLoop);
HWY_EXPORT(CopyLoop);

// Chosen before main(), where the benchmark confines the kernels to one instruction set.
const bool kChosen = (hwy::GetChosenTarget().Update(hwy::SupportedTargets()), true);
const auto kThreeLoop = HWY_DYNAMIC_DISPATCH(ThreeLoop);

const auto kCopyLoop = HWY_DYNAMIC_DISPATCH(CopyLoop);

void Copy(const std::byte* from, std::byte* to, uint64_t bytes) { kCopyLoop(from, to, bytes); }

void UpdateThreeArrays(float* a, float* b, float* c, uint64_t n) { kThreeLoop(a, b, c, n); }

}  // namespace ballast::bench
#endif
