#include "ballast/services/threads/deadlines.h"

#include "absl/status/statusor.h"
#include "ballast/proto/base/threads.h"

namespace ballast::services {

Deadlines::Deadlines() {
  absl::StatusOr<std::thread> thread = model::MakeThread([this] { Loop(); });
  made_ = thread.status();
  if (thread.ok()) thread_ = *std::move(thread);
}

Deadlines::~Deadlines() {
  {
    absl::MutexLock lock(&mu_);
    stopping_ = true;
    changed_.Signal();
  }
  if (thread_.joinable()) thread_.join();
}

uint64_t Deadlines::Add(absl::Time when, std::function<void()> callback) {
  absl::MutexLock lock(&mu_);
  const uint64_t id = next_id_++;
  const auto placed = due_.emplace(Key{when, id}, std::move(callback)).first;
  times_.emplace(id, when);
  if (placed == due_.begin()) changed_.Signal();
  return id;
}

void Deadlines::Cancel(uint64_t id) {
  std::function<void()> dropped;  // destroyed after the lock: it may own the last reference to a job
  absl::MutexLock lock(&mu_);
  const auto time = times_.find(id);
  if (time == times_.end()) return;
  const auto due = due_.find({time->second, id});
  dropped = std::move(due->second);
  due_.erase(due);
  times_.erase(time);
}

void Deadlines::Loop() {
  for (;;) {
    std::function<void()> callback;
    {
      absl::MutexLock lock(&mu_);
      for (;;) {
        if (stopping_) return;
        if (due_.empty()) {
          changed_.Wait(&mu_);
          continue;
        }
        if (due_.begin()->first.first <= absl::Now()) break;
        changed_.WaitWithDeadline(&mu_, due_.begin()->first.first);
      }
      callback = std::move(due_.begin()->second);
      times_.erase(due_.begin()->first.second);
      due_.erase(due_.begin());
    }
    callback();
  }
}

}  // namespace ballast::services
