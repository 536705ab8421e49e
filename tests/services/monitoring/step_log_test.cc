#include "ballast/services/counters/step_log.h"

#include <gtest/gtest.h>

#include <numeric>
#include <thread>

#include "absl/time/clock.h"

namespace ballast::services {
namespace {

void Sleep(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }
absl::Duration Sum(const StageTimes& times) { return std::accumulate(times.begin(), times.end(), absl::Duration()); }
absl::Duration Of(const StageTimes& times, Stage stage) { return times[static_cast<size_t>(stage)]; }

TEST(StepClock, IsInOneStageAtATime) {
  const absl::Time began = absl::Now();
  StepClock clock;
  const absl::Time made = absl::Now();
  Sleep(20);
  clock.SetIntake(Stage::kPush);
  Sleep(20);
  {
    const Working working(&clock, Stage::kKernel);
    Sleep(20);
    clock.SetUpdate(Stage::kStateRead);
    clock.SetIntake(Stage::kSealWait);  // hidden behind the worker
    Sleep(20);
  }
  clock.SetUpdate(Stage::kKernel);  // nobody is at work
  Sleep(20);
  const absl::Time asked = absl::Now();
  const StageTimes times = clock.totals();
  EXPECT_GE(Sum(times), asked - made - absl::Milliseconds(1));
  EXPECT_LE(Sum(times), absl::Now() - began + absl::Milliseconds(1));
  for (const Stage stage : {Stage::kIdle, Stage::kPush, Stage::kKernel, Stage::kStateRead, Stage::kSealWait}) {
    EXPECT_GE(Of(times, stage), absl::Milliseconds(19)) << kStageNames[static_cast<size_t>(stage)];
  }
}

TEST(StepClock, AFlushStaysAFlush) {
  StepClock clock;
  const Working working(&clock, Stage::kFlush);
  clock.SetUpdate(Stage::kStateWrite);
  Sleep(10);
  EXPECT_GE(Of(clock.totals(), Stage::kFlush), absl::Milliseconds(9));
  EXPECT_EQ(Of(clock.totals(), Stage::kStateWrite), absl::ZeroDuration());
}

TEST(StepLog, KeepsWhenSlicesSealsAndDecisionCame) {
  StepLog log;
  const absl::Time before_first = absl::Now();
  log.Pushed(0, 0);
  const absl::Time after_first = absl::Now();
  Sleep(10);
  const TrainerTimes fast = {absl::Seconds(1)}, slow = {absl::Seconds(3)};
  log.Sealed(0, 0, 1, 2, fast);
  Sleep(20);
  log.Sealed(0, 0, 0, 2, slow);
  log.Sealed(0, 0, 1, 2, fast);  // again: its answer was lost
  log.Appended();
  Sleep(10);
  log.Prepared();
  const absl::Time before_last = absl::Now();
  log.Decided(0);
  const absl::Time after_last = absl::Now();
  const std::optional<SeenStep> seen = log.newest();
  ASSERT_TRUE(seen.has_value());
  EXPECT_EQ(seen->ranks, 2u);
  EXPECT_EQ(seen->slowest_rank, 0u);
  EXPECT_GE(seen->last_seal - seen->first_seal, absl::Milliseconds(19));
  EXPECT_GE(Of(seen->stages, Stage::kPush), absl::Milliseconds(9));
  EXPECT_GE(Of(seen->stages, Stage::kSealWait), absl::Milliseconds(19));
  EXPECT_GE(Of(seen->stages, Stage::kLogSync), absl::Milliseconds(9));
  // The log and its clock look at the time one after the other, and a busy machine may stop them in between.
  for (const absl::Duration time : {Sum(seen->stages), seen->decided - seen->began}) {
    EXPECT_GE(time, before_last - after_first);
    EXPECT_LE(time, after_last - before_first);
  }
  EXPECT_EQ(log.trainers_sum()[0], absl::Seconds(4));
  EXPECT_EQ(log.trainers_max()[0], absl::Seconds(3));
  EXPECT_EQ(log.seconds().sum_seconds(), 0);  // there is no step before
  log.UpdateBegan(0);
  log.Updated(0);
  EXPECT_GE(log.newest()->updated, log.newest()->update_began);
}

TEST(StepLog, ASingleRanksRecordIsAppendedBeforeItsSealIsNoted) {
  StepLog log;
  log.Appended();
  log.Sealed(0, 0, 0, 1, {});
  EXPECT_EQ(log.clock().totals()[static_cast<size_t>(Stage::kSealWait)], absl::ZeroDuration());
  Sleep(10);
  EXPECT_GE(Of(log.clock().totals(), Stage::kLogSync), absl::Milliseconds(9));
}

TEST(StepLog, CountsDroppedAttempts) {
  StepLog log;
  log.Pushed(0, 0);
  log.Sealed(0, 0, 0, 2, {});
  log.Pushed(0, 1);
  log.Pushed(0, 0);  // late
  log.Sealed(0, 1, 1, 2, {});
  log.Decided(0);
  log.Pushed(1, 0);
  EXPECT_EQ(log.dropped_attempts(), 1u);
  EXPECT_EQ(log.newest()->ranks, 1u);
}

TEST(StepLog, ANewEpochBeginsTheStepAnew) {
  StepLog log;
  EXPECT_FALSE(log.in_flight().has_value());
  log.Decided(0);
  log.Pushed(1, 7);
  log.Sealed(1, 7, 0, 2, {});
  log.Appended();
  const absl::Time began = log.in_flight()->began;
  EXPECT_NE(log.in_flight()->appended, absl::InfinitePast());
  log.Opened();
  EXPECT_FALSE(log.in_flight().has_value());
  // The new group counts its attempts from 0.
  log.Sealed(1, 0, 1, 2, {});
  ASSERT_TRUE(log.in_flight().has_value());
  EXPECT_EQ(log.in_flight()->ranks, 1u);
  EXPECT_EQ(log.in_flight()->first_push, absl::InfinitePast());
  EXPECT_EQ(log.in_flight()->appended, absl::InfinitePast());
  EXPECT_EQ(log.in_flight()->began, began) << "the time before belongs to the step";
  EXPECT_EQ(log.dropped_attempts(), 0u);
}

TEST(DurationHistogram, AClockThatWasSetBackTakesNothingAway) {
  storage::DurationHistogram histogram;
  histogram.Observe(absl::Seconds(2));
  histogram.Observe(-absl::Seconds(5));
  EXPECT_DOUBLE_EQ(histogram.sum_seconds(), 2);
  EXPECT_EQ(histogram.count(0), 1u);
}

TEST(StepLog, SumsTheStagesOfTheLastSteps) {
  StepLog log;
  EXPECT_FALSE(log.last_stages().has_value());
  for (size_t step = 0; step < StepLog::kStepsShown + 5; ++step) {
    log.Pushed(static_cast<int64_t>(step), 0);
    if (step < 5) Sleep(10);
    log.Decided(static_cast<int64_t>(step));
  }
  absl::Duration expected;
  const std::vector<SeenStep> steps = log.Steps();
  for (size_t i = 5; i < steps.size(); ++i) expected += Sum(steps[i].stages);
  ASSERT_TRUE(log.last_stages().has_value());
  EXPECT_EQ(Sum(*log.last_stages()), expected);
  EXPECT_GE(Sum(steps[4].stages), absl::Milliseconds(9));
}

TEST(StepLog, IsBounded) {
  StepLog log;
  for (int64_t step = 0; step < 300; ++step) log.Decided(step);
  const std::vector<SeenStep> steps = log.Steps();
  ASSERT_EQ(steps.size(), StepLog::kStepsKept);
  EXPECT_EQ(steps.front().step, 44);
  EXPECT_EQ(steps.back().step, 299);
  log.Updated(0);  // gone
}

}  // namespace
}  // namespace ballast::services
