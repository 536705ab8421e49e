// A state server dies at each named failpoint (tests/seeded/failpoint.h), at the first passing, the second and so on.
// After its restart, the run must end with the bits of an undisturbed run, and no acknowledged step may be lost.
//
//   failpoint_test [--point NAME] [--passings N]
//
// One of two servers is armed. Its restart is armed for the next failpoint, so every death is followed by a recovery. A
// failpoint not reached in a whole run is a failure.
#include "ballast/tests/seeded/failpoint.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "ballast/tests/fault/fleet.h"

namespace ballast {
namespace {

uint64_t passings = 2;
std::string only;  // empty: all

constexpr int kArmed = 0;      // which server
constexpr int kSteps = 40;     // many times the whole log
constexpr int kSomeSteps = 3;  // so that there is state to recover or to drop
// The shortest log: steps wait for flushes, and restarts for room.
const FleetOptions kOptions = WithShortLog(kSteps);

// When it is passed.
enum Kind { kRun, kFence, kRecovery, kLengthen, kDrop, kCreate, kEmbedded };

Kind KindOf(absl::string_view point) {
  if (absl::StartsWith(point, "fence/")) return kFence;
  if (absl::StartsWith(point, "recovery/")) return kRecovery;
  if (absl::StartsWith(point, "lengthen/")) return kLengthen;
  if (absl::StartsWith(point, "drop/")) return kDrop;
  if (storage::IsOfTrainersMemory(point)) return kEmbedded;  // embedded_failpoint_test has them
  return absl::StartsWith(point, "create/") ? kCreate : kRun;
}

void SleepBriefly() { std::this_thread::sleep_for(std::chrono::milliseconds(2)); }

class FailpointTest : public ::testing::Test {
 protected:
  // Kills the armed server if running, and starts it anew. True if the server lives to serve.
  bool Start(absl::string_view point, uint64_t passing);
  void StartUnarmed();
  // Each: true if the server died where it should.
  bool DiesInRecovery(absl::string_view point);
  bool DiesInLengthening(absl::string_view point);
  bool DiesInDrop(absl::string_view point);
  bool DiesInCreation(absl::string_view point);
  bool DiesInFence(absl::string_view point, uint64_t passing);
  bool DiesInRun(absl::string_view point, uint64_t passing);

  bool DiesWhileRanksRun();
  void EnsureRanks();
  // As Fleet::Drop, also where the armed server dies meanwhile: then it is started without a point.
  int DropWhoeverDies();
  void WaitForSteps();
  // Reads the output of a rank after its end, by itself or killed.
  void TakeAcknowledged(const services::Finished& rank);
  void FinishRun();
  void KillRanks();
  void Round(uint64_t passing, Kind kind, int* died);

  Fleet fleet_{kOptions};
  const std::string reference_ = fleet_.ReferenceDigest();
  int acknowledged_ = -1;
  int runs_ = 0;
  bool died_late_ = false;  // behind the end of a run, since the server was armed
};

bool FailpointTest::Start(absl::string_view point, uint64_t passing) {
  died_late_ = false;
  fleet_.KillServer(kArmed);
  setenv("FAILPOINT", absl::StrCat(point, ":", passing).c_str(), /*overwrite=*/1);
  const bool serves = fleet_.TryStartServer(kArmed);
  unsetenv("FAILPOINT");
  return serves;
}

void FailpointTest::StartUnarmed() {
  fleet_.KillServer(kArmed);
  fleet_.StartServer(kArmed);
}

void FailpointTest::TakeAcknowledged(const services::Finished& rank) {
  if (const int continued = Fleet::ContinuedAfterIn(rank.out); continued >= 0) {
    EXPECT_GE(continued, acknowledged_) << "a step that a trainer was told is done was forgotten";
  }
  acknowledged_ = std::max(acknowledged_, Fleet::LastStepIn(rank.out));
}

int FailpointTest::DropWhoeverDies() {
  const int code = fleet_.Drop();
  if (code == 0 || !fleet_.AwaitServerEnd(kArmed)) return code;
  died_late_ = true;
  StartUnarmed();
  return fleet_.Drop();
}

// To its end, wherever it is; then the job is dropped.
void FailpointTest::FinishRun() {
  const auto finished = fleet_.EndRanks();
  TakeAcknowledged(finished[0]);
  ASSERT_EQ(finished[0].code, 0) << finished[0].err;
  ASSERT_EQ(finished[1].code, 0) << finished[1].err;
  ASSERT_EQ(Fleet::DigestIn(finished[0].out), reference_);
  ASSERT_EQ(DropWhoeverDies(), 0);
  acknowledged_ = -1;
  ++runs_;
}

void FailpointTest::KillRanks() {
  if (!fleet_.ranks_started()) return;
  for (int rank = 0; rank < Fleet::kRanks; ++rank) fleet_.KillRank(rank);
  TakeAcknowledged(fleet_.EndRanks()[0]);
}

void FailpointTest::EnsureRanks() {
  if (fleet_.ranks_started() && fleet_.ranks_ended()) FinishRun();
  if (!HasFatalFailure() && !fleet_.ranks_started()) fleet_.StartRanks();
}

void FailpointTest::WaitForSteps() {
  EnsureRanks();
  while (!HasFatalFailure() && fleet_.AskStatus().committed_min < kSomeSteps) {
    if (fleet_.server_ended(kArmed)) StartUnarmed();  // died too early at the point before
    EnsureRanks();
  }
}

bool FailpointTest::DiesWhileRanksRun() {
  while (!fleet_.server_ended(kArmed) && !fleet_.ranks_ended()) SleepBriefly();
  return fleet_.server_ended(kArmed);
}

bool FailpointTest::DiesInRecovery(absl::string_view point) {
  constexpr int kAttempts = 5, kStepsBetween = 5;
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    WaitForSteps();
    if (HasFatalFailure()) return false;
    if (!Start(point, 1)) return true;
    // The first step afterwards may pass the point, or the next recovery, which finds more versions recorded.
    const int before = fleet_.AskStatus().committed_min;
    while (!fleet_.server_ended(kArmed) && !fleet_.ranks_ended() &&
           fleet_.AskStatus().committed_min < before + kStepsBetween) {
    }
    if (fleet_.server_ended(kArmed)) return true;
  }
  return false;
}

// The job is new, so that its log is short and there are steps enough to come.
bool FailpointTest::DiesInLengthening(absl::string_view point) {
  KillRanks();
  StartUnarmed();
  if (HasFatalFailure() || fleet_.Drop() != 0) return false;
  acknowledged_ = -1;
  WaitForSteps();
  if (HasFatalFailure()) return false;
  fleet_.set_log_steps(kOptions.log_steps + 2);
  const bool died = !Start(point, 1) || DiesWhileRanksRun();
  fleet_.set_log_steps(kOptions.log_steps);
  return died;
}

bool FailpointTest::DiesInDrop(absl::string_view point) {
  WaitForSteps();
  KillRanks();
  if (HasFatalFailure() || !Start(point, 1)) return false;
  (void)fleet_.Drop();
  if (!fleet_.AwaitServerEnd(kArmed)) return false;
  StartUnarmed();
  // Half dropped, it can be dropped again; the next run begins from nothing.
  EXPECT_EQ(fleet_.Drop(), 0);
  acknowledged_ = -1;
  return true;
}

bool FailpointTest::DiesInCreation(absl::string_view point) {
  KillRanks();
  if (fleet_.Drop() != 0 || !Start(point, 1)) return false;
  acknowledged_ = -1;
  fleet_.StartRanks();
  return DiesWhileRanksRun();
}

bool FailpointTest::DiesInFence(absl::string_view point, uint64_t passing) {
  WaitForSteps();
  if (HasFatalFailure()) return false;
  if (!Start(point, passing)) return true;
  // Two groups more than needed: the run may be at its end for one group, and the next may find no job yet.
  for (uint64_t group = 0; group < passing + 2; ++group) {
    KillRanks();
    fleet_.StartRanks();
    const int before = fleet_.AskStatus().committed_min;
    while (!fleet_.server_ended(kArmed) && !fleet_.ranks_ended() && fleet_.AskStatus().committed_min <= before + 1) {
    }
    if (fleet_.server_ended(kArmed)) return true;
    EnsureRanks();
    if (HasFatalFailure()) return false;
  }
  return false;
}

bool FailpointTest::DiesInRun(absl::string_view point, uint64_t passing) {
  EnsureRanks();
  if (HasFatalFailure()) return false;
  if (!Start(point, passing)) return true;  // recovery passes it too
  if (DiesWhileRanksRun()) return true;
  // The run was too far gone. Now a whole one.
  EnsureRanks();
  return !HasFatalFailure() && (died_late_ || DiesWhileRanksRun());
}

void FailpointTest::Round(uint64_t passing, Kind kind, int* died) {
  for (const absl::string_view point : storage::kFailpoints) {
    if (KindOf(point) != kind || (!only.empty() && point != only)) continue;
    SCOPED_TRACE(absl::StrCat(point, ":", passing));
    bool reached = false;
    switch (kind) {
      case kRun:
        reached = DiesInRun(point, passing);
        break;
      case kFence:
        reached = DiesInFence(point, passing);
        break;
      case kRecovery:
        reached = DiesInRecovery(point);
        break;
      case kLengthen:
        reached = DiesInLengthening(point);
        break;
      case kDrop:
        reached = DiesInDrop(point);
        break;
      case kCreate:
        reached = DiesInCreation(point);
        break;
      case kEmbedded:
        break;
    }
    ASSERT_FALSE(HasFailure());
    ASSERT_TRUE(reached) << point << " was not passed " << passing << " times in a whole run";
    ++*died;
    if (kind != kCreate && kind != kLengthen) continue;
    // What comes next would drop the job: this run must come to the same end.
    StartUnarmed();
    FinishRun();
    ASSERT_FALSE(HasFailure());
  }
}

TEST_F(FailpointTest, ADeathAtEachChangesNothing) {
  int died = 0;
  for (uint64_t passing = 1; passing <= passings; ++passing) {
    for (const Kind kind : {kRun, kFence, kRecovery, kLengthen, kDrop, kCreate}) {
      Round(passing, kind, &died);
      ASSERT_FALSE(HasFailure());
    }
  }
  StartUnarmed();
  EnsureRanks();
  FinishRun();
  std::printf("%zu failpoints, %d deaths, %d runs compared\n", std::size(storage::kFailpoints), died, runs_);
}

}  // namespace
}  // namespace ballast

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::strcmp(argv[i], "--point") == 0) {
      ballast::only = argv[i + 1];
    } else if (std::strcmp(argv[i], "--passings") != 0 || !absl::SimpleAtoi(argv[i + 1], &ballast::passings)) {
      std::fprintf(stderr, "usage: failpoint_test [--point NAME] [--passings N]\n");
      return 2;
    }
  }
  return RUN_ALL_TESTS();
}
