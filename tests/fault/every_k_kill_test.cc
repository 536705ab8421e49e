// A long training run under durability every-K ends with the bits of an undisturbed run, although servers and trainers
// are killed again and again, at moments chosen by a seed. Lost steps are trained again from the servers' newest common
// pin, never more than K steps old.
//
//   every_k_kill_test [--loops N] [--seed S]
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

uint64_t loops = 40;
uint64_t seed = 1;

constexpr int kSteps = 120;
constexpr int kPinInterval = 4;
constexpr int kDelayMsMax = 900;
constexpr int kSurvivorMsMax = 300;
constexpr char kLost[] = "jobs lost before their first step";

void SleepMs(uint64_t ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

class EveryKKillTest : public ::testing::TestWithParam<FleetOptions> {
 protected:
  void Run();
  void Loop();
  // Reads the output of the ended ranks.
  void Take(const std::vector<services::Finished>& finished);
  void Finish(const char* what);

  FleetOptions Options() const {
    FleetOptions options = GetParam();
    options.steps = kSteps;
    options.flags = {"--durability", "every-K", "--pin-interval", absl::StrCat(kPinInterval)};
    return options;
  }

  sim::Random random_{seed};
  Fleet fleet_{Options()};
  std::string reference_;
  int acknowledged_ = -1;  // the newest step that rank 0 printed since the last server ended
  bool servers_ended_ = false;
  std::map<std::string, int> tally_;
};

void EveryKKillTest::Finish(const char* what) {
  ++tally_[what];
  ASSERT_EQ(fleet_.Drop(), 0);
  acknowledged_ = -1;
  servers_ended_ = false;
}

void EveryKKillTest::Take(const std::vector<services::Finished>& finished) {
  const std::string& out = finished[0].out;
  if (const int continued = Fleet::ContinuedAfterIn(out); continued >= 0) {
    ++tally_[servers_ended_ ? "resumptions after a server's end" : "resumptions"];
    EXPECT_GE(continued, acknowledged_ - (servers_ended_ ? kPinInterval : 0)) << out << finished[0].err;
    acknowledged_ = continued;
    servers_ended_ = false;
  }
  acknowledged_ = std::max(acknowledged_, Fleet::LastStepIn(out));
  if (out.find("CRC32C") != std::string::npos) {
    EXPECT_EQ(Fleet::DigestIn(out), reference_);
    Finish("runs compared");
  } else if (finished[0].err.find("there is no version that all servers have pinned") != std::string::npos) {
    EXPECT_LE(acknowledged_, 0);
    Finish(kLost);
  }
}

void EveryKKillTest::Loop() {
  if (!fleet_.ranks_started()) fleet_.StartRanks();
  SleepMs(random_.Below(kDelayMsMax));
  const uint64_t chance = random_.Below(100);
  const int one = static_cast<int>(random_.Below(Fleet::kServers));
  const bool ranks_too = chance < 50, server_ends = chance >= 20;
  if (ranks_too) fleet_.KillRank(static_cast<int>(random_.Below(Fleet::kRanks)));
  // A trainer that is still starting resumes after the server's end.
  const bool resumed = Fleet::ContinuedAfterIn(fleet_.RankOutputSoFar(0)) >= 0;
  if (server_ends) {
    const int count = chance < 65 ? 1 : 2;
    for (int i = 0; i < count; ++i) fleet_.KillServer(i == 0 ? one : 1 - one);
    for (int i = 0; i < count; ++i) ASSERT_NO_FATAL_FAILURE(fleet_.StartServer(i == 0 ? one : 1 - one));
    ++tally_[count == 1 ? "a server" : "both servers"];
  }
  if (ranks_too) {
    SleepMs(random_.Below(kSurvivorMsMax));
    for (int rank = 0; rank < Fleet::kRanks; ++rank) fleet_.KillRank(rank);
    ++tally_["trainers"];
  }
  // Ranks still alive learn that their server forgot their steps, and end by themselves.
  const auto finished = fleet_.EndRanks();
  servers_ended_ = servers_ended_ || (server_ends && !resumed);
  Take(finished);
  servers_ended_ = servers_ended_ || server_ends;
}

void EveryKKillTest::Run() {
  reference_ = fleet_.ReferenceDigest();
  const absl::Time began = absl::Now();
  for (uint64_t loop = 0; loop < loops; ++loop) {
    SCOPED_TRACE(absl::StrCat("loop ", loop, "; replay with --seed ", seed));
    Loop();
    if (HasFailure()) return;
  }
  // A job that the last loop's kill lost before its first pin is trained again from nothing.
  const int lost = tally_[kLost];
  std::vector<services::Finished> finished;
  for (int run = 0; run == 0 || (run == 1 && tally_[kLost] > lost); ++run) {
    fleet_.StartRanks();
    finished = fleet_.EndRanks();
    Take(finished);
  }
  ASSERT_EQ(finished[0].code, 0) << finished[0].err;
  std::printf("seed %llu, %llu loops in %.0f s:", static_cast<unsigned long long>(seed),
              static_cast<unsigned long long>(loops), absl::ToDoubleSeconds(absl::Now() - began));
  for (const auto& [what, count] : tally_) std::printf(" %s %d,", what.c_str(), count);
  std::printf("\n");
  if (loops >= 20) {
    EXPECT_GT(tally_["resumptions after a server's end"], 3);
  }
}

TEST_P(EveryKKillTest, EndsWithTheBitsOfAnUndisturbedRun) { Run(); }

INSTANTIATE_TEST_SUITE_P(Tiers, EveryKKillTest,
                         ::testing::Values(FleetOptions{.dram = "64MiB", .staging = "4MiB"},
                                           // Holds slices and working copies, and little state.
                                           FleetOptions{.dram = "6MiB", .staging = "2MiB"}),
                         [](const auto& info) { return info.param.dram == "64MiB" ? "Dram" : "PartlyNvme"; });

}  // namespace
}  // namespace ballast

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::strcmp(argv[i], "--loops") == 0 && absl::SimpleAtoi(argv[i + 1], &ballast::loops)) continue;
    if (std::strcmp(argv[i], "--seed") == 0 && absl::SimpleAtoi(argv[i + 1], &ballast::seed)) continue;
    std::fprintf(stderr, "usage: every_k_kill_test [--loops N] [--seed S]\n");
    return 2;
  }
  return RUN_ALL_TESTS();
}
