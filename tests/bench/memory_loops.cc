#include "ballast/tests/bench/memory_loops.h"

#include <cstddef>
#include <cstdlib>

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

constexpr size_t kLine = 64;

// The result keeps the reads of a loop that writes nothing.
template <int kRead, int kWrite>
uint64_t MoveLines(const std::byte* HWY_RESTRICT from, std::byte* HWY_RESTRICT to, size_t steps) {
  const hn::ScalableTag<uint64_t> d;
  const size_t width = hn::Lanes(d) * sizeof(uint64_t);
  auto sum = hn::Zero(d), other = hn::Zero(d);
  for (size_t step = 0; step < steps; ++step, from += kRead * kLine, to += kWrite * kLine) {
    if constexpr (kWrite < kRead) {
      for (size_t k = kWrite * kLine; k < kRead * kLine; k += width < kLine ? 2 * width : width) {
        sum = hn::Xor(sum, hn::LoadU(d, reinterpret_cast<const uint64_t*>(from + k)));
        if (width < kLine) other = hn::Xor(other, hn::LoadU(d, reinterpret_cast<const uint64_t*>(from + k + width)));
      }
    }
    for (size_t k = 0; k < kWrite * kLine; k += width) {
      const auto* source = reinterpret_cast<const uint64_t*>(from + k % (kRead * kLine));
      hn::Stream(hn::LoadU(d, source), d, reinterpret_cast<uint64_t*>(to + k));
    }
  }
  hwy::FlushStream();
  return hn::GetLane(hn::Xor(sum, other));
}

uint64_t MoveLoop(const std::byte* from, int read_lines, std::byte* to, int write_lines, size_t steps) {
  switch (read_lines * 10 + write_lines) {
    case 10:
      return MoveLines<1, 0>(from, to, steps);
    case 11:
      return MoveLines<1, 1>(from, to, steps);
    case 21:
      return MoveLines<2, 1>(from, to, steps);
    case 12:
      return MoveLines<1, 2>(from, to, steps);
    case 41:
      return MoveLines<4, 1>(from, to, steps);
    case 14:
      return MoveLines<1, 4>(from, to, steps);
    case 32:
      return MoveLines<3, 2>(from, to, steps);
    case 42:
      return MoveLines<4, 2>(from, to, steps);
    case 24:
      return MoveLines<2, 4>(from, to, steps);
  }
  std::abort();
}

}  // namespace ballast::bench::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ballast::bench {
HWY_EXPORT(ThreeLoop);
HWY_EXPORT(MoveLoop);

// Chosen before main(), where the benchmark confines the kernels to one instruction set.
const bool kChosen = (hwy::GetChosenTarget().Update(hwy::SupportedTargets()), true);
const auto kThreeLoop = HWY_DYNAMIC_DISPATCH(ThreeLoop);

const auto kMoveLoop = HWY_DYNAMIC_DISPATCH(MoveLoop);

void Move(const std::byte* from, int read_lines, std::byte* to, int write_lines, uint64_t steps) {
  volatile uint64_t keep = kMoveLoop(from, read_lines, to, write_lines, steps);
  static_cast<void>(keep);
}

void UpdateThreeArrays(float* a, float* b, float* c, uint64_t n) { kThreeLoop(a, b, c, n); }

}  // namespace ballast::bench
#endif
