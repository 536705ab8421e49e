#include "ballast/services/threads/answer_room.h"

#include <algorithm>
#include <utility>

namespace ballast::services {

AnswerRoom::Lease AnswerRoom::Take(const std::shared_ptr<Part>& part, uint64_t bytes) {
  bytes = std::min(bytes, bound_.max());
  absl::MutexLock lock(&mu_);
  if (!part->awaited.empty()) return nullptr;
  // Whoever waits for bytes to become free at all would otherwise wait behind every smaller answer.
  for (const auto& [arrival, other] : oldest_) {
    if (other->awaited.begin()->second.bytes > bound_.free()) return nullptr;
  }
  if (!part->share.Take(bytes)) return nullptr;
  return MakeLease(part, bytes);
}

AnswerRoom::Ticket AnswerRoom::Await(const std::shared_ptr<Part>& part, uint64_t bytes,
                                     std::function<void(Lease)> granted) {
  bytes = std::min(bytes, bound_.max());
  Grants grants;
  uint64_t arrival = 0;
  {
    absl::MutexLock lock(&mu_);
    arrival = next_arrival_++;
    if (part->awaited.empty()) oldest_.emplace(arrival, part);
    part->awaited.emplace(arrival, Awaited{bytes, std::move(granted)});
    grants = Grant();  // room may have become free since the caller asked for it
  }
  Post(std::move(grants));
  return Ticket(nullptr, [this, part, arrival](void*) { GiveUp(part.get(), arrival); });
}

void AnswerRoom::GiveUp(Part* part, uint64_t arrival) {
  std::function<void(Lease)> dropped;  // destroyed after the lock
  Grants grants;
  {
    absl::MutexLock lock(&mu_);
    const auto place = part->awaited.find(arrival);
    if (place == part->awaited.end()) return;
    dropped = std::move(place->second.granted);
    part->awaited.erase(place);
    if (auto oldest = oldest_.extract(arrival); !oldest.empty() && !part->awaited.empty()) {
      oldest.key() = part->awaited.begin()->first;
      oldest_.insert(std::move(oldest));
    }
    grants = Grant();  // others may have waited behind this one alone
  }
  Post(std::move(grants));
}

void AnswerRoom::Return(Part* part, uint64_t bytes) {
  Grants grants;
  {
    absl::MutexLock lock(&mu_);
    part->share.Return(bytes);
    grants = Grant();
  }
  Post(std::move(grants));
}

void AnswerRoom::Post(Grants grants) {
  for (auto& [executor, grant] : grants) executor->Post(std::move(grant));
}

AnswerRoom::Lease AnswerRoom::MakeLease(const std::shared_ptr<Part>& part, uint64_t bytes) {
  // Not null, so that it differs from no lease.
  return Lease(part.get(), [this, part, bytes](void*) { Return(part.get(), bytes); });
}

AnswerRoom::Grants AnswerRoom::Grant() {
  Grants grants;
  for (auto next = oldest_.begin(); next != oldest_.end();) {
    const std::shared_ptr<Part> part = next->second;
    const auto first = part->awaited.begin();
    const uint64_t bytes = first->second.bytes;
    if (!part->share.Take(bytes)) {
      if (bytes > bound_.free()) return grants;  // bytes that become free are for this one
      ++next;                                    // the job holds its share: the others go on
      continue;
    }
    grants.emplace_back(part->executor, [granted = std::move(first->second.granted),
                                         lease = MakeLease(part, bytes)]() mutable { granted(std::move(lease)); });
    part->awaited.erase(first);
    next = oldest_.erase(next);
    // The job's next pull came later than this one: the loop meets it in its turn.
    if (part->awaited.empty()) continue;
    const auto later = oldest_.emplace(part->awaited.begin()->first, part).first;
    if (next == oldest_.end() || later->first < next->first) next = later;
  }
  return grants;
}

}  // namespace ballast::services
