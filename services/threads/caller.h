// The client's end of a call. If the client is gone, its call gives back its place among the waiting requests.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace ballast::services {

// Threads: any.
class Caller {
 public:
  // The client is gone: nobody reads the answer any more. No lock held.
  void Leave() ABSL_LOCKS_EXCLUDED(mu_) {
    std::function<void()> left;
    {
      absl::MutexLock lock(&mu_);
      gone_ = true;
      left.swap(on_leave_);
    }
    if (left) left();
  }
  // Leave calls `left`, instead of an earlier one. False if the client is gone already: nobody calls `left` then.
  bool OnLeave(std::function<void()> left) ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    if (!gone_) on_leave_ = std::move(left);
    return !gone_;
  }

  // The caller's identity, if the server checks identities; set before the call begins. Dry runs of different
  // identities take turns.
  void set_identity(std::string identity) { identity_ = std::move(identity); }
  const std::string& identity() const { return identity_; }

  bool gone() const ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    return gone_;
  }

 private:
  std::string identity_;
  mutable absl::Mutex mu_;
  bool gone_ ABSL_GUARDED_BY(mu_) = false;
  std::function<void()> on_leave_ ABSL_GUARDED_BY(mu_);
};

// How long a call may wait: until its deadline, and while its client is there.
struct CallLimit {
  // Implicit: most calls within a process have a deadline alone.
  // NOLINTNEXTLINE(google-explicit-constructor)
  CallLimit(absl::Time deadline, std::shared_ptr<Caller> caller = nullptr)
      : deadline(deadline), caller(std::move(caller)) {}

  absl::Time deadline;
  std::shared_ptr<Caller> caller;  // null: the client is always there
};

}  // namespace ballast::services
