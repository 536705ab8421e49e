// Versions that are pinned durably, and the way back to them: bits, step counts and blobs, over restarts, on every
// tier; space is refused with numbers and given back.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ballast/proto/base/status.h"
#include "ballast/tests/client/session/durable_servers.h"
#include "ballast/tests/services/trainer_group.h"

namespace ballast::client {
namespace {

class SessionRestoreTest : public ::testing::TestWithParam<Budget> {
 protected:
  SessionRestoreTest() : servers_(GetParam().bytes) {}
  absl::Status RunRanks(int world_size, const std::function<absl::Status(Session&)>& body) {
    return SessionFixture::RunRanks(world_size, [&](Collective* collective) -> absl::Status {
      BALLAST_ASSIGN_OR_RETURN(const auto session,
                               Session::Open(DurableOptions(), TestTensors(), servers_.Connect(), collective));
      return body(*session);
    });
  }
  Servers servers_;
};

TEST_P(SessionRestoreTest, WhatFollowsARestoreIsWhatFollowedThePin) {
  const auto blobs_of = [](int64_t step) { return std::vector<std::string>{Blob(0, step), Blob(1, step)}; };
  ASSERT_EQ(RunRanks(2,
                     [&](Session& session) -> absl::Status {
                       BALLAST_RETURN_IF_ERROR(InitialiseAll(session));
                       BALLAST_RETURN_IF_ERROR(Train(session, 1, 3));
                       if (session.rank() == 0) BALLAST_RETURN_IF_ERROR(session.PinDurably());
                       BALLAST_RETURN_IF_ERROR(Train(session, 4, 6));
                       BALLAST_RETURN_IF_ERROR(ExpectIsStep(session, 6));
                       BALLAST_ASSIGN_OR_RETURN(const StepReport report, session.Restore({.version = 3}));
                       BALLAST_RETURN_IF_ERROR(Expect(report.version == 7 && session.version() == 7, "version"));
                       BALLAST_RETURN_IF_ERROR(Expect(session.resumed_blobs() == blobs_of(3), "blobs"));
                       BALLAST_RETURN_IF_ERROR(ExpectIsStep(session, 3));
                       BALLAST_RETURN_IF_ERROR(Train(session, 4, 5));
                       return ExpectIsStep(session, 5);
                     }),
            absl::OkStatus());
  servers_.Restart();
  // Another world size finds the restored timeline, and the pin for another restore.
  ASSERT_EQ(RunRanks(1,
                     [&](Session& session) -> absl::Status {
                       BALLAST_RETURN_IF_ERROR(Expect(session.version() == 9, "version after the restart"));
                       BALLAST_RETURN_IF_ERROR(Expect(session.resumed_blobs() == blobs_of(5), "blobs"));
                       BALLAST_RETURN_IF_ERROR(ExpectIsStep(session, 5));
                       BALLAST_ASSIGN_OR_RETURN(const auto pins, session.DurablePins());
                       BALLAST_RETURN_IF_ERROR(Expect(Numbers(pins) == std::vector<int64_t>{3}, "pins"));
                       BALLAST_RETURN_IF_ERROR(session.Restore({.version = 3}).status());
                       BALLAST_RETURN_IF_ERROR(Expect(session.version() == 10, "version"));
                       BALLAST_RETURN_IF_ERROR(Expect(session.resumed_blobs() == blobs_of(3), "blobs"));
                       return ExpectIsStep(session, 3);
                     }),
            absl::OkStatus());
  // Right after a restore, too.
  servers_.Restart();
  ASSERT_EQ(RunRanks(2,
                     [&](Session& session) -> absl::Status {
                       BALLAST_RETURN_IF_ERROR(Expect(session.version() == 10, "version"));
                       BALLAST_RETURN_IF_ERROR(ExpectIsStep(session, 3));
                       BALLAST_RETURN_IF_ERROR(Train(session, 4, 8));
                       return ExpectIsStep(session, 8);
                     }),
            absl::OkStatus());
}

TEST_P(SessionRestoreTest, SeveralPinsShareWhatDidNotChange) {
  ASSERT_EQ(RunRanks(1,
                     [&](Session& session) -> absl::Status {
                       BALLAST_RETURN_IF_ERROR(InitialiseAll(session));
                       BALLAST_RETURN_IF_ERROR(Train(session, 1, 2));
                       const uint64_t before = servers_.NvmeUsed();
                       BALLAST_RETURN_IF_ERROR(session.PinDurably());
                       BALLAST_RETURN_IF_ERROR(session.PinDurably());  // the same again
                       const uint64_t one_pin = servers_.NvmeUsed() - before;
                       BALLAST_RETURN_IF_ERROR(Expect(one_pin > 0, "a pin takes space"));
                       // Only one tensor changes.
                       std::vector<float> bias(100, 0.5f);
                       BALLAST_RETURN_IF_ERROR(session.Write("layer.bias", bias));
                       BALLAST_RETURN_IF_ERROR(session.CommitValues().status());
                       BALLAST_RETURN_IF_ERROR(session.PinDurably());
                       return Expect(servers_.NvmeUsed() - before <= 2 * one_pin, "two pins take twice at most");
                     }),
            absl::OkStatus());
  servers_.Restart();
  ASSERT_EQ(RunRanks(1,
                     [&](Session& session) -> absl::Status {
                       BALLAST_RETURN_IF_ERROR(session.UnpinDurably(3));
                       BALLAST_RETURN_IF_ERROR(session.Restore({.version = 2}).status());
                       return ExpectIsStep(session, 2);
                     }),
            absl::OkStatus());
}

TEST_P(SessionRestoreTest, UnpinnedSpaceComesBack) {
  ASSERT_EQ(RunRanks(1,
                     [&](Session& session) -> absl::Status {
                       BALLAST_RETURN_IF_ERROR(InitialiseAll(session));
                       BALLAST_RETURN_IF_ERROR(Train(session, 1, 1));
                       const uint64_t before = servers_.NvmeUsed();
                       for (int64_t step = 2; step <= 5; ++step) {
                         BALLAST_RETURN_IF_ERROR(session.PinDurably());
                         BALLAST_RETURN_IF_ERROR(Train(session, step, step));
                         BALLAST_RETURN_IF_ERROR(session.UnpinDurably(step - 1));
                       }
                       BALLAST_RETURN_IF_ERROR(session.UnpinDurably(1));  // is not there: no error
                       BALLAST_RETURN_IF_ERROR(Expect(servers_.NvmeUsed() == before, "space after unpins"));
                       BALLAST_RETURN_IF_ERROR(
                           ExpectError(session.Restore({.version = 4}).status(), model::kVersionGone, "no version is"));
                       // The session goes on.
                       BALLAST_RETURN_IF_ERROR(Train(session, 6, 6));
                       return ExpectIsStep(session, 6);
                     }),
            absl::OkStatus());
  const uint64_t used = servers_.NvmeUsed();
  servers_.Restart();
  EXPECT_EQ(servers_.NvmeUsed(), used);
  EXPECT_EQ(servers_.Status(0).jobs(0).durable_versions_size(), 0);
}

// It cannot be restored, and keeps its space on some servers.
TEST_P(SessionRestoreTest, APinThatOnlySomeServersHaveEndsWithTheNextGroup) {
  ASSERT_EQ(RunRanks(2,
                     [&](Session& session) -> absl::Status {
                       BALLAST_RETURN_IF_ERROR(InitialiseAll(session));
                       BALLAST_RETURN_IF_ERROR(Train(session, 1, 1));
                       if (session.rank() == 0) BALLAST_RETURN_IF_ERROR(session.PinDurably());
                       return Train(session, 2, 2);
                     }),
            absl::OkStatus());
  ASSERT_EQ(servers_.PinDurably(1, 2), absl::OkStatus());
  ASSERT_EQ(servers_.Status(1).jobs(0).durable_versions_size(), 2);
  ASSERT_EQ(RunRanks(2, [&](Session& session) { return ExpectIsStep(session, 2); }), absl::OkStatus());
  for (int i = 0; i < kServers; ++i) {
    EXPECT_THAT(servers_.Status(i).jobs(0).durable_versions(), ::testing::ElementsAre(1));
  }
}

// Tensors registered later have no state in the version. The group is told before anything changes, and goes on.
TEST_P(SessionRestoreTest, AVersionFromBeforeARegistrationIsRefusedAndTheGroupGoesOn) {
  ASSERT_EQ(RunRanks(2,
                     [&](Session& session) -> absl::Status {
                       BALLAST_RETURN_IF_ERROR(InitialiseAll(session));
                       BALLAST_RETURN_IF_ERROR(Train(session, 1, 1));
                       if (session.rank() == 0) BALLAST_RETURN_IF_ERROR(session.PinDurably());
                       const TensorSpec late{.name = "late", .unit = "late", .shape = {1000}};
                       BALLAST_RETURN_IF_ERROR(session.Register({late}));
                       for (int i = 0; i < 2; ++i) {
                         BALLAST_RETURN_IF_ERROR(Expect(session.needs_values() == (i == 0), "values"));
                         BALLAST_RETURN_IF_ERROR(ExpectError(session.Restore({.version = 1}).status(), model::kBadSpec,
                                                             "before tensor 'late' had values"));
                         if (i == 0) BALLAST_RETURN_IF_ERROR(InitialiseAll(session));
                       }
                       // A version pinned now can be restored.
                       const int64_t whole = session.version();
                       if (session.rank() == 0) BALLAST_RETURN_IF_ERROR(session.PinDurably());
                       BALLAST_RETURN_IF_ERROR(Train(session, 2, 2));
                       return session.Restore({.version = whole}).status();
                     }),
            absl::OkStatus());
}

// The number alone does not tell: a job trained on from an older copy of its servers' directories counts on from there.
TEST_P(SessionRestoreTest, AVersionOfAnotherLifeOrHistoryIsRefusedAndTheGroupGoesOn) {
  KeptVersion common, given_up, own;
  // Runs steps first..4, with a pin of step 4; returns that pin and the first one.
  const auto history = [&](int64_t first, KeptVersion* newest) {
    return RunRanks(1, [&, first, newest](Session& session) -> absl::Status {
      if (first == 1) {
        BALLAST_RETURN_IF_ERROR(InitialiseAll(session));
        BALLAST_RETURN_IF_ERROR(Train(session, 1, 2));
        BALLAST_RETURN_IF_ERROR(session.PinDurably());
      } else {
        BALLAST_RETURN_IF_ERROR(Train(session, 3, 4));
        BALLAST_RETURN_IF_ERROR(session.PinDurably());
      }
      BALLAST_ASSIGN_OR_RETURN(const auto pins, session.DurablePins());
      *newest = pins.back();
      return absl::OkStatus();
    });
  };
  ASSERT_EQ(history(1, &common), absl::OkStatus());
  const std::deque<ScratchDirectory> copies = servers_.Copy();
  ASSERT_EQ(history(3, &given_up), absl::OkStatus());
  servers_.RestartOn(copies);
  ASSERT_EQ(history(3, &own), absl::OkStatus());
  EXPECT_NE(own.life, 0);
  EXPECT_EQ(own.life, given_up.life);
  EXPECT_EQ(own.version, 4);
  EXPECT_EQ(given_up.version, 4);
  ASSERT_EQ(RunRanks(2,
                     [&](Session& session) -> absl::Status {
                       BALLAST_RETURN_IF_ERROR(Train(session, 5, 5));
                       BALLAST_RETURN_IF_ERROR(
                           ExpectError(session.Restore(given_up).status(), model::kVersionGone, "of another history"));
                       KeptVersion earlier = own;
                       earlier.life ^= 1;
                       BALLAST_RETURN_IF_ERROR(
                           ExpectError(session.Restore(earlier).status(), model::kBadSpec, "of an earlier job 'test'"));
                       BALLAST_RETURN_IF_ERROR(ExpectIsStep(session, 5));
                       // What is there, what both histories have, and what only a number names.
                       BALLAST_RETURN_IF_ERROR(session.Restore(own).status());
                       BALLAST_RETURN_IF_ERROR(ExpectIsStep(session, 4));
                       BALLAST_RETURN_IF_ERROR(session.Restore(common).status());
                       BALLAST_RETURN_IF_ERROR(ExpectIsStep(session, 2));
                       BALLAST_RETURN_IF_ERROR(session.Restore({.version = 4}).status());
                       return ExpectIsStep(session, 4);
                     }),
            absl::OkStatus());
}

INSTANTIATE_TEST_SUITE_P(Tiers, SessionRestoreTest,
                         ::testing::Values(Budget{"Dram", {0, 64 * kMiB, 256 * kMiB}},
                                           Budget{"Mixed", {0, 9 * kMiB, 256 * kMiB}}),
                         [](const auto& info) { return info.param.name; });

TEST(SessionPinTest, WithoutSpaceNothingIsPinned) {
  // First a budget that holds the job and no pin: what the job takes, measured with room to spare.
  uint64_t job_bytes = 0;
  for (const uint64_t nvme : {256 * kMiB, uint64_t{0}}) {
    Servers servers({0, 64 * kMiB, nvme > 0 ? nvme : job_bytes + kMiB});
    ASSERT_EQ(SessionFixture::RunRanks(
                  1,
                  [&](Collective* collective) -> absl::Status {
                    BALLAST_ASSIGN_OR_RETURN(const auto session, Session::Open(DurableOptions(), TestTensors(),
                                                                               servers.Connect(), collective));
                    BALLAST_RETURN_IF_ERROR(InitialiseAll(*session));
                    BALLAST_RETURN_IF_ERROR(Train(*session, 1, 2));
                    if (nvme > 0) {
                      for (int i = 0; i < kServers; ++i) {
                        job_bytes = std::max<uint64_t>(job_bytes, servers.Status(i).tiers(2).used_bytes());
                      }
                      return absl::OkStatus();
                    }
                    const uint64_t before = servers.NvmeUsed();
                    BALLAST_RETURN_IF_ERROR(ExpectError(session->PinDurably(), model::kBudget, "nvme is short of"));
                    BALLAST_RETURN_IF_ERROR(Expect(servers.NvmeUsed() == before, "a refused pin keeps nothing"));
                    BALLAST_ASSIGN_OR_RETURN(const auto pins, session->DurablePins());
                    BALLAST_RETURN_IF_ERROR(Expect(pins.empty(), "no pin"));
                    BALLAST_RETURN_IF_ERROR(Train(*session, 3, 4));
                    return ExpectIsStep(*session, 4);
                  }),
              absl::OkStatus());
  }
}

TEST(SessionPinTest, DurabilityNoneKeepsNothing) {
  Servers servers({0, 64 * kMiB, 256 * kMiB});
  ASSERT_EQ(SessionFixture::RunRanks(
                1,
                [&](Collective* collective) -> absl::Status {
                  SessionOptions options = DurableOptions();
                  options.durability = v1::DURABILITY_NONE;
                  BALLAST_ASSIGN_OR_RETURN(const auto session,
                                           Session::Open(options, TestTensors(), servers.Connect(), collective));
                  BALLAST_RETURN_IF_ERROR(InitialiseAll(*session));
                  return ExpectError(session->PinDurably(), model::kUnsupported, "durability none");
                }),
            absl::OkStatus());
}

}  // namespace
}  // namespace ballast::client
