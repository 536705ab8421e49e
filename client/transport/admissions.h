// Back pressure for whoever pushes.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace ballast::client {

// Counts operations that were queued, and those for which there was room, in the same order. Threads: any. Held by
// shared_ptr: a waiter may outlive the router.
class Admissions : public std::enable_shared_from_this<Admissions> {
 public:
  void Queue();
  void Admit(uint64_t operations = 1);

  // Blocks until there was room for all that were queued before.
  void Await() { AwaitUpTo(queued()); }
  // A function that blocks until there was room for all that were queued before now. On any thread; may outlive all but
  // itself.
  std::function<void()> Waiter();
  // Spent in Waiter()'s functions.
  absl::Duration waited() const;

 private:
  uint64_t queued() const;
  void AwaitUpTo(uint64_t queued);

  mutable absl::Mutex mutex_;
  uint64_t queued_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t admitted_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Duration waited_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ballast::client
