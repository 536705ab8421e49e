// Searches whole state servers with durability `step`, and with every-K, with seeded random schedules.
//
//   server_simulation_test [--seeds N] [--seed S]
//
// Runs seeds S, S + 1, ... of crashes, and a tenth as many of each kind of disk fault. A failure prints its seed and
// test; `--seeds 1 --seed S --gtest_filter=<test>` runs it again.
#include <spdlog/spdlog.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

#include "absl/strings/numbers.h"
#include "ballast/tests/scratch_directory.h"
#include "ballast/tests/sim_server/server_schedule.h"
#include "gtest/gtest.h"

namespace ballast::sim {
namespace {

uint64_t seeds = 100;
uint64_t first_seed = 1;

void Print(uint64_t schedules, const ServerTally& sum) {
  std::printf("%llu schedules:", static_cast<unsigned long long>(schedules));
  const auto say = [](uint64_t count, const char* what) {
    std::printf(" %llu %s,", static_cast<unsigned long long>(count), what);
  };
  say(sum.group.steps, "steps");
  say(sum.group.skipped, "skipped");
  say(sum.group.groups, "groups");
  say(sum.group.ranks_lost, "ranks lost");
  say(sum.group.finished_for_others, "steps finished by the next group");
  say(sum.group.abandoned, "abandoned");
  say(sum.group.drops, "drops");
  say(sum.group.norms, "norms");
  say(sum.group.pins, "durable pins of a server");
  say(sum.group.restores, "restores");
  say(sum.group.gone, "of what was gone");
  say(sum.moments_written, "steps that write moments");
  say(sum.power_cuts, "power cuts");
  say(sum.cuts_in_operations, "of them amid something");
  say(sum.cuts_in_recovery, "amid a recovery");
  say(sum.kills, "kills");
  say(sum.stops, "stops");
  say(sum.recoveries, "starts");
  say(sum.chunks_checked, "chunks compared");
  say(sum.without_copies, "times without all working copies");
  say(sum.chunks_ahead, "contents ahead of the log");
  say(sum.pulls_checked, "pulls compared");
  say(sum.budget_changes, "budgets changed");
  say(sum.moves_begun, "moves begun");
  say(sum.jobs_failed, "jobs failed");
  say(sum.short_of_memory, "pushes short of memory");
  say(sum.rotten_bits, "rotten bits");
  say(sum.scrubs, "pieces asked of scrubs");
  say(sum.refused, "refused for good");
  say(sum.states_lost, "states lost");
  say(sum.went_on, "groups that went on");
  say(sum.group.went_back, "groups that went back");
  say(sum.group.numbers_left, "of them behind free numbers");
  say(sum.group.dead, "jobs lost with no pin that all must have");
  std::printf("\n");
}

ServerTally Search(Faults faults, uint64_t count, bool every_k = false, bool goes_on = false) {
  const ScratchDirectory directory;
  ServerTally sum;
  for (uint64_t seed = first_seed; seed < first_seed + count; ++seed) {
    const ServerScheduleResult result = RunServerSchedule(
        {.seed = seed, .faults = faults, .every_k = every_k, .goes_on = goes_on, .directory = directory.path()});
    if (count == 1) std::printf("trace %016llx\n", static_cast<unsigned long long>(result.trace));
    sum.Add(result.tally);
    EXPECT_EQ(result.violation, "") << "replay with --seeds 1 --seed " << seed;
    if (!result.violation.empty()) break;
  }
  Print(count, sum);
  return sum;
}

uint64_t Tenth() { return (seeds + 9) / 10; }

TEST(ServerSimulation, Crashes) {
  const ServerTally sum = Search(Faults::kCrashes, seeds);
  if (seeds < 200 || HasFailure()) return;
  // A search that never gets into trouble shows nothing.
  EXPECT_GT(sum.group.steps, 2 * seeds);
  EXPECT_GT(sum.recoveries, 4 * seeds);
  for (const uint64_t count :
       {sum.group.skipped, sum.group.ranks_lost, sum.group.finished_for_others, sum.group.abandoned, sum.group.drops,
        sum.group.norms, sum.group.pins, sum.group.restores, sum.cuts_in_operations, sum.cuts_in_recovery, sum.kills,
        sum.stops, sum.without_copies, sum.pulls_checked, sum.budget_changes, sum.moves_begun, sum.moments_written}) {
    EXPECT_GT(count, seeds / 50);
  }
}

// Fewer may not meet what is rare.
constexpr uint64_t kSeedsThatMeetAll = 1000;

TEST(ServerSimulation, IoErrors) {
  const ServerTally sum = Search(Faults::kIoErrors, Tenth());
  if (seeds >= kSeedsThatMeetAll) {
    EXPECT_GT(sum.jobs_failed, Tenth() / 10);
  }
}

TEST(ServerSimulation, FullDisks) {
  const ServerTally sum = Search(Faults::kFullDisk, Tenth());
  if (seeds >= kSeedsThatMeetAll) {
    EXPECT_GT(sum.jobs_failed, Tenth() / 50);
  }
}

TEST(ServerSimulation, Rot) {
  const ServerTally sum = Search(Faults::kRot, Tenth());
  if (seeds >= kSeedsThatMeetAll) {
    EXPECT_GT(sum.rotten_bits, Tenth() / 4);
  }
}

TEST(ServerSimulation, EveryK) {
  const uint64_t count = (seeds + 3) / 4;
  const ServerTally sum = Search(Faults::kCrashes, count, /*every_k=*/true);
  if (count < 100 || HasFailure()) return;
  for (const uint64_t times : {sum.states_lost, sum.group.went_back, sum.group.numbers_left, sum.group.restores,
                               sum.group.pins, sum.cuts_in_operations, sum.pulls_checked}) {
    EXPECT_GT(times, count / 50);
  }
}

TEST(ServerSimulation, EveryKWithIoErrors) { Search(Faults::kIoErrors, Tenth(), /*every_k=*/true); }

TEST(ServerSimulation, GroupsThatGoOn) {
  const ServerTally sum = Search(Faults::kCrashes, Tenth(), /*every_k=*/false, /*goes_on=*/true);
  if (Tenth() < 20 || HasFailure()) return;
  EXPECT_GT(sum.went_on, Tenth());
  EXPECT_GT(sum.group.steps, 2 * Tenth());
}

TEST(ServerSimulation, ASeedIsASchedule) {
  const ScratchDirectory directory;
  for (const Faults faults : {Faults::kCrashes, Faults::kIoErrors}) {
    const ServerScheduleOptions options{.seed = first_seed, .faults = faults, .directory = directory.path()};
    const ServerScheduleResult a = RunServerSchedule(options), b = RunServerSchedule(options);
    EXPECT_EQ(a.violation, b.violation);
    EXPECT_EQ(a.trace, b.trace);
    EXPECT_EQ(a.tally.group.steps, b.tally.group.steps);
  }
}

}  // namespace
}  // namespace ballast::sim

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  spdlog::set_level(std::getenv("SIM_LOG") != nullptr ? spdlog::level::debug : spdlog::level::off);
  for (int i = 1; i < argc; i += 2) {
    uint64_t* const value = std::strcmp(argv[i], "--seeds") == 0  ? &ballast::sim::seeds
                            : std::strcmp(argv[i], "--seed") == 0 ? &ballast::sim::first_seed
                                                                  : nullptr;
    if (value == nullptr || i + 1 == argc || !absl::SimpleAtoi(argv[i + 1], value)) {
      std::fprintf(stderr, "expected [--seeds N] [--seed S], got '%s'\n", argv[i]);
      return 2;
    }
  }
  return RUN_ALL_TESTS();
}
