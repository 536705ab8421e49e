// Sessions whose servers are gone, or have lost acknowledged data, as in a crash before the log's write.
#include <gtest/gtest.h>

#include <atomic>
#include <set>
#include <stdexcept>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "ballast/kernels/kernels.h"
#include "ballast/proto/base/status.h"
#include "ballast/tests/client/session/forwarding_transport.h"
#include "ballast/tests/client/session/session_fixture.h"

namespace ballast::client {
namespace {

// Behaviour of the servers from now on.
struct Script {
  std::atomic<bool> loses_pushes{false};   // acknowledges and forgets pushes, until the next seal or norm
  std::atomic<bool> loses_commits{false};  // each server forgets its next commit
  std::atomic<bool> gone{false};           // pushes are refused
  std::atomic<int> seals{0};
  std::atomic<int> first_named{0};  // missing slices, in each server's first answer that names some
  absl::Mutex mutex;
  std::set<std::tuple<int, uint32_t, uint64_t>> refused ABSL_GUARDED_BY(mutex);  // slices: kind, unit, begin
};

class LossyTransport final : public ForwardingTransport {
 public:
  LossyTransport(std::unique_ptr<Transport> server, Script* script)
      : ForwardingTransport(std::move(server)), script_(script) {}
  void Norm(const v1::NormRequest& r, absl::Time t, Callback<v1::NormResponse> done) override {
    script_->loses_pushes = false;
    ForwardingTransport::Norm(r, t, std::move(done));
  }
  void Seal(const v1::SealRequest& r, absl::Time t, Callback<v1::SealResponse> done) override {
    script_->loses_pushes = false;
    ++script_->seals;
    ForwardingTransport::Seal(r, t, [this, done = std::move(done)](absl::StatusOr<v1::SealResponse> answer) {
      const int named = answer.ok() ? answer->pending().missing_size() : 0;
      if (named > 0 && !told_missing_.exchange(true)) script_->first_named += named;
      done(std::move(answer));
    });
  }
  void Commit(const v1::CommitRequest& r, absl::Time t, Callback<v1::CommitResponse> done) override {
    if (script_->loses_commits && !std::exchange(lost_commit_, true)) return done(v1::CommitResponse());
    ForwardingTransport::Commit(r, t, std::move(done));
  }
  void Push(const v1::PushRequest& r, absl::Span<const std::byte> payload, absl::Time t,
            Callback<v1::PushResponse> done) override {
    if (script_->gone) {
      absl::MutexLock lock(&script_->mutex);
      script_->refused.emplace(r.kind(), r.unit(), r.begin());
    }
    if (script_->gone) return done(model::Error(absl::StatusCode::kUnavailable, model::kServerDown, "gone"));
    if (script_->loses_pushes) return done(v1::PushResponse());
    ForwardingTransport::Push(r, payload, t, std::move(done));
  }

 private:
  Script* const script_;
  std::atomic<bool> told_missing_ = false;
  bool lost_commit_ = false;
};

// 160 slices of one tensor on two servers.
std::vector<TensorSpec> LongTensor() {
  return {{.name = "long", .unit = "long", .shape = {160, kChunk}, .group = 0, .aliases = {}}};
}

class LossTest : public ::testing::Test {
 protected:
  absl::StatusOr<std::unique_ptr<Session>> Open(Collective* collective, const std::vector<TensorSpec>& tensors,
                                                SessionOptions options = TestOptions()) {
    std::vector<std::unique_ptr<Transport>> transports;
    for (auto& server : servers_.Connect()) {
      transports.push_back(std::make_unique<LossyTransport>(std::move(server), &script_));
    }
    return Session::Open(options, tensors, std::move(transports), collective);
  }
  static absl::Status OnRanks(int world_size, const std::function<absl::Status(Collective*)>& body) {
    return SessionFixture::RunRanks(world_size, body);
  }
  size_t Refused() {
    absl::MutexLock lock(&script_.mutex);
    return script_.refused.size();
  }

  SessionFixture servers_{2, uint64_t{256} << 20};
  Script script_;
};

TEST_F(LossTest, AllThatIsMissingIsSentAgainAtOnce) {
  EXPECT_EQ(OnRanks(1,
                    [&](Collective* collective) -> absl::Status {
                      BALLAST_ASSIGN_OR_RETURN(auto session, Open(collective, LongTensor()));
                      BALLAST_RETURN_IF_ERROR(InitialiseAll(*session));
                      script_.seals = 0;
                      script_.loses_pushes = true;
                      std::vector<bf16> gradient(session->owned_elements(0));
                      for (uint64_t i = 0; i < gradient.size(); ++i) {
                        gradient[i] = kernels::ToBf16(GradientValue("long", i, 1));
                      }
                      BALLAST_RETURN_IF_ERROR(session->Push(0, gradient));
                      BALLAST_RETURN_IF_ERROR(session->Step(TestStep()).status());
                      Reference reference(LongTensor());
                      reference.Step(1, TestStep());
                      return reference.Compare(*session, 1);
                    }),
            absl::OkStatus());
  // For each server: a seal whose answer names all missing slices, and the seals until the slices have come, one a
  // second. Slices that were sent one by one would need 80.
  EXPECT_EQ(script_.first_named, 160);
  EXPECT_LE(script_.seals, 2 * 30);
}

// Its memory is free before the step; a server that loses the gradient then ends the session.
TEST_F(LossTest, AGradientThatIsLetGo) {
  EXPECT_EQ(OnRanks(1,
                    [&](Collective* collective) -> absl::Status {
                      BALLAST_ASSIGN_OR_RETURN(auto session, Open(collective, LongTensor()));
                      BALLAST_RETURN_IF_ERROR(InitialiseAll(*session));
                      std::weak_ptr<const void> left;
                      const auto push = [&](int64_t step) {
                        auto gradient = std::make_shared<std::vector<bf16>>(session->owned_elements(0));
                        for (uint64_t i = 0; i < gradient->size(); ++i) {
                          (*gradient)[i] = kernels::ToBf16(GradientValue("long", i, step));
                        }
                        left = gradient;
                        const auto* const bytes = reinterpret_cast<const std::byte*>(gradient->data());
                        return session->PushBorrowed(0, {{0, {bytes, gradient->size() * sizeof(bf16)}}}, {}, gradient);
                      };
                      BALLAST_RETURN_IF_ERROR(push(1));
                      BALLAST_RETURN_IF_ERROR(session->Norm().status());  // waits for the pushes
                      BALLAST_RETURN_IF_ERROR(Expect(left.expired(), "the gradient is still there"));
                      BALLAST_RETURN_IF_ERROR(session->Step(TestStep()).status());
                      Reference reference(LongTensor());
                      reference.Step(1, TestStep());
                      BALLAST_RETURN_IF_ERROR(reference.Compare(*session, 1));
                      script_.loses_pushes = true;
                      BALLAST_RETURN_IF_ERROR(push(2));
                      return ExpectError(session->Step(TestStep()).status(), model::kStateLost,
                                         "has lost gradients of unit 'long', which this rank had let go");
                    }),
            absl::OkStatus());
}

TEST_F(LossTest, NormsAreAnsweredAllTheSame) {
  std::atomic<double> expected{0};
  for (const bool lost : {false, true}) {
    EXPECT_EQ(OnRanks(2,
                      [&](Collective* collective) -> absl::Status {
                        SessionOptions options = TestOptions();
                        options.job = absl::StrCat("job", lost);
                        BALLAST_ASSIGN_OR_RETURN(auto session, Open(collective, TestTensors(), options));
                        BALLAST_RETURN_IF_ERROR(InitialiseAll(*session));
                        BALLAST_RETURN_IF_ERROR(TrainStep(*session, 1).status());
                        script_.loses_pushes = lost;
                        for (uint32_t unit = 0; unit < session->unit_count(); ++unit) {
                          BALLAST_RETURN_IF_ERROR(session->Push(unit, OwnedGradient(*session, unit, 2)));
                        }
                        BALLAST_ASSIGN_OR_RETURN(const double norm, session->Norm());
                        if (!lost) expected = norm;
                        return Expect(norm == expected && norm > 0, absl::StrCat("norm ", norm));
                      }),
              absl::OkStatus());
  }
}

TEST_F(LossTest, StepCountsAreThoseOfTheDecisionThatServersForgot) {
  EXPECT_EQ(OnRanks(1,
                    [&](Collective* collective) -> absl::Status {
                      BALLAST_ASSIGN_OR_RETURN(auto session, Open(collective, TestTensors()));
                      BALLAST_RETURN_IF_ERROR(InitialiseAll(*session));
                      script_.loses_commits = true;
                      BALLAST_RETURN_IF_ERROR(TrainStep(*session, 1).status());
                      BALLAST_ASSIGN_OR_RETURN(const uint64_t steps, session->TensorSteps("layer.bias", 1));
                      return Expect(steps == 1, absl::StrCat(steps, " steps"));
                    }),
            absl::OkStatus());
}

// Each slice more would wait for the same server as long again.
TEST_F(LossTest, PushesBehindOneThatFailedAreNotTried) {
  EXPECT_EQ(OnRanks(1,
                    [&](Collective* collective) -> absl::Status {
                      SessionOptions options = TestOptions();
                      options.step_timeout = absl::Milliseconds(300);
                      BALLAST_ASSIGN_OR_RETURN(auto session, Open(collective, LongTensor(), options));
                      script_.gone = true;
                      BALLAST_RETURN_IF_ERROR(ExpectError(InitialiseAll(*session), model::kServerDown, "gone"));
                      script_.gone = false;
                      return absl::OkStatus();
                    }),
            absl::OkStatus());
  EXPECT_GT(Refused(), 0u);
  EXPECT_LE(Refused(), 16u) << "of 160";
}

TEST_F(LossTest, ACallersErrorAmidValuesTakesNoMemory) {
  EXPECT_EQ(OnRanks(1,
                    [&](Collective* collective) -> absl::Status {
                      BALLAST_ASSIGN_OR_RETURN(auto session, Open(collective, TestTensors()));
                      for (int i = 0; i < 8; ++i) {
                        EXPECT_THROW((void)session->Initialise([](absl::string_view, uint64_t, absl::Span<float>) {
                          throw std::runtime_error("a caller's");
                        }),
                                     std::runtime_error);
                      }
                      return InitialiseAll(*session);
                    }),
            absl::OkStatus());
}

}  // namespace
}  // namespace ballast::client
