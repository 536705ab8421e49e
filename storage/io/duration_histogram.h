// Counts of durations by size.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/time/time.h"
#include "absl/types/span.h"

namespace ballast::storage {

// Three bounds per decade from 100 us to 100 s: a call within memory and a stuck disk both fall inside.
inline constexpr std::array<double, 19> kCallBoundsSeconds = {
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100};
// Eight bounds per decade from 1 ms to 1000 s: a quantile of steps is then within 15 %. Rounded to three digits.
inline constexpr std::array<double, 49> kStepBoundsSeconds = {
    0.001,  0.00133, 0.00178, 0.00237, 0.00316, 0.00422, 0.00562, 0.0075, 0.01,  0.0133, 0.0178, 0.0237, 0.0316,
    0.0422, 0.0562,  0.075,   0.1,     0.133,   0.178,   0.237,   0.316,  0.422, 0.562,  0.75,   1,      1.33,
    1.78,   2.37,    3.16,    4.22,    5.62,    7.5,     10,      13.3,   17.8,  23.7,   31.6,   42.2,   56.2,
    75,     100,     133,     178,     237,     316,     422,     562,    750,   1000};

// Threads: any.
class DurationHistogram {
 public:
  // Borrows `bounds_seconds`, in ascending order.
  explicit DurationHistogram(absl::Span<const double> bounds_seconds = kCallBoundsSeconds)
      : bounds_(bounds_seconds), counts_(bounds_seconds.size() + 1) {}

  // If the clock was set back, a duration can be negative; it counts as zero. Prometheus would take a sum that shrinks
  // for a restart.
  void Observe(absl::Duration duration) {
    duration = std::max(duration, absl::ZeroDuration());
    const double seconds = absl::ToDoubleSeconds(duration);
    size_t bucket = 0;
    while (bucket < bounds_.size() && seconds > bounds_[bucket]) ++bucket;
    counts_[bucket].fetch_add(1, std::memory_order_relaxed);
    sum_nanoseconds_.fetch_add(absl::ToInt64Nanoseconds(duration), std::memory_order_relaxed);
  }
  absl::Span<const double> bounds_seconds() const { return bounds_; }
  // Observations in bucket `i` only. The last bucket counts those above all bounds.
  uint64_t count(size_t i) const { return counts_[i].load(std::memory_order_relaxed); }
  double sum_seconds() const { return 1e-9 * static_cast<double>(sum_nanoseconds_.load(std::memory_order_relaxed)); }

 private:
  const absl::Span<const double> bounds_;
  std::vector<std::atomic<uint64_t>> counts_;
  std::atomic<int64_t> sum_nanoseconds_{0};
};

}  // namespace ballast::storage
