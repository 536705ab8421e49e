// A bound on something that the jobs of a server share, such as waiting requests. A job that takes all it can get still
// leaves room for every other job, without any configuration.
//
// The rule: what a job held before it takes more may be at most what is free afterwards. So one job alone gets half of
// the bound (and up to half of its last amount more), and n jobs that take all they can get hold about 1 / (n + 1)
// each; as much stays free for the next.
// Source: A. K. Choudhury, E. L. Hahne, "Dynamic queue length thresholds for shared-memory packet switches", IEEE/ACM
// Transactions on Networking 6(2), 1998; their threshold with alpha = 1.
#pragma once

#include <atomic>
#include <cstdint>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace ballast::services {

// Threads: any, as for its shares.
class SharedBound {
 public:
  // Keeps in `*used` how much all jobs hold; borrowed.
  SharedBound(uint64_t max, std::atomic<uint64_t>* used) : max_(max), used_(used) {}

  // The part of one job. Must not outlive the bound.
  class Share {
   public:
    explicit Share(SharedBound* bound) : bound_(bound) {}
    // False: the job holds more than would stay free. Nothing was taken.
    bool Take(uint64_t amount);
    void Return(uint64_t amount);
    uint64_t held() const;

   private:
    SharedBound* const bound_;
    uint64_t held_ ABSL_GUARDED_BY(bound_->mu_) = 0;
  };

  uint64_t max() const { return max_; }
  uint64_t used() const { return used_->load(); }
  uint64_t free() const { return max_ - used_->load(); }

 private:
  const uint64_t max_;
  mutable absl::Mutex mu_;
  std::atomic<uint64_t>* const used_;  // written under the lock
};

}  // namespace ballast::services
