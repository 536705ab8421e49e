// Threads that do what neither an RPC thread nor a job's thread should: blocking reads, and answers to woken requests.
#pragma once

#include <deque>
#include <functional>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace ballast::services {

// Runs closures in the order they came. Threads: any. The queue is bounded by what posts to it: waiting requests.
class Executor {
 public:
  virtual ~Executor() = default;  // joins
  // Runs what is queued, then ends. What is posted after that is dropped. Threads: any but its own.
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
