// A bound on something that the jobs of a server share, such as requests that wait: one job that takes all that it can
// get still leaves room for every other job, and nothing has to be configured for that.
//
// The rule: a job may hold at most as much as is still free. A job alone may hold half of the bound; n jobs that take
// all that they can get hold 1 / (n + 1) each, and as much stays free for the next.
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
    // False: the job would hold more than is free. Nothing was taken.
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
