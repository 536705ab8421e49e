#include "ballast/services/counters/step_clock.h"

#include <chrono>
#include <utility>

#include "absl/time/clock.h"

namespace ballast::services {

absl::Duration StepClock::Now() { return absl::FromChrono(std::chrono::steady_clock::now().time_since_epoch()); }

StepClock::StepClock() : since_(Now()) {}

void StepClock::Advance() {
  const absl::Duration now = Now();
  totals_[static_cast<size_t>(worker_.value_or(intake_))] += now - std::exchange(since_, now);
}

void StepClock::SetIntake(Stage stage) {
  absl::MutexLock lock(&mu_);
  if (stage == intake_) return;
  Advance();
  intake_ = stage;
}

Stage StepClock::intake() const {
  absl::MutexLock lock(&mu_);
  return intake_;
}

void StepClock::SetWorker(std::optional<Stage> stage) {
  absl::MutexLock lock(&mu_);
  if (stage == worker_) return;
  Advance();
  worker_ = stage;
}

void StepClock::SetUpdate(Stage stage) {
  absl::MutexLock lock(&mu_);
  if (!worker_.has_value() || stage == *worker_) return;
  if (*worker_ == Stage::kFlush || *worker_ == Stage::kMove) return;
  Advance();
  worker_ = stage;
}

StageTimes StepClock::totals() const {
  absl::MutexLock lock(&mu_);
  StageTimes totals = totals_;
  totals[static_cast<size_t>(worker_.value_or(intake_))] += Now() - since_;
  return totals;
}

}  // namespace ballast::services
