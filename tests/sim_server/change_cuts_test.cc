// Cuts a server's power at every operation of its disk, and every write of its catalog, while servers copy chunks and
// give chunks up (change_run.h).
//
//   change_cuts_test [--seeds N] [--cuts N] [--seed S] [--place K]
//
// Runs seeds S, S + 1, ... A seed's first run is cut nowhere, and counts the places: each operation of each server's
// disk and each write of its catalog. Then one run for each place; with --cuts, for so many of them, chosen by the
// seed. A failure prints seed and place; `--seeds 1 --seed S --place K` runs that place alone.
#include "ballast/tests/sim_server/change_cuts.h"

#include <spdlog/spdlog.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "absl/strings/numbers.h"
#include "ballast/tests/scratch_directory.h"
#include "gtest/gtest.h"

namespace ballast::sim {
namespace {

uint64_t seeds = 4;
uint64_t cuts = 20;
uint64_t first_seed = 1;
uint64_t place = 0;

TEST(ChangeCuts, EveryOperation) {
  const ScratchDirectory directory;
  ChangeCutsTally tally;
  for (uint64_t seed = first_seed; seed < first_seed + seeds && !HasFailure(); ++seed) {
    EXPECT_EQ(SearchCuts({.seed = seed, .cuts_max = cuts, .only = place, .directory = directory.path()}, &tally), "");
  }
  const auto say = [](uint64_t count, const char* what) {
    std::printf("%llu %s", static_cast<unsigned long long>(count), what);
  };
  say(tally.places, "places, ");
  say(tally.runs, "runs, ");
  say(tally.cut, "of them cut, ");
  say(tally.cuts_in_recovery, "cuts amid a recovery, ");
  say(tally.left_out, "servers left out, ");
  say(tally.steps, "steps, ");
  say(tally.copies, "chunks copied, ");
  say(tally.given_up, "times some given up, ");
  say(tally.pulls, "pulls compared\n");
  if (HasFailure() || place > 0) return;
  // A search that never gets into trouble shows nothing.
  EXPECT_GT(tally.cut, tally.runs / 2);
  EXPECT_GT(tally.copies, tally.runs);
  EXPECT_GT(tally.given_up, tally.runs / 2);
  EXPECT_GT(tally.left_out, tally.runs / 20);
}

// Where the search found faults of the product.
TEST(ChangeCuts, PlacesOfFormerFaults) {
  struct Place {
    uint64_t seed, place;
  };
  const ScratchDirectory directory;
  ChangeCutsTally tally;
  for (const Place& former : {Place{1, 142}, Place{2, 268}, Place{3, 32}, Place{6, 2}}) {
    EXPECT_EQ(SearchCuts({.seed = former.seed, .only = former.place, .directory = directory.path()}, &tally), "");
  }
  EXPECT_EQ(tally.cut, 4u);
}

}  // namespace
}  // namespace ballast::sim

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  spdlog::set_level(std::getenv("SIM_LOG") != nullptr ? spdlog::level::debug : spdlog::level::off);
  for (int i = 1; i < argc; i += 2) {
    uint64_t* const value = std::strcmp(argv[i], "--seeds") == 0   ? &ballast::sim::seeds
                            : std::strcmp(argv[i], "--cuts") == 0  ? &ballast::sim::cuts
                            : std::strcmp(argv[i], "--seed") == 0  ? &ballast::sim::first_seed
                            : std::strcmp(argv[i], "--place") == 0 ? &ballast::sim::place
                                                                   : nullptr;
    if (value == nullptr || i + 1 == argc || !absl::SimpleAtoi(argv[i + 1], value)) {
      std::fprintf(stderr, "expected [--seeds N] [--cuts N] [--seed S] [--place K], got '%s'\n", argv[i]);
      return 2;
    }
  }
  return RUN_ALL_TESTS();
}
