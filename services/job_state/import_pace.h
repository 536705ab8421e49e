// The rate at which a server copies chunks from others, so that training keeps the network.
#pragma once

#include <algorithm>
#include <cstdint>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace ballast::services {

// A token bucket that may go below zero: a copy begins once those before it are paid for. Threads: any.
class ImportPace {
 public:
  // 0: no bound.
  explicit ImportPace(uint64_t bytes_per_s) : bytes_per_s_(bytes_per_s) {}

  // When a copy of `bytes` bytes may begin: `now`, and then the bytes count, or later.
  absl::Time Take(uint64_t bytes, absl::Time now) ABSL_LOCKS_EXCLUDED(mu_) {
    if (bytes_per_s_ == 0) return now;
    absl::MutexLock lock(&mu_);
    if (free_ > now) return free_;
    free_ =
        std::max(free_, now - kBurst) + absl::Seconds(static_cast<double>(bytes) / static_cast<double>(bytes_per_s_));
    return now;
  }

 private:
  // Of time in which nothing was copied.
  static constexpr absl::Duration kBurst = absl::Milliseconds(100);

  const uint64_t bytes_per_s_;
  absl::Mutex mu_;
  absl::Time free_ ABSL_GUARDED_BY(mu_) = absl::InfinitePast();
};

}  // namespace ballast::services
