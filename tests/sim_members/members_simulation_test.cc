// Searches the rules of members with seeded random schedules.
//
//   members_simulation_test [--schedules N] [--seed S]
//
// Runs seeds S, S + 1, ... A failure prints its seed; `--seed S --schedules 1` runs it again.
#include <cstdio>
#include <cstring>

#include "absl/strings/numbers.h"
#include "ballast/tests/sim_members/schedule.h"
#include "gtest/gtest.h"

namespace ballast::sim_members {
namespace {

uint64_t schedules = 100000;
uint64_t first_seed = 1;

TEST(MembersSimulation, EveryScheduleKeepsThePromises) {
  Tally sum;
  for (uint64_t seed = first_seed; seed < first_seed + schedules; ++seed) {
    const ScheduleResult result = RunSchedule({.seed = seed});
    ASSERT_EQ(result.violation, "") << "replay with --schedules 1 --seed " << seed;
    sum.Add(result.tally);
  }
  const auto n = [](uint64_t count) { return static_cast<unsigned long long>(count); };
  std::printf(
      "%llu schedules: %llu steps, %llu groups (%llu fenced by others), %llu crashes, %llu disks lost (%llu jobs with "
      "them), %llu chunks damaged, %llu tables (%llu without a silent member, %llu begin a change, %llu end one), %llu "
      "epochs of groups at "
      "work, %llu steps adopted (%llu from some), %llu claims and %llu writes lost, %llu drops, %llu imports (%llu too "
      "late), %llu updates passed over\n",
      n(schedules), n(sum.steps), n(sum.groups), n(sum.stale), n(sum.crashes), n(sum.disks_lost), n(sum.lost),
      n(sum.damages), n(sum.tables), n(sum.left_out), n(sum.begun), n(sum.ended), n(sum.continued), n(sum.adopted),
      n(sum.adopted_some), n(sum.claims_lost), n(sum.writes_lost), n(sum.drops), n(sum.imports), n(sum.late_imports),
      n(sum.passed_over));
  if (schedules < 1000) return;
  // A search that never gets into trouble shows nothing.
  EXPECT_GT(sum.steps, 3 * schedules);
  EXPECT_LT(sum.lost, schedules / 4);
  for (const uint64_t count :
       {sum.stale, sum.crashes, sum.disks_lost, sum.damages, sum.left_out, sum.begun, sum.ended, sum.continued,
        sum.adopted, sum.adopted_some, sum.claims_lost, sum.drops, sum.imports, sum.late_imports, sum.passed_over}) {
    EXPECT_GT(count, schedules / 100);
  }
}

TEST(MembersSimulation, ASeedIsASchedule) {
  const ScheduleResult a = RunSchedule({.seed = first_seed}), b = RunSchedule({.seed = first_seed});
  EXPECT_EQ(a.violation, b.violation);
  EXPECT_EQ(a.tally.steps, b.tally.steps);
  EXPECT_EQ(a.tally.tables, b.tally.tables);
  EXPECT_EQ(a.tally.imports, b.tally.imports);
}

}  // namespace
}  // namespace ballast::sim_members

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  for (int i = 1; i < argc; i += 2) {
    uint64_t* const value = std::strcmp(argv[i], "--schedules") == 0 ? &ballast::sim_members::schedules
                            : std::strcmp(argv[i], "--seed") == 0    ? &ballast::sim_members::first_seed
                                                                     : nullptr;
    if (value == nullptr || i + 1 == argc || !absl::SimpleAtoi(argv[i + 1], value)) {
      std::fprintf(stderr, "expected [--schedules N] [--seed S], got '%s'\n", argv[i]);
      return 2;
    }
  }
  return RUN_ALL_TESTS();
}
