// A queue of closures and the threads that run the closures: a job's worker, clerk and readers, or a server's threads
// for answers to requests that have waited.
#pragma once

#include <deque>
#include <functional>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"

namespace ballast::services {

// Runs closures in the order of Post. Threads: any. The queue is bounded by its sources: requests, and decided steps.
class Executor {
 public:
  virtual ~Executor() = default;  // joins
  // Runs the queued closures, then ends. Closures posted later never run. Threads: any but its own.
  virtual void Join() = 0;
  // Makes a thread if there is none yet; once it did, Post cannot fail. RESOURCE_EXHAUSTED (LIMIT) if the system makes
  // none.
  virtual absl::Status Prepare() { return absl::OkStatus(); }
  // Ends the process if there is no thread and the system makes none; call Prepare before to find out.
  virtual void Post(std::function<void()> work) = 0;
};

// The threads start with the first closures, or in Prepare: an executor that nobody uses has no thread.
class ThreadExecutor : public Executor {
 public:
  explicit ThreadExecutor(int threads) : threads_max_(static_cast<size_t>(threads)) {}
  ~ThreadExecutor() override;

  void Join() override;
  absl::Status Prepare() override;
  void Post(std::function<void()> work) override;

 private:
  void Loop();

  const size_t threads_max_;
  absl::Mutex mu_;
  std::deque<std::function<void()>> queue_ ABSL_GUARDED_BY(mu_);
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<std::thread> threads_ ABSL_GUARDED_BY(mu_);
  absl::Mutex join_mu_;  // before mu_; held until all threads have ended
};

}  // namespace ballast::services
