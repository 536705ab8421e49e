// The rate at which a server copies chunks from others, so that training keeps the network and the processors.
#pragma once

#include <algorithm>
#include <cstdint>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace ballast::services {

// Why a chunk is copied. kLacking: it has fewer copies than the job wants, and the loss of another server may cost the
// state. kMoving: it has all its copies, and only shall lie elsewhere, so there is no hurry.
enum class CopyNeed { kLacking, kMoving };

// Threads: any.
class ImportPace {
 public:
  // Bytes a second; 0: no bound.
  struct Rates {
    uint64_t all = 0;
    uint64_t moving = 0;  // of all, those for kMoving
  };
  // `bytes_per_s`: as Rates::all. `processors`: that this server may use.
  static Rates RatesOf(uint64_t bytes_per_s, int processors) {
    const uint64_t moving = static_cast<uint64_t>(std::max(1, processors)) * kMovingBytesPerProcessor;
    return {bytes_per_s, std::min(bytes_per_s, moving)};
  }
  explicit ImportPace(const Rates& rates) : all_(rates.all), moving_(rates.moving) {}

  // When a copy of `bytes` bytes may begin: `now`, and then the bytes count, or later.
  absl::Time Take(CopyNeed need, uint64_t bytes, absl::Time now) ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    const bool moves = need == CopyNeed::kMoving;
    const absl::Time free = moves ? std::max(all_.free(), moving_.free()) : all_.free();
    if (free > now) return free;
    all_.Take(bytes, now);
    if (moves) moving_.Take(bytes, now);
    return now;
  }

 private:
  // A copy takes processors on both servers, some 8 ms for each MiB. So this is a fortieth of the importing server's
  // processors, however few these are. With 85 processors it is import_rate's default.
  static constexpr uint64_t kMovingBytesPerProcessor = uint64_t{3} << 20;  // a second

  // A token bucket that may go below zero: a copy begins once those before it are paid for.
  class Bucket {
   public:
    explicit Bucket(uint64_t bytes_per_s) : bytes_per_s_(bytes_per_s) {}
    absl::Time free() const { return free_; }
    void Take(uint64_t bytes, absl::Time now) {
      if (bytes_per_s_ == 0) return;
      free_ =
          std::max(free_, now - kBurst) + absl::Seconds(static_cast<double>(bytes) / static_cast<double>(bytes_per_s_));
    }

   private:
    // Of time in which nothing was copied.
    static constexpr absl::Duration kBurst = absl::Milliseconds(100);

    const uint64_t bytes_per_s_;
    absl::Time free_ = absl::InfinitePast();
  };

  absl::Mutex mu_;
  Bucket all_ ABSL_GUARDED_BY(mu_), moving_ ABSL_GUARDED_BY(mu_);
};

}  // namespace ballast::services
