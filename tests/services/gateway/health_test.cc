// gRPC's health protocol: what it answers, and what strangers may take of it.
#include "ballast/services/gateway/health.h"

#include <grpcpp/generic/generic_stub.h>

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ballast/tests/services/gateway/rpc_fixture.h"

namespace ballast::services {
namespace {

// grpc.health.v1.HealthCheckRequest{service = 1}; the answer's field 1 is the status, 1 = SERVING, 2 = NOT_SERVING.
grpc::Status CheckHealth(const std::shared_ptr<grpc::Channel>& channel, const std::string& service,
                         std::string* answer) {
  std::string request = service;
  if (!service.empty()) request = std::string("\x0a") + static_cast<char>(service.size()) + service;
  return RawCall(channel, "/grpc.health.v1.Health/Check", request, answer);
}

class HealthTest : public RpcTest {};

TEST_F(HealthTest, AnswersForEachService) {
  std::string answer;
  for (const char* service : {"", "ballast.v1.StateService", "ballast.v1.AdminService"}) {
    ASSERT_TRUE(CheckHealth(channel_, service, &answer).ok()) << service;
    EXPECT_EQ(answer, "\x08\x01") << service;
  }
  EXPECT_EQ(CheckHealth(channel_, "no.such.Service", &answer).error_code(), grpc::StatusCode::NOT_FOUND);
}

// A stranger's message of 16 MB is no question about health.
TEST_F(HealthTest, TakesNoLargeMessage) {
  std::string answer;
  for (const char* method : {"Check", "Watch"}) {
    const grpc::Status status =
        RawCall(channel_, absl::StrCat("/grpc.health.v1.Health/", method), std::string(size_t{1} << 20, '\0'), &answer);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << method;
    EXPECT_NE(status.error_message().find("at most 4096 bytes, got 1048576"), std::string::npos)
        << status.error_message();
  }
}

// A stream of Health.Watch, as a client of gRPC holds one.
class HealthWatch {
 public:
  HealthWatch(const std::shared_ptr<grpc::Channel>& channel, const std::string& request) : stub_(channel) {
    context_.set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(30)));
    call_ = stub_.PrepareCall(&context_, "/grpc.health.v1.Health/Watch", &queue_);
    call_->StartCall(nullptr);
    Next();
    call_->WriteLast(BytesOf(request), grpc::WriteOptions(), nullptr);
    Next();
  }
  // The next status; empty at the stream's end.
  std::string Read() {
    grpc::ByteBuffer bytes;
    call_->Read(&bytes, nullptr);
    grpc::Slice whole;
    if (!Next() || !bytes.DumpToSingleSlice(&whole).ok()) return "";
    return {reinterpret_cast<const char*>(whole.begin()), whole.size()};
  }
  grpc::Status Finish() {
    grpc::Status status;
    call_->Finish(&status, nullptr);
    Next();
    return status;
  }
  void Cancel() { context_.TryCancel(); }

 private:
  bool Next() {
    void* tag = nullptr;
    bool ok = false;
    return queue_.Next(&tag, &ok) && ok;
  }
  grpc::CompletionQueue queue_;
  grpc::GenericStub stub_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> call_;
};

TEST_F(HealthTest, WhoeverWatchesHealthIsToldOfTheEnd) {
  const std::string state = "ballast.v1.StateService";
  HealthWatch all(channel_, ""), one(channel_, "\x0a" + std::string(1, static_cast<char>(state.size())) + state),
      unknown(channel_, "\x0a\x01x");
  EXPECT_EQ(all.Read(), "\x08\x01");
  EXPECT_EQ(one.Read(), "\x08\x01");
  EXPECT_EQ(unknown.Read(), "\x08\x03") << "it may come: the stream stays";
  HealthWatch left(channel_, "");
  EXPECT_EQ(left.Read(), "\x08\x01");
  left.Cancel();
  EXPECT_EQ(left.Finish().error_code(), grpc::StatusCode::CANCELLED);
  rpc_->Stop(absl::Minutes(1));  // no stream holds it up until its own deadline
  EXPECT_EQ(all.Read(), "\x08\x02");
  EXPECT_EQ(all.Read(), "");
  EXPECT_TRUE(all.Finish().ok());
  EXPECT_EQ(one.Read(), "\x08\x02");
  EXPECT_TRUE(one.Finish().ok());
  EXPECT_EQ(unknown.Read(), "\x08\x03");
  EXPECT_TRUE(unknown.Finish().ok());
}

// A connection of its own.
std::shared_ptr<grpc::Channel> Connect(const std::string& address) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
}

// Headers of health's calls without their message, as many as the server lets wait.
class HalfCalls {
 public:
  HalfCalls(const std::shared_ptr<grpc::Channel>& channel, size_t count) : stub_(channel), calls_(count) {
    for (Call& call : calls_) {
      call.stream = stub_.PrepareCall(&call.context, "/grpc.health.v1.Health/Check", &queue_);
      call.stream->StartCall(nullptr);
      Next();
      call.stream->Finish(&call.status, &call);
    }
  }
  ~HalfCalls() {
    for (Call& call : calls_) call.context.TryCancel();
    while (ended_.size() < calls_.size()) Next();
  }
  // Waits until the server has ended so many.
  const std::vector<absl::Status>& Ended(size_t count, absl::Duration patience) {
    const absl::Time until = absl::Now() + patience;
    while (ended_.size() < count && Next(until)) continue;
    return ended_;
  }

 private:
  struct Call {
    grpc::ClientContext context;
    std::unique_ptr<grpc::GenericClientAsyncReaderWriter> stream;
    grpc::Status status;
  };
  bool Next(absl::Time until = absl::InfiniteFuture()) {
    void* tag = nullptr;
    bool ok = false;
    if (queue_.AsyncNext(&tag, &ok, absl::ToChronoTime(until)) != grpc::CompletionQueue::GOT_EVENT) return false;
    if (tag != nullptr) ended_.push_back(FromGrpc(static_cast<Call*>(tag)->status));
    return true;
  }

  grpc::CompletionQueue queue_;
  grpc::GenericStub stub_;
  std::deque<Call> calls_;
  std::vector<absl::Status> ended_;
};

// Each that waits takes memory of gRPC's, and nobody knows of whom it is.
TEST_F(HealthTest, FewStrangersWait) {
  constexpr size_t kCalls = 400;
  HalfCalls flood(Connect(rpc_->address()), kCalls);
  // Some more may be read meanwhile.
  constexpr size_t kKept = Health::kWaitingMax + Reads::kInTurnMax + Reads::kAsideMax;
  const auto& ended = flood.Ended(kCalls - kKept, absl::Minutes(1));
  EXPECT_GE(ended.size(), kCalls - kKept);
  for (const absl::Status& status : ended) EXPECT_EQ(model::ReasonOf(status), model::kBusy) << status;
}

TEST_F(HealthTest, AProbeIsAnsweredBesideAFlood) {
  HalfCalls flood(Connect(rpc_->address()), 400), another(Connect(rpc_->address()), 400);
  std::string answer;
  constexpr int kProbes = 20;
  int in_time = 0;  // as Kubernetes waits; a slow machine delays some
  for (int i = 0; i < kProbes; ++i) {
    const auto probe = Connect(rpc_->address());
    const absl::Time began = absl::Now();
    const grpc::Status status = CheckHealth(probe, "", &answer);
    EXPECT_TRUE(status.ok()) << status.error_message();
    if (absl::Now() - began < absl::Seconds(1)) ++in_time;
  }
  EXPECT_GT(in_time, kProbes / 2);
  EXPECT_EQ(rpc_->Try(absl::Seconds(30)), absl::OkStatus());
}

TEST_F(HealthTest, OneHostDoesNotTakeAllWatches) {
  std::deque<HealthWatch> watches;
  for (size_t i = 0; i < Health::kWatchesOfHostMax; ++i) {
    EXPECT_EQ(watches.emplace_back(channel_, "").Read(), "\x08\x01");
  }
  HealthWatch one_more(channel_, "");
  EXPECT_EQ(one_more.Read(), "");
  EXPECT_EQ(model::ReasonOf(FromGrpc(one_more.Finish())), model::kBusy);
  watches.front().Cancel();
  (void)watches.front().Finish();
  const absl::Time until = absl::Now() + absl::Seconds(30);
  std::string status;
  while (status.empty() && absl::Now() < until) status = HealthWatch(channel_, "").Read();
  EXPECT_EQ(status, "\x08\x01");
  rpc_->Stop(absl::Minutes(1));
}

}  // namespace
}  // namespace ballast::services
