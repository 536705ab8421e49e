// Durability every-K: servers lose what came after their pins, and the group goes on from the newest that all have.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "ballast/proto/base/status.h"
#include "ballast/tests/client/session/durable_servers.h"

namespace ballast::client {
namespace {

using Body = std::function<absl::Status(Session&)>;

class SessionEveryKTest : public ::testing::TestWithParam<Budget> {
 protected:
  SessionEveryKTest() : servers_(GetParam().bytes) {}
  static SessionOptions Options(uint64_t interval = 3) {
    SessionOptions options = DurableOptions();
    options.durability = v1::DURABILITY_EVERY_K;
    options.pin_interval = interval;
    return options;
  }
  absl::Status RunRanks(int world_size, const Body& body, const SessionOptions& options = Options()) {
    return SessionFixture::RunRanks(world_size, [&](Collective* collective) -> absl::Status {
      BALLAST_ASSIGN_OR_RETURN(const auto session,
                               Session::Open(options, TestTensors(), servers_.Connect(), collective));
      return body(*session);
    });
  }
  // Steps 0 to `last` of a new job.
  absl::Status Begin(int world_size, int64_t last) {
    return RunRanks(world_size, [&](Session& session) -> absl::Status {
      BALLAST_RETURN_IF_ERROR(Expect(session.restored_version() == -1, "nothing is lost yet"));
      BALLAST_RETURN_IF_ERROR(InitialiseAll(session));
      BALLAST_RETURN_IF_ERROR(Train(session, 1, last));
      return ExpectIsStep(session, last);
    });
  }
  Servers servers_;
};

TEST_P(SessionEveryKTest, GoesOnFromTheNewestPinThatAllHave) {
  ASSERT_EQ(Begin(2, 5), absl::OkStatus());
  servers_.Restart(1);  // the other goes back too
  ASSERT_EQ(RunRanks(2,
                     [&](Session& session) -> absl::Status {
                       BALLAST_RETURN_IF_ERROR(Expect(session.restored_version() == 3, "restored version"));
                       // Steps 4 and 5 were decided: the restore is the sixth.
                       BALLAST_RETURN_IF_ERROR(Expect(session.version() == 6, "version"));
                       const std::vector<std::string> blobs = {Blob(0, 3), Blob(1, 3)};
                       BALLAST_RETURN_IF_ERROR(Expect(session.resumed_blobs() == blobs, "blobs"));
                       BALLAST_RETURN_IF_ERROR(ExpectIsStep(session, 3));
                       BALLAST_RETURN_IF_ERROR(Train(session, 4, 8));
                       return ExpectIsStep(session, 8);
                     }),
            absl::OkStatus());
  // Version 9 held step 6. Nobody is left who knows of 10 and 11: these numbers stay free, up to the next due pin.
  servers_.Restart();
  ASSERT_EQ(RunRanks(1,
                     [&](Session& session) -> absl::Status {
                       BALLAST_RETURN_IF_ERROR(Expect(session.restored_version() == 9, "restored version"));
                       BALLAST_RETURN_IF_ERROR(Expect(session.version() == 13, "version"));
                       BALLAST_RETURN_IF_ERROR(ExpectIsStep(session, 6));
                       return Train(session, 7, 7);
                     }),
            absl::OkStatus());
  // Nothing was lost since.
  ASSERT_EQ(RunRanks(2,
                     [&](Session& session) -> absl::Status {
                       BALLAST_RETURN_IF_ERROR(Expect(session.restored_version() == -1, "nothing is lost"));
                       BALLAST_RETURN_IF_ERROR(Expect(session.version() == 14, "version"));
                       return ExpectIsStep(session, 7);
                     }),
            absl::OkStatus());
}

TEST_P(SessionEveryKTest, KeepsOnePinOfItsOwnAndThoseOfUsers) {
  uint64_t used = 0;
  ASSERT_EQ(RunRanks(1,
                     [&](Session& session) -> absl::Status {
                       BALLAST_RETURN_IF_ERROR(InitialiseAll(session));
                       BALLAST_RETURN_IF_ERROR(Train(session, 1, 3));
                       used = servers_.NvmeUsed();
                       BALLAST_RETURN_IF_ERROR(session.PinDurably());  // as the servers do
                       BALLAST_RETURN_IF_ERROR(Train(session, 4, 4));
                       BALLAST_RETURN_IF_ERROR(session.PinDurably());
                       BALLAST_RETURN_IF_ERROR(Train(session, 5, 11));
                       BALLAST_ASSIGN_OR_RETURN(auto pins, session.DurablePins());
                       BALLAST_RETURN_IF_ERROR(Expect(Numbers(pins) == std::vector<int64_t>({3, 4, 9}), "pins"));
                       // Each kind comes back to whom it is of.
                       BALLAST_RETURN_IF_ERROR(session.UnpinDurably(3));
                       BALLAST_RETURN_IF_ERROR(session.UnpinDurably(4));
                       BALLAST_RETURN_IF_ERROR(session.UnpinDurably(9));
                       BALLAST_ASSIGN_OR_RETURN(pins, session.DurablePins());
                       BALLAST_RETURN_IF_ERROR(Expect(Numbers(pins) == std::vector<int64_t>({9}), "pins"));
                       return Expect(servers_.NvmeUsed() == used, "space");
                     }),
            absl::OkStatus());
  servers_.Restart();
  EXPECT_EQ(servers_.NvmeUsed(), used);
}

TEST_P(SessionEveryKTest, WhatAUserRestoredIsWhatIsGoneBackTo) {
  ASSERT_EQ(Begin(1, 1), absl::OkStatus());
  ASSERT_EQ(RunRanks(1,
                     [&](Session& session) -> absl::Status {
                       BALLAST_RETURN_IF_ERROR(session.PinDurably());
                       BALLAST_RETURN_IF_ERROR(Train(session, 2, 7));
                       BALLAST_RETURN_IF_ERROR(session.Restore({.version = 1}).status());
                       BALLAST_RETURN_IF_ERROR(ExpectIsStep(session, 1));
                       // 6 is of what was given up; the server keeps 1 in its place.
                       BALLAST_ASSIGN_OR_RETURN(const auto pins, session.DurablePins());
                       BALLAST_RETURN_IF_ERROR(Expect(Numbers(pins) == std::vector<int64_t>({1}), "pins"));
                       return session.UnpinDurably(1);
                     }),
            absl::OkStatus());
  servers_.Restart(0);
  ASSERT_EQ(RunRanks(1,
                     [&](Session& session) -> absl::Status {
                       BALLAST_RETURN_IF_ERROR(Expect(session.restored_version() == 1, "restored version"));
                       BALLAST_RETURN_IF_ERROR(ExpectIsStep(session, 1));
                       BALLAST_RETURN_IF_ERROR(Train(session, 2, 4));
                       return ExpectIsStep(session, 4);
                     }),
            absl::OkStatus());
}

INSTANTIATE_TEST_SUITE_P(Tiers, SessionEveryKTest,
                         ::testing::Values(Budget{"Dram", {0, 64 * kMiB, 64 * kMiB}},
                                           Budget{"Mixed", {0, 9 * kMiB, 64 * kMiB}}),
                         [](const auto& info) { return info.param.name; });

// One of the two servers has no chunk of the job.
TEST(SessionEveryKLifeTest, ARestartedServerWithoutChunksIsOfTheSameLife) {
  Servers servers({0, 64 * kMiB, 64 * kMiB});
  std::vector<KeptVersion> pins;
  const auto run = [&](bool first) {
    return SessionFixture::RunRanks(1, [&, first](Collective* collective) -> absl::Status {
      SessionOptions options = DurableOptions();
      options.durability = v1::DURABILITY_EVERY_K;
      options.pin_interval = 2;
      BALLAST_ASSIGN_OR_RETURN(const auto session, Session::Open(options, {{.name = "w", .unit = "u", .shape = {8}}},
                                                                 servers.Connect(), collective));
      if (first) {
        BALLAST_RETURN_IF_ERROR(session->Initialise(
            [](absl::string_view, uint64_t, absl::Span<float> values) { std::fill(values.begin(), values.end(), 1); }));
        BALLAST_RETURN_IF_ERROR(session->PinDurably());
        BALLAST_ASSIGN_OR_RETURN(pins, session->DurablePins());
      }
      if (pins.size() != 1 || pins[0].life == 0) return Wrong("the pin is of no life");
      return session->CheckKept(pins[0]);
    });
  };
  ASSERT_EQ(run(true), absl::OkStatus());
  for (int i = 0; i < kServers; ++i) {
    servers.Restart(i);
    EXPECT_EQ(run(false), absl::OkStatus()) << "server " << i;
  }
}

TEST(SessionEveryKOptionsTest, KIsAsked) {
  Servers servers({0, 64 * kMiB, 64 * kMiB});
  const auto open = [&](v1::Durability durability, uint64_t interval) {
    return SessionFixture::RunRanks(1, [&](Collective* collective) -> absl::Status {
      SessionOptions options = DurableOptions();
      options.durability = durability;
      options.pin_interval = interval;
      return Session::Open(options, TestTensors(), servers.Connect(), collective).status();
    });
  };
  EXPECT_EQ(ExpectError(open(v1::DURABILITY_EVERY_K, 0), model::kBadSpec, "from 1 to 4294967296"), absl::OkStatus());
  EXPECT_EQ(ExpectError(open(v1::DURABILITY_STEP, 5), model::kBadSpec, "got 5 with DURABILITY_STEP"), absl::OkStatus());
  EXPECT_EQ(open(v1::DURABILITY_EVERY_K, 1), absl::OkStatus());
}

TEST(SessionEveryKOptionsTest, TensorsCannotBeAdded) {
  Servers servers({0, 64 * kMiB, 64 * kMiB});
  ASSERT_EQ(SessionFixture::RunRanks(
                1,
                [&](Collective* collective) -> absl::Status {
                  SessionOptions options = DurableOptions();
                  options.durability = v1::DURABILITY_EVERY_K;
                  options.pin_interval = 2;
                  BALLAST_ASSIGN_OR_RETURN(const auto session,
                                           Session::Open(options, TestTensors(), servers.Connect(), collective));
                  BALLAST_RETURN_IF_ERROR(InitialiseAll(*session));
                  BALLAST_RETURN_IF_ERROR(ExpectError(session->Register({{.name = "more", .unit = "m", .shape = {10}}}),
                                                      model::kUnsupported, "name all tensors when the job is created"));
                  return absl::OkStatus();
                }),
            absl::OkStatus());
}

TEST(SessionEveryKOptionsTest, ABudgetThatHoldsNoPinsIsRefused) {
  Servers servers({0, 64 * kMiB, 4 * kMiB});
  EXPECT_EQ(SessionFixture::RunRanks(
                1,
                [&](Collective* collective) -> absl::Status {
                  SessionOptions options = DurableOptions();
                  options.durability = v1::DURABILITY_EVERY_K;
                  options.pin_interval = 2;
                  return ExpectError(Session::Open(options, TestTensors(), servers.Connect(), collective).status(),
                                     model::kBudget, "nvme");
                }),
            absl::OkStatus());
}

}  // namespace
}  // namespace ballast::client
