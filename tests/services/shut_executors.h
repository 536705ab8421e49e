// Keeps a job's lock for as long as a test likes.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <utility>

#include "absl/synchronization/notification.h"
#include "ballast/tests/services/machine_with_disk.h"

namespace ballast::services {

// Its executors take no task while a gate is shut. A job posts a promise under its lock.
class ShutExecutors : public ThisMachine {
 public:
  // Keeps one task, and the thread that posts it.
  struct Gate {
    absl::Notification there, open;
  };
  std::unique_ptr<Executor> MakeExecutor(int threads) override {
    return std::make_unique<Gated>(this, ThisMachine::MakeExecutor(threads));
  }
  // The next task that is posted waits, at a gate of the test's or at the machine's own.
  void Shut(Gate* gate) { shut_ = gate; }
  void Shut() { Shut(&own_); }
  void AwaitTask() { own_.there.WaitForNotification(); }
  void Open() { own_.open.Notify(); }

 private:
  class Gated : public Executor {
   public:
    Gated(ShutExecutors* machine, std::unique_ptr<Executor> executor)
        : machine_(machine), executor_(std::move(executor)) {}
    void Join() override { executor_->Join(); }
    void Post(std::function<void()> work) override {
      if (Gate* const gate = machine_->shut_.exchange(nullptr); gate != nullptr) {
        gate->there.Notify();
        gate->open.WaitForNotification();
      }
      executor_->Post(std::move(work));
    }

   private:
    ShutExecutors* const machine_;
    const std::unique_ptr<Executor> executor_;
  };
  std::atomic<Gate*> shut_ = nullptr;
  Gate own_;
};

}  // namespace ballast::services
