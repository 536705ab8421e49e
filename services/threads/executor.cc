#include "ballast/services/threads/executor.h"

#include <spdlog/spdlog.h>

#include <cstdlib>
#include <string>
#include <utility>

#include "ballast/proto/base/status.h"
#include "ballast/proto/base/threads.h"

namespace ballast::services {

ThreadExecutor::~ThreadExecutor() { Join(); }

void ThreadExecutor::Join() {
  {
    absl::MutexLock lock(&mu_);
    stopping_ = true;
  }
  absl::MutexLock join(&join_mu_);
  std::vector<std::thread> threads;
  {
    absl::MutexLock lock(&mu_);
    threads.swap(threads_);
  }
  for (std::thread& thread : threads) thread.join();
}

absl::Status ThreadExecutor::Prepare() {
  absl::MutexLock lock(&mu_);
  if (stopping_ || !threads_.empty()) return absl::OkStatus();
  BALLAST_ASSIGN_OR_RETURN(std::thread thread, model::MakeThread([this] { Loop(); }));
  threads_.push_back(std::move(thread));
  return absl::OkStatus();
}

void ThreadExecutor::Post(std::function<void()> work) {
  absl::MutexLock lock(&mu_);
  if (stopping_) return;
  if (threads_.size() < threads_max_) {
    absl::StatusOr<std::thread> thread = model::MakeThread([this] { Loop(); });
    if (thread.ok()) {
      threads_.push_back(*std::move(thread));
    } else if (threads_.empty()) {  // else fewer do
      spdlog::critical("work was given to threads that nobody had prepared: {}",
                       std::string(thread.status().message()));
      std::abort();
    }
  }
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
