#include "ballast/client/transport/tally.h"

#include <utility>

namespace ballast::client {

void Tally::Start(int calls) {
  absl::MutexLock lock(&mutex_);
  under_way_ += calls;
}

void Tally::Finish(const absl::Status& status) {
  absl::MutexLock lock(&mutex_);
  --under_way_;
  if (error_.ok()) error_ = status;
}

absl::Status Tally::Wait() {
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(
      +[](int* n) { return *n == 0; }, &under_way_));
  return std::exchange(error_, absl::OkStatus());
}

bool Tally::WaitUntil(absl::Time deadline) {
  absl::MutexLock lock(&mutex_);
  return mutex_.AwaitWithDeadline(absl::Condition(
                                      +[](int* n) { return *n == 0; }, &under_way_),
                                  deadline);
}

bool Tally::idle() const {
  absl::MutexLock lock(&mutex_);
  return under_way_ == 0;
}

bool Tally::failed() const {
  absl::MutexLock lock(&mutex_);
  return !error_.ok();
}

}  // namespace ballast::client
