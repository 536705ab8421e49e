// What a call may cost before, and once, its caller is known.
#include <grpcpp/generic/generic_stub.h>
#include <malloc.h>

#include <deque>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "ballast/services/gateway/message_memory.h"
#include "ballast/services/gateway/message_size.h"
#include "ballast/services/gateway/parse_room.h"
#include "ballast/services/gateway/security/guard.h"
#include "ballast/tests/scratch_directory.h"
#include "ballast/tests/services/gateway/rpc_fixture.h"

namespace ballast::services {
namespace {

grpc::ByteBuffer MessageOf(const std::string& text) {
  const grpc::Slice slice(text);
  return grpc::ByteBuffer(&slice, 1);
}

// Sends the headers of a call and no message.
grpc::Status CallWithoutMessage(const std::shared_ptr<grpc::Channel>& channel, const std::string& method) {
  grpc::CompletionQueue queue;
  grpc::GenericStub stub(channel);
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(30)));
  const auto call = stub.PrepareCall(&context, method, &queue);
  grpc::Status status;
  void* tag = nullptr;
  bool ok = false;
  call->StartCall(nullptr);
  EXPECT_TRUE(queue.Next(&tag, &ok));
  call->Finish(&status, nullptr);
  EXPECT_TRUE(queue.Next(&tag, &ok));
  return status;
}

TEST(Door, ACallerIsKnownBeforeItsMessageIsRead) {
  ScratchDirectory directory;
  const std::string tokens = directory.path() + "/tokens.yaml";
  std::ofstream(tokens) << "tokens: [{identity: one, sha256: "
                           "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad}]\n";
  GuardOptions guard_options;
  guard_options.tokens = tokens;
  guard_options.audit_log = "none";
  const auto guard = Guard::Make(guard_options);
  ASSERT_TRUE(guard.ok()) << guard.status();
  TestServer server("s");
  RpcServerOptions options;
  options.guard = guard->get();
  const auto rpc = RpcServer::Start(options, server.get());
  ASSERT_TRUE(rpc.ok()) << rpc.status();
  const auto channel = grpc::CreateChannel((*rpc)->address(), grpc::InsecureChannelCredentials());
  for (const char* method : {"Open", "Seal", "Fence", "Push", "Pull", "Identify"}) {
    const grpc::Status status = CallWithoutMessage(channel, absl::StrCat("/ballast.v1.StateService/", method));
    EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAUTHENTICATED) << method << ": " << status.error_message();
    EXPECT_EQ(model::ReasonOf(FromGrpc(status)), model::kNoIdentity);
  }
}

class DoorTest : public RpcTest {
 protected:
  absl::Status Send(const std::string& method, const std::string& message) {
    std::string answer;
    return FromGrpc(RawCall(channel_, method, message, &answer));
  }
};

TEST_F(DoorTest, ElementsAreCountedBeforeTheyAreParsed) {
  // 8M ranges of nothing are 16 MB on the wire, and most of a gigabyte in memory.
  std::string tiling;
  for (int i = 0; i < 4'000'000; ++i) tiling += std::string("\x12\x00", 2);
  v1::OpenRequest open;
  open.mutable_spec()->set_name("job");
  std::string message = open.SerializeAsString();
  message += '\x22';
  for (size_t length = tiling.size(); length > 0; length >>= 7) {
    message += static_cast<char>((length & 127) | (length > 127 ? 128 : 0));
  }
  message += tiling;
  const absl::Status status = Send("/ballast.v1.StateService/Open", message);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_EQ(model::ReasonOf(status), model::kBadRequest);
  EXPECT_NE(status.message().find(absl::StrCat("at most ", ParseRoom::kBytesMax, " bytes of memory")),
            absl::string_view::npos)
      << status;
}

TEST_F(DoorTest, EachMethodHasASize) {
  v1::GetJobRequest request;
  request.set_job(std::string(5000, 'j'));
  const absl::Status status = Send("/ballast.v1.StateService/GetJob", request.SerializeAsString());
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_NE(status.message().find("a GetJobRequest has at most 4096 bytes, got 5003"), absl::string_view::npos)
      << status;
}

// A call whose answer its client does not take: the stream's window has room for five bytes.
class UntakenAnswer {
 public:
  UntakenAnswer(const StateServer& server, const std::string& address, const std::string& method,
                const std::string& message) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, 5);
    arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
    NameTarget(server, &context_);
    grpc::GenericStub stub(grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments));
    call_ = stub.PrepareCall(&context_, method, &queue_);
    call_->StartCall(nullptr);
    Await();
    call_->WriteLast(MessageOf(message), grpc::WriteOptions(), nullptr);
    Await();
  }
  ~UntakenAnswer() {
    context_.TryCancel();
    grpc::Status status;
    call_->Finish(&status, nullptr);
    Await();
    queue_.Shutdown();
  }

 private:
  void Await() {
    void* tag = nullptr;
    bool ok = false;
    EXPECT_TRUE(queue_.Next(&tag, &ok));
  }

  grpc::CompletionQueue queue_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> call_;
};

TEST_F(DoorTest, AnAnswerThatNobodyTakesKeepsNoRoom) {
  std::deque<UntakenAnswer> untaken;
  for (int i = 0; i < 12; ++i) {
    v1::FenceRequest fence;
    fence.set_job(absl::StrCat("job-", i));
    fence.mutable_epoch()->set_counter(1);
    fence.set_protocol_version(model::kProtocolVersion);
    fence.GetReflection()->MutableUnknownFields(&fence)->AddLengthDelimited(1000)->assign(3 << 20, 'x');
    untaken.emplace_back(*server_.get(), rpc_->address(), "/ballast.v1.StateService/Fence", fence.SerializeAsString());
    v1::GetJobRequest ask;
    ask.set_job(fence.job());
    v1::GetJobResponse job;
    const absl::Time until = absl::Now() + absl::Seconds(30);
    while (!job.exists() && absl::Now() < until) {
      ASSERT_EQ(Call(&v1::StateService::Stub::GetJob, ask, &job), absl::OkStatus());
    }
    ASSERT_TRUE(job.exists()) << i;
  }
  v1::OpenRequest open;
  for (int i = 0; i < 400'000; ++i) open.mutable_tiling()->add_ranges();
  const absl::Time until = absl::Now() + absl::Minutes(1);
  absl::Status status;
  do {
    status = Send("/ballast.v1.StateService/Open", open.SerializeAsString());
  } while (model::ReasonOf(status) == model::kBusy && absl::Now() < until);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
}

TEST_F(DoorTest, MethodsThatAreNotThere) {
  const absl::Status status = Send("/ballast.v1.StateService/NoSuchMethod", "");
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented) << status;
  EXPECT_EQ(model::ReasonOf(status), model::kUnsupported);
}

// What counting says holds for what parsing takes.
TEST(ParsedBytes, IsNoLessThanWhatParsingTakes) {
  v1::OpenRequest open;
  for (int i = 0; i < 1000; ++i) {
    v1::TensorSpec* const tensor = open.mutable_spec()->add_registrations()->add_tensors();
    tensor->set_name(absl::StrCat("transformer.blocks.", i, ".attention.query.weight"));
    tensor->set_unit(absl::StrCat("transformer.blocks.", i));
    tensor->add_shape(4096);
    tensor->add_shape(4096);
    tensor->add_aliases("other");
    v1::RankRange* const range = open.mutable_tiling()->add_ranges();
    range->set_rank(static_cast<uint32_t>(i));
    range->set_end(1 << 20);
    open.mutable_tiling()->add_placement_of(3);
    open.add_members()->set_weight(1);
    open.GetReflection()->MutableUnknownFields(&open)->AddVarint(99, 7);
  }
  const grpc::ByteBuffer bytes = MessageOf(open.SerializeAsString());
  v1::OpenRequest parsed;
  ASSERT_TRUE(parsed.ParseFromString(open.SerializeAsString()));
  const uint64_t counted = ParsedBytes(v1::OpenRequest::descriptor(), bytes, uint64_t{1} << 30).value();
  EXPECT_GE(counted, parsed.SpaceUsedLong());
  EXPECT_LE(counted, 3 * parsed.SpaceUsedLong());
  // Counting stops soon after its bound.
  EXPECT_LT(ParsedBytes(v1::OpenRequest::descriptor(), bytes, 10'000), 11'000 + bytes.Length());
}

// A large message takes nothing of malloc's, which would keep what the message leaves, and no more than was counted.
TEST(MessageMemory, IsTheSystemsAndIsCounted) {
  std::string text;
  {
    v1::OpenRequest open;
    for (uint32_t i = 0; i < 300'000; ++i) {
      open.mutable_tiling()->add_ranges()->set_rank(i);
      open.mutable_tiling()->add_placement_of(i);
    }
    text = open.SerializeAsString();
  }
  const size_t heap = mallinfo2().uordblks;
  const std::shared_ptr<v1::OpenRequest> message = MakeLargeMessage<v1::OpenRequest>();
  ASSERT_TRUE(message->ParseFromString(text));
  EXPECT_LT(mallinfo2().uordblks, heap + (size_t{1} << 20));
  EXPECT_EQ(message->tiling().ranges_size(), 300'000);
  EXPECT_LE(message->GetArena()->SpaceUsed() + text.size(),
            ParsedBytes(v1::OpenRequest::descriptor(), MessageOf(text), uint64_t{1} << 30));
}

// A field that has another type on the wire than its message's is kept as one of a later version is.
TEST(ParsedBytes, CountsFieldsOfOtherTypes) {
  std::string message;
  for (int i = 0; i < 100'000; ++i) message += std::string("\x20\x01", 2);  // OpenRequest.tiling as a number
  v1::OpenRequest parsed;
  ASSERT_TRUE(parsed.ParseFromString(message));
  EXPECT_GE(ParsedBytes(v1::OpenRequest::descriptor(), MessageOf(message), uint64_t{1} << 30), parsed.SpaceUsedLong());
}

// Within a group all is of a later version, and no bytes are wrong there; what comes behind is counted.
TEST(ParsedBytes, GroupsHideNothing) {
  const std::string begin("\x9b\x06", 2), end("\x9c\x06", 2), tiling_of_one_byte("\x22\x01\x08", 3);
  std::string message = begin + begin + tiling_of_one_byte + end + end + "\x22";
  std::string tiling;
  for (int i = 0; i < 100'000; ++i) tiling += std::string("\x12\x00", 2);
  for (size_t length = tiling.size(); length > 0; length >>= 7) {
    message += static_cast<char>((length & 127) | (length > 127 ? 128 : 0));
  }
  message += tiling;
  v1::OpenRequest parsed;
  ASSERT_TRUE(parsed.ParseFromString(message));
  EXPECT_GE(ParsedBytes(v1::OpenRequest::descriptor(), MessageOf(message), uint64_t{1} << 30), parsed.SpaceUsedLong());
}

// A packed field may claim more bytes than its message has, and parsing takes them before it sees that.
TEST(ParsedBytes, WhatIsNoMessageHasNone) {
  std::string message("\x22\x02\x2a\xa0",
                      4);  // a tiling of two bytes; the length of its placement_of goes on behind it
  message += std::string("\x8d\x06") + std::string(100'000, '\x01');
  v1::OpenRequest parsed;
  EXPECT_FALSE(parsed.ParseFromString(message));
  EXPECT_GT(parsed.SpaceUsedLong(), 4 * message.size());
  EXPECT_EQ(ParsedBytes(v1::OpenRequest::descriptor(), MessageOf(message), uint64_t{1} << 30), std::nullopt);
}

TEST(ParseRoomTest, IsSharedAndSmallMessagesNeedNone) {
  ParseRoom room;
  auto lease = room.Take(ParseRoom::kBytesMax);
  ASSERT_TRUE(lease.ok());
  const absl::Status busy = room.Take(ParseRoom::kSmallBytesMax + 1).status();
  EXPECT_EQ(busy.code(), absl::StatusCode::kUnavailable) << busy;
  EXPECT_EQ(model::ReasonOf(busy), model::kBusy);
  EXPECT_EQ(model::ReasonOf(room.CheckFree(ParseRoom::kSmallBytesMax + 1)), model::kBusy) << "before it is counted";
  EXPECT_EQ(room.CheckFree(ParseRoom::kSmallBytesMax), absl::OkStatus());
  EXPECT_TRUE(room.Take(ParseRoom::kSmallBytesMax).ok());
  lease = ParseRoom::Lease();
  EXPECT_TRUE(room.Take(ParseRoom::kBytesMax).ok());
  EXPECT_TRUE(room.TakeReturned());
}

}  // namespace
}  // namespace ballast::services
