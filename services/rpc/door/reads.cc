#include "ballast/services/rpc/door/reads.h"

#include "absl/time/clock.h"

namespace ballast::services {

void Reads::Begin(Read* read) {
  read->state_ = Read::State::kReading;
  read->since_ = absl::Now();
  read->place_ = reading_.insert(reading_.end(), read);
}

bool Reads::Ask(const std::string& who, bool in_turn, Read* read) {
  {
    absl::MutexLock lock(&mu_);
    read->in_turn_ = in_turn;
    if (in_turn) {
      read->who_ = who;
      Caller& caller = callers_[who];
      if (caller.reading == kInTurnMax) {
        if (caller.waiting.size() == kWaitingMax) return false;
        read->state_ = Read::State::kWaiting;
        read->place_ = caller.waiting.insert(caller.waiting.end(), read);
        return true;
      }
      ++caller.reading;
    }
    Begin(read);
  }
  read->Start();
  return true;
}

bool Reads::Leave(Read* read) {
  absl::MutexLock lock(&mu_);
  if (read->state_ != Read::State::kWaiting) return false;
  callers_[read->who_].waiting.erase(read->place_);
  read->state_ = Read::State::kOver;
  return true;
}

Read* Reads::Remove(Read* read) {
  reading_.erase(read->place_);
  read->state_ = Read::State::kOver;
  if (!read->in_turn_) return nullptr;
  const auto caller = callers_.find(read->who_);
  --caller->second.reading;
  if (caller->second.waiting.empty()) {
    if (caller->second.reading == 0) callers_.erase(caller);
    return nullptr;
  }
  Read* const next = caller->second.waiting.front();
  caller->second.waiting.pop_front();
  ++caller->second.reading;
  Begin(next);
  return next;
}

bool Reads::End(Read* read) {
  Read* next = nullptr;
  {
    absl::MutexLock lock(&mu_);
    if (read->state_ != Read::State::kReading) return false;
    next = Remove(read);
  }
  if (next != nullptr) next->Start();
  return true;
}

void Reads::EndLate(absl::Time now) {
  std::vector<Read*> late, next;
  {
    absl::MutexLock lock(&mu_);
    while (!reading_.empty() && reading_.front()->since_ + kPatience <= now) {
      late.push_back(reading_.front());
      if (Read* const after = Remove(late.back()); after != nullptr) next.push_back(after);
    }
  }
  for (Read* read : late) read->BeLate();
  for (Read* read : next) read->Start();
}

}  // namespace ballast::services
