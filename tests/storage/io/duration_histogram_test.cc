#include "ballast/storage/io/duration_histogram.h"

#include <algorithm>

#include "gtest/gtest.h"

namespace ballast::storage {
namespace {

TEST(DurationHistogramTest, ABoundIsTheLastOfItsBucket) {
  constexpr double kBounds[] = {1, 2};
  DurationHistogram histogram(kBounds);
  for (const double seconds : {0.5, 1.0, 1.5, 2.0, 3.0}) histogram.Observe(absl::Seconds(seconds));
  EXPECT_EQ(histogram.count(0), 2u);
  EXPECT_EQ(histogram.count(1), 2u);
  EXPECT_EQ(histogram.count(2), 1u);
  EXPECT_DOUBLE_EQ(histogram.sum_seconds(), 8);
}

TEST(DurationHistogramTest, AClockThatWasSetBackCountsAsZero) {
  DurationHistogram histogram;
  histogram.Observe(absl::Seconds(-5));
  histogram.Observe(-absl::InfiniteDuration());
  EXPECT_EQ(histogram.count(0), 2u);
  EXPECT_EQ(histogram.sum_seconds(), 0);
}

TEST(DurationHistogramTest, BoundsAscend) {
  EXPECT_TRUE(std::is_sorted(kCallBoundsSeconds.begin(), kCallBoundsSeconds.end()));
  EXPECT_TRUE(std::is_sorted(kStepBoundsSeconds.begin(), kStepBoundsSeconds.end()));
}

}  // namespace
}  // namespace ballast::storage
