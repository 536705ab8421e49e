#include "ballast/services/gateway/reads.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/string_view.h"
#include "absl/time/clock.h"

namespace ballast::services {
namespace {

constexpr absl::Duration kForgetInterval = absl::Seconds(1);

// Of "ipv4:10.0.0.3:4711" without the port.
absl::string_view HostOf(absl::string_view connection) { return connection.substr(0, connection.rfind(':')); }

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
    started->back()->number_ = ++last_number_;
    starting_.insert(last_number_);
  }
}

void Reads::StartAll(const Few& started) {
  for (Read* read : started) {
    const uint64_t number = read->number_;
    read->Start();  // its call may be over by now
    absl::MutexLock lock(&mu_);
    starting_.erase(number);
  }
}

std::list<Read*>::iterator Reads::Rank(Read* read, Lane* lane) const {
  if (!rules_.hosts_take_turns) return lane->waiting.end();
  read->rank_ = {};
  for (const Read* one : lane->waiting) read->rank_.first += one->connection_ == read->connection_ ? 1 : 0;
  for (const Read* one : lane->waiting) {
    const bool beside = one->rank_.first == read->rank_.first && HostOf(one->connection_) == HostOf(read->connection_);
    read->rank_.second += beside ? 1 : 0;
  }
  return std::find_if(lane->waiting.begin(), lane->waiting.end(),
                      [read](const Read* one) { return read->rank_ <= one->rank_; });
}

Read* Reads::CrowdOut(const Read& read, Caller* caller) {
  if (!rules_.hosts_take_turns || read.push_) return nullptr;
  Lane& lane = caller->lane(!caller->aside.waiting.empty());
  Read* const last = lane.waiting.back();
  if (last->aside_ == read.aside_ ? last->rank_ < read.rank_ : read.aside_) return nullptr;
  lane.waiting.pop_back();
  last->state_ = Read::State::kOver;
  return last;
}

bool Reads::Wait(Read* read, Caller* caller, Read** crowded_out) {
  Lane& lane = caller->LaneOf(*read);
  (void)Rank(read, &lane);
  if (caller->waiting(read->push_) >= rules_.waiting_max) {
    refused_ = true;
    *crowded_out = CrowdOut(*read, caller);
    if (*crowded_out == nullptr) return false;
  }
  read->state_ = Read::State::kWaiting;
  read->lane_place_ = lane.waiting.insert(Rank(read, &lane), read);
  return true;
}

bool Reads::Ask(const std::string& who, const std::string& connection, bool push, Read* read) {
  Read* crowded_out = nullptr;
  bool begins = false;
  {
    absl::MutexLock lock(&mu_);
    read->push_ = push;
    read->who_ = who;
    read->connection_ = connection;
    read->aside_ = !push && slow_.contains(connection);
    Caller& caller = callers_[who];
    Lane& lane = caller.LaneOf(*read);
    begins = lane.reading.size() < lane.places_max;
    if (begins) Begin(read, &lane);
    if (!begins && !Wait(read, &caller, &crowded_out)) return false;
  }
  if (crowded_out != nullptr) crowded_out->BeCrowdedOut();
  // gRPC keeps a call, even an ended one, until the thread that brings it returns.
  if (begins) read->Start();
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
      to.waiting.splice(Rank(*at, &to), from.waiting, at);
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
    if (read->aside_ && absl::Now() - read->since_ < rules_.in_turn_patience) {
      Caller& caller = callers_.at(read->who_);
      Mark(read->connection_, &caller, /*slow=*/false);
      BeginNext(&caller.in_turn, &started);
    }
    if (read->push_) EndTurn(read, &started);
  }
  StartAll(started);
  return true;
}

void Reads::End(Read* read) {
  Few started;
  {
    absl::MutexLock lock(&mu_);
    if (read->state_ == Read::State::kRead) EndTurn(read, &started);
  }
  StartAll(started);
}

void Reads::PutAside(Read* read, absl::Time now, Few* started, Few* yielding) {
  Caller& caller = callers_.at(read->who_);
  Mark(read->connection_, &caller, /*slow=*/true);
  read->aside_ = true;
  caller.aside.reading.splice(caller.aside.reading.end(), caller.in_turn.reading, read->lane_place_);
  BeginNext(&caller.in_turn, started);
  if (caller.aside.reading.size() <= caller.aside.places_max) return BeginNext(&caller.aside, started);
  // Not one that had no time to come yet.
  const auto oldest = std::find_if(caller.aside.reading.begin(), caller.aside.reading.end(), [&](Read* one) {
    mu_.AssertHeld();
    return one == read || (IsBeingRead(*one) && one->since_ + rules_.in_turn_patience <= now);
  });
  yielding->push_back(*oldest);  // this one at the latest
  Remove(yielding->back(), started);
}

bool Reads::Look(absl::Time now) {
  Few late, yielding, started;
  bool refused = false;
  {
    absl::MutexLock lock(&mu_);
    Few slow, slowest;
    for (Read* read : reading_) {
      if (read->since_ + rules_.in_turn_patience > now) break;
      if (!IsBeingRead(*read)) continue;
      if (read->since_ + kPatience <= now) {
        late.push_back(read);
      } else if (!read->push_ && !read->aside_) {
        slow.push_back(read);
      } else if (!read->push_ && read->since_ + rules_.aside_patience <= now) {
        slowest.push_back(read);
      }
    }
    for (Read* read : late) Remove(read, &started);
    for (Read* read : slowest) {
      if (callers_.at(read->who_).aside.waiting.empty()) continue;
      yielding.push_back(read);
      Remove(read, &started);
    }
    for (Read* read : slow) {
      if (!callers_.at(read->who_).in_turn.waiting.empty()) PutAside(read, now, &started, &yielding);
    }
    if (forgot_ + kForgetInterval <= now) {
      forgot_ = now;
      absl::erase_if(slow_, [&](const auto& one) { return one.second + rules_.slow_for <= now; });
    }
    refused = std::exchange(refused_, false);
  }
  for (Read* read : late) read->BeLate();
  for (Read* read : yielding) read->GiveWay();
  StartAll(started);
  return refused || !late.empty() || !yielding.empty();
}

}  // namespace ballast::services
