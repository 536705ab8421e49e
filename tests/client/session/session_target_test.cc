// Calls that reach another server than the one that they are meant for, or one of another protocol version.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/protocol.h"
#include "ballast/services/gateway/rpc_server.h"
#include "ballast/tests/client/session/forwarding_transport.h"
#include "ballast/tests/client/session/session_fixture.h"
#include "ballast/tests/held_port.h"

namespace ballast::client {
namespace {

// Once told so, sends seals to another server, as an address would that leads there.
class StrayingTransport final : public ForwardingTransport {
 public:
  StrayingTransport(std::unique_ptr<Transport> server, std::unique_ptr<Transport> other, std::atomic<bool>* strays)
      : ForwardingTransport(std::move(server)), other_(std::move(other)), strays_(strays) {}
  void Seal(const v1::SealRequest& request, absl::Time deadline, Callback<v1::SealResponse> done) override {
    if (*strays_) return other_->Seal(request, deadline, std::move(done));
    ForwardingTransport::Seal(request, deadline, std::move(done));
  }

 private:
  const std::unique_ptr<Transport> other_;
  std::atomic<bool>* const strays_;
};

// A step without norms: nothing else tells that one server prepared it twice, and another not at all.
TEST(SessionTarget, AStepThatOneServerPreparedTwiceIsNotAcknowledged) {
  SessionFixture servers(2);
  std::atomic<bool> strays = false;
  EXPECT_EQ(
      SessionFixture::RunRanks(
          1,
          [&](Collective* collective) -> absl::Status {
            auto transports = servers.Connect();
            transports[1] =
                std::make_unique<StrayingTransport>(std::move(transports[1]), std::move(servers.Connect()[0]), &strays);
            BALLAST_ASSIGN_OR_RETURN(auto session,
                                     Session::Open(TestOptions(), TestTensors(), std::move(transports), collective));
            strays = true;
            return ExpectError(InitialiseAll(*session), model::kOtherServer, "answered twice that it prepared step 0");
          }),
      absl::OkStatus());
}

// A durable server behind gRPC, which comes back at its address.
class Served {
 public:
  Served() {
    state_options_.server_id = "s";
    state_options_.budget = {0, uint64_t{64} << 20, uint64_t{512} << 20};
    rpc_options_.listen = port_.address();
  }
  // Ends what is there, and starts a server with this directory and protocol version.
  absl::Status Start(const std::string& directory, uint32_t version) {
    rpc_.reset();
    state_.reset();
    state_options_.data_directory = directory;
    BALLAST_ASSIGN_OR_RETURN(state_, services::StateServer::Start(state_options_));
    rpc_options_.protocol_version = version;
    BALLAST_ASSIGN_OR_RETURN(rpc_, services::RpcServer::Start(rpc_options_, state_.get()));
    return absl::OkStatus();
  }
  const std::string& address() const { return port_.address(); }
  services::StateServer* state() const { return state_.get(); }

 private:
  const HeldPort port_;
  services::StateServerOptions state_options_;
  services::RpcServerOptions rpc_options_;
  std::unique_ptr<services::StateServer> state_;
  std::unique_ptr<services::RpcServer> rpc_;
};

// The lines that a session shows while it waits.
class Lines {
 public:
  void Add(const std::string& line) {
    absl::MutexLock lock(&mutex_);
    lines_.push_back(line);
  }
  // Blocks until a line has `text`; false after a minute.
  bool Await(const std::string& text) {
    absl::MutexLock lock(&mutex_);
    const auto has = [this, &text]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return std::any_of(lines_.begin(), lines_.end(), [&](const auto& line) { return absl::StrContains(line, text); });
    };
    return mutex_.AwaitWithTimeout(absl::Condition(&has), absl::Minutes(1));
  }

 private:
  absl::Mutex mutex_;
  std::vector<std::string> lines_ ABSL_GUARDED_BY(mutex_);
};

// Neither is taken for the group's server: the group waits, says for whom, and goes on once its own server is back.
TEST(SessionTarget, ServersOfTheNextVersionAndOthersByTheSameNameAreRefused) {
  const ScratchDirectory own, other;
  Served served;
  ASSERT_EQ(served.Start(own.path(), model::kProtocolVersion), absl::OkStatus());
  Lines lines;
  SessionOptions options = TestOptions();
  options.durability = v1::DURABILITY_STEP;
  options.progress = [&](const std::string& line) { lines.Add(line); };
  const auto meets = [&](Session* session, int64_t step, const std::string& directory, uint32_t version,
                         const std::string& text) -> absl::Status {
    BALLAST_RETURN_IF_ERROR(served.Start(directory, version));
    absl::Status stepped;
    std::thread training([&] { stepped = TrainStep(*session, step).status(); });
    absl::Status status = Expect(lines.Await(text), absl::StrCat("no line says '", text, "'"));
    const v1::GetServerStatusResponse now = served.state()->Status();
    for (const v1::JobStatus& job : now.jobs()) status.Update(Expect(job.committed() < step, "the step was decided"));
    status.Update(served.Start(own.path(), model::kProtocolVersion));
    training.join();
    status.Update(stepped);
    return status;
  };
  EXPECT_EQ(SessionFixture::RunRanks(
                1,
                [&](Collective* collective) -> absl::Status {
                  BALLAST_ASSIGN_OR_RETURN(auto session,
                                           Session::Connect(options, TestTensors(), {served.address()}, collective));
                  BALLAST_RETURN_IF_ERROR(Expect(lines.Await("job 'test' is new"), "nobody says that the job is new"));
                  BALLAST_RETURN_IF_ERROR(InitialiseAll(*session));
                  BALLAST_RETURN_IF_ERROR(TrainStep(*session, 1).status());
                  BALLAST_RETURN_IF_ERROR(meets(session.get(), 2, own.path(), model::kProtocolVersion + 1,
                                                absl::StrCat("speaks protocol version ", model::kProtocolVersion + 1)));
                  BALLAST_RETURN_IF_ERROR(meets(session.get(), 3, other.path(), model::kProtocolVersion,
                                                "this call is meant for server s/"));
                  return TrainStep(*session, 4).status();
                }),
            absl::OkStatus());
  ASSERT_EQ(served.Start(own.path(), model::kProtocolVersion), absl::OkStatus());
  options.resume = Resume::kAuto;
  EXPECT_EQ(SessionFixture::RunRanks(
                1,
                [&](Collective* collective) {
                  return Session::Connect(options, TestTensors(), {served.address()}, collective).status();
                }),
            absl::OkStatus());
  EXPECT_TRUE(lines.Await("job 'test' continues at version 4"));
}

}  // namespace
}  // namespace ballast::client
