#include "ballast/client/transport/admissions.h"

#include "absl/time/clock.h"

namespace ballast::client {

void Admissions::Queue() {
  absl::MutexLock lock(&mutex_);
  ++queued_;
}

void Admissions::Admit(uint64_t operations) {
  absl::MutexLock lock(&mutex_);
  admitted_ += operations;
}

std::function<void()> Admissions::Waiter() {
  return [self = shared_from_this(), before = queued()] {
    const absl::Time began = absl::Now();
    self->AwaitUpTo(before);
    absl::MutexLock lock(&self->mutex_);
    self->waited_ += absl::Now() - began;
  };
}

absl::Duration Admissions::waited() const {
  absl::MutexLock lock(&mutex_);
  return waited_;
}

uint64_t Admissions::queued() const {
  absl::MutexLock lock(&mutex_);
  return queued_;
}

void Admissions::AwaitUpTo(uint64_t queued) {
  absl::MutexLock lock(&mutex_);
  const auto admitted = [this, queued]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return admitted_ >= queued; };
  mutex_.Await(absl::Condition(&admitted));
}

}  // namespace ballast::client
