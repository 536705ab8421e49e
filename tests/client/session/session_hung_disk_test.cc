// Sessions on servers whose disk hangs under the group before: the next group takes the job over without waiting.
#include <gtest/gtest.h>

#include <atomic>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ballast/client/collective/loopback_collective.h"
#include "ballast/proto/base/status.h"
#include "ballast/services/gateway/embedded_transport.h"
#include "ballast/services/server/state_server.h"
#include "ballast/tests/client/session/durable_servers.h"
#include "ballast/tests/client/session/session_fixture.h"
#include "ballast/tests/scratch_directory.h"
#include "ballast/tests/services/answer.h"
#include "ballast/tests/services/gated_disk.h"
#include "ballast/tests/services/trainer_group.h"

namespace ballast::client {
namespace {

using services::Answer;
using services::GatedOperation;

// Servers "s0" and "s1", each with a gate of its own in its disk.
class SessionHungDisk : public ::testing::Test {
 protected:
  SessionHungDisk() : servers_(kServers) {
    for (int i = 0; i < kServers; ++i) {
      services::StateServerOptions options;
      options.data_directory = servers_[i].directory.path();
      options.server_id = absl::StrCat("s", i);
      options.budget = {0, 64 * kMiB, 256 * kMiB};
      options.foundation = &servers_[i].disk;
      servers_[i].state = *services::StateServer::Start(options);
    }
    options_.open_timeout = absl::Seconds(30);
  }
  ~SessionHungDisk() override {
    for (Server& server : servers_) server.disk.Release();
  }

  services::GatedDisk& disk(int i) { return servers_[i].disk; }
  services::StateServer* server(int i) { return servers_[i].state.get(); }
  void HoldWrites(int i, const std::string& file) {
    disk(i).Hold([file](const std::string& path, GatedOperation operation, uint64_t) {
      return absl::EndsWith(path, file) && operation == GatedOperation::kWrite;
    });
  }
  absl::StatusOr<std::unique_ptr<Session>> Open() {
    std::vector<std::unique_ptr<Transport>> transports;
    for (Server& server : servers_) transports.push_back(services::MakeEmbeddedTransport(server.state.get(), 3));
    return Session::Open(options_, TestTensors(), std::move(transports), group_[0].get());
  }
  v1::GetJobResponse GetJob(int i) {
    v1::GetJobRequest request;
    request.set_job("test");
    Answer<v1::GetJobResponse> answer;
    server(i)->GetJob(request, answer.reply());
    return *answer.Wait();
  }
  Answer<v1::PinResponse> BeginPin(int i, int64_t version) {
    v1::PinRequest pin;
    pin.set_job("test");
    pin.set_durable(true);
    pin.set_version(version);
    *pin.mutable_epoch() = GetJob(i).promised();
    Answer<v1::PinResponse> answer;
    server(i)->Pin(pin, absl::InfiniteFuture(), answer.reply());
    return answer;
  }
  // A group comes to version 2 and dies while it pins the version: the pin is complete on s0, and the disk of s1 hangs
  // amid it. Returns the answer of s1.
  Answer<v1::PinResponse> DieWhilePinning() {
    const auto first = Open();
    EXPECT_EQ(first.status(), absl::OkStatus());
    EXPECT_EQ(InitialiseAll(**first), absl::OkStatus());
    EXPECT_EQ(Train(**first, 1, 2), absl::OkStatus());
    EXPECT_EQ(ExpectIsStep(**first, 2), absl::OkStatus());
    HoldWrites(1, "/nvme.tier");
    Answer<v1::PinResponse> hangs = BeginPin(1, 2);
    disk(1).AwaitWaiting();
    EXPECT_EQ(BeginPin(0, 2).Wait().status(), absl::OkStatus());
    return hangs;
  }

  struct Server {
    ScratchDirectory directory;
    services::GatedDisk disk;
    std::unique_ptr<services::StateServer> state;
  };
  std::deque<Server> servers_;
  SessionOptions options_ = DurableOptions();
  std::vector<std::unique_ptr<Collective>> group_ = MakeLoopbackGroup(1, absl::Seconds(30));
};

TEST_F(SessionHungDisk, ARestartDoesNotWaitForAPinAndNoPartOfThePinStays) {
  Answer<v1::PinResponse> hangs = DieWhilePinning();
  const auto second = Open();
  ASSERT_EQ(second.status(), absl::OkStatus());
  EXPECT_EQ((*second)->version(), 2);
  EXPECT_EQ(model::ReasonOf(hangs.Wait().status()), model::kStaleEpoch);
  disk(1).Release();
  // A task of the worker, which comes behind the pin.
  EXPECT_EQ(Train(**second, 3, 4), absl::OkStatus());
  EXPECT_EQ(ExpectIsStep(**second, 4), absl::OkStatus());
  EXPECT_EQ((*second)->PinDurably(), absl::OkStatus());
  const auto pins = (*second)->DurablePins();
  ASSERT_EQ(pins.status(), absl::OkStatus());
  ASSERT_EQ(pins->size(), 1);
  EXPECT_EQ(pins->front().version, 4);
  for (int i = 0; i < kServers; ++i) {
    EXPECT_EQ(GetJob(i).durable_versions_size(), 1) << "of s" << i;
  }
}

TEST_F(SessionHungDisk, TheNextGroupMayPinTheVersionWhosePinHangs) {
  (void)DieWhilePinning();
  const auto second = Open();
  ASSERT_EQ(second.status(), absl::OkStatus());
  Answer<v1::PinResponse> pins[] = {BeginPin(0, 2), BeginPin(1, 2)};
  EXPECT_EQ(pins[0].Wait().status(), absl::OkStatus());
  disk(1).Release();
  EXPECT_EQ(pins[1].Wait().status(), absl::OkStatus());
  EXPECT_EQ(Train(**second, 3, 4), absl::OkStatus());
  ASSERT_EQ((*second)->Restore({.version = 2}).status(), absl::OkStatus());
  EXPECT_EQ(ExpectIsStep(**second, 2), absl::OkStatus());
}

TEST_F(SessionHungDisk, ARestartAmidTheFirstOpenFencesAtOnce) {
  v1::JobSpec spec = services::MakeSpec("test", services::SmallModel());
  spec.set_durability(v1::DURABILITY_STEP);
  services::TrainerGroup first({server(0), server(1)}, spec, 1);
  std::vector<v1::GetJobResponse> jobs;
  ASSERT_EQ(first.Fence(&jobs), absl::OkStatus());
  HoldWrites(1, "/log-test");
  Answer<v1::OpenResponse> opened;
  server(1)->Open(first.open_request(-1, std::nullopt), absl::InfiniteFuture(), opened.reply());
  disk(1).AwaitWaiting();

  std::atomic<bool> ended = false;
  absl::StatusOr<std::unique_ptr<Session>> second = absl::UnknownError("not opened");
  std::thread opening([&] {
    second = Open();
    ended = true;
  });
  while (!ended && GetJob(1).promised().counter() == first.epoch().counter()) absl::SleepFor(absl::Milliseconds(5));
  EXPECT_FALSE(ended) << second.status();
  EXPECT_FALSE(opened.arrived() && opened.Wait().ok());
  disk(1).Release();
  opening.join();
  ASSERT_EQ(second.status(), absl::OkStatus());
  EXPECT_EQ(InitialiseAll(**second), absl::OkStatus());
  EXPECT_EQ(Train(**second, 1, 1), absl::OkStatus());
  EXPECT_EQ(ExpectIsStep(**second, 1), absl::OkStatus());
}

}  // namespace
}  // namespace ballast::client
