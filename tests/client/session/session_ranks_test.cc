// Differences allowed between ranks, differences not allowed, and the session after such a difference.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>

#include "absl/synchronization/notification.h"
#include "ballast/client/session.h"
#include "ballast/kernels/kernels.h"
#include "ballast/proto/base/status.h"
#include "ballast/tests/client/session/session_fixture.h"

namespace ballast::client {
namespace {

TEST(Session, RankWithoutAGradientCountsZeros) {
  SessionFixture servers;
  EXPECT_EQ(SessionFixture::RunRanks(
                2,
                [&](Collective* collective) -> absl::Status {
                  BALLAST_ASSIGN_OR_RETURN(auto session, servers.Open(collective, TestOptions(), TestTensors()));
                  BALLAST_RETURN_IF_ERROR(InitialiseAll(*session));
                  BALLAST_ASSIGN_OR_RETURN(const uint32_t embed, session->FindUnit("embed"));
                  BALLAST_ASSIGN_OR_RETURN(const uint32_t layer, session->FindUnit("layer"));
                  // Rank 0 has no gradient for "layer", and says that "embed.weight" has none; rank 1 has all.
                  if (session->rank() == 0) {
                    BALLAST_RETURN_IF_ERROR(session->Push(embed, OwnedGradient(*session, embed, 1), {"embed.weight"}));
                  } else {
                    BALLAST_RETURN_IF_ERROR(session->Push(embed, OwnedGradient(*session, embed, 1)));
                    BALLAST_RETURN_IF_ERROR(session->Push(layer, OwnedGradient(*session, layer, 1)));
                  }
                  BALLAST_RETURN_IF_ERROR(session->Norm().status());
                  BALLAST_RETURN_IF_ERROR(session->Step(TestStep()).status());
                  // Present everywhere; where rank 0 owns, the gradient was zero: master only decays, moments stay
                  // zero.
                  BALLAST_ASSIGN_OR_RETURN(const uint64_t t, session->TensorSteps("layer.up", session->version()));
                  BALLAST_RETURN_IF_ERROR(Expect(t == 1, "present"));
                  BALLAST_ASSIGN_OR_RETURN(const auto at, session->Locate("layer.down"));
                  std::vector<float> moment(at.end - at.begin);
                  BALLAST_RETURN_IF_ERROR(session->Read("layer.down", Content::kMoment1, 1, absl::MakeSpan(moment)));
                  uint64_t zeros = 0;
                  for (uint64_t i = at.begin; i < at.end; ++i) {
                    bool of_rank_0 = false;
                    for (const UnitRange& range : session->RangesOf(0, layer)) {
                      of_rank_0 = of_rank_0 || (i >= range.begin && i < range.end);
                    }
                    const float gradient =
                        kernels::FromBf16(kernels::ToBf16(GradientValue("layer.down", i - at.begin, 1)));
                    if (of_rank_0 && moment[i - at.begin] != 0) return Wrong("rank 0's part moved");
                    if (!of_rank_0 && gradient != 0 && moment[i - at.begin] == 0)
                      return Wrong("rank 1's part did not move");
                    zeros += of_rank_0 ? 1 : 0;
                  }
                  return Expect(zeros > 0 && zeros < moment.size(), "both ranks own a part of layer.down");
                }),
            absl::OkStatus());
}

TEST(Session, BadArgumentsAreExplained) {
  SessionFixture servers;
  EXPECT_EQ(
      SessionFixture::RunRanks(
          1,
          [&](Collective* collective) -> absl::Status {
            BALLAST_ASSIGN_OR_RETURN(auto session, servers.Open(collective, TestOptions(), TestTensors()));
            BALLAST_RETURN_IF_ERROR(InitialiseAll(*session));
            BALLAST_RETURN_IF_ERROR(
                ExpectError(session->Initialise([](auto, auto, auto) {}), model::kBadRequest, "Write"));
            const std::vector<bf16> gradient = OwnedGradient(*session, 0, 1);
            BALLAST_RETURN_IF_ERROR(ExpectError(session->Push(9, gradient), model::kUnknownUnit, "unit 9"));
            BALLAST_RETURN_IF_ERROR(ExpectError(session->Acquire(9).status(), model::kUnknownUnit, "unit 9"));
            BALLAST_RETURN_IF_ERROR(ExpectError(session->FindUnit("none").status(), model::kUnknownUnit, "none"));
            BALLAST_RETURN_IF_ERROR(ExpectError(session->Locate("none").status(), model::kUnknownTensor, "none"));
            BALLAST_RETURN_IF_ERROR(
                ExpectError(session->Push(0, absl::MakeConstSpan(gradient).subspan(1)), model::kBadLength, "expected"));
            BALLAST_RETURN_IF_ERROR(
                ExpectError(session->Push(0, gradient, {"layer.up"}), model::kBadRequest, "layer.up"));
            BALLAST_RETURN_IF_ERROR(session->Push(0, gradient));
            BALLAST_RETURN_IF_ERROR(ExpectError(session->Push(0, gradient), model::kBadRequest, "pushed already"));
            BALLAST_RETURN_IF_ERROR(ExpectError(session->CommitValues().status(), model::kBadRequest, "written"));
            StepOptions options = TestStep();
            options.groups.pop_back();
            BALLAST_RETURN_IF_ERROR(
                ExpectError(session->Step(options).status(), model::kBadRequest, "2 parameter group"));
            options = TestStep();
            options.blob.assign(65537, 'x');
            BALLAST_RETURN_IF_ERROR(ExpectError(session->Step(options).status(), model::kBadRequest, "65536"));
            std::vector<float> to(257);
            BALLAST_RETURN_IF_ERROR(ExpectError(session->Read("embed.weight", Content::kMaster, 0, absl::MakeSpan(to)),
                                                model::kBadLength, "77100"));
            // None of it cost the session anything.
            BALLAST_RETURN_IF_ERROR(session->Push(1, OwnedGradient(*session, 1, 1)));
            BALLAST_RETURN_IF_ERROR(session->Step(TestStep()).status());
            Reference reference(TestTensors());
            reference.Step(1, TestStep());
            return reference.Compare(*session, 1);
          }),
      absl::OkStatus());
}

TEST(Session, RanksThatDisagreeAreNamedBeforeAnySeal) {
  SessionFixture servers;
  EXPECT_EQ(
      SessionFixture::RunRanks(
          2,
          [&](Collective* collective) -> absl::Status {
            BALLAST_ASSIGN_OR_RETURN(auto session, servers.Open(collective, TestOptions(), TestTensors()));
            BALLAST_RETURN_IF_ERROR(InitialiseAll(*session));
            const StepOptions own = TestStep(session->rank() == 0 ? 0.01 : 0.02);
            BALLAST_RETURN_IF_ERROR(
                ExpectError(TrainStep(*session, 1, own).status(), model::kPlanMismatch, "rank 1 has other"));
            if (session->rank() == 1) {
              BALLAST_RETURN_IF_ERROR(ExpectError(session->Norm().status(), model::kPlanMismatch, "Norm"));
            } else {
              BALLAST_RETURN_IF_ERROR(ExpectError(session->Step(TestStep()).status(), model::kPlanMismatch, "Norm"));
            }
            // Nothing was sealed: the same step goes on with what was pushed.
            BALLAST_RETURN_IF_ERROR(session->Step(TestStep()).status());
            Reference reference(TestTensors());
            reference.Step(1, TestStep());
            return reference.Compare(*session, 1);
          }),
      absl::OkStatus());
}

TEST(Session, OneRanksErrorReachesAll) {
  SessionFixture servers;
  EXPECT_EQ(SessionFixture::RunRanks(2,
                                     [&](Collective* collective) -> absl::Status {
                                       BALLAST_ASSIGN_OR_RETURN(auto session,
                                                                servers.Open(collective, TestOptions(), TestTensors()));
                                       BALLAST_RETURN_IF_ERROR(InitialiseAll(*session));
                                       if (session->rank() == 1)
                                         BALLAST_RETURN_IF_ERROR(session->Push(0, OwnedGradient(*session, 0, 1)));
                                       const std::vector<float> values(100, 1);
                                       if (session->rank() == 0)
                                         BALLAST_RETURN_IF_ERROR(session->Write("layer.bias", values));
                                       const absl::Status status = session->CommitValues().status();
                                       return ExpectError(status, model::kBadRequest,
                                                          session->rank() == 0 ? "rank 1: " : "nothing was written");
                                     }),
            absl::OkStatus());
}

// Ranks with different numbers of drops agree again: the rank behind sends its pushes once more.
TEST(Session, ARankThatDropsAloneIsNamedOnce) {
  SessionFixture servers;
  const absl::Status ran = SessionFixture::RunRanks(2, [&](Collective* collective) -> absl::Status {
    BALLAST_ASSIGN_OR_RETURN(auto session, servers.Open(collective, TestOptions(), TestTensors()));
    BALLAST_RETURN_IF_ERROR(InitialiseAll(*session));
    const auto push = [&]() -> absl::Status {
      for (uint32_t unit = 0; unit < session->unit_count(); ++unit) {
        BALLAST_RETURN_IF_ERROR(session->Push(unit, OwnedGradient(*session, unit, 1)));
      }
      return absl::OkStatus();
    };
    BALLAST_RETURN_IF_ERROR(push());
    if (session->rank() == 1) {
      BALLAST_RETURN_IF_ERROR(session->Drop());
      BALLAST_RETURN_IF_ERROR(push());
    }
    BALLAST_RETURN_IF_ERROR(
        ExpectError(session->Step(TestStep()).status(), model::kPlanMismatch, "has dropped 1 time(s) against 0"));
    BALLAST_RETURN_IF_ERROR(session->Step(TestStep()).status());
    Reference reference(TestTensors());
    reference.Step(1, TestStep());
    return reference.Compare(*session, 1);
  });
  EXPECT_EQ(ran, absl::OkStatus());
}

// Values accepted by servers without becoming a transaction do not hinder later values.
TEST(Session, OtherValuesAfterSomeWereRefused) {
  SessionFixture servers;
  const absl::Status ran = SessionFixture::RunRanks(2, [&](Collective* collective) -> absl::Status {
    BALLAST_ASSIGN_OR_RETURN(auto session, servers.Open(collective, TestOptions(), TestTensors()));
    const absl::Status refused = session->Initialise([&](absl::string_view tensor, uint64_t, absl::Span<float> values) {
      for (float& value : values) value = 7;
      if (session->rank() == 1 && tensor == "layer.down") values[0] = std::nanf("");
    });
    BALLAST_RETURN_IF_ERROR(ExpectError(refused, model::kBadRequest, "nan"));
    BALLAST_RETURN_IF_ERROR(InitialiseAll(*session));
    BALLAST_RETURN_IF_ERROR(TrainStep(*session, 1).status());
    Reference reference(TestTensors());
    reference.Step(1, TestStep());
    return reference.Compare(*session, 1);
  });
  EXPECT_EQ(ran, absl::OkStatus());
}

// Rank 1 is alive and never steps: its peer finds out by the group's timeout.
absl::Status MissARank(absl::Duration timeout) {
  SessionFixture servers;
  absl::Notification found_out;
  const auto run = [&](Collective* collective) -> absl::Status {
    BALLAST_ASSIGN_OR_RETURN(auto session, servers.Open(collective, TestOptions(), TestTensors()));
    BALLAST_RETURN_IF_ERROR(InitialiseAll(*session));
    if (session->rank() == 1) {
      found_out.WaitForNotification();
      return absl::OkStatus();
    }
    BALLAST_RETURN_IF_ERROR(ExpectError(TrainStep(*session, 1).status(), model::kRankMissing, "rank 1 "));
    // The session is finished, and says why.
    return ExpectError(session->Acquire(0).status(), model::kRankMissing, "rank 1 ");
  };
  return SessionFixture::RunRanks(
      2,
      [&](Collective* collective) {
        const absl::Status ran = run(collective);
        if (collective->rank() == 0) found_out.Notify();
        return ran;
      },
      timeout);
}

TEST(Session, MissingRankIsNamed) {
  // On a busy machine the ranks may meet later than a short timeout.
  absl::Status missed = absl::UnknownError("not tried");
  for (absl::Duration timeout = absl::Seconds(2); timeout < absl::Minutes(1) && !missed.ok(); timeout *= 4) {
    missed = MissARank(timeout);
  }
  EXPECT_EQ(missed, absl::OkStatus());
}

TEST(Session, ForkedChildIsRefused) {
  SessionFixture servers;
  EXPECT_EQ(SessionFixture::RunRanks(
                1,
                [&](Collective* collective) -> absl::Status {
                  BALLAST_ASSIGN_OR_RETURN(auto session, servers.Open(collective, TestOptions(), TestTensors()));
                  BALLAST_RETURN_IF_ERROR(InitialiseAll(*session));
                  const pid_t child = fork();
                  if (child == 0) {
                    const absl::Status status = session->Step(TestStep()).status();
                    session.reset();
                    _exit(absl::IsFailedPrecondition(status) && status.message().find("fork") != absl::string_view::npos
                              ? 0
                              : 1);
                  }
                  int exit_code = -1;
                  if (waitpid(child, &exit_code, 0) != child) return Wrong("waitpid");
                  return Expect(exit_code == 0, "the child was not refused");
                }),
            absl::OkStatus());
}

}  // namespace
}  // namespace ballast::client
