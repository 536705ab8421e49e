// Keeps a job's lock for as long as a test likes.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <utility>

#include "absl/synchronization/notification.h"
#include "ballast/tests/services/machine_with_disk.h"

namespace ballast::services {

// Its executors take no task while the gate is shut. A job posts a promise under its lock.
class ShutExecutors : public ThisMachine {
 public:
  std::unique_ptr<Executor> MakeExecutor(int threads) override {
    return std::make_unique<Gated>(this, ThisMachine::MakeExecutor(threads));
  }
  // The next task that is posted waits.
  void Shut() { shut_ = true; }
  void AwaitTask() { there_.WaitForNotification(); }
  void Open() { open_.Notify(); }

 private:
  class Gated : public Executor {
   public:
    Gated(ShutExecutors* machine, std::unique_ptr<Executor> executor)
        : machine_(machine), executor_(std::move(executor)) {}
    void Join() override { executor_->Join(); }
    void Post(std::function<void()> work) override {
      if (machine_->shut_.exchange(false)) {
        machine_->there_.Notify();
        machine_->open_.WaitForNotification();
      }
      executor_->Post(std::move(work));
    }

   private:
    ShutExecutors* const machine_;
    const std::unique_ptr<Executor> executor_;
  };
  std::atomic<bool> shut_ = false;
  absl::Notification there_, open_;
};

}  // namespace ballast::services
