#include "ballast/services/gateway/rpc_server.h"

#include <gmock/gmock.h>
#include <grpcpp/generic/generic_stub.h>
#include <sys/socket.h>
#include <unistd.h>

#include <thread>

#include "absl/strings/match.h"
#include "ballast/kernels/kernels.h"
#include "ballast/services/counters/counters.h"
#include "ballast/services/counters/process_counters.h"
#include "ballast/tests/services/gateway/rpc_fixture.h"

namespace ballast::services {
namespace {

class RpcServerTest : public RpcTest {};

// Asks for the list of services; `listed` is the answer's bytes.
grpc::Status AskReflection(const std::shared_ptr<grpc::Channel>& channel, std::string* listed) {
  // ServerReflectionRequest{list_services = 7: ""}.
  const std::string request("\x3a\x00", 2);
  grpc::CompletionQueue queue;
  grpc::GenericStub stub(channel);
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(30)));
  const auto call =
      stub.PrepareCall(&context, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", &queue);
  void* tag = nullptr;
  bool ok = false;
  const auto next = [&] { return queue.Next(&tag, &ok) && ok; };
  call->StartCall(nullptr);
  next();
  call->Write(BytesOf(request), nullptr);
  next();
  grpc::ByteBuffer response;
  call->Read(&response, nullptr);
  if (next()) {
    grpc::Slice slice;
    (void)response.DumpToSingleSlice(&slice);
    listed->assign(reinterpret_cast<const char*>(slice.begin()), slice.size());
    call->WritesDone(nullptr);
    next();
  }
  grpc::Status status;
  call->Finish(&status, nullptr);
  next();
  return status;
}

TEST_F(RpcServerTest, ReflectionIsOffUnlessConfigured) {
  std::string listed;
  EXPECT_EQ(AskReflection(channel_, &listed).error_code(), grpc::StatusCode::UNIMPLEMENTED);
}

TEST_F(RpcServerTest, ReflectionListsTheServices) {
  RpcServerOptions options;
  options.reflection = true;
  const auto rpc = RpcServer::Start(options, server_.get());
  ASSERT_TRUE(rpc.ok()) << rpc.status();
  std::string listed;
  const grpc::Status status =
      AskReflection(grpc::CreateChannel((*rpc)->address(), grpc::InsecureChannelCredentials()), &listed);
  EXPECT_TRUE(status.ok()) << status.error_message();
  for (const char* service : {"ballast.v1.StateService", "ballast.v1.AdminService", "grpc.health.v1.Health"}) {
    EXPECT_NE(listed.find(service), std::string::npos) << service;
  }
}

TEST_F(RpcServerTest, KnowsThatItCanBeReached) { EXPECT_EQ(rpc_->Try(absl::Seconds(30)), absl::OkStatus()); }

// Strangers beyond the bound give their places to whoever comes, and a client that was let in keeps its own.
TEST_F(RpcServerTest, IdleConnectionsKeepNoClientOut) {
  RpcServerOptions options;
  options.connections_max = 8;
  const auto rpc = RpcServer::Start(options, server_.get());
  ASSERT_TRUE(rpc.ok()) << rpc.status();
  const auto connect = [&] {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    return grpc::CreateCustomChannel((*rpc)->address(), grpc::InsecureChannelCredentials(), arguments);
  };
  const auto identify = [](const std::shared_ptr<grpc::Channel>& channel) {
    std::string answer;
    return RawCall(channel, "/ballast.v1.StateService/Identify", "", &answer);
  };
  const auto first = connect();
  ASSERT_TRUE(identify(first).ok());
  std::vector<int> idle;
  for (int i = 0; i < 100; ++i) {
    idle.push_back(ConnectTo((*rpc)->address()));
    // Some have shaken hands.
    const std::string preface("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0", 33);
    if (i % 2 == 0) (void)::send(idle.back(), preface.data(), preface.size(), MSG_NOSIGNAL);
  }
  const grpc::Status late = identify(connect());
  EXPECT_TRUE(late.ok()) << late.error_message();
  EXPECT_EQ((*rpc)->Try(absl::Seconds(30)), absl::OkStatus());
  EXPECT_LE(OfProcess().connections.load(), 8u);
  EXPECT_TRUE(identify(first).ok());
  EXPECT_EQ(first->GetState(false), GRPC_CHANNEL_READY);
  for (const int fd : idle) ::close(fd);
}

// All callers of this test are one: those of one host.
TEST_F(RpcServerTest, OneCallerLeavesConnectionsToOthers) {
  RpcServerOptions options;
  options.connections_max = 16;
  const auto rpc = RpcServer::Start(options, server_.get());
  ASSERT_TRUE(rpc.ok()) << rpc.status();
  std::vector<std::shared_ptr<grpc::Channel>> channels;
  int let_in = 0, refused = 0;
  for (int i = 0; i < 16; ++i) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    channels.push_back(grpc::CreateCustomChannel((*rpc)->address(), grpc::InsecureChannelCredentials(), arguments));
    std::string answer;
    const grpc::Status status = RawCall(channels.back(), "/ballast.v1.StateService/Identify", "", &answer);
    ++(status.ok() ? let_in : refused);
    if (!status.ok()) {
      EXPECT_EQ(model::ReasonOf(FromGrpc(status)), model::kBusy) << status.error_message();
      EXPECT_THAT(status.error_message(), testing::HasSubstr("14 of the 16 connections"));
    }
  }
  EXPECT_EQ(let_in, 14);
  EXPECT_EQ(refused, 2);
  EXPECT_EQ((*rpc)->Try(absl::Seconds(30)), absl::OkStatus());
  channels.erase(channels.begin());
  for (int tries = 0; tries < 100 && refused > 0; ++tries) {
    std::string answer;
    if (RawCall(channels.back(), "/ballast.v1.StateService/Identify", "", &answer).ok()) refused = 0;
    absl::SleepFor(absl::Milliseconds(100));
  }
  EXPECT_EQ(refused, 0) << "a connection that was closed counts no more";
}

// A stuck reader of standard error would stop gRPC's threads.
TEST(RpcServerLogs, BadMessagesWriteNothingToStandardError) {
  RpcServer::TakeLogs();
  testing::internal::CaptureStderr();
  v1::FenceRequest request;
  EXPECT_FALSE(request.ParseFromString("\x0a\x01\xff")) << "a job's name is UTF-8";
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
}

// Whoever comes last has had no time to say anything.
TEST_F(RpcServerTest, ANewConnectionDoesNotMakeRoom) {
  RpcServerOptions options;
  options.connections_max = 4;
  const auto rpc = RpcServer::Start(options, server_.get());
  ASSERT_TRUE(rpc.ok()) << rpc.status();
  std::vector<int> idle;
  for (int i = 0; i < 8; ++i) {
    idle.push_back(ConnectTo((*rpc)->address()));
    const std::string preface("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0", 33);
    (void)::send(idle.back(), preface.data(), preface.size(), MSG_NOSIGNAL);
    char answer = 0;
    EXPECT_EQ(::recv(idle.back(), &answer, 1, 0), 1) << i << ": gRPC has it";
  }
  const int last = ConnectTo((*rpc)->address());
  EXPECT_EQ((*rpc)->Try(absl::Seconds(30)), absl::OkStatus()) << "after it";
  char answer = 0;
  EXPECT_EQ(::recv(last, &answer, 1, MSG_DONTWAIT), -1) << "it is open";
  ::close(last);
  for (const int fd : idle) ::close(fd);
}

TEST_F(RpcServerTest, PullCarriesPayloadAndChecksum) {
  TrainerGroup group({server_.get()}, MakeSpec("job", SmallModel()), 1);
  ASSERT_EQ(group.Start(), absl::OkStatus());
  ASSERT_EQ(group.Initialise(Ones), absl::OkStatus());
  v1::PullRequest request;
  request.set_job("job");
  request.set_content(v1::CONTENT_MASTER);
  request.set_begin(1000);
  request.set_end(60'000);
  v1::PullResponse response;
  ASSERT_EQ(Call(&v1::StateService::Stub::Pull, request, &response), absl::OkStatus());
  ASSERT_EQ(response.payload().size(), 59'000u * 4);
  float first = 0;
  std::memcpy(&first, response.payload().data(), sizeof first);
  EXPECT_EQ(first, 1.0f);
  EXPECT_EQ(response.crc32c(),
            kernels::Crc32c(absl::MakeConstSpan(reinterpret_cast<const std::byte*>(response.payload().data()),
                                                response.payload().size())));
}

// With room for the answers to two pulls at a time.
class RpcAnswerRoomTest : public RpcTest {
 protected:
  RpcAnswerRoomTest() {
    server_.options().answer_bytes_max = 4 * kBytes;
    server_.Restart();
  }
  static constexpr uint64_t kElements = 60'000, kBytes = 4 * kElements;
};

TEST_F(RpcAnswerRoomTest, PullsWaitForRoomAndAreAllAnswered) {
  TrainerGroup group({server_.get()}, MakeSpec("job", SmallModel()), 1);
  ASSERT_EQ(group.Start(), absl::OkStatus());
  ASSERT_EQ(group.Initialise(Ones), absl::OkStatus());
  v1::PullRequest request;
  request.set_job("job");
  request.set_content(v1::CONTENT_MASTER);
  request.set_end(kElements);
  struct Pull {
    grpc::ClientContext context;
    v1::PullResponse response;
    grpc::Status status;
    std::unique_ptr<grpc::ClientAsyncResponseReader<v1::PullResponse>> call;
  };
  grpc::CompletionQueue queue;
  std::vector<Pull> pulls(64);
  for (size_t i = 0; i < pulls.size(); ++i) {
    Pull& pull = pulls[i];
    pull.context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(30)));
    pull.call = state_->AsyncPull(&pull.context, request, &queue);
    pull.call->Finish(&pull.response, &pull.status, &pull);
    if (i % 4 == 0) pull.context.TryCancel();  // the room of a client that is gone goes to the next
  }
  for (size_t i = 0; i < pulls.size(); ++i) {
    void* tag = nullptr;
    bool ok = false;
    ASSERT_TRUE(queue.Next(&tag, &ok));
  }
  for (size_t i = 0; i < pulls.size(); ++i) {
    if (i % 4 == 0) continue;
    EXPECT_TRUE(pulls[i].status.ok()) << i << ": " << pulls[i].status.error_message();
    EXPECT_EQ(pulls[i].response.payload().size(), kBytes);
  }
}

TEST_F(RpcServerTest, CountsTheTimeOfStatus) {
  const auto count = [this] {
    uint64_t sum = 0;
    const storage::DurationHistogram& calls =
        server_->counters().calls[static_cast<size_t>(services::Call::kGetServerStatus)];
    for (size_t i = 0; i <= calls.bounds_seconds().size(); ++i) sum += calls.count(i);
    return sum;
  };
  EXPECT_EQ(count(), 0u);
  grpc::ClientContext context;
  v1::GetServerStatusResponse status;
  ASSERT_TRUE(admin_->GetServerStatus(&context, {}, &status).ok());
  EXPECT_EQ(status.server_id(), "s");
  EXPECT_EQ(count(), 1u);
}

TEST_F(RpcServerTest, SurvivesRandomBytes) {
  constexpr uint64_t kSeed = 20'240'601;
  SendRandomBytes(rpc_->address(), kSeed);
  v1::GetJobResponse response;
  EXPECT_EQ(Call(&v1::StateService::Stub::GetJob, v1::GetJobRequest(), &response), absl::OkStatus())
      << "seed " << kSeed;
  EXPECT_EQ(response.server_id(), "s");
}

TEST_F(RpcServerTest, RefusesWhatIsNoAddress) {
  const absl::Status status = RpcServer::Start({.listen = "127.0.0.1:99999"}, server_.get()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
}

TEST_F(RpcServerTest, RefusesAPortInUse) {
  RpcServerOptions options;
  options.listen = rpc_->address();
  const absl::Status status = RpcServer::Start(options, server_.get()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_NE(status.message().find(absl::StrCat("cannot listen on '", rpc_->address(), "': the port is in use")),
            absl::string_view::npos)
      << status;
}

TEST_F(RpcServerTest, ACancelledCallHarmsNobody) {
  TrainerGroup group({server_.get()}, MakeSpec("job", SmallModel()), 1);
  ASSERT_EQ(group.Start(), absl::OkStatus());
  v1::PullRequest request;
  request.set_job("job");
  request.set_content(v1::CONTENT_WORKING);
  request.set_end(10);
  grpc::ClientContext context;
  grpc::CompletionQueue queue;
  v1::PullResponse response;
  grpc::Status status;
  int done = 0;
  const auto call = state_->AsyncPull(&context, request, &queue);
  call->Finish(&response, &status, &done);
  // Cancelled once it waits inside the server, so that the server's answer comes late.
  const absl::Time patience = absl::Now() + absl::Seconds(30);
  while (server_->counters().waiting_requests == 0 && absl::Now() < patience) std::this_thread::yield();
  ASSERT_EQ(server_->counters().waiting_requests, 1u);
  context.TryCancel();
  void* tag = nullptr;
  bool ok = false;
  ASSERT_TRUE(queue.Next(&tag, &ok));
  EXPECT_EQ(status.error_code(), grpc::StatusCode::CANCELLED);
  ASSERT_EQ(group.Initialise(Ones), absl::OkStatus());
  v1::PullResponse pulled;
  EXPECT_EQ(Call(&v1::StateService::Stub::Pull, request, &pulled), absl::OkStatus());
}

// The calls have no deadline: only the news that their client is gone ends them soon.
TEST_F(RpcServerTest, ACallWhoseClientIsGoneGivesItsPlaceBack) {
  TrainerGroup group({server_.get()}, MakeSpec("job", SmallModel()), 1);
  ASSERT_EQ(group.Start(), absl::OkStatus());
  ASSERT_EQ(group.Initialise(Ones), absl::OkStatus());
  v1::PullRequest pull;
  pull.set_job("job");
  pull.set_content(v1::CONTENT_WORKING);
  pull.set_version(1);
  pull.set_end(10);
  const v1::SealRequest seal = group.SealOf(0, UpdateHeader(4), /*wait_ms=*/3'600'000);
  grpc::ClientContext pull_context, seal_context;
  NameTarget(*server_.get(), &seal_context);
  grpc::CompletionQueue queue;
  v1::PullResponse pulled;
  v1::SealResponse sealed;
  grpc::Status pull_status, seal_status;
  const auto pulling = state_->AsyncPull(&pull_context, pull, &queue);
  pulling->Finish(&pulled, &pull_status, nullptr);
  const auto sealing = state_->AsyncSeal(&seal_context, seal, &queue);
  sealing->Finish(&sealed, &seal_status, nullptr);
  const auto await_waiting = [this](uint64_t count) {
    const absl::Time patience = absl::Now() + absl::Seconds(30);
    uint64_t waiting = 0;
    while ((waiting = server_->counters().waiting_requests) != count && absl::Now() < patience) {
      std::this_thread::yield();
    }
    return waiting;
  };
  ASSERT_EQ(await_waiting(2), 2u);
  pull_context.TryCancel();
  EXPECT_EQ(await_waiting(1), 1u);
  seal_context.TryCancel();
  EXPECT_EQ(await_waiting(0), 0u);
  // Given back one after the other.
  const absl::Time patience = absl::Now() + absl::Seconds(30);
  while (server_->counters().waiting_request_bytes != 0 && absl::Now() < patience) std::this_thread::yield();
  EXPECT_EQ(server_->counters().waiting_request_bytes, 0u);
  void* tag = nullptr;
  bool ok = false;
  for (int i = 0; i < 2; ++i) ASSERT_TRUE(queue.Next(&tag, &ok));
  EXPECT_EQ(pull_status.error_code(), grpc::StatusCode::CANCELLED);
  EXPECT_EQ(seal_status.error_code(), grpc::StatusCode::CANCELLED);
  // The same requests once more, from a client that stays.
  ASSERT_EQ(group.PushAll(v1::SLICE_KIND_GRADIENT, AllTensors(4), Ones), absl::OkStatus());
  EXPECT_EQ(group.Finish(UpdateHeader(4)).status(), absl::OkStatus());
  EXPECT_EQ(Call(&v1::StateService::Stub::Pull, pull, &pulled), absl::OkStatus());
}

// A call of a trainer says its protocol version and the server that it is meant for.
TEST_F(RpcServerTest, RefusesCallsOfOtherVersionsAndForOtherServers) {
  TrainerGroup group({server_.get()}, MakeSpec("job", SmallModel()), 1);
  ASSERT_EQ(group.Start(), absl::OkStatus());
  const std::string version = absl::StrCat(model::kProtocolVersion);
  const std::string own = model::TargetOf(server_->server_id(), server_->disk());
  const std::string wiped = model::TargetOf(server_->server_id(), server_->disk() + 1);
  const auto seal = [&](const std::string& said_version, const std::string& said_server) {
    grpc::ClientContext context;
    if (!said_version.empty()) context.AddMetadata(model::kVersionMetadata, said_version);
    if (!said_server.empty()) context.AddMetadata(model::kServerMetadata, said_server);
    v1::SealResponse response;
    return FromGrpc(state_->Seal(&context, group.SealOf(0, UpdateHeader(4), /*wait_ms=*/0), &response));
  };
  EXPECT_EQ(model::ReasonOf(seal("4", own)), model::kVersionsDiffer);
  EXPECT_EQ(model::ReasonOf(seal("", "")), model::kVersionsDiffer) << "as of version 4";
  const absl::Status other = seal(version, wiped);
  EXPECT_EQ(model::ReasonOf(other), model::kOtherServer);
  EXPECT_TRUE(absl::IsUnavailable(other)) << "the trainer sends it again";
  EXPECT_TRUE(absl::StrContains(other.message(), own) && absl::StrContains(other.message(), wiped)) << other;
  EXPECT_EQ(model::ReasonOf(seal(version, "")), model::kBadRequest);
  const absl::Status right = seal(version, own);
  EXPECT_NE(model::ReasonOf(right), model::kOtherServer);
  EXPECT_FALSE(absl::IsUnavailable(right)) << right;
  // Who only looks need not say.
  grpc::ClientContext context;
  v1::GetJobRequest ask;
  ask.set_job("job");
  v1::GetJobResponse job;
  EXPECT_TRUE(state_->GetJob(&context, ask, &job).ok());
  EXPECT_EQ(job.disk(), server_->disk());
}

TEST_F(RpcServerTest, KeepsNoFieldsThatItDoesNotKnow) {
  TrainerGroup group({server_.get()}, MakeSpec("job", SmallModel()), 2);
  ASSERT_EQ(group.Start(), absl::OkStatus());
  v1::PullRequest pull;
  pull.set_job("job");
  pull.set_content(v1::CONTENT_WORKING);
  pull.set_end(10);
  pull.GetReflection()->MutableUnknownFields(&pull)->AddLengthDelimited(99, std::string(3000, 'x'));
  grpc::ClientContext pull_context;
  v1::PullResponse pulled;
  std::thread puller([&] { (void)state_->Pull(&pull_context, pull, &pulled); });
  const absl::Time patience = absl::Now() + absl::Seconds(30);
  while (server_->counters().waiting_requests < 1 && absl::Now() < patience) std::this_thread::yield();
  EXPECT_EQ(server_->counters().waiting_requests, 1u);
  EXPECT_LT(server_->counters().waiting_request_bytes, 2000u);
  pull_context.TryCancel();
  puller.join();
}

TEST_F(RpcServerTest, StopAnswersWhatWaits) {
  TrainerGroup group({server_.get()}, MakeSpec("job", SmallModel()), 1);
  ASSERT_EQ(group.Start(), absl::OkStatus());
  absl::Status status;
  std::thread puller([&] {
    v1::PullRequest request;
    request.set_job("job");
    request.set_content(v1::CONTENT_WORKING);
    request.set_end(10);
    v1::PullResponse response;
    status = Call(&v1::StateService::Stub::Pull, request, &response);
  });
  const absl::Time patience = absl::Now() + absl::Seconds(30);
  while (server_->counters().waiting_requests == 0 && absl::Now() < patience) std::this_thread::yield();
  EXPECT_EQ(server_->counters().waiting_requests, 1u) << "the request must wait when the server stops";
  rpc_->Stop(absl::Minutes(1));
  puller.join();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_EQ(model::ReasonOf(status), model::kServerDown);
}

TEST(StatusCodec, KeepsCodeReasonAndMessage) {
  const absl::Status status = model::Error(absl::StatusCode::kAborted, model::kStaleAttempt, "attempt 3, got 2");
  const absl::Status back = FromGrpc(ToGrpc(status));
  EXPECT_EQ(back.code(), status.code());
  EXPECT_EQ(back.message(), status.message());
  EXPECT_EQ(model::ReasonOf(back), model::kStaleAttempt);
  EXPECT_TRUE(FromGrpc(ToGrpc(absl::OkStatus())).ok());
}

TEST(StatusCodec, KeepsDetailsThatFit) {
  absl::Status status = model::Error(absl::StatusCode::kFailedPrecondition, model::kStaleEpoch, "over");
  model::SetDetail(model::kPromised, "7.9", &status);
  model::SetDetail(model::kGroup, "c0ffee", &status);
  model::SetDetail("long", std::string(100'000, 'x'), &status);
  const absl::Status back = FromGrpc(ToGrpc(status));
  EXPECT_EQ(model::ReasonOf(back), model::kStaleEpoch);
  EXPECT_EQ(model::DetailsOf(back), (model::Details{{model::kPromised, "7.9"}, {model::kGroup, "c0ffee"}}));
}

TEST(StatusCodec, BoundsMessages) {
  const std::string endless(100'000, 'x');
  EXPECT_EQ(ToGrpc(absl::InternalError(endless)).error_message().size(), 2048u);
  // Characters of two bytes, shifted by one: the last one would be cut in half.
  std::string letters = "x";
  for (int i = 0; i < 2000; ++i) letters += "\xc3\xa4";
  EXPECT_EQ(ToGrpc(absl::InternalError(letters)).error_message(), letters.substr(0, 2047));
}

}  // namespace
}  // namespace ballast::services
