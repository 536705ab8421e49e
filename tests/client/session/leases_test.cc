// Working parameters that a trainer reads where its server, in the same process, has them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ballast/client/collective/loopback_collective.h"
#include "ballast/proto/base/status.h"
#include "ballast/services/gateway/embedded_transport.h"
#include "ballast/tests/client/session/forwarding_transport.h"
#include "ballast/tests/client/session/session_fixture.h"
#include "ballast/tests/services/answer.h"

namespace ballast::client {
namespace {

using services::Answer;
using ::testing::HasSubstr;

class LeasesTest : public ::testing::Test {
 protected:
  std::unique_ptr<Session> Open(const SessionOptions& options = TestOptions()) {
    auto session = servers_.Open(alone_.get(), options, TestTensors());
    EXPECT_TRUE(session.ok()) << session.status();
    EXPECT_EQ(InitialiseAll(**session), absl::OkStatus());
    return *std::move(session);
  }
  static WorkingCopyLease Lease(Session& session, uint32_t unit, std::optional<UnitRange> range = std::nullopt) {
    auto lease = session.StartLease(unit, {range.value_or(UnitRange{0, session.unit_elements(unit)})});
    EXPECT_TRUE(lease.ok()) << lease.status();
    return *std::move(lease);
  }
  // The bits of all tensors of the unit, after `steps` steps, in parts that follow one another.
  static void ExpectBits(Session& session, uint32_t unit, absl::Span<const LeasedPart> parts, int64_t steps) {
    Reference reference(TestTensors());
    for (int64_t step = 1; step <= steps; ++step) reference.Step(step, TestStep());
    std::vector<bf16> all(session.unit_elements(unit));
    uint64_t at = 0;
    for (const LeasedPart& part : parts) {
      ASSERT_EQ(part.range.begin, at);
      at = part.range.end;
      ASSERT_EQ(part.bytes.size(), (part.range.end - part.range.begin) * sizeof(bf16));
      std::memcpy(all.data() + part.range.begin, part.bytes.data(), part.bytes.size());
    }
    ASSERT_EQ(at, all.size());
    for (const TensorSpec& tensor : TestTensors()) {
      const auto place = session.Locate(tensor.name);
      if (place->unit != unit) continue;
      EXPECT_TRUE(std::equal(all.begin() + static_cast<std::ptrdiff_t>(place->begin),
                             all.begin() + static_cast<std::ptrdiff_t>(place->end),
                             reference.at(tensor.name).working.begin()))
          << tensor.name;
    }
  }
  uint64_t Sent() {
    uint64_t sent = 0;
    for (const auto& [name, counters] : server()->Figures().jobs) sent += counters->sent_bytes;
    return sent;
  }
  // All chunks of the job, or of a unit, show the version.
  absl::Status Applied(int64_t version, std::optional<uint32_t> unit = std::nullopt,
                       absl::Duration within = absl::Seconds(30), const std::string& job = "test") {
    Answer<v1::CommitResponse> answer;
    server()->AwaitApplied(job, version, unit, absl::Now() + within, answer.reply());
    return answer.Wait().status();
  }
  void ExpectWaits(int64_t version, uint32_t unit) {
    std::string said;
    for (int i = 0; i < 600 && !absl::StrContains(said, "the update waits for"); ++i) {
      said = Applied(version, unit, absl::Milliseconds(50)).ToString();
    }
    EXPECT_THAT(said, HasSubstr("the update waits for"));
  }
  services::StateServer* server() { return servers_.server(0); }

  SessionFixture servers_{1};
  std::unique_ptr<Collective> alone_ = std::move(MakeLoopbackGroup(1).front());
};

TEST_F(LeasesTest, NoByteIsCopied) {
  const auto session = Open();
  for (int64_t step = 0; step <= 2; ++step) {
    if (step > 0) {
      ASSERT_TRUE(TrainStep(*session, step).ok());
    }
    for (uint32_t unit = 0; unit < session->unit_count(); ++unit) {
      ASSERT_EQ(Applied(step), absl::OkStatus());  // flushes and norms read, too
      const uint64_t sent = Sent(), read = server()->traffic().read[storage::TierKind::kDram];
      const SessionStats before = session->stats();
      WorkingCopyLease lease = Lease(*session, unit);
      EXPECT_EQ(lease.version(), step);
      const auto parts = lease.Await();
      ASSERT_TRUE(parts.ok()) << parts.status();
      ExpectBits(*session, unit, *parts, step);
      EXPECT_EQ(session->stats().leased_bytes - before.leased_bytes, session->unit_elements(unit) * sizeof(bf16));
      EXPECT_EQ(session->stats().pulled_bytes, before.pulled_bytes);
      EXPECT_EQ(Sent(), sent);
      EXPECT_EQ(server()->traffic().read[storage::TierKind::kDram], read);
      // The same memory, for as many as want it.
      WorkingCopyLease other = Lease(*session, unit, UnitRange{1, 9});
      ASSERT_TRUE(other.Await().ok());
      EXPECT_EQ(other.Await()->front().bytes.data(), parts->front().bytes.data() + sizeof(bf16));
    }
  }
}

TEST_F(LeasesTest, AnUpdateWaitsForItsChunkAlone) {
  const auto session = Open();
  std::optional<WorkingCopyLease> lease = Lease(*session, 0, UnitRange{0, 10});
  ASSERT_TRUE(lease->Await().ok());
  const std::byte* const first = lease->Await()->front().bytes.data();
  const std::vector<std::byte> before(first, first + 20);
  ASSERT_TRUE(TrainStep(*session, 1).ok());
  EXPECT_EQ(Applied(1, 1), absl::OkStatus()) << "the other unit";
  // Chunks of the same unit behind the leased one go first.
  std::vector<bf16> tail(10);
  const uint64_t elements = session->unit_elements(0);
  auto pull = session->StartPull(
      0, {{{elements - 10, elements}, absl::MakeSpan(reinterpret_cast<std::byte*>(tail.data()), 20)}});
  ASSERT_TRUE(pull.ok());
  EXPECT_EQ(pull->Await(), absl::OkStatus());
  ExpectWaits(1, 0);
  EXPECT_TRUE(std::equal(before.begin(), before.end(), first)) << "what is leased stays";
  // Who wants the next version waits as a pull does.
  WorkingCopyLease next = Lease(*session, 0);
  EXPECT_EQ(next.version(), 1);
  std::thread([&] { lease.reset(); }).join();
  const auto parts = next.Await();
  ASSERT_TRUE(parts.ok()) << parts.status();
  ExpectBits(*session, 0, *parts, 1);
  EXPECT_EQ(Applied(1), absl::OkStatus());
}

TEST_F(LeasesTest, AStepThatWaitsLongSaysForWhat) {
  SessionOptions options = TestOptions();
  options.step_timeout = absl::Seconds(4);
  const auto session = Open(options);
  WorkingCopyLease lease = Lease(*session, 1);
  ASSERT_TRUE(lease.Await().ok());
  const size_t parts = lease.Await()->size();
  ASSERT_TRUE(TrainStep(*session, 1).ok());
  std::vector<bf16> values(8);
  auto pull = session->StartPull(1, {{{0, 8}, absl::MakeSpan(reinterpret_cast<std::byte*>(values.data()), 16)}});
  ASSERT_TRUE(pull.ok());
  const std::string pulled = pull->Await().ToString();
  EXPECT_THAT(pulled, HasSubstr(absl::StrCat("the update waits for ", parts, " leases")));
  EXPECT_THAT(pulled, ::testing::ContainsRegex("not given back: chunk [0-9]+ of unit 1 has been leased for .*s"));
  // So does the push of the next step.
  EXPECT_EQ(session->Push(1, OwnedGradient(*session, 1, 2)), absl::OkStatus());
  EXPECT_THAT(session->Norm().status().ToString(), HasSubstr("the update waits for"));
  EXPECT_EQ(session->Drop(), absl::OkStatus());
}

TEST_F(LeasesTest, AnEndedLeaseAbandonsPartsOnTheirWay) {
  const auto session = Open();
  std::optional<WorkingCopyLease> first = Lease(*session, 0);
  ASSERT_TRUE(first->Await().ok());
  ASSERT_TRUE(TrainStep(*session, 1).ok());
  { const WorkingCopyLease late = Lease(*session, 0); }  // waits for version 1
  first.reset();
  ASSERT_EQ(Applied(1), absl::OkStatus());
  ASSERT_TRUE(TrainStep(*session, 2).ok());
  EXPECT_EQ(Applied(2), absl::OkStatus()) << "nobody holds version 1";
}

// Tells when a lease goes back to the server.
class ToldLeases : public ForwardingTransport {
 public:
  ToldLeases(std::unique_ptr<Transport> server, std::atomic<int>* given_back)
      : ForwardingTransport(std::move(server)), given_back_(given_back) {}
  void Lease(const v1::PullRequest& r, absl::Time t, Callback<model::LeasedBytes> done) override {
    server()->Lease(r, t,
                    [done = std::move(done), given_back = given_back_](absl::StatusOr<model::LeasedBytes> leased) {
                      if (leased.ok() && leased->held != nullptr) {
                        const void* const place = leased->held.get();
                        leased->held = {place, [held = std::move(leased->held), given_back](const void*) mutable {
                                          held.reset();
                                          ++*given_back;
                                        }};
                      }
                      done(std::move(leased));
                    });
  }

 private:
  std::atomic<int>* const given_back_;
};

// While other threads of the parent take and give back leases.
TEST_F(LeasesTest, AForkedChildLeavesTheLeaseToItsParent) {
  std::atomic<int> given_back = 0;
  std::vector<std::unique_ptr<Transport>> transports;
  for (auto& transport : servers_.Connect()) {
    transports.push_back(std::make_unique<ToldLeases>(std::move(transport), &given_back));
  }
  auto opened = Session::Open(TestOptions(), TestTensors(), std::move(transports), alone_.get());
  ASSERT_TRUE(opened.ok()) << opened.status();
  const std::unique_ptr<Session> session = *std::move(opened);
  ASSERT_EQ(InitialiseAll(*session), absl::OkStatus());
  std::optional<WorkingCopyLease> lease = Lease(*session, 0);
  ASSERT_TRUE(lease->Await().ok());
  for (int i = 0; i < 20; ++i) {
    std::optional<WorkingCopyLease> other = Lease(*session, 1);
    std::thread dropper([&] { other.reset(); });
    const pid_t child = fork();
    if (child == 0) {
      alarm(30);
      const int before = given_back;
      lease.reset();
      _exit(given_back == before ? 0 : 1);
    }
    dropper.join();
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFEXITED(status)) << "signal " << WTERMSIG(status);
    ASSERT_EQ(WEXITSTATUS(status), 0) << "the child gave the lease back";
  }
  ASSERT_TRUE(TrainStep(*session, 1).ok());
  ExpectWaits(1, 0);
  lease.reset();
  EXPECT_GT(given_back, 0);
  EXPECT_EQ(Applied(1), absl::OkStatus());
}

TEST_F(LeasesTest, TheEndOfASessionEndsItsLeases) {
  auto session = Open();
  std::optional<WorkingCopyLease> lease = Lease(*session, 0);
  ASSERT_TRUE(lease->Await().ok());
  ASSERT_TRUE(TrainStep(*session, 1).ok());
  const std::optional<WorkingCopyLease> late = Lease(*session, 0);  // still on its way
  ExpectWaits(1, 0);
  session.reset();
  EXPECT_EQ(Applied(1), absl::OkStatus());
  lease.reset();
}

TEST_F(LeasesTest, AnotherJobsStepsDoNotWait) {
  const auto session = Open();
  WorkingCopyLease lease = Lease(*session, 0);
  ASSERT_TRUE(lease.Await().ok());
  ASSERT_TRUE(TrainStep(*session, 1).ok());
  SessionOptions options = TestOptions();
  options.job = "other";
  const auto alone = std::move(MakeLoopbackGroup(1).front());
  const auto other = servers_.Open(alone.get(), options, TestTensors());
  ASSERT_TRUE(other.ok()) << other.status();
  ASSERT_EQ(InitialiseAll(**other), absl::OkStatus());
  for (int64_t step = 1; step <= 3; ++step) {
    ASSERT_TRUE(TrainStep(**other, step).ok());
    ASSERT_EQ(Applied(step, std::nullopt, absl::Seconds(30), "other"), absl::OkStatus());
  }
  ExpectWaits(1, 0);
}

TEST_F(LeasesTest, BeyondTheBoundLeasesAreCopies) {
  SessionOptions options = TestOptions();
  options.inflight_bytes_max = 4096;
  const auto session = Open(options);
  std::optional<WorkingCopyLease> alone = Lease(*session, 0);  // a larger one goes alone
  ASSERT_TRUE(alone->Await().ok());
  EXPECT_EQ(session->stats().pulled_bytes, 0u);
  {
    WorkingCopyLease copy = Lease(*session, 0);
    ASSERT_TRUE(copy.Await().ok());
    EXPECT_EQ(session->stats().pulled_bytes, session->unit_elements(0) * sizeof(bf16));
    ExpectBits(*session, 0, *copy.Await(), 0);
    EXPECT_NE(copy.Await()->front().bytes.data(), alone->Await()->front().bytes.data());
    ASSERT_TRUE(TrainStep(*session, 1).ok());
    ExpectBits(*session, 0, *copy.Await(), 0);
  }
  alone.reset();
  WorkingCopyLease small = Lease(*session, 0, UnitRange{0, 8});
  WorkingCopyLease beside = Lease(*session, 0, UnitRange{8, 16});
  ASSERT_TRUE(small.Await().ok() && beside.Await().ok());
  EXPECT_EQ(beside.Await()->front().bytes.data(), small.Await()->front().bytes.data() + 16);
}

// Its transport is a wire, as far as the session knows.
TEST_F(LeasesTest, ElsewhereLeasesAreCopies) {
  std::vector<std::unique_ptr<Transport>> transports;
  for (auto& transport : servers_.Connect()) {
    transports.push_back(std::make_unique<ForwardingTransport>(std::move(transport)));
  }
  const auto session = Session::Open(TestOptions(), TestTensors(), std::move(transports), alone_.get());
  ASSERT_TRUE(session.ok()) << session.status();
  ASSERT_EQ(InitialiseAll(**session), absl::OkStatus());
  WorkingCopyLease lease = Lease(**session, 1);
  const auto parts = lease.Await();
  ASSERT_TRUE(parts.ok()) << parts.status();
  ExpectBits(**session, 1, *parts, 0);
  EXPECT_EQ((*session)->stats().leased_bytes, 0u);
  EXPECT_EQ((*session)->stats().pulled_bytes, (*session)->unit_elements(1) * sizeof(bf16));
}

TEST_F(LeasesTest, AServerWithoutWorkingCopiesLeasesNothing) {
  ScratchDirectory directory;
  services::StateServerOptions options;
  options.data_directory = directory.path();
  options.server_id = "none";
  options.budget.dram = uint64_t{64} << 20;
  options.working_copies = false;
  const auto server = services::StateServer::Start(options);
  ASSERT_TRUE(server.ok()) << server.status();
  std::vector<std::unique_ptr<Transport>> transports;
  transports.push_back(services::MakeEmbeddedTransport(server->get(), 1));
  const auto session = Session::Open(TestOptions(), TestTensors(), std::move(transports), alone_.get());
  ASSERT_TRUE(session.ok()) << session.status();
  ASSERT_EQ(InitialiseAll(**session), absl::OkStatus());
  WorkingCopyLease lease = Lease(**session, 1);
  const auto parts = lease.Await();
  ASSERT_TRUE(parts.ok()) << parts.status();
  ExpectBits(**session, 1, *parts, 0);
  EXPECT_EQ((*session)->stats().leased_bytes, 0u);
}

TEST_F(LeasesTest, WhatIsLeasedOutlivesADroppedJob) {
  const auto session = Open();
  WorkingCopyLease lease = Lease(*session, 0);
  const auto parts = lease.Await();
  ASSERT_TRUE(parts.ok()) << parts.status();
  ASSERT_TRUE(TrainStep(*session, 1).ok());  // its update waits, and ends with the job
  ExpectWaits(1, 0);
  Answer<v1::DropJobResponse> dropped;
  v1::DropJobRequest request;
  request.set_job("test");
  *request.mutable_epoch() = server()->Status().jobs(0).epoch();
  server()->DropJob(request, dropped.reply());
  ASSERT_EQ(dropped.Wait().status(), absl::OkStatus());
  ExpectBits(*session, 0, *parts, 0);
}

TEST_F(LeasesTest, TensorsAreAddedWhenAllLeasesAreBack) {
  const auto session = Open();
  std::optional<WorkingCopyLease> lease = Lease(*session, 0);
  const std::vector<TensorSpec> more = {{.name = "more", .unit = "more", .shape = {10}}};
  EXPECT_THAT(session->Register(more).ToString(), HasSubstr("give all leases back"));
  lease.reset();
  EXPECT_EQ(session->Register(more), absl::OkStatus());
}

TEST_F(LeasesTest, BadRangesAreRefused) {
  const auto session = Open();
  EXPECT_EQ(model::ReasonOf(session->StartLease(0, {{0, session->unit_elements(0) + 1}}).status()), model::kBadRange);
  EXPECT_FALSE(session->StartLease(7, {{0, 1}}).ok());
}

}  // namespace
}  // namespace ballast::client
