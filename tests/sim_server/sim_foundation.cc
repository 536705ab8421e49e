#include "ballast/tests/sim_server/sim_foundation.h"

#include <algorithm>
#include <utility>

namespace ballast::sim {

class SimFoundation::ManualExecutor : public services::Executor {
 public:
  ManualExecutor(SimFoundation* foundation, int threads) : foundation_(foundation), threads_(threads) {
    foundation_->executors_.push_back(this);
  }
  ~ManualExecutor() override {
    Join();
    std::erase(foundation_->executors_, this);
  }

  void Post(std::function<void()> work) override {
    if (!joined_ && !foundation_->dead_) queue_.push_back(std::move(work));
  }

  void Join() override {
    while (!queue_.empty() && !foundation_->dead_) Run(0);
    joined_ = true;
    queue_.clear();
  }

  bool idle() const { return queue_.empty(); }
  // Tasks begin in turn, but several threads may overtake each other.
  size_t Ready() const { return std::min(queue_.size(), static_cast<size_t>(threads_)); }
  void Run(size_t which) {
    const auto task = queue_.begin() + static_cast<std::ptrdiff_t>(which);
    const std::function<void()> work = std::move(*task);
    queue_.erase(task);
    work();
  }

 private:
  SimFoundation* const foundation_;
  const int threads_;
  bool joined_ = false;
  std::deque<std::function<void()>> queue_;
};

std::unique_ptr<services::Executor> SimFoundation::MakeExecutor(int threads) {
  return std::make_unique<ManualExecutor>(this, threads);
}

absl::Status SimFoundation::Pump(storage::GradientLog* log, std::function<void()> progress) {
  log->set_progress(std::move(progress));
  if (!dead_) logs_.push_back(log);
  return absl::OkStatus();
}

void SimFoundation::StopPumping(storage::GradientLog* log) { std::erase(logs_, log); }

bool SimFoundation::RunTask(Random* random) {
  std::vector<ManualExecutor*> busy;
  std::copy_if(executors_.begin(), executors_.end(), std::back_inserter(busy), [](auto* e) { return !e->idle(); });
  if (busy.empty()) return false;
  ManualExecutor* const chosen = busy[random->Below(busy.size())];
  chosen->Run(random->Below(chosen->Ready()));
  return true;
}

bool SimFoundation::PumpOne(Random* random) {
  if (logs_.empty()) return false;
  return logs_[random->Below(logs_.size())]->Pump(/*wait=*/false);
}

void SimFoundation::Die() {
  dead_ = true;
  logs_.clear();
}

}  // namespace ballast::sim
