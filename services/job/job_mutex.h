// A job's lock, in a form that a compiler can check. The parts of a job share one lock and hold only a pointer to it;
// clang's analysis cannot tell that the pointers are equal. So the annotations of all parts name one capability,
// `job_lock`, which stands for the lock of the job at hand. Code holds the locks of two jobs never.
#pragma once

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace ballast::services {

class ABSL_LOCKABLE JobLock {};
// Only named in annotations.
inline JobLock job_lock;

class JobMutex {
 public:
  void Lock() ABSL_EXCLUSIVE_LOCK_FUNCTION(job_lock) ABSL_NO_THREAD_SAFETY_ANALYSIS { mu_.Lock(); }
  void Unlock() ABSL_UNLOCK_FUNCTION(job_lock) ABSL_NO_THREAD_SAFETY_ANALYSIS { mu_.Unlock(); }
  // At the head of a closure that runs under the lock: the analysis does not follow closures.
  void AssertHeld() const ABSL_ASSERT_EXCLUSIVE_LOCK(job_lock) { mu_.AssertHeld(); }
  void Await(const absl::Condition& condition) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) { mu_.Await(condition); }

 private:
  absl::Mutex mu_;
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
