// A long training run under durability `step` ends with the bits of an undisturbed run and loses no acknowledged step,
// although servers and trainers are killed again and again, at moments chosen by a seed.
//
//   kill_test [--loops N] [--seed S]
//
// If a run ends while loops are left, the test compares it, drops the job and begins a new run.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <map>
#include <thread>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ballast/tests/fault/fleet.h"
#include "ballast/tests/sim/random.h"

namespace ballast {
namespace {

uint64_t loops = 100;
uint64_t seed = 1;

constexpr int kSteps = 120;  // four seconds undisturbed, so that ten loops or so fall into one run
// After a kill, the next group needs 200 ms to its first step, and 40 ms more to the second.
constexpr int kDelayMsMax = 700;
constexpr int kRecoveryMsMax = 120;
constexpr int kSurvivorMsMax = 200;
constexpr int kMiB = 1 << 20;
// Five steps are eleven segments of 4 MiB. A restart adds what is missing to six free segments.
constexpr int kShortLogBytesMax = (44 + 6 * 4 + 4) * kMiB;

enum Victims { kOneServer, kBothServers, kOneRank, kBothRanks, kServerAndRank, kEverything, kVictimsEnd };
constexpr const char* kVictimNames[] = {"a server",      "both servers",         "a trainer",
                                        "both trainers", "a server and trainer", "everything"};

void SleepMs(uint64_t ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

class KillTest : public ::testing::TestWithParam<FleetOptions> {
 protected:
  void Run();
  void Loop();
  // Reads the output of the ended ranks. Every step reported to rank 0 must have been kept.
  void Take(const std::vector<services::Finished>& finished);
  bool RunEnded(const std::vector<services::Finished>& finished) const;
  void FinishRun(const std::vector<services::Finished>& finished);
  void KillServers(const std::vector<int>& victims);

  FleetOptions WithSteps() const {
    FleetOptions options = GetParam();
    if (options.steps == 0) options.steps = kSteps;
    return options;
  }

  sim::Random random_{seed};
  Fleet fleet_{WithSteps()};
  std::string reference_;
  int acknowledged_ = -1;  // the newest step that rank 0 printed
  std::map<std::string, int> tally_;
};

void KillTest::Take(const std::vector<services::Finished>& finished) {
  const std::string& out = finished[0].out;
  if (const int continued = Fleet::ContinuedAfterIn(out); continued >= 0) {
    EXPECT_GE(continued, acknowledged_) << "a step that a trainer was told is done was forgotten";
    ++tally_["resumptions seen"];
  }
  acknowledged_ = std::max(acknowledged_, Fleet::LastStepIn(out));
}

bool KillTest::RunEnded(const std::vector<services::Finished>& finished) const {
  return finished[0].out.find("CRC32C") != std::string::npos;
}

void KillTest::FinishRun(const std::vector<services::Finished>& finished) {
  EXPECT_EQ(Fleet::DigestIn(finished[0].out), reference_);
  if (GetParam().log_steps > 0) {
    const Fleet::Status status = fleet_.AskStatus();
    EXPECT_GT(status.log_bytes_max, kMiB) << status.text;
    EXPECT_LT(status.log_bytes_max, kShortLogBytesMax) << "restarts made it longer: " << status.text;
    tally_["MiB of log"] = std::max(tally_["MiB of log"], status.log_bytes_max / kMiB);
  }
  ASSERT_EQ(fleet_.Drop(), 0);
  acknowledged_ = -1;
  ++tally_["runs compared"];
}

void KillTest::KillServers(const std::vector<int>& victims) {
  for (const int i : victims) fleet_.KillServer(i);
  if (GetParam().log_steps > 0) {
    // A log that is longer already stays so; a shorter one gets longer amid the run.
    fleet_.set_log_steps(GetParam().log_steps + static_cast<int>(random_.Below(3)));
  }
  for (const int i : victims) {
    // Recoveries are killed too.
    while (random_.Percent(25)) {
      ++tally_["starts killed"];
      ASSERT_NO_FATAL_FAILURE(fleet_.StartAndKillServer(i, static_cast<int>(random_.Below(kRecoveryMsMax))));
    }
    if (random_.Percent(50)) SleepMs(random_.Below(100));
    ASSERT_NO_FATAL_FAILURE(fleet_.StartServer(i));
  }
}

void KillTest::Loop() {
  if (!fleet_.ranks_started()) fleet_.StartRanks();
  SleepMs(random_.Below(kDelayMsMax));
  const auto victims = static_cast<Victims>(random_.Below(kVictimsEnd));
  ++tally_[kVictimNames[victims]];
  const Fleet::Status before = fleet_.AskStatus();

  std::vector<int> servers, ranks;
  const int one_server = static_cast<int>(random_.Below(Fleet::kServers));
  const int one_rank = static_cast<int>(random_.Below(Fleet::kRanks));
  if (victims == kOneServer || victims == kServerAndRank) servers = {one_server};
  if (victims == kBothServers || victims == kEverything) servers = {one_server, 1 - one_server};
  if (victims == kOneRank || victims == kServerAndRank) ranks = {one_rank};
  if (victims == kBothRanks || victims == kEverything) ranks = {one_rank, 1 - one_rank};

  SleepMs(random_.Below(40));  // a step's time, since the status took its own
  for (const int rank : ranks) fleet_.KillRank(rank);
  ASSERT_NO_FATAL_FAILURE(KillServers(servers));
  if (!ranks.empty()) {
    // A survivor gives up by itself, unless it had not yet met the others; its group is over in any case.
    SleepMs(random_.Below(kSurvivorMsMax));
    for (int rank = 0; rank < Fleet::kRanks; ++rank) fleet_.KillRank(rank);
    const auto finished = fleet_.EndRanks();
    Take(finished);
    if (RunEnded(finished)) return FinishRun(finished);
  }
  const Fleet::Status after = fleet_.AskStatus();
  ASSERT_TRUE(after.answered) << after.text;
  // A commit is not synced on its own (services/step, rule 8). If the commit is lost, the step is still prepared, and
  // Take checks that it was not forgotten.
  EXPECT_GE(after.committed_min, before.committed_min - 1) << after.text;
}

void KillTest::Run() {
  reference_ = fleet_.ReferenceDigest();
  const absl::Time began = absl::Now();
  const uint64_t loops_here = GetParam().log_steps > 0 ? (loops + 1) / 2 : loops;  // longer steps
  for (uint64_t loop = 0; loop < loops_here; ++loop) {
    SCOPED_TRACE(absl::StrCat("loop ", loop, "; replay with --seed ", seed));
    Loop();
    if (HasFailure()) return;
  }
  if (!fleet_.ranks_started()) fleet_.StartRanks();
  const auto finished = fleet_.EndRanks();
  Take(finished);
  ASSERT_EQ(finished[0].code, 0) << finished[0].err;
  ASSERT_EQ(finished[1].code, 0) << finished[1].err;
  FinishRun(finished);
  std::printf("seed %llu, %llu loops in %.0f s:", static_cast<unsigned long long>(seed),
              static_cast<unsigned long long>(loops_here), absl::ToDoubleSeconds(absl::Now() - began));
  for (const auto& [what, count] : tally_) std::printf(" %s %d,", what.c_str(), count);
  std::printf("\n");
}

TEST_P(KillTest, NoAcknowledgedStepIsLost) { Run(); }

INSTANTIATE_TEST_SUITE_P(Tiers, KillTest,
                         ::testing::Values(FleetOptions{.dram = "64MiB", .staging = "4MiB"},
                                           // Holds a chunk's state or two beside working copies and gradients.
                                           FleetOptions{.dram = "4500KiB", .staging = "2MiB"},
                                           WithShortLog(/*steps=*/40)),
                         [](const auto& info) {
                           if (info.param.log_steps > 0) return "ShortLog";
                           return info.param.dram == "64MiB" ? "Dram" : "PartlyNvme";
                         });

}  // namespace
}  // namespace ballast

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::strcmp(argv[i], "--loops") == 0 && absl::SimpleAtoi(argv[i + 1], &ballast::loops)) continue;
    if (std::strcmp(argv[i], "--seed") == 0 && absl::SimpleAtoi(argv[i + 1], &ballast::seed)) continue;
    std::fprintf(stderr, "usage: kill_test [--loops N] [--seed S]\n");
    return 2;
  }
  return RUN_ALL_TESTS();
}
