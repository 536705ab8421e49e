#include "ballast/services/foundation/executor.h"

#include <utility>

namespace ballast::services {

ThreadExecutor::ThreadExecutor(int threads) {
  absl::MutexLock lock(&join_mu_);
  for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { Loop(); });
}

ThreadExecutor::~ThreadExecutor() { Join(); }

void ThreadExecutor::Join() {
  {
    absl::MutexLock lock(&mu_);
    stopping_ = true;
  }
  absl::MutexLock lock(&join_mu_);
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

void ThreadExecutor::Post(std::function<void()> work) {
  absl::MutexLock lock(&mu_);
  queue_.push_back(std::move(work));
}

void ThreadExecutor::Loop() {
  for (;;) {
    std::function<void()> work;
    {
      absl::MutexLock lock(&mu_);
      const auto ready = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return stopping_ || !queue_.empty(); };
      mu_.Await(absl::Condition(&ready));
      if (queue_.empty()) return;
      work = std::move(queue_.front());
      queue_.pop_front();
    }
    work();
  }
}

}  // namespace ballast::services
