#include "ballast/services/counters/step_log.h"

#include <algorithm>

#include "absl/time/clock.h"

namespace ballast::services {

void StepLog::Enter(int64_t step, uint64_t attempt) {
  if (!entered_ || step != flying_.step) {
    entered_ = true;
    attempt_ = attempt;
    flying_.step = step;
    if (flying_.began == absl::InfinitePast()) {
      flying_.began = absl::Now();
      before_ = clock_.totals();
    }
    return;
  }
  if (attempt <= attempt_) return;
  attempt_ = attempt;
  ++dropped_attempts_;
  sealed_.clear();
  flying_.ranks = 0;
  flying_.first_seal = flying_.last_seal = flying_.appended = flying_.prepared = absl::InfinitePast();
  flying_.trainers_sum = flying_.trainers_max = {};
}

void StepLog::Opened() {
  absl::MutexLock lock(&mu_);
  const absl::Time began = flying_.began;
  flying_ = SeenStep();
  flying_.began = began;
  entered_ = false;
  attempt_ = 0;
  sealed_.clear();
  clock_.SetIntake(Stage::kIdle);
}

void StepLog::Pushed(int64_t step, uint64_t attempt) {
  absl::MutexLock lock(&mu_);
  Enter(step, attempt);
  if (flying_.first_push != absl::InfinitePast()) return;
  flying_.first_push = absl::Now();
  if (flying_.ranks == 0) clock_.SetIntake(Stage::kPush);
}

void StepLog::Sealed(int64_t step, uint64_t attempt, uint32_t rank, uint32_t world_size, const TrainerTimes& times) {
  absl::MutexLock lock(&mu_);
  Enter(step, attempt);
  sealed_.resize(std::max<size_t>(sealed_.size(), world_size));
  if (attempt < attempt_ || sealed_[rank]) return;
  sealed_[rank] = true;
  const absl::Time now = absl::Now();
  if (flying_.ranks++ == 0) {
    flying_.first_seal = now;
    // The seal of the last rank has led to the record already.
    if (flying_.appended == absl::InfinitePast()) clock_.SetIntake(Stage::kSealWait);
  }
  flying_.last_seal = now;
  flying_.slowest_rank = rank;
  for (size_t i = 0; i < kTrainerSpans; ++i) {
    flying_.trainers_sum[i] += times[i];
    flying_.trainers_max[i] = std::max(flying_.trainers_max[i], times[i]);
  }
}

void StepLog::Appended() {
  absl::MutexLock lock(&mu_);
  flying_.appended = absl::Now();
  clock_.SetIntake(Stage::kLogSync);
}

void StepLog::Prepared() {
  absl::MutexLock lock(&mu_);
  if (flying_.prepared != absl::InfinitePast()) return;
  flying_.prepared = absl::Now();
  clock_.SetIntake(Stage::kSealWait);
}

void StepLog::Decided(int64_t step) {
  absl::MutexLock lock(&mu_);
  Enter(step, attempt_);
  const absl::Time now = absl::Now();
  clock_.SetIntake(Stage::kIdle);
  const StageTimes totals = clock_.totals();
  flying_.decided = now;
  for (size_t i = 0; i < kStages; ++i) flying_.stages[i] = totals[i] - before_[i];
  for (size_t i = 0; i < kTrainerSpans; ++i) {
    trainers_sum_[i] += flying_.trainers_sum[i];
    trainers_max_[i] += flying_.trainers_max[i];
  }
  if (last_decision_ != absl::InfinitePast()) seconds_.Observe(now - last_decision_);
  last_decision_ = now;
  steps_.push_back(flying_);
  if (steps_.size() > kStepsKept) steps_.pop_front();
  flying_ = SeenStep();
  flying_.began = now;
  before_ = totals;
  entered_ = false;
  sealed_.clear();
}

SeenStep* StepLog::Find(int64_t step) {
  const auto found = std::find_if(steps_.rbegin(), steps_.rend(), [&](const SeenStep& s) { return s.step == step; });
  return found == steps_.rend() ? nullptr : &*found;
}

void StepLog::UpdateBegan(int64_t step) {
  absl::MutexLock lock(&mu_);
  if (SeenStep* const seen = Find(step); seen != nullptr) seen->update_began = absl::Now();
}

void StepLog::Updated(int64_t step) {
  absl::MutexLock lock(&mu_);
  if (SeenStep* const seen = Find(step); seen != nullptr) seen->updated = absl::Now();
}

void StepLog::Flushed(int64_t step) {
  absl::MutexLock lock(&mu_);
  if (SeenStep* const seen = Find(step); seen != nullptr) seen->flushed = absl::Now();
}

uint64_t StepLog::dropped_attempts() const {
  absl::MutexLock lock(&mu_);
  return dropped_attempts_;
}

absl::Time StepLog::last_decision() const {
  absl::MutexLock lock(&mu_);
  return last_decision_;
}

TrainerTimes StepLog::trainers_sum() const {
  absl::MutexLock lock(&mu_);
  return trainers_sum_;
}

TrainerTimes StepLog::trainers_max() const {
  absl::MutexLock lock(&mu_);
  return trainers_max_;
}

std::vector<SeenStep> StepLog::Steps() const {
  absl::MutexLock lock(&mu_);
  return {steps_.begin(), steps_.end()};
}

std::optional<SeenStep> StepLog::newest() const {
  absl::MutexLock lock(&mu_);
  return steps_.empty() ? std::nullopt : std::optional(steps_.back());
}

std::optional<StageTimes> StepLog::last_stages() const {
  absl::MutexLock lock(&mu_);
  if (steps_.empty()) return std::nullopt;
  StageTimes sums = {};
  for (size_t i = steps_.size() - std::min(steps_.size(), kStepsShown); i < steps_.size(); ++i) {
    for (size_t stage = 0; stage < kStages; ++stage) sums[stage] += steps_[i].stages[stage];
  }
  return sums;
}

std::optional<SeenStep> StepLog::in_flight() const {
  absl::MutexLock lock(&mu_);
  return entered_ ? std::optional(flying_) : std::nullopt;
}

}  // namespace ballast::services
