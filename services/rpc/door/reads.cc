#include "ballast/services/rpc/door/reads.h"

#include <algorithm>
#include <iterator>

#include "absl/time/clock.h"

namespace ballast::services {
namespace {

// How long a connection whose messages all wait, or do not come, is known to be slow.
constexpr absl::Duration kSlowFor = absl::Minutes(10);

}  // namespace

void Reads::Begin(Read* read, Lane* lane) {
  read->state_ = Read::State::kReading;
  read->since_ = absl::Now();
  read->place_ = reading_.insert(reading_.end(), read);
  read->lane_place_ = lane->reading.insert(lane->reading.end(), read);
}

void Reads::BeginNext(Lane* lane, Few* started) {
  while (lane->reading.size() < lane->places_max && !lane->waiting.empty()) {
    started->push_back(lane->waiting.front());
    lane->waiting.pop_front();
    Begin(started->back(), lane);
  }
}

bool Reads::Ask(const std::string& who, const std::string& connection, bool push, Read* read) {
  {
    absl::MutexLock lock(&mu_);
    read->push_ = push;
    read->who_ = who;
    read->connection_ = connection;
    read->aside_ = !push && slow_.contains(connection);
    Lane& lane = callers_[who].LaneOf(*read);
    if (lane.reading.size() >= lane.places_max) {
      if (lane.waiting.size() >= kWaitingMax) return false;
      read->state_ = Read::State::kWaiting;
      read->lane_place_ = lane.waiting.insert(lane.waiting.end(), read);
      return true;
    }
    Begin(read, &lane);
  }
  read->Start();
  return true;
}

bool Reads::Leave(Read* read) {
  absl::MutexLock lock(&mu_);
  if (read->state_ != Read::State::kWaiting) return false;
  callers_.at(read->who_).LaneOf(*read).waiting.erase(read->lane_place_);
  read->state_ = Read::State::kOver;
  return true;
}

void Reads::Remove(Read* read, Few* started) {
  reading_.erase(read->place_);
  EndTurn(read, started);
}

void Reads::EndTurn(Read* read, Few* started) {
  read->state_ = Read::State::kOver;
  const auto caller = callers_.find(read->who_);
  Lane& lane = caller->second.LaneOf(*read);
  lane.reading.erase(read->lane_place_);
  BeginNext(&lane, started);
  if (caller->second.idle()) callers_.erase(caller);
}

void Reads::Mark(const std::string& connection, Caller* caller, bool slow) {
  if (slow) {
    slow_[connection] = absl::Now();
  } else if (slow_.erase(connection) == 0) {
    return;
  }
  Lane &from = caller->lane(!slow), &to = caller->lane(slow);
  for (auto at = from.waiting.begin(); at != from.waiting.end();) {
    const auto next = std::next(at);
    if ((*at)->connection_ == connection) {
      (*at)->aside_ = slow;
      to.waiting.splice(to.waiting.end(), from.waiting, at);
    }
    at = next;
  }
}

bool Reads::Come(Read* read) {
  Few started;
  {
    absl::MutexLock lock(&mu_);
    if (read->state_ != Read::State::kReading) return false;
    reading_.erase(read->place_);
    read->state_ = Read::State::kRead;
    if (read->aside_ && absl::Now() - read->since_ < kInTurnPatience) {
      Caller& caller = callers_.at(read->who_);
      Mark(read->connection_, &caller, /*slow=*/false);
      BeginNext(&caller.in_turn, &started);
    }
    if (read->push_) EndTurn(read, &started);
  }
  for (Read* next : started) next->Start();
  return true;
}

void Reads::End(Read* read) {
  Few started;
  {
    absl::MutexLock lock(&mu_);
    if (read->state_ == Read::State::kRead) EndTurn(read, &started);
  }
  for (Read* next : started) next->Start();
}

void Reads::PutAside(Read* read, Few* started, Few* yielding) {
  Caller& caller = callers_.at(read->who_);
  Mark(read->connection_, &caller, /*slow=*/true);
  read->aside_ = true;
  caller.aside.reading.splice(caller.aside.reading.end(), caller.in_turn.reading, read->lane_place_);
  BeginNext(&caller.in_turn, started);
  if (caller.aside.reading.size() <= caller.aside.places_max) return BeginNext(&caller.aside, started);
  const auto oldest = std::find_if(caller.aside.reading.begin(), caller.aside.reading.end(),
                                   [](const Read* one) { return one->state_ == Read::State::kReading; });
  yielding->push_back(*oldest);  // this one at the latest
  Remove(yielding->back(), started);
}

bool Reads::Look(absl::Time now) {
  Few late, yielding, started;
  {
    absl::MutexLock lock(&mu_);
    while (!reading_.empty() && reading_.front()->since_ + kPatience <= now) {
      late.push_back(reading_.front());
      Remove(late.back(), &started);
    }
    Few slow, slowest;
    for (Read* read : reading_) {
      if (read->since_ + kInTurnPatience > now) break;
      if (read->push_) continue;
      if (!read->aside_) slow.push_back(read);
      if (read->aside_ && read->since_ + kAsidePatience <= now) slowest.push_back(read);
    }
    for (Read* read : slowest) {
      if (callers_.at(read->who_).aside.waiting.empty()) continue;
      yielding.push_back(read);
      Remove(read, &started);
    }
    for (Read* read : slow) {
      if (!callers_.at(read->who_).in_turn.waiting.empty()) PutAside(read, &started, &yielding);
    }
    absl::erase_if(slow_, [now](const auto& one) { return one.second + kSlowFor <= now; });
  }
  for (Read* read : late) read->BeLate();
  for (Read* read : yielding) read->GiveWay();
  for (Read* read : started) read->Start();
  return !late.empty() || !yielding.empty();
}

}  // namespace ballast::services
