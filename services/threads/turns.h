// Threads that many owners share in turn. Each has its own queue, so a long queue delays only its owner.
#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "ballast/services/threads/executor.h"

namespace ballast::services {

// Threads: any.
class Turns {
 public:
  Turns(std::unique_ptr<Executor> threads, size_t queues);
  // Queue `number` modulo the queues' count. Its closures begin in the order of Post, and several may run at a time.
  // Valid as long as the Turns; Join does nothing.
  Executor* queue(size_t number) { return &queues_[number % queues_.size()]; }
  // As Executor's: the threads can be made.
  absl::Status Prepare() { return threads_->Prepare(); }
  // Runs the queued closures, then ends the threads. Closures posted later never run.
  void Join() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  class Queue : public Executor {
   public:
    explicit Queue(Turns* turns) : turns_(turns) {}
    void Join() override {}
    void Post(std::function<void()> work) override { turns_->Post(this, std::move(work)); }

   private:
    friend class Turns;
    Turns* const turns_;
    std::deque<std::function<void()>> work_;  // the Turns' lock guards it
  };
  void Post(Queue* queue, std::function<void()> work) ABSL_LOCKS_EXCLUDED(mu_);
  void RunNext() ABSL_LOCKS_EXCLUDED(mu_);

  absl::Mutex mu_;
  std::deque<Queue> queues_;                       // their addresses stay
  std::deque<Queue*> turns_ ABSL_GUARDED_BY(mu_);  // queues with closures, the next first
  bool joined_ ABSL_GUARDED_BY(mu_) = false;
  const std::unique_ptr<Executor> threads_;
};

inline Turns::Turns(std::unique_ptr<Executor> threads, size_t queues) : threads_(std::move(threads)) {
  for (size_t i = 0; i < queues; ++i) queues_.emplace_back(this);
}

inline void Turns::Join() {
  {
    absl::MutexLock lock(&mu_);
    joined_ = true;
  }
  threads_->Join();
}

inline void Turns::Post(Queue* queue, std::function<void()> work) {
  absl::MutexLock lock(&mu_);
  if (joined_) return;
  threads_->Post([this] { RunNext(); });
  queue->work_.push_back(std::move(work));
  if (queue->work_.size() == 1) turns_.push_back(queue);
}

inline void Turns::RunNext() {
  std::function<void()> work;
  {
    absl::MutexLock lock(&mu_);
    if (turns_.empty()) return;
    Queue* const queue = turns_.front();
    turns_.pop_front();
    work = std::move(queue->work_.front());
    queue->work_.pop_front();
    if (!queue->work_.empty()) turns_.push_back(queue);
  }
  work();
}

}  // namespace ballast::services
