// Requests of a job that the server cannot answer yet. It evaluates a request again after an event for which the
// request waits, and answers it when its deadline passes or its client is gone. Bounds over all jobs of a server limit
// the number of waiting requests and their bytes.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "ballast/services/threads/caller.h"
#include "ballast/services/threads/deadlines.h"
#include "ballast/services/threads/shared_bound.h"

namespace ballast::services {

// Work to be done once the job's lock is released: replies, and copies of payloads.
using Replies = std::vector<std::function<void()>>;

// Runs the replies in order, no lock held. More replies may arise meanwhile: a copy ends and lets the next begin, or a
// client calls again from its callback. The outermost call on this thread runs those, so the stack does not grow with
// the number of requests.
void Run(Replies replies);

// DEADLINE_EXCEEDED. `what` the request waited for.
absl::Status DeadlinePassed(const std::string& what);

struct Waiter {
  // Evaluates the request, the job's lock held. False: not yet. True: it answered by adding to `replies`.
  std::function<bool(Replies* replies)> attempt;
  // Answers because the deadline passed; the job's lock held.
  std::function<void(Replies* replies)> expire;
  // Answers with an error; the job's lock held.
  std::function<void(const absl::Status& status, Replies* replies)> refuse;
  CallLimit limit = absl::InfiniteFuture();
  uint64_t bytes = 0;  // of the request, which the closures hold
};

// Bounds of the requests that may wait at a server, and of the bytes of their messages.
struct WaitingBounds {
  SharedBound* requests = nullptr;
  SharedBound* bytes = nullptr;
};

// One job's part of the bounds. Threads: any, also under the job's lock. May outlive the job.
class WaitingPlaces : public std::enable_shared_from_this<WaitingPlaces> {
 public:
  explicit WaitingPlaces(const WaitingBounds& bounds)
      : bounds_(bounds), requests_(bounds.requests), bytes_(bounds.bytes) {}
  // Counts a request of `bytes` bytes until Return. UNAVAILABLE (BUSY) when too much waits already.
  absl::Status Take(uint64_t bytes);
  void Return(uint64_t bytes);
  // As Take, for a request that waits elsewhere, for a thread, until the token is gone.
  absl::StatusOr<std::shared_ptr<void>> Hold(uint64_t bytes);

 private:
  const WaitingBounds bounds_;
  SharedBound::Share requests_, bytes_;
};

// Threads: the job's lock guards every call.
class Waiting {
 public:
  // Ids of the waiters woken by the same event, in order of arrival.
  using Queue = std::set<uint64_t>;

  // `expire(id)` is called on the deadlines' thread, or where a client is found to be gone, and must lead to
  // Expire(id). No lock held.
  Waiting(Deadlines* deadlines, const WaitingBounds& bounds, std::function<void(uint64_t)> expire);
  ~Waiting();

  // Evaluates the request at once; if it must wait, parks it in `queue`. Calls `refuse` with UNAVAILABLE (BUSY) when
  // too much waits already, and with CANCELLED when the client is gone.
  void Submit(Waiter waiter, Queue* queue, Replies* replies);
  // Evaluates all requests in `queue`. True if some were answered. An attempt must neither wake nor submit.
  bool Wake(Queue* queue, Replies* replies);
  // As Wake, for a queue whose waiters go in turn: stops at the first waiter that still has to wait, since the rest
  // wait for the same event.
  void WakeInTurn(Queue* queue, Replies* replies);
  // The request's deadline has passed, or its client is gone. A request that was answered before is left alone.
  void Expire(uint64_t id, Replies* replies);
  void RefuseAll(const absl::Status& status, Replies* replies);
  void Refuse(Queue* queue, const absl::Status& status, Replies* replies);
  bool empty() const { return parked_.empty(); }
  const std::shared_ptr<WaitingPlaces>& places() const { return places_; }

 private:
  struct Parked {
    Waiter waiter;
    Queue* queue;
    uint64_t timer;
  };
  Waiter Remove(uint64_t id);

  Deadlines* const deadlines_;
  const std::shared_ptr<WaitingPlaces> places_;
  const std::function<void(uint64_t)> on_deadline_;
  absl::flat_hash_map<uint64_t, std::unique_ptr<Parked>> parked_;
  uint64_t next_id_ = 1;
};

}  // namespace ballast::services
