// Counts calls under way, so that a caller can wait for them.
#pragma once

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace ballast::client {

// Also keeps the first error. Threads: any. Must live until every Finish() has returned, so hold it by shared_ptr.
class Tally {
 public:
  void Start(int calls = 1);
  void Finish(const absl::Status& status);
  // Blocks until no call is under way. Returns the first error since the last Wait, and forgets it.
  absl::Status Wait();
  // Like Wait, but gives up at `deadline`. Returns whether no call is under way.
  bool WaitUntil(absl::Time deadline);
  bool idle() const;
  // Whether a call has failed since the last Wait.
  bool failed() const;

 private:
  mutable absl::Mutex mutex_;
  int under_way_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Status error_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ballast::client
