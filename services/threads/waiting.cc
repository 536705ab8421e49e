#include "ballast/services/threads/waiting.h"

#include <deque>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"

namespace ballast::services {
namespace {
// A request without a deadline would hold its place for ever if its client died.
constexpr absl::Duration kWaitMax = absl::Minutes(10);

absl::Status ClientGone() { return absl::CancelledError("the client is gone; nothing was undone"); }

}  // namespace

void Run(Replies replies) {
  thread_local std::deque<std::function<void()>>* running = nullptr;
  if (running != nullptr) {
    for (auto& reply : replies) running->push_back(std::move(reply));
    return;
  }
  std::deque<std::function<void()>> queue(std::make_move_iterator(replies.begin()),
                                          std::make_move_iterator(replies.end()));
  running = &queue;
  while (!queue.empty()) {
    const std::function<void()> next = std::move(queue.front());
    queue.pop_front();
    next();
  }
  running = nullptr;
}

absl::Status DeadlinePassed(const std::string& what) {
  return model::Error(absl::StatusCode::kDeadlineExceeded, model::kBusy,
                      absl::StrCat("the deadline passed while waiting for ", what,
                                   "; nothing was undone: send the same request again"));
}

absl::Status WaitingPlaces::Take(uint64_t bytes) {
  if (requests_.Take(1)) {
    if (bytes_.Take(bytes)) return absl::OkStatus();
    requests_.Return(1);
  }
  return model::Error(
      absl::StatusCode::kUnavailable, model::kBusy,
      absl::StrCat("already ", requests_.held(), " requests of ", bytes_.held(),
                   " bytes of this job wait at this server; a job may hold as much as is free, which is ",
                   bounds_.requests->free(), " of ", bounds_.requests->max(), " requests and ", bounds_.bytes->free(),
                   " of ", bounds_.bytes->max(), " bytes; this request has ", bytes, " bytes: send it again"));
}

void WaitingPlaces::Return(uint64_t bytes) {
  requests_.Return(1);
  bytes_.Return(bytes);
}

absl::StatusOr<std::shared_ptr<void>> WaitingPlaces::Hold(uint64_t bytes) {
  BALLAST_RETURN_IF_ERROR(Take(bytes));
  return std::shared_ptr<void>(nullptr, [places = shared_from_this(), bytes](void*) { places->Return(bytes); });
}

Waiting::Waiting(Deadlines* deadlines, const WaitingBounds& bounds, std::function<void(uint64_t)> expire)
    : deadlines_(deadlines), places_(std::make_shared<WaitingPlaces>(bounds)), on_deadline_(std::move(expire)) {}

Waiting::~Waiting() {
  for (auto& [id, parked] : parked_) {
    deadlines_->Cancel(parked->timer);
    places_->Return(parked->waiter.bytes);
  }
}

void Waiting::Submit(Waiter waiter, Queue* queue, Replies* replies) {
  if (waiter.attempt(replies)) return;
  if (const absl::Status taken = places_->Take(waiter.bytes); !taken.ok()) return waiter.refuse(taken, replies);
  const uint64_t id = next_id_++;
  const std::shared_ptr<Caller>& caller = waiter.limit.caller;
  if (caller != nullptr && !caller->OnLeave([expire = on_deadline_, id] { expire(id); })) {
    places_->Return(waiter.bytes);
    return waiter.refuse(ClientGone(), replies);
  }
  const absl::Time deadline = std::min(waiter.limit.deadline, absl::Now() + kWaitMax);
  const uint64_t timer = deadlines_->Add(deadline, [expire = on_deadline_, id] { expire(id); });
  queue->insert(id);
  parked_.emplace(id, std::make_unique<Parked>(Parked{std::move(waiter), queue, timer}));
}

bool Waiting::Wake(Queue* queue, Replies* replies) {
  bool answered = false;
  for (auto id = queue->begin(); id != queue->end();) {
    const uint64_t current = *id;
    if (parked_.at(current)->waiter.attempt(replies)) {
      answered = true;
      Remove(current);
    }
    id = queue->upper_bound(current);
  }
  return answered;
}

void Waiting::WakeInTurn(Queue* queue, Replies* replies) {
  while (!queue->empty() && parked_.at(*queue->begin())->waiter.attempt(replies)) Remove(*queue->begin());
}

void Waiting::Expire(uint64_t id, Replies* replies) {
  if (!parked_.contains(id)) return;
  const Waiter waiter = Remove(id);
  if (waiter.limit.caller != nullptr && waiter.limit.caller->gone()) return waiter.refuse(ClientGone(), replies);
  waiter.expire(replies);
}

void Waiting::RefuseAll(const absl::Status& status, Replies* replies) {
  while (!parked_.empty()) Remove(parked_.begin()->first).refuse(status, replies);
}

void Waiting::Refuse(Queue* queue, const absl::Status& status, Replies* replies) {
  while (!queue->empty()) Remove(*queue->begin()).refuse(status, replies);
}

Waiter Waiting::Remove(uint64_t id) {
  const auto parked = parked_.find(id);
  Waiter waiter = std::move(parked->second->waiter);
  parked->second->queue->erase(id);
  deadlines_->Cancel(parked->second->timer);
  parked_.erase(parked);
  places_->Return(waiter.bytes);
  return waiter;
}

}  // namespace ballast::services
