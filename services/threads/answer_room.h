// Room for the answers to pulls that have not been sent yet. A pull that finds no room waits for its turn.
//
// Each job has a share of the room (SharedBound). The pulls of a job get room in order of arrival. Among jobs the
// oldest pull comes first, but a job that must not take more holds up no other job.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "ballast/services/threads/executor.h"
#include "ballast/services/threads/shared_bound.h"

namespace ballast::services {

// Threads: any. Calls, leases and tickets may end under a job's lock: callbacks run on an executor.
class AnswerRoom {
 public:
  // Room for an answer, given back when the last copy is gone. Must not outlive the AnswerRoom. Null: no room.
  using Lease = std::shared_ptr<void>;
  // A place in the queue, given up when the ticket is gone.
  using Ticket = std::shared_ptr<void>;

  // `bytes_max`: of all answers together. A larger answer goes alone.
  explicit AnswerRoom(uint64_t bytes_max) : bound_(bytes_max, &used_) {}

 private:
  struct Awaited {
    uint64_t bytes = 0;
    std::function<void(Lease)> granted;
  };
  // The room that a job holds, and its pulls that wait.
  struct Part {
    Part(SharedBound* bound, Executor* executor) : share(bound), executor(executor) {}
    SharedBound::Share share;
    Executor* const executor;
    std::map<uint64_t, Awaited> awaited;  // by arrival
  };

 public:
  // The view of one job.
  class ForJob {
   public:
    // `executor`: runs what Await calls back.
    ForJob(AnswerRoom* room, Executor* executor)
        : room_(room), part_(std::make_shared<Part>(&room->bound_, executor)) {}
    // Null if there is no room, or if others wait for it.
    Lease Take(uint64_t bytes) { return room_->Take(part_, bytes); }
    // Calls `granted` once there is room, unless the ticket is gone before. `granted` must not block.
    Ticket Await(uint64_t bytes, std::function<void(Lease)> granted) {
      return room_->Await(part_, bytes, std::move(granted));
    }

   private:
    AnswerRoom* const room_;
    const std::shared_ptr<Part> part_;  // leases and tickets may outlive the job
  };

 public:
  const SharedBound& bound() const { return bound_; }

 private:
  Lease Take(const std::shared_ptr<Part>& part, uint64_t bytes) ABSL_LOCKS_EXCLUDED(mu_);
  Ticket Await(const std::shared_ptr<Part>& part, uint64_t bytes, std::function<void(Lease)> granted)
      ABSL_LOCKS_EXCLUDED(mu_);
  void GiveUp(Part* part, uint64_t arrival) ABSL_LOCKS_EXCLUDED(mu_);
  void Return(Part* part, uint64_t bytes) ABSL_LOCKS_EXCLUDED(mu_);
  Lease MakeLease(const std::shared_ptr<Part>& part, uint64_t bytes);
  // Closures that hold leases, and their executors. An executor that has ended drops a closure, and the lease with it:
  // so they are posted without the lock.
  using Grants = std::vector<std::pair<Executor*, std::function<void()>>>;
  // Gives room to those who wait, as far as there is any.
  Grants Grant() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  static void Post(Grants grants);

  std::atomic<uint64_t> used_{0};
  SharedBound bound_;
  absl::Mutex mu_;
  uint64_t next_arrival_ ABSL_GUARDED_BY(mu_) = 0;
  // The jobs that wait, by the arrival of each one's oldest pull.
  std::map<uint64_t, std::shared_ptr<Part>> oldest_ ABSL_GUARDED_BY(mu_);
};

}  // namespace ballast::services
