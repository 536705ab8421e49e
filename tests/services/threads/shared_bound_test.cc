#include "ballast/services/threads/shared_bound.h"

#include <gtest/gtest.h>

#include <deque>

namespace ballast::services {
namespace {

// Takes single units until refused; returns how many.
uint64_t TakeAll(SharedBound::Share* share) {
  uint64_t taken = 0;
  while (share->Take(1)) ++taken;
  return taken;
}

TEST(SharedBound, AJobAloneHoldsHalfAndEachJobThatFollowsHalfOfTheRest) {
  std::atomic<uint64_t> used{0};
  SharedBound bound(1024, &used);
  std::deque<SharedBound::Share> jobs;
  for (const uint64_t expected : {512, 256, 128, 64, 32}) {
    EXPECT_EQ(TakeAll(&jobs.emplace_back(&bound)), expected);
    EXPECT_EQ(jobs.back().held(), expected);
  }
  EXPECT_EQ(used, 992u);
}

TEST(SharedBound, BusyJobsComeToEqualShares) {
  std::atomic<uint64_t> used{0};
  SharedBound bound(1000, &used);
  std::deque<SharedBound::Share> jobs;
  for (int i = 0; i < 4; ++i) TakeAll(&jobs.emplace_back(&bound));
  // All have more to do than they may; work ends in turn.
  for (int round = 0; round < 2000; ++round) {
    for (SharedBound::Share& job : jobs) {
      if (job.held() > 0) job.Return(1);
    }
    for (SharedBound::Share& job : jobs) TakeAll(&job);
  }
  for (const SharedBound::Share& job : jobs) EXPECT_NEAR(static_cast<double>(job.held()), 200, 2);
}

TEST(SharedBound, RefusesAsAWholeAndGivesBack) {
  std::atomic<uint64_t> used{0};
  SharedBound bound(100, &used);
  SharedBound::Share job(&bound);
  EXPECT_FALSE(job.Take(101));
  EXPECT_EQ(used, 0u);
  EXPECT_TRUE(job.Take(100)) << "a job that holds nothing may take all that is free";
  EXPECT_FALSE(job.Take(1));
  job.Return(100);
  EXPECT_EQ(bound.free(), 100u);
}

}  // namespace
}  // namespace ballast::services
