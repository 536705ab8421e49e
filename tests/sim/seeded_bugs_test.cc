// The simulation is worth as much as the bugs it notices: each of these, planted alone, must break a promise within a
// bounded number of schedules.
#include <cstdio>
#include <string>

#include "ballast/tests/seeded/step_bugs.h"
#include "ballast/tests/sim/schedule.h"
#include "gtest/gtest.h"

namespace ballast::sim {
namespace {

using services::SeededBug;

constexpr uint64_t kSchedulesMax = 20000;

struct Planted {
  const char* name;
  SeededBug server = SeededBug::kNone;
  ClientBug client = ClientBug::kNone;
  bool every_k = false;
};

class SeededBugTest : public testing::TestWithParam<Planted> {
 protected:
  ~SeededBugTest() override { services::seeded_bug = SeededBug::kNone; }
};

TEST_P(SeededBugTest, IsCaught) {
  services::seeded_bug = GetParam().server;
  for (uint64_t seed = 1; seed <= kSchedulesMax; ++seed) {
    const ScheduleResult result =
        RunSchedule({.seed = seed, .bug = GetParam().client, .every_k = GetParam().every_k, .leave_on_error = true});
    if (result.violation.empty()) continue;
    std::printf("  caught in schedule %llu: %s\n", static_cast<unsigned long long>(seed), result.violation.c_str());
    return;
  }
  FAIL() << GetParam().name << " broke no promise in " << kSchedulesMax << " schedules";
}

INSTANTIATE_TEST_SUITE_P(Server, SeededBugTest,
                         testing::Values(Planted{"PromiseNotSynced", SeededBug::kPromiseNotSynced},
                                         Planted{"FenceMissesPrepareInFlight", SeededBug::kFenceMissesPrepareInFlight},
                                         Planted{"PushIgnoresEpoch", SeededBug::kPushIgnoresEpoch},
                                         Planted{"SealIgnoresEpoch", SeededBug::kSealIgnoresEpoch},
                                         Planted{"PreparedAnsweredUnsynced", SeededBug::kPreparedAnsweredUnsynced},
                                         Planted{"PlanHashIgnored", SeededBug::kPlanHashIgnored},
                                         Planted{"CoverageIgnoresAttempt", SeededBug::kCoverageIgnoresAttempt},
                                         Planted{"LowerAttemptAccepted", SeededBug::kLowerAttemptAccepted},
                                         Planted{"PushAfterPrepared", SeededBug::kPushAfterPrepared},
                                         Planted{"PushNextOncePrepared", SeededBug::kPushNextOncePrepared},
                                         Planted{"PushEndUnchecked", SeededBug::kPushEndUnchecked},
                                         Planted{"PlaceShared", SeededBug::kPlaceShared},
                                         Planted{"CommitAppliesAgain", SeededBug::kCommitAppliesAgain},
                                         Planted{"CommitTrustsBlobs", SeededBug::kCommitTrustsBlobs},
                                         Planted{"OpenKeepsSlices", SeededBug::kOpenKeepsSlices},
                                         Planted{"OpenKeepsPrepared", SeededBug::kOpenKeepsPrepared},
                                         Planted{"RecoveryPresumesCommit", SeededBug::kRecoveryPresumesCommit},
                                         Planted{"DecisionAfterNextPrepared", SeededBug::kDecisionAfterNextPrepared},
                                         Planted{"SkipAdvancesStepCounts", SeededBug::kSkipAdvancesStepCounts},
                                         Planted{"SnapshotForgetsPrepared", SeededBug::kSnapshotForgetsPrepared},
                                         Planted{"SnapshotForgetsStepCounts", SeededBug::kSnapshotForgetsStepCounts},
                                         Planted{"RestoreWithoutPin", SeededBug::kRestoreWithoutPin},
                                         Planted{"RestoreKeepsStepCounts", SeededBug::kRestoreKeepsStepCounts},
                                         Planted{"UnpinWhileRestoring", SeededBug::kUnpinWhileRestoring}),
                         [](const auto& planted) { return planted.param.name; });

INSTANTIATE_TEST_SUITE_P(
    Client, SeededBugTest,
    testing::Values(Planted{"EpochWithoutNonce", SeededBug::kNone, ClientBug::kEpochWithoutNonce},
                    Planted{"ResolveIgnoresEpoch", SeededBug::kNone, ClientBug::kResolveIgnoresEpoch},
                    Planted{"ResolveWithoutAll", SeededBug::kNone, ClientBug::kResolveWithoutAll},
                    Planted{"ResolveNeverFinishes", SeededBug::kNone, ClientBug::kResolveNeverFinishes},
                    Planted{"DecidesWithoutAll", SeededBug::kNone, ClientBug::kDecidesWithoutAll},
                    Planted{"RestartsInEpoch", SeededBug::kNone, ClientBug::kRestartsInEpoch},
                    Planted{"ForgetsCommit", SeededBug::kNone, ClientBug::kForgetsCommit},
                    Planted{"FreesGradientsEarly", SeededBug::kNone, ClientBug::kFreesGradientsEarly},
                    Planted{"LogCutAtOwnCommit", SeededBug::kNone, ClientBug::kLogCutAtOwnCommit},
                    Planted{"PinBeforeDurable", SeededBug::kNone, ClientBug::kPinBeforeDurable},
                    Planted{"UnpinBeforeFlush", SeededBug::kNone, ClientBug::kUnpinBeforeFlush}),
    [](const auto& planted) { return planted.param.name; });

INSTANTIATE_TEST_SUITE_P(
    EveryK, SeededBugTest,
    testing::Values(Planted{"PinNotAwaited", SeededBug::kPinNotAwaited, ClientBug::kNone, true},
                    Planted{"PinDroppedByTheNext", SeededBug::kPinDroppedByTheNext, ClientBug::kNone, true},
                    Planted{"LossNotTold", SeededBug::kLossNotTold, ClientBug::kNone, true},
                    Planted{"UpdateOfLostState", SeededBug::kUpdateOfLostState, ClientBug::kRestoreForgotten, true},
                    Planted{"RestoreKeepsPins", SeededBug::kRestoreKeepsPins, ClientBug::kNone, true},
                    Planted{"NumbersUsedAgain", SeededBug::kNone, ClientBug::kNumbersUsedAgain, true}),
    [](const auto& planted) { return planted.param.name; });

TEST(SeededBugs, NoneIsActiveByDefault) {
  for (uint64_t seed = 1; seed <= 1000; ++seed) {
    ASSERT_EQ(RunSchedule({.seed = seed, .every_k = seed % 2 == 0, .leave_on_error = true}).violation, "")
        << "seed " << seed;
  }
}

}  // namespace
}  // namespace ballast::sim
