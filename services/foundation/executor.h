// A queue of closures and the threads that run them: a job's own thread, or a server's threads for blocking reads and
// for answers to woken requests.
#pragma once

#include <deque>
#include <functional>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace ballast::services {

// Runs closures in the order of Post. Threads: any. The queue is bounded by its sources: requests, and decided steps.
class Executor {
 public:
  virtual ~Executor() = default;  // joins
  // Runs the queued closures, then ends. Closures posted later never run. Threads: any but its own.
  virtual void Join() = 0;
  virtual void Post(std::function<void()> work) = 0;
};

class ThreadExecutor : public Executor {
 public:
  explicit ThreadExecutor(int threads);
  ~ThreadExecutor() override;

  void Join() override;
  void Post(std::function<void()> work) override;

 private:
  void Loop();

  absl::Mutex mu_;
  std::deque<std::function<void()>> queue_ ABSL_GUARDED_BY(mu_);
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  absl::Mutex join_mu_;
  std::vector<std::thread> threads_ ABSL_GUARDED_BY(join_mu_);
};

}  // namespace ballast::services
