#include "ballast/services/foundation/turns.h"

#include <utility>

namespace ballast::services {

Turns::Turns(std::unique_ptr<Executor> threads, size_t queues) : threads_(std::move(threads)) {
  for (size_t i = 0; i < queues; ++i) queues_.emplace_back(this);
}

void Turns::Join() {
  {
    absl::MutexLock lock(&mu_);
    joined_ = true;
  }
  threads_->Join();
}

void Turns::Post(Queue* queue, std::function<void()> work) {
  absl::MutexLock lock(&mu_);
  if (joined_) return;
  threads_->Post([this] { RunNext(); });  // may throw: nothing is queued then
  queue->work_.push_back(std::move(work));
  if (queue->work_.size() == 1) turns_.push_back(queue);
}

void Turns::RunNext() {
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
