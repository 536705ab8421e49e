// Threads that many share in turn: each has a queue of its own, so that a long queue delays nobody but its owner.
#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "ballast/services/foundation/executor.h"

namespace ballast::services {

// Threads: any.
class Turns {
 public:
  Turns(std::unique_ptr<Executor> threads, size_t queues);
  // Queue `number` modulo the queues' count. Its closures begin in the order of Post, and several may run at a time.
  // Valid as long as the Turns; Join does nothing.
  Executor* queue(size_t number) { return &queues_[number % queues_.size()]; }
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

}  // namespace ballast::services
