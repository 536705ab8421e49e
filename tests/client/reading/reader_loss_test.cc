// Readers of a job with two copies, whose servers die while they read.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ballast/client/collective/loopback_collective.h"
#include "ballast/client/reader.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/protocol.h"
#include "ballast/services/gateway/embedded_transport.h"
#include "ballast/tests/client/reading/read_all.h"
#include "ballast/tests/client/session/forwarding_transport.h"
#include "ballast/tests/client/session/session_fixture.h"
#include "ballast/tests/client/transport/small_etcd.h"

namespace ballast::client {
namespace {

constexpr int kMachines = 3;

struct Machine {
  std::atomic<bool> dead{false};
  v1::Member member;
};

// To a server that etcd names, on a machine that may die.
class MortalTransport final : public ForwardingTransport {
 public:
  using Connect = std::function<std::unique_ptr<Transport>(const v1::Member&)>;
  MortalTransport(std::unique_ptr<Transport> server, const Machine* machine, registry::Registry* registry,
                  Connect connect, std::function<void()> before_pull)
      : ForwardingTransport(std::move(server)),
        machine_(machine),
        registry_(registry),
        connect_(std::move(connect)),
        before_pull_(std::move(before_pull)) {}

  std::string name() const override { return machine_->member.address(); }
  registry::Registry* registry() const override { return registry_; }
  std::string registered_as() const override {
    return model::TargetOf(machine_->member.server_id(), machine_->member.disk());
  }
  absl::StatusOr<std::unique_ptr<Transport>> Another(const v1::Member& member) override { return connect_(member); }
  void Identify(const v1::IdentifyRequest& r, absl::Time t, Callback<v1::IdentifyResponse> done) override {
    Ask(&Transport::Identify, r, t, std::move(done));
  }
  void GetJob(const v1::GetJobRequest& r, absl::Time t, Callback<v1::GetJobResponse> done) override {
    Ask(&Transport::GetJob, r, t, std::move(done));
  }
  void Fence(const v1::FenceRequest& r, absl::Time t, Callback<v1::FenceResponse> done) override {
    Ask(&Transport::Fence, r, t, std::move(done));
  }
  void Open(const v1::OpenRequest& r, absl::Time t, Callback<v1::OpenResponse> done) override {
    Ask(&Transport::Open, r, t, std::move(done));
  }
  void Norm(const v1::NormRequest& r, absl::Time t, Callback<v1::NormResponse> done) override {
    Ask(&Transport::Norm, r, t, std::move(done));
  }
  void Seal(const v1::SealRequest& r, absl::Time t, Callback<v1::SealResponse> done) override {
    Ask(&Transport::Seal, r, t, std::move(done));
  }
  void Commit(const v1::CommitRequest& r, absl::Time t, Callback<v1::CommitResponse> done) override {
    Ask(&Transport::Commit, r, t, std::move(done));
  }
  void Pin(const v1::PinRequest& r, absl::Time t, Callback<v1::PinResponse> done) override {
    Ask(&Transport::Pin, r, t, std::move(done));
  }
  void Unpin(const v1::UnpinRequest& r, absl::Time t, Callback<v1::UnpinResponse> done) override {
    Ask(&Transport::Unpin, r, t, std::move(done));
  }
  void Push(const v1::PushRequest& r, absl::Span<const std::byte> payload, absl::Time t,
            Callback<v1::PushResponse> done) override {
    if (machine_->dead) return done(Down());
    ForwardingTransport::Push(r, payload, t, std::move(done));
  }
  void Pull(const v1::PullRequest& r, absl::Span<std::byte> to, absl::Time t,
            std::function<void(absl::Status)> done) override {
    if (before_pull_) before_pull_();
    if (machine_->dead) return done(Down());
    ForwardingTransport::Pull(r, to, t, std::move(done));
  }

 private:
  static absl::Status Down() {
    return model::Error(absl::StatusCode::kUnavailable, model::kServerDown, "the machine is dead");
  }
  template <typename Request, typename Response>
  void Ask(void (Transport::*method)(const Request&, absl::Time, Callback<Response>), const Request& request,
           absl::Time deadline, Callback<Response> done) {
    if (machine_->dead) return done(Down());
    (server()->*method)(request, deadline, std::move(done));
  }

  const Machine* const machine_;
  registry::Registry* const registry_;
  const Connect connect_;
  const std::function<void()> before_pull_;
};

class ReaderLossTest : public ::testing::Test {
 protected:
  ReaderLossTest() : registry_(etcd_.Connect()) {
    for (int i = 0; i < kMachines; ++i) {
      v1::Member& member = machines_[i].member;
      member.set_server_id(absl::StrCat("s", i));
      member.set_disk(servers_.server(i)->disk());
      member.set_address(absl::StrCat("s", i, ":7070"));
      v1::ServerEntry entry;
      entry.set_server_id(member.server_id());
      entry.set_disk(member.disk());
      entry.set_address(member.address());
      entry.set_state(v1::SERVER_STATE_SERVING);
      EXPECT_TRUE(*registry_.Put(entry, 0, 0, absl::Now() + absl::Minutes(1)));
    }
  }

  std::unique_ptr<Transport> Connect(int i, bool reads) {
    std::function<void()> before_pull;
    if (reads) before_pull = [this, i] { before_pull_(i); };
    return std::make_unique<MortalTransport>(
        services::MakeEmbeddedTransport(servers_.server(i), 3), &machines_[i], &registry_,
        [this, reads](const v1::Member& member) { return Connect(member.server_id()[1] - '0', reads); },
        std::move(before_pull));
  }
  std::vector<std::unique_ptr<Transport>> ConnectAll(bool reads) {
    std::vector<std::unique_ptr<Transport>> all;
    for (int i = 0; i < kMachines; ++i) all.push_back(Connect(i, reads));
    return all;
  }
  void Open(absl::Duration failover_after) {
    SessionOptions options = TestOptions();
    options.replicas = 2;
    options.failover_after = failover_after;
    auto session = Session::Open(options, TestTensors(), ConnectAll(/*reads=*/false), group_[0].get());
    ASSERT_TRUE(session.ok()) << session.status();
    session_ = *std::move(session);
    ASSERT_EQ(InitialiseAll(*session_), absl::OkStatus());
  }
  void Train(int64_t steps) {
    while (session_->version() < steps) {
      ASSERT_EQ(TrainStep(*session_, session_->version() + 1).status(), absl::OkStatus());
      reference_.Step(session_->version(), TestStep());
    }
  }
  absl::StatusOr<std::unique_ptr<Reader>> OpenReader() {
    ReaderOptions options;
    options.job = "test";
    options.timeout = absl::Minutes(2);
    return Reader::Open(options, ConnectAll(/*reads=*/true));
  }
  int MembersByKey() {
    const auto key = registry_.FindJob("test", absl::Now() + absl::Minutes(1));
    return key.ok() && key->has_value() ? (*key)->value.table().members_size() : 0;
  }

  SessionFixture servers_{kMachines};
  SmallEtcd etcd_;
  registry::Registry registry_;
  std::array<Machine, kMachines> machines_;
  std::function<void(int server)> before_pull_ = [](int) {};  // a reader's
  std::vector<std::unique_ptr<Collective>> group_ = MakeLoopbackGroup(1);
  std::unique_ptr<Session> session_;
  Reference reference_{TestTensors()};
};

TEST_F(ReaderLossTest, WhatADeadServerHadComesFromTheOtherHolder) {
  Open(/*failover_after=*/absl::Minutes(10));  // the group stays as it is
  Train(2);
  const auto reader = OpenReader();
  ASSERT_TRUE(reader.ok()) << reader.status();
  ASSERT_EQ((*reader)->Take()->version, 2);
  const TensorBytes working = Expected(reference_), masters = Expected(reference_, true);
  Train(3);
  before_pull_ = [this](int server) {
    if (server == 1) machines_[1].dead = true;
  };
  auto read = ReadAll(**reader);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(*read, working);
  EXPECT_TRUE(machines_[1].dead) << "the reader asked it";
  read = ReadAll(**reader, true);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(*read, masters);
  machines_[1].dead = false;
}

TEST_F(ReaderLossTest, AReadGoesOnWhileTheGroupDoesWithoutTheServer) {
  Open(/*failover_after=*/absl::Seconds(1));
  Train(2);
  const auto reader = OpenReader();
  ASSERT_TRUE(reader.ok()) << reader.status();
  ASSERT_EQ((*reader)->Take()->version, 2);
  const TensorBytes expected = Expected(reference_);
  before_pull_ = [this](int server) {
    if (server != 1 && !machines_[1].dead) return;
    machines_[1].dead = true;
    while (MembersByKey() != 2) absl::SleepFor(absl::Milliseconds(10));
  };
  std::thread trainer([this] {
    while (!machines_[1].dead) absl::SleepFor(absl::Milliseconds(10));
    Train(3);
  });
  const auto read = ReadAll(**reader);
  machines_[1].dead = true;
  trainer.join();
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(*read, expected);
  const auto next = (*reader)->Take();
  ASSERT_TRUE(next.ok()) << next.status();
  EXPECT_EQ(next->version, 3);
  EXPECT_EQ(*ReadAll(**reader), Expected(reference_));
}

// Both holders of each chunk are gone. The reader says so, and does not wait for its time-out.
TEST_F(ReaderLossTest, AVersionThatNobodyHasAnyMoreIsGone) {
  Open(/*failover_after=*/absl::Minutes(10));
  Train(2);
  const auto reader = OpenReader();
  ASSERT_TRUE(reader.ok()) << reader.status();
  ASSERT_EQ((*reader)->Take()->version, 2);
  before_pull_ = [this](int) {
    for (Machine& machine : machines_) machine.dead = true;
  };
  const absl::Status lost = ReadAll(**reader).status();
  EXPECT_EQ(ExpectError(lost, model::kVersionGone, "version 2 was lost while it was read, so take a newer one"),
            absl::OkStatus());
  EXPECT_EQ(ExpectError(lost, model::kVersionGone, "no answer for 5s from 's"), absl::OkStatus());
  EXPECT_EQ(ExpectError(lost, model::kVersionGone, "which alone had the chunk"), absl::OkStatus());
  before_pull_ = [](int) {};
  for (Machine& machine : machines_) machine.dead = false;
  const auto next = (*reader)->Take();
  ASSERT_TRUE(next.ok()) << next.status();
  EXPECT_EQ(*ReadAll(**reader), Expected(reference_));
}

}  // namespace
}  // namespace ballast::client
