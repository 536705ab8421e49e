// A job's clock: always in one stage, the worker's before the intake's.
#include "ballast/services/counters/step_clock.h"

#include <optional>

#include "absl/time/clock.h"
#include "gtest/gtest.h"

namespace ballast::services {
namespace {

class StepClockTest : public ::testing::Test {
 protected:
  absl::Duration Of(Stage stage) const { return clock_.totals()[static_cast<size_t>(stage)]; }
  // Time passes for this stage, and for no other.
  void ExpectShows(Stage stage) {
    const StageTimes before = clock_.totals();
    while (Of(stage) == before[static_cast<size_t>(stage)]) absl::SleepFor(absl::Microseconds(10));
    const StageTimes after = clock_.totals();
    for (size_t i = 0; i < kStages; ++i) {
      if (i == static_cast<size_t>(stage)) continue;
      EXPECT_EQ(after[i], before[i]) << kStageNames[i] << " beside " << kStageNames[static_cast<size_t>(stage)];
    }
  }

  StepClock clock_;
};

TEST_F(StepClockTest, TheWorkersStageGoesBeforeTheIntakes) {
  ExpectShows(Stage::kIdle);
  clock_.SetIntake(Stage::kPush);
  EXPECT_EQ(clock_.intake(), Stage::kPush);
  ExpectShows(Stage::kPush);
  {
    const Working working(&clock_, Stage::kKernel);
    ExpectShows(Stage::kKernel);
    clock_.SetIntake(Stage::kSealWait);
    ExpectShows(Stage::kKernel);
  }
  ExpectShows(Stage::kSealWait);
}

TEST_F(StepClockTest, AFlushStaysAFlushWhateverItWaitsFor) {
  clock_.SetUpdate(Stage::kStateRead);
  ExpectShows(Stage::kIdle);
  clock_.SetWorker(Stage::kKernel);
  clock_.SetUpdate(Stage::kStateRead);
  ExpectShows(Stage::kStateRead);
  clock_.SetWorker(Stage::kFlush);
  clock_.SetUpdate(Stage::kStateWrite);
  ExpectShows(Stage::kFlush);
  clock_.SetWorker(std::nullopt);
  ExpectShows(Stage::kIdle);
}

}  // namespace
}  // namespace ballast::services
