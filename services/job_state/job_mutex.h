// A job's lock, in a form that a compiler can check. The parts of a job share one lock and hold only a pointer to it;
// clang's analysis cannot tell that the pointers are equal. So the annotations of all parts name one capability,
// `job_lock`, which stands for the lock of the job at hand. No thread ever holds two jobs' locks.
#pragma once

#include <cstdlib>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace ballast::services {

class ABSL_LOCKABLE JobLock {};
// Only named in annotations.
inline JobLock job_lock;

// A lock that can be waited for with a bound, which absl::Mutex cannot: `mu_` guards the flag alone, and nobody keeps
// it.
class JobMutex {
 public:
  void Lock() ABSL_EXCLUSIVE_LOCK_FUNCTION(job_lock) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    mu_.LockWhen(free_);
    held_ = true;
    mu_.Unlock();
  }
  // False, and nothing is locked, if the lock does not come free within `patience`.
  bool LockWithin(absl::Duration patience)
      ABSL_EXCLUSIVE_TRYLOCK_FUNCTION(true, job_lock) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    const bool taken = mu_.LockWhenWithTimeout(free_, patience);
    if (taken) held_ = true;
    mu_.Unlock();
    return taken;
  }
  void Unlock() ABSL_UNLOCK_FUNCTION(job_lock) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    absl::MutexLock lock(&mu_);
    held_ = false;
  }
  // At the head of a closure that runs under the lock: the analysis does not follow closures.
  void AssertHeld() const ABSL_ASSERT_EXCLUSIVE_LOCK(job_lock) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    if (!held_) std::abort();
  }
  void Await(const absl::Condition& condition) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    const auto ready = [&] {
      if (held_) return false;
      held_ = true;  // as far as the condition asks
      const bool met = condition.Eval();
      held_ = false;
      return met;
    };
    absl::MutexLock lock(&mu_);
    held_ = false;
    mu_.Await(absl::Condition(&ready));
    held_ = true;
  }

 private:
  absl::Mutex mu_;
  bool held_ = false;
  const absl::Condition free_{+[](const bool* held) { return !*held; }, static_cast<const bool*>(&held_)};
};

class ABSL_SCOPED_LOCKABLE JobMutexLock {
 public:
  explicit JobMutexLock(JobMutex* mutex) ABSL_EXCLUSIVE_LOCK_FUNCTION(job_lock) : mutex_(mutex) { mutex_->Lock(); }
  ~JobMutexLock() ABSL_UNLOCK_FUNCTION() ABSL_NO_THREAD_SAFETY_ANALYSIS { mutex_->Unlock(); }
  JobMutexLock(const JobMutexLock&) = delete;
  JobMutexLock& operator=(const JobMutexLock&) = delete;

 private:
  JobMutex* const mutex_;
};

}  // namespace ballast::services
