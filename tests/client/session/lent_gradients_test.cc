// Gradients that servers in this process read in the trainer's memory, until the step is applied or cannot be decided.
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ballast/client/collective/loopback_collective.h"
#include "ballast/kernels/kernels.h"
#include "ballast/proto/base/status.h"
#include "ballast/tests/client/session/durable_servers.h"
#include "ballast/tests/client/session/forwarding_transport.h"
#include "ballast/tests/client/session/session_fixture.h"

namespace ballast::client {
namespace {

constexpr uint64_t kRows = 40;  // of a chunk each
constexpr uint64_t kBytes = kRows * kChunk * sizeof(bf16);

std::vector<TensorSpec> LongTensor() { return {{.name = "long", .unit = "long", .shape = {kRows, kChunk}}}; }

using Memory = std::shared_ptr<std::vector<bf16>>;

Memory GradientOf(const Session& session, int64_t step) {
  auto gradient = std::make_shared<std::vector<bf16>>(session.owned_elements(0));
  uint64_t at = 0;
  for (const UnitRange& range : session.owned(0)) {
    for (uint64_t i = range.begin; i < range.end; ++i) {
      (*gradient)[at++] = kernels::ToBf16(GradientValue("long", i, step));
    }
  }
  return gradient;
}

absl::Status PushLent(Session& session, const Memory& gradient) {
  const auto* const bytes = reinterpret_cast<const std::byte*>(gradient->data());
  return session.PushBorrowed(0, {{0, {bytes, gradient->size() * sizeof(bf16)}}}, {}, gradient, Keep::kUntilApplied);
}

// Pushes the step's gradient and lets go of it.
absl::StatusOr<std::weak_ptr<const void>> Push(Session& session, int64_t step) {
  const Memory gradient = GradientOf(session, step);
  BALLAST_RETURN_IF_ERROR(PushLent(session, gradient));
  return std::weak_ptr<const void>(gradient);
}

bool Goes(const std::weak_ptr<const void>& memory) {
  for (const absl::Time end = absl::Now() + absl::Minutes(1); !memory.expired() && absl::Now() < end;) {
    absl::SleepFor(absl::Milliseconds(1));
  }
  return memory.expired();
}

Reference ReferenceOf(int64_t steps) {
  Reference reference(LongTensor());
  for (int64_t step = 1; step <= steps; ++step) reference.Step(step, TestStep());
  return reference;
}

// Behaviour of the servers from now on.
struct Script {
  std::atomic<bool> unheard{false};       // they prepare steps, and their answers are lost
  std::atomic<bool> loses_pushes{false};  // they acknowledge and forget pushes, until the next seal
};

class ScriptedServer final : public ForwardingTransport {
 public:
  ScriptedServer(std::unique_ptr<Transport> server, Script* script)
      : ForwardingTransport(std::move(server)), script_(script) {}
  void PushLent(const v1::PushRequest& r, absl::Span<const std::byte> payload,
                std::shared_ptr<model::LentGradients> lent, absl::Time t, Callback<v1::PushResponse> done) override {
    if (script_->loses_pushes) return done(v1::PushResponse());
    ForwardingTransport::PushLent(r, payload, std::move(lent), t, std::move(done));
  }
  void Seal(const v1::SealRequest& r, absl::Time t, Callback<v1::SealResponse> done) override {
    script_->loses_pushes = false;
    ForwardingTransport::Seal(r, t, [this, done = std::move(done)](absl::StatusOr<v1::SealResponse> answer) {
      const bool prepared = answer.ok() && answer->has_prepared();
      if (!prepared || !script_->unheard) return done(std::move(answer));
      done(model::Error(absl::StatusCode::kInternal, model::kIo, "unheard"));
    });
  }

 private:
  Script* const script_;
};

class LentGradientsTest : public ::testing::Test {
 protected:
  std::unique_ptr<Session> Open(SessionOptions options = TestOptions(), Collective* collective = nullptr) {
    std::vector<std::unique_ptr<Transport>> transports;
    for (auto& server : servers_.Connect()) {
      transports.push_back(std::make_unique<ScriptedServer>(std::move(server), &script_));
    }
    if (collective == nullptr) collective = alone_.get();
    auto session = Session::Open(options, LongTensor(), std::move(transports), collective);
    EXPECT_TRUE(session.ok()) << session.status();
    return session.ok() ? *std::move(session) : nullptr;
  }
  std::unique_ptr<Session> OpenAgain() {
    SessionOptions options = TestOptions();
    options.resume = Resume::kMust;
    return Open(options);
  }
  std::unique_ptr<Session> Initialised() {
    auto session = Open();
    EXPECT_EQ(InitialiseAll(*session), absl::OkStatus());
    return session;
  }
  // Of gradients and values that servers were pushed / had no copy of.
  uint64_t Received(std::atomic<uint64_t> services::JobCounters::*bytes) {
    uint64_t sum = 0;
    for (int i = 0; i < 2; ++i) {
      for (const auto& [name, counters] : servers_.server(i)->Figures().jobs) sum += (*counters).*bytes;
    }
    return sum;
  }
  uint64_t InPlace() { return Received(&services::JobCounters::received_in_place_bytes); }

  SessionFixture servers_{2, uint64_t{128} << 20};
  std::unique_ptr<Collective> alone_ = std::move(MakeLoopbackGroup(1).front());
  Script script_;
};

TEST_F(LentGradientsTest, NoByteIsCopied) {
  const auto session = Initialised();
  EXPECT_EQ(InPlace(), 0u);
  const uint64_t values = Received(&services::JobCounters::received_bytes);
  for (int64_t step = 1; step <= 3; ++step) {
    const auto memory = Push(*session, step);
    ASSERT_TRUE(memory.ok()) << memory.status();
    ASSERT_TRUE(session->Norm().ok());  // waits for the pushes
    EXPECT_FALSE(memory->expired()) << "the update is to read it";
    ASSERT_TRUE(session->Step(TestStep()).ok());
    EXPECT_TRUE(Goes(*memory));
  }
  EXPECT_EQ(ReferenceOf(3).Compare(*session, 3), absl::OkStatus());
  EXPECT_EQ(InPlace(), 3 * kBytes);
  EXPECT_EQ(Received(&services::JobCounters::received_bytes) - values, 3 * kBytes);
}

// Copies where memory is let go early, or has no owner. Steps may change from one way to the other.
TEST_F(LentGradientsTest, OtherWaysCopy) {
  const auto session = Initialised();
  for (int64_t step = 1; step <= 4; ++step) {
    const Memory gradient = GradientOf(*session, step);
    const auto* const bytes = reinterpret_cast<const std::byte*>(gradient->data());
    const std::vector<GradientRun> runs = {{0, {bytes, gradient->size() * sizeof(bf16)}}};
    const uint64_t before = InPlace();
    absl::Status pushed;
    if (step == 1) pushed = session->PushBorrowed(0, runs);
    if (step == 2) pushed = session->PushBorrowed(0, runs, {}, gradient);
    if (step == 3) pushed = PushLent(*session, gradient);
    if (step == 4) pushed = session->Push(0, *gradient);
    ASSERT_EQ(pushed, absl::OkStatus());
    ASSERT_TRUE(session->Step(TestStep()).ok());
    ASSERT_EQ(ReferenceOf(step).Compare(*session, step), absl::OkStatus());
    EXPECT_EQ(InPlace() - before, step == 3 ? kBytes : 0u);
  }
}

// The session has it still, and sends it again.
TEST_F(LentGradientsTest, AServerThatLosesThem) {
  const auto session = Initialised();
  script_.loses_pushes = true;
  const auto memory = Push(*session, 1);
  ASSERT_TRUE(memory.ok()) << memory.status();
  ASSERT_TRUE(session->Step(TestStep()).ok());
  EXPECT_EQ(ReferenceOf(1).Compare(*session, 1), absl::OkStatus());
  EXPECT_EQ(InPlace(), kBytes);
  EXPECT_TRUE(Goes(*memory));
}

// A drop gives the memory back at once, and the servers apply what came after it.
TEST_F(LentGradientsTest, DropGivesMemoryBack) {
  const auto session = Initialised();
  const auto dropped = Push(*session, 7);
  ASSERT_TRUE(dropped.ok()) << dropped.status();
  ASSERT_TRUE(session->Norm().ok());
  EXPECT_FALSE(dropped->expired());
  ASSERT_EQ(session->Drop(), absl::OkStatus());
  EXPECT_TRUE(dropped->expired());
  ASSERT_TRUE(Push(*session, 1).ok());
  ASSERT_TRUE(session->Step(TestStep()).ok());
  EXPECT_EQ(ReferenceOf(1).Compare(*session, 1), absl::OkStatus());
}

// Of a step that no rank sealed: the session has the memory until the drop.
TEST_F(LentGradientsTest, ReturnedMemoryStaysLentUntilDrop) {
  const auto session = Initialised();
  const auto returned = Push(*session, 7);
  ASSERT_TRUE(returned.ok()) << returned.status();
  session->ReturnGradients();
  EXPECT_EQ(ExpectError(session->Step(TestStep()).status(), model::kBadRequest, "Drop() comes before another step"),
            absl::OkStatus());
  EXPECT_FALSE(returned->expired());
  ASSERT_EQ(session->Drop(), absl::OkStatus());
  EXPECT_TRUE(returned->expired());
  ASSERT_TRUE(Push(*session, 1).ok());
  ASSERT_TRUE(session->Step(TestStep()).ok());
  EXPECT_EQ(ReferenceOf(1).Compare(*session, 1), absl::OkStatus());
}

TEST_F(LentGradientsTest, ASkippedStepGivesMemoryBack) {
  const auto session = Initialised();
  Memory gradient = GradientOf(*session, 1);
  (*gradient)[3] = 0x7f80;  // infinite
  ASSERT_EQ(PushLent(*session, gradient), absl::OkStatus());
  const auto report = session->Step(TestStep());
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_TRUE(report->skipped);
  const std::weak_ptr<const void> memory = gradient;
  gradient.reset();
  EXPECT_TRUE(Goes(memory));
  ASSERT_TRUE(Push(*session, 2).ok());
  ASSERT_TRUE(session->Step(TestStep()).ok());
  Reference reference(LongTensor());
  reference.Step(2, TestStep());
  EXPECT_EQ(reference.Compare(*session, 2), absl::OkStatus());
}

TEST_F(LentGradientsTest, AChangeBeforeTheUpdateFailsTheJob) {
  const auto session = Initialised();
  const Memory gradient = GradientOf(*session, 1);
  ASSERT_EQ(PushLent(*session, gradient), absl::OkStatus());
  ASSERT_TRUE(session->Norm().ok());
  (*gradient)[kChunk + 5] = static_cast<bf16>((*gradient)[kChunk + 5] ^ 0x8000);  // the norm is as it was
  ASSERT_TRUE(session->Step(TestStep()).ok()) << "it is decided";
  std::vector<float> found(kRows * kChunk);
  const absl::Status read = session->Read("long", Content::kMaster, 1, absl::MakeSpan(found));
  EXPECT_EQ(ExpectError(read, model::kChecksum, "changed it before its update had ended"), absl::OkStatus());
}

// Nobody can decide the step any more once another group has come.
TEST_F(LentGradientsTest, ASessionThatDiesBeforeItsSeal) {
  auto session = Initialised();
  const auto memory = Push(*session, 5);
  ASSERT_TRUE(memory.ok()) << memory.status();
  ASSERT_TRUE(session->Norm().ok());
  session.reset();
  EXPECT_FALSE(memory->expired()) << "the servers have it";
  session = OpenAgain();
  ASSERT_NE(session, nullptr);
  EXPECT_TRUE(Goes(*memory));
  EXPECT_EQ(session->version(), 0);
  ASSERT_TRUE(Push(*session, 1).ok());
  ASSERT_TRUE(session->Step(TestStep()).ok());
  EXPECT_EQ(ReferenceOf(1).Compare(*session, 1), absl::OkStatus());
}

// The next group decides the step, from the memory of the group that is gone.
TEST_F(LentGradientsTest, ASessionThatDiesBetweenPreparedAndDecided) {
  auto session = Initialised();
  const auto memory = Push(*session, 1);
  ASSERT_TRUE(memory.ok()) << memory.status();
  script_.unheard = true;
  EXPECT_EQ(ExpectError(session->Step(TestStep()).status(), model::kIo, "its outcome is not known"), absl::OkStatus());
  session->ReturnGradients();
  EXPECT_FALSE(memory->expired()) << "the outcome is not known: the next group may apply it";
  EXPECT_FALSE(session->Drop().ok());
  session.reset();
  EXPECT_FALSE(memory->expired());
  script_.unheard = false;
  session = OpenAgain();
  ASSERT_NE(session, nullptr);
  EXPECT_EQ(session->version(), 1);
  EXPECT_EQ(ReferenceOf(1).Compare(*session, 1), absl::OkStatus());
  EXPECT_TRUE(Goes(*memory));
}

TEST_F(LentGradientsTest, AServerThatEndsLetsGo) {
  ScratchDirectory directory;
  services::StateServerOptions options;
  options.data_directory = directory.path();
  options.server_id = "alone";
  options.budget.dram = uint64_t{128} << 20;
  auto server = services::StateServer::Start(options);
  ASSERT_TRUE(server.ok()) << server.status();
  std::vector<std::unique_ptr<Transport>> transports;
  transports.push_back(services::MakeEmbeddedTransport(server->get()));
  auto session = Session::Open(TestOptions(), LongTensor(), std::move(transports), alone_.get());
  ASSERT_TRUE(session.ok()) << session.status();
  ASSERT_EQ(InitialiseAll(**session), absl::OkStatus());
  const auto memory = Push(**session, 1);
  ASSERT_TRUE(memory.ok()) << memory.status();
  ASSERT_TRUE((*session)->Norm().ok());
  session->reset();
  EXPECT_FALSE(memory->expired());
  server->reset();
  EXPECT_TRUE(memory->expired());
}

// A chunk that two ranks share is copied; the others are not.
TEST_F(LentGradientsTest, RanksThatShareAChunk) {
  EXPECT_EQ(SessionFixture::RunRanks(3,
                                     [&](Collective* collective) -> absl::Status {
                                       const auto session = Open(TestOptions(), collective);
                                       BALLAST_RETURN_IF_ERROR(InitialiseAll(*session));
                                       for (int64_t step = 1; step <= 2; ++step) {
                                         BALLAST_RETURN_IF_ERROR(Push(*session, step).status());
                                         BALLAST_RETURN_IF_ERROR(session->Step(TestStep()).status());
                                       }
                                       return ReferenceOf(2).Compare(*session, 2);
                                     }),
            absl::OkStatus());
  // 40 chunks among 3 ranks: two are shared.
  EXPECT_EQ(InPlace(), 2 * (kBytes - 2 * kChunk * sizeof(bf16)));
}

// The log has its one copy, and the servers keep nothing of the trainer's memory.
TEST(LentGradients, AreCopiedIntoALog) {
  Servers servers({0, 64 * kMiB, 256 * kMiB});
  const std::unique_ptr<Collective> alone = std::move(MakeLoopbackGroup(1).front());
  auto session = Session::Open(DurableOptions(), LongTensor(), servers.Connect(), alone.get());
  ASSERT_TRUE(session.ok()) << session.status();
  ASSERT_EQ(InitialiseAll(**session), absl::OkStatus());
  const auto memory = Push(**session, 1);
  ASSERT_TRUE(memory.ok()) << memory.status();
  ASSERT_TRUE((*session)->Step(TestStep()).ok());
  EXPECT_TRUE(Goes(*memory));
  EXPECT_EQ(ReferenceOf(1).Compare(**session, 1), absl::OkStatus());
}

}  // namespace
}  // namespace ballast::client
