// Searches the step transaction with seeded random schedules.
//
//   step_simulation_test [--schedules N] [--seed S]
//
// Runs seeds S, S + 1, ... A failure prints its seed; `--seed S --schedules 1` runs it again.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "absl/strings/numbers.h"
#include "ballast/tests/sim/schedule.h"
#include "gtest/gtest.h"

namespace ballast::sim {
namespace {

uint64_t schedules = 100000;
uint64_t first_seed = 1;

TEST(StepSimulation, EveryScheduleKeepsThePromises) {
  Tally sum;
  for (uint64_t seed = first_seed; seed < first_seed + schedules; ++seed) {
    const ScheduleResult result = RunSchedule({.seed = seed});
    ASSERT_EQ(result.violation, "") << "replay with --schedules 1 --seed " << seed;
    sum.Add(result.tally);
  }
  std::printf(
      "%llu schedules: %llu steps (%llu skipped), %llu groups (%llu resized), %llu server crashes (%llu decisions "
      "lost), "
      "%llu ranks lost, %llu fenced, %llu steps finished by the next group, %llu abandoned, %llu drops, %llu norms, "
      "%llu plan mismatches, %llu pins, %llu restores, %llu of what was gone\n",
      static_cast<unsigned long long>(schedules), static_cast<unsigned long long>(sum.steps),
      static_cast<unsigned long long>(sum.skipped), static_cast<unsigned long long>(sum.groups),
      static_cast<unsigned long long>(sum.resized), static_cast<unsigned long long>(sum.crashes),
      static_cast<unsigned long long>(sum.decisions_lost), static_cast<unsigned long long>(sum.ranks_lost),
      static_cast<unsigned long long>(sum.stale), static_cast<unsigned long long>(sum.finished_for_others),
      static_cast<unsigned long long>(sum.abandoned), static_cast<unsigned long long>(sum.drops),
      static_cast<unsigned long long>(sum.norms), static_cast<unsigned long long>(sum.mismatches),
      static_cast<unsigned long long>(sum.pins), static_cast<unsigned long long>(sum.restores),
      static_cast<unsigned long long>(sum.gone));
  if (schedules < 1000) return;
  // A search that never gets into trouble shows nothing.
  EXPECT_GT(sum.steps, 3 * schedules);
  EXPECT_GT(sum.groups, 2 * schedules);
  EXPECT_GT(sum.crashes, schedules);
  for (const uint64_t count :
       {sum.skipped, sum.resized, sum.decisions_lost, sum.ranks_lost, sum.stale, sum.finished_for_others, sum.abandoned,
        sum.drops, sum.norms, sum.mismatches, sum.pins, sum.restores}) {
    EXPECT_GT(count, schedules / 100);
  }
}

// Servers that lose what was decided since their pins.
TEST(StepSimulation, EveryK) {
  const uint64_t count = (schedules + 3) / 4;
  Tally sum;
  for (uint64_t seed = first_seed; seed < first_seed + count; ++seed) {
    const ScheduleResult result = RunSchedule({.seed = seed, .every_k = true});
    ASSERT_EQ(result.violation, "") << "replay with --schedules 1 --seed " << seed;
    sum.Add(result.tally);
  }
  std::printf(
      "%llu schedules: %llu steps, %llu server crashes, %llu states lost, %llu groups went back (%llu of them behind "
      "numbers that stay free), %llu restores, %llu pins asked for, %llu jobs lost before their first pin\n",
      static_cast<unsigned long long>(count), static_cast<unsigned long long>(sum.steps),
      static_cast<unsigned long long>(sum.crashes), static_cast<unsigned long long>(sum.states_lost),
      static_cast<unsigned long long>(sum.went_back), static_cast<unsigned long long>(sum.numbers_left),
      static_cast<unsigned long long>(sum.restores), static_cast<unsigned long long>(sum.pins),
      static_cast<unsigned long long>(sum.dead));
  if (count < 1000) return;
  EXPECT_GT(sum.steps, 2 * count);
  EXPECT_GT(sum.states_lost, count / 2);
  for (const uint64_t times : {sum.went_back, sum.numbers_left, sum.restores, sum.pins}) {
    EXPECT_GT(times, count / 100);
  }
}

TEST(StepSimulation, ASeedIsASchedule) {
  for (const bool every_k : {false, true}) {
    const ScheduleResult a = RunSchedule({.seed = first_seed, .every_k = every_k});
    const ScheduleResult b = RunSchedule({.seed = first_seed, .every_k = every_k});
    EXPECT_EQ(a.violation, b.violation);
    EXPECT_EQ(a.tally.steps, b.tally.steps);
    EXPECT_EQ(a.tally.norms, b.tally.norms);
    EXPECT_EQ(a.tally.groups, b.tally.groups);
  }
}

}  // namespace
}  // namespace ballast::sim

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  for (int i = 1; i < argc; i += 2) {
    uint64_t* const value = std::strcmp(argv[i], "--schedules") == 0 ? &ballast::sim::schedules
                            : std::strcmp(argv[i], "--seed") == 0    ? &ballast::sim::first_seed
                                                                     : nullptr;
    if (value == nullptr || i + 1 == argc || !absl::SimpleAtoi(argv[i + 1], value)) {
      std::fprintf(stderr, "expected [--schedules N] [--seed S], got '%s'\n", argv[i]);
      return 2;
    }
  }
  return RUN_ALL_TESTS();
}
