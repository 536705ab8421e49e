// Calls between two steps, and the state after a refused call: values, blobs, norms, registrations.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "absl/time/clock.h"
#include "ballast/kernels/kernels.h"
#include "ballast/proto/base/status.h"
#include "ballast/services/gateway/rpc_server.h"
#include "ballast/tests/client/session/session_fixture.h"

namespace ballast::client {
namespace {

const TensorSpec& Adapter() {
  static const auto* const adapter =
      new TensorSpec{.name = "adapter", .unit = "adapter", .shape = {50, 30}, .group = 1, .aliases = {}};
  return *adapter;
}

absl::Status OnRanks(int world_size, const std::function<absl::Status(Collective*)>& body) {
  return SessionFixture::RunRanks(world_size, body);
}

// Another job takes most of the second server's memory.
absl::Status FillSecondServer(const SessionFixture& servers) {
  return OnRanks(1, [&](Collective* collective) -> absl::Status {
    SessionOptions options = TestOptions();
    options.job = "other";
    std::vector<std::unique_ptr<Transport>> second;
    second.push_back(std::move(servers.Connect()[1]));
    const TensorSpec filling = {.name = "filling", .unit = "filling", .shape = {3300, 1024}};
    return Session::Open(options, {filling}, std::move(second), collective).status();
  });
}

TEST(SessionBoundary, RegisterWithoutRoomLeavesTheJobAsItWas) {
  SessionFixture servers;
  ASSERT_EQ(FillSecondServer(servers), absl::OkStatus());
  const TensorSpec big = {.name = "big", .unit = "big", .shape = {4096, 1024}};
  EXPECT_EQ(OnRanks(2,
                    [&](Collective* collective) -> absl::Status {
                      BALLAST_ASSIGN_OR_RETURN(auto session, servers.Open(collective, TestOptions(), TestTensors()));
                      BALLAST_RETURN_IF_ERROR(InitialiseAll(*session));
                      BALLAST_RETURN_IF_ERROR(ExpectError(session->Register({big}), model::kBudget, "server 's1'"));
                      // The session goes on, and agrees with the servers about the job.
                      BALLAST_RETURN_IF_ERROR(TrainStep(*session, 1).status());
                      Reference reference(TestTensors());
                      reference.Step(1, TestStep());
                      return reference.Compare(*session, 1);
                    }),
            absl::OkStatus());
  EXPECT_EQ(OnRanks(1,
                    [&](Collective* collective) -> absl::Status {
                      SessionOptions options = TestOptions();
                      options.resume = Resume::kMust;
                      BALLAST_ASSIGN_OR_RETURN(auto session, servers.Open(collective, options, TestTensors()));
                      return TrainStep(*session, 2).status();
                    }),
            absl::OkStatus());
}

TEST(SessionBoundary, AModelThatDoesNotFitCanBeMadeSmaller) {
  SessionFixture servers;
  ASSERT_EQ(FillSecondServer(servers), absl::OkStatus());
  EXPECT_EQ(OnRanks(1,
                    [&](Collective* collective) -> absl::Status {
                      std::vector<TensorSpec> tensors = TestTensors();
                      tensors.push_back({.name = "big", .unit = "big", .shape = {4096, 1024}});
                      BALLAST_RETURN_IF_ERROR(ExpectError(servers.Open(collective, TestOptions(), tensors).status(),
                                                          model::kBudget, "server 's1'"));
                      for (int i = 0; i < 2; ++i) {
                        BALLAST_RETURN_IF_ERROR(Expect(servers.server(i)->Status().jobs_size() == i,
                                                       absl::StrCat("a job was left on server ", i)));
                      }
                      BALLAST_ASSIGN_OR_RETURN(auto session, servers.Open(collective, TestOptions(), TestTensors()));
                      return InitialiseAll(*session);
                    }),
            absl::OkStatus());
}

TEST(SessionBoundary, ANameThatIsAnAliasIsRefused) {
  SessionFixture servers;
  EXPECT_EQ(OnRanks(1,
                    [&](Collective* collective) -> absl::Status {
                      BALLAST_ASSIGN_OR_RETURN(auto session, servers.Open(collective, TestOptions(), TestTensors()));
                      BALLAST_RETURN_IF_ERROR(InitialiseAll(*session));
                      BALLAST_RETURN_IF_ERROR(
                          ExpectError(session->Register({{.name = "head.weight", .unit = "head", .shape = {3}}}),
                                      model::kBadSpec, "alias of tensor 'embed.weight'"));
                      return TrainStep(*session, 1).status();
                    }),
            absl::OkStatus());
}

TEST(SessionBoundary, ABlobComesWithTheFirstValues) {
  SessionFixture servers;
  const auto fill = [](absl::string_view tensor, uint64_t first, absl::Span<float> values) {
    for (size_t i = 0; i < values.size(); ++i) values[i] = InitialValue(tensor, first + i);
  };
  EXPECT_EQ(OnRanks(2,
                    [&](Collective* collective) -> absl::Status {
                      BALLAST_ASSIGN_OR_RETURN(auto session, servers.Open(collective, TestOptions(), TestTensors()));
                      return session->Initialise(fill, absl::StrCat("origin of ", session->rank()));
                    }),
            absl::OkStatus());
  EXPECT_EQ(OnRanks(2,
                    [&](Collective* collective) -> absl::Status {
                      SessionOptions options = TestOptions();
                      options.resume = Resume::kMust;
                      BALLAST_ASSIGN_OR_RETURN(auto session, servers.Open(collective, options, TestTensors()));
                      EXPECT_THAT(session->resumed_blobs(), ::testing::ElementsAre("origin of 0", "origin of 1"));
                      return absl::OkStatus();
                    }),
            absl::OkStatus());
}

TEST(SessionBoundary, BlobsOutliveTransactionsOfValues) {
  SessionFixture servers;
  EXPECT_EQ(OnRanks(2,
                    [&](Collective* collective) -> absl::Status {
                      BALLAST_ASSIGN_OR_RETURN(auto session, servers.Open(collective, TestOptions(), TestTensors()));
                      BALLAST_RETURN_IF_ERROR(InitialiseAll(*session));
                      StepOptions step = TestStep();
                      step.blob = absl::StrCat("cursor of ", session->rank());
                      BALLAST_RETURN_IF_ERROR(TrainStep(*session, 1, step).status());
                      const std::vector<float> bias(100, 7.0f);
                      BALLAST_RETURN_IF_ERROR(session->Write("layer.bias", bias));
                      BALLAST_RETURN_IF_ERROR(session->CommitValues().status());
                      BALLAST_RETURN_IF_ERROR(session->Register({Adapter()}));
                      return InitialiseAll(*session);
                    }),
            absl::OkStatus());
  std::vector<TensorSpec> tensors = TestTensors();
  tensors.push_back(Adapter());
  // Twice, because a resumed session that commits values must hand on its blobs.
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(OnRanks(2,
                      [&](Collective* collective) -> absl::Status {
                        SessionOptions options = TestOptions();
                        options.resume = Resume::kMust;
                        BALLAST_ASSIGN_OR_RETURN(auto session, servers.Open(collective, options, tensors));
                        EXPECT_THAT(session->resumed_blobs(), ::testing::ElementsAre("cursor of 0", "cursor of 1"));
                        BALLAST_RETURN_IF_ERROR(session->Write("layer.bias", std::vector<float>(100, 8.0f)));
                        return session->CommitValues().status();
                      }),
              absl::OkStatus());
  }
}

TEST(SessionBoundary, InitialiseKeepsWhatWasWritten) {
  SessionFixture servers;
  EXPECT_EQ(OnRanks(2,
                    [&](Collective* collective) -> absl::Status {
                      BALLAST_ASSIGN_OR_RETURN(auto session, servers.Open(collective, TestOptions(), TestTensors()));
                      BALLAST_RETURN_IF_ERROR(InitialiseAll(*session));
                      BALLAST_RETURN_IF_ERROR(session->Register({Adapter()}));
                      BALLAST_ASSIGN_OR_RETURN(const uint32_t unit, session->FindUnit("adapter"));
                      BALLAST_RETURN_IF_ERROR(
                          ExpectError(session->Acquire(unit).status(), model::kBadRequest, "no values yet"));
                      BALLAST_RETURN_IF_ERROR(session->Write("layer.bias", std::vector<float>(100, 7.0f)));
                      BALLAST_RETURN_IF_ERROR(InitialiseAll(*session));
                      BALLAST_RETURN_IF_ERROR(session->CommitValues().status());
                      std::vector<float> read(100);
                      BALLAST_RETURN_IF_ERROR(
                          session->Read("layer.bias", Content::kMaster, session->version(), absl::MakeSpan(read)));
                      return Expect(read == std::vector<float>(100, 7.0f), "the written values");
                    }),
            absl::OkStatus());
}

TEST(SessionBoundary, ARefusedStepCanBeCorrected) {
  SessionFixture servers;
  EXPECT_EQ(
      OnRanks(
          2,
          [&](Collective* collective) -> absl::Status {
            BALLAST_ASSIGN_OR_RETURN(auto session, servers.Open(collective, TestOptions(), TestTensors()));
            BALLAST_RETURN_IF_ERROR(InitialiseAll(*session));
            std::vector<float> bias(100, 1.0f);
            BALLAST_RETURN_IF_ERROR(session->Write("layer.bias", bias));
            StepOptions bad = TestStep();
            bad.gradient_scale = 1e39;
            BALLAST_RETURN_IF_ERROR(ExpectError(session->Step(bad).status(), model::kBadRequest, "finite in fp32"));
            bias.assign(100, 2.0f);
            BALLAST_RETURN_IF_ERROR(session->Write("layer.bias", bias));
            bias[3] = NAN;
            BALLAST_RETURN_IF_ERROR(ExpectError(session->Write("layer.bias", bias), model::kBadRequest, "element 3"));
            BALLAST_RETURN_IF_ERROR(session->Step(TestStep()).status());
            std::vector<float> read(100);
            BALLAST_RETURN_IF_ERROR(ExpectError(session->Read("layer.bias", Content::kMaster, 9, absl::MakeSpan(read)),
                                                model::kBadRequest, "version 9 is not decided yet"));
            BALLAST_RETURN_IF_ERROR(session->Read("layer.bias", Content::kMaster, 1, absl::MakeSpan(read)));
            return Expect(read == std::vector<float>(100, 2.0f), "the corrected values");
          }),
      absl::OkStatus());
}

TEST(SessionBoundary, NormsAreOfThisEpoch) {
  SessionFixture servers;
  EXPECT_EQ(OnRanks(1,
                    [&](Collective* collective) -> absl::Status {
                      BALLAST_ASSIGN_OR_RETURN(auto session, servers.Open(collective, TestOptions(), TestTensors()));
                      BALLAST_RETURN_IF_ERROR(InitialiseAll(*session));
                      BALLAST_RETURN_IF_ERROR(session->Push(1, OwnedGradient(*session, 1, 1)));
                      BALLAST_ASSIGN_OR_RETURN(const double before, session->Norm());
                      BALLAST_RETURN_IF_ERROR(Expect(before > 0, "a norm"));
                      BALLAST_RETURN_IF_ERROR(
                          ExpectError(session->Initialise([](auto, auto, auto) {}), model::kBadRequest, "Drop"));
                      BALLAST_RETURN_IF_ERROR(session->Drop());
                      BALLAST_RETURN_IF_ERROR(session->Register({Adapter()}));
                      const std::vector<bf16> zeros(session->owned_elements(1), 0);
                      BALLAST_RETURN_IF_ERROR(session->Push(1, zeros));
                      BALLAST_ASSIGN_OR_RETURN(const double after, session->Norm());
                      return Expect(after == 0, "the norm of zeros");
                    }),
            absl::OkStatus());
}

// A step whose second rank is later than the servers' time.
absl::Status StepWithALateRank(absl::Duration step_timeout) {
  SessionFixture servers(1);
  BALLAST_ASSIGN_OR_RETURN(const auto rpc, services::RpcServer::Start({}, servers.server(0)));
  return OnRanks(2, [&](Collective* collective) -> absl::Status {
    SessionOptions options = TestOptions();
    options.step_timeout = step_timeout;
    BALLAST_ASSIGN_OR_RETURN(auto session, Session::Connect(options, TestTensors(), {rpc->address()}, collective));
    BALLAST_RETURN_IF_ERROR(InitialiseAll(*session));
    for (uint32_t unit = 0; unit < session->unit_count(); ++unit) {
      BALLAST_RETURN_IF_ERROR(session->Push(unit, OwnedGradient(*session, unit, 1)));
    }
    // There is no event to wait for: being late is the point.
    if (session->rank() == 1) absl::SleepFor(step_timeout + absl::Milliseconds(200));
    BALLAST_RETURN_IF_ERROR(session->Step(TestStep()).status());
    return collective->Exchange("done").status();
  });
}

// Ranks wait for each other as long as the collective does; servers' time starts when all have come.
TEST(SessionBoundary, ALateRankDoesNotUseUpTheServersTime) {
  // On a busy machine all else may take longer than this time.
  absl::Status stepped = absl::UnknownError("not tried");
  for (absl::Duration time = absl::Seconds(3); time < absl::Minutes(1) && !stepped.ok(); time *= 4) {
    stepped = StepWithALateRank(time);
  }
  EXPECT_EQ(stepped, absl::OkStatus());
}

}  // namespace
}  // namespace ballast::client
