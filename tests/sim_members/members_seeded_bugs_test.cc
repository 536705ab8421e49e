// The simulation is worth as much as the bugs it notices: each of these, planted alone, must break a promise within a
// bounded number of schedules. The names are those of the model of the rules, where it has the bug.
#include <cstdio>

#include "ballast/tests/seeded/step_bugs.h"
#include "ballast/tests/sim_members/schedule.h"
#include "gtest/gtest.h"

namespace ballast::sim_members {
namespace {

using services::SeededBug;

constexpr uint64_t kSchedulesMax = 20000;

struct Planted {
  const char* name;
  SeededBug machine = SeededBug::kNone;
  Bug bug = Bug::kNone;
};

class MembersSeededBugTest : public testing::TestWithParam<Planted> {
 protected:
  ~MembersSeededBugTest() override { services::seeded_bug = SeededBug::kNone; }
};

TEST_P(MembersSeededBugTest, IsCaught) {
  services::seeded_bug = GetParam().machine;
  for (uint64_t seed = 1; seed <= kSchedulesMax; ++seed) {
    const ScheduleResult result = RunSchedule({.seed = seed, .bug = GetParam().bug, .leave_on_error = true});
    if (result.violation.empty()) continue;
    std::printf("  caught in schedule %llu: %s\n", static_cast<unsigned long long>(seed), result.violation.c_str());
    services::seeded_bug = SeededBug::kNone;
    EXPECT_EQ(RunSchedule({.seed = seed, .leave_on_error = true}).violation, "") << "found without the bug";
    return;
  }
  FAIL() << GetParam().name << " broke no promise in " << kSchedulesMax << " schedules";
}

// All 36 of the model's bugs. kFilledUndecided, which the model does not have, is in tests/sim_server.
INSTANTIATE_TEST_SUITE_P(
    Machine, MembersSeededBugTest,
    testing::Values(Planted{"samename", SeededBug::kSameName, Bug::kBelieve},
                    Planted{"wipedholds", SeededBug::kWipedHolds, Bug::kNoCover},
                    Planted{"resetkeeps", SeededBug::kResetKeeps}, Planted{"promisevol", SeededBug::kPromiseNotSynced},
                    Planted{"nopromise", SeededBug::kOpenUnpromised}, Planted{"carryall", SeededBug::kSlicesOfAnyGroup},
                    Planted{"nodrop", SeededBug::kNothingFreed}, Planted{"ignoreminw", SeededBug::kLeastVersionIgnored},
                    Planted{"minwvol", SeededBug::kLeastVersionForgotten},
                    Planted{"fillforgot", SeededBug::kUnfilledForgotten},
                    Planted{"openvol", SeededBug::kTableNotSynced},
                    Planted{"syncsets", SeededBug::kOnlyOtherChunksSynced},
                    Planted{"normsoffilled", SeededBug::kNormsOfFilledAlone}),
    [](const auto& planted) { return planted.param.name; });

INSTANTIATE_TEST_SUITE_P(Client, MembersSeededBugTest,
                         testing::Values(Planted{"noclaim", SeededBug::kNone, Bug::kNoClaim},
                                         Planted{"nofence", SeededBug::kNone, Bug::kNoFence},
                                         Planted{"casblind", SeededBug::kNone, Bug::kCasBlind},
                                         Planted{"openearly", SeededBug::kNone, Bug::kOpenEarly},
                                         Planted{"readfirst", SeededBug::kNone, Bug::kReadFirst},
                                         Planted{"blind", SeededBug::kNone, Bug::kBlind},
                                         Planted{"serversays", SeededBug::kNone, Bug::kServersSay},
                                         Planted{"abortunknown", SeededBug::kNone, Bug::kAbortUnknown},
                                         Planted{"someprepared", SeededBug::kNone, Bug::kSomePrepared},
                                         Planted{"believe", SeededBug::kNone, Bug::kBelieve},
                                         Planted{"nosince", SeededBug::kNone, Bug::kNoSince},
                                         Planted{"nocover", SeededBug::kNone, Bug::kNoCover},
                                         Planted{"unfilledcounts", SeededBug::kNone, Bug::kUnfilledCounts},
                                         Planted{"settleearly", SeededBug::kNone, Bug::kSettleEarly},
                                         Planted{"neversettle", SeededBug::kNone, Bug::kNeverSettle},
                                         Planted{"deadtarget", SeededBug::kNone, Bug::kDeadTarget},
                                         Planted{"survivors", SeededBug::kNone, Bug::kSurvivors},
                                         Planted{"commitatfence", SeededBug::kNone, Bug::kCommitAtFence}),
                         [](const auto& planted) { return planted.param.name; });

INSTANTIATE_TEST_SUITE_P(Host, MembersSeededBugTest,
                         testing::Values(Planted{"label", SeededBug::kNone, Bug::kLabel},
                                         Planted{"fillersource", SeededBug::kNone, Bug::kFillerSource},
                                         Planted{"staleinstall", SeededBug::kNone, Bug::kStaleInstall},
                                         Planted{"twice", SeededBug::kNone, Bug::kTwice},
                                         Planted{"reportearly", SeededBug::kNone, Bug::kReportEarly},
                                         Planted{"releaseearly", SeededBug::kNone, Bug::kReleaseEarly}),
                         [](const auto& planted) { return planted.param.name; });

TEST(MembersSeededBugs, NoneIsActiveByDefault) {
  for (uint64_t seed = 1; seed <= 1000; ++seed) {
    ASSERT_EQ(RunSchedule({.seed = seed, .leave_on_error = true}).violation, "") << "seed " << seed;
  }
}

}  // namespace
}  // namespace ballast::sim_members
