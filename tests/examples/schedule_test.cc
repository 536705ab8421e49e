#include "ballast/client/examples/bytes_lm/schedule.h"

#include "gtest/gtest.h"

namespace ballast::client {
namespace {

TEST(ScheduleTest, WarmsUpPeaksAndFallsToATenth) {
  const Schedule schedule{.peak = 2.0, .warmup_steps = 10, .total_steps = 110};
  EXPECT_DOUBLE_EQ(schedule.LearningRate(1), 0.2);
  EXPECT_DOUBLE_EQ(schedule.LearningRate(5), 1.0);
  EXPECT_DOUBLE_EQ(schedule.LearningRate(10), 2.0);
  EXPECT_DOUBLE_EQ(schedule.LearningRate(60), 1.1);
  EXPECT_DOUBLE_EQ(schedule.LearningRate(110), 0.2);
  EXPECT_DOUBLE_EQ(schedule.LearningRate(1000), 0.2);
  for (uint64_t step = 11; step <= 110; ++step) EXPECT_LT(schedule.LearningRate(step), schedule.LearningRate(step - 1));
}

TEST(ScheduleTest, WithoutRoomForACosineStaysAtThePeak) {
  const Schedule schedule{.peak = 1.0, .warmup_steps = 4, .total_steps = 4};
  EXPECT_DOUBLE_EQ(schedule.LearningRate(2), 0.5);
  EXPECT_DOUBLE_EQ(schedule.LearningRate(4), 1.0);
  EXPECT_DOUBLE_EQ(schedule.LearningRate(9), 1.0);
  EXPECT_DOUBLE_EQ((Schedule{.peak = 1.0, .warmup_steps = 0, .total_steps = 10}.LearningRate(10)), 0.1);
}

}  // namespace
}  // namespace ballast::client
