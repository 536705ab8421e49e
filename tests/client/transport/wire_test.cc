// What a transport reads and writes, and what it shares, without a connection.
#include <sys/socket.h>

#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"
#include "ballast/client/transport/admissions.h"
#include "ballast/client/transport/grpc_calls.h"
#include "ballast/client/transport/grpc_pull_reader.h"
#include "ballast/client/transport/grpc_status.h"
#include "ballast/client/transport/sharing.h"
#include "ballast/kernels/kernels.h"
#include "ballast/proto/base/descriptor.h"
#include "ballast/proto/base/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ballast::client {
namespace {

TEST(WireStatusTest, AnErrorComesBackWithItsReasonAndDetails) {
  absl::Status status = model::Error(absl::StatusCode::kAborted, model::kStaleAttempt, "dropped");
  model::SetDetail("rank", "7", &status);
  const absl::Status back = FromWire(ToWire(status));
  EXPECT_EQ(back.code(), absl::StatusCode::kAborted);
  EXPECT_EQ(back.message(), "dropped");
  EXPECT_EQ(model::ReasonOf(back), model::kStaleAttempt);
  EXPECT_EQ(model::DetailsOf(back).at("rank"), "7");
  EXPECT_EQ(FromWire(ToWire(absl::InternalError("plain"))), absl::InternalError("plain"));
  EXPECT_EQ(FromWire(ToWire(absl::OkStatus())), absl::OkStatus());
}

TEST(WireStatusTest, WhatOthersSendIsAnErrorAllTheSame) {
  v1::RpcStatus wire;
  wire.set_code(4711);
  wire.set_message("no such code");
  EXPECT_EQ(FromWire(wire), absl::UnknownError("no such code"));
  wire.set_code(-1);
  EXPECT_EQ(FromWire(wire).code(), absl::StatusCode::kUnknown);
  wire = ToWire(model::Error(absl::StatusCode::kAborted, model::kStaleAttempt, "dropped"));
  v1::ErrorInfo info;
  ASSERT_TRUE(info.ParseFromString(wire.details(0).value()));
  info.set_domain("elsewhere");
  wire.mutable_details(0)->set_value(info.SerializeAsString());
  EXPECT_EQ(model::ReasonOf(FromWire(wire)), "") << "another domain's reasons are not ours";
  wire.mutable_details(0)->set_value("\xff\xff");
  EXPECT_EQ(FromWire(wire).code(), absl::StatusCode::kAborted);
}

TEST(FromGrpcTest, ACallWithoutAnAnswerIsSentAgain) {
  const auto of = [](grpc::StatusCode code, const std::string& message) {
    return FromGrpc(grpc::Status(code, message));
  };
  EXPECT_EQ(FromGrpc(grpc::Status::OK), absl::OkStatus());
  EXPECT_EQ(model::ReasonOf(of(grpc::StatusCode::UNAVAILABLE, "refused")), model::kServerDown);
  const absl::Status dropped = of(grpc::StatusCode::RESOURCE_EXHAUSTED, "out of memory quota");
  EXPECT_EQ(dropped.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(model::ReasonOf(dropped), model::kBusy);
  const absl::Status large = of(grpc::StatusCode::RESOURCE_EXHAUSTED, "Sent message larger than max (9 vs. 8)");
  EXPECT_EQ(large.code(), absl::StatusCode::kResourceExhausted) << "it never succeeds";
  const absl::Status server = model::Error(absl::StatusCode::kResourceExhausted, model::kBudget, "the server's own");
  EXPECT_EQ(FromGrpc(grpc::Status(grpc::StatusCode::RESOURCE_EXHAUSTED, "x", ToWire(server).SerializeAsString())),
            server);
}

TEST(EncodePushTest, ThePayloadIsSentFromWhereItLies) {
  v1::PushRequest header;
  header.set_job("job");
  header.set_begin(7);
  const std::string payload(100'000, 'p');
  auto* call = new PushCall;
  absl::Notification released;
  CallSet calls;
  call->calls = &calls;
  call->done = [&](const absl::StatusOr<v1::PushResponse>&) { released.Notify(); };
  calls.Enter();
  call->holders = 1;
  {
    const grpc::ByteBuffer buffer =
        EncodePush(header, {reinterpret_cast<const std::byte*>(payload.data()), payload.size()}, call);
    std::vector<grpc::Slice> slices;
    ASSERT_TRUE(buffer.Dump(&slices).ok());
    std::string bytes;
    bool borrowed = false;
    for (const grpc::Slice& slice : slices) {
      bytes.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
      borrowed = borrowed || slice.begin() == reinterpret_cast<const uint8_t*>(payload.data());
    }
    EXPECT_TRUE(borrowed);
    v1::PushRequest read;
    ASSERT_TRUE(read.ParseFromString(bytes));
    EXPECT_EQ(read.payload() == payload, true);
    read.clear_payload();
    EXPECT_EQ(read.SerializeAsString(), header.SerializeAsString());
    EXPECT_FALSE(released.HasBeenNotified());
  }
  released.WaitForNotification();
  calls.CancelAndWait();
}

class PullReaderTest : public ::testing::Test {
 protected:
  // The message's bytes, in slices of so many.
  static grpc::ByteBuffer Cut(const std::string& bytes, size_t piece) {
    std::vector<grpc::Slice> slices;
    for (size_t at = 0; at < bytes.size(); at += piece) slices.emplace_back(bytes.substr(at, piece));
    return grpc::ByteBuffer(slices.data(), slices.size());
  }
  std::string Answer(const std::string& payload) const {
    v1::PullResponse response;
    response.set_crc32c(kernels::Crc32c({reinterpret_cast<const std::byte*>(payload_.data()), payload_.size()}));
    response.set_payload(payload);
    return response.SerializeAsString();
  }
  absl::Status Read(const std::string& bytes, size_t piece = 1000, absl::Span<const std::byte> shared = {}) {
    to_.assign(payload_.size(), '\0');
    return PullReader(Cut(bytes, piece)).ReadInto({reinterpret_cast<std::byte*>(to_.data()), to_.size()}, shared);
  }

  const std::string payload_ = [] {
    std::string bytes(300, '\0');
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(i * 7);
    return bytes;
  }();
  std::string to_;
};

TEST_F(PullReaderTest, APayloadIsReadAcrossAnySlices) {
  for (const size_t piece : {1, 2, 3, 7, 100, 1000}) {
    ASSERT_EQ(Read(Answer(payload_), piece), absl::OkStatus()) << piece;
    EXPECT_EQ(to_, payload_);
  }
}

TEST_F(PullReaderTest, DamagedBytesAreAskedForAgain) {
  std::string bytes = Answer(payload_);
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  EXPECT_EQ(model::ReasonOf(Read(bytes)), model::kChecksum);
  EXPECT_EQ(Read(bytes).code(), absl::StatusCode::kUnavailable);
}

TEST_F(PullReaderTest, AnAnswerThatIsNoneIsRefused) {
  const std::string whole = Answer(payload_);
  for (size_t bytes = 1; bytes < whole.size(); ++bytes) {
    ASSERT_FALSE(Read(whole.substr(0, bytes), 50).ok()) << bytes << " bytes of " << whole.size();
  }
  EXPECT_EQ(model::ReasonOf(Read("")), model::kBadLength);
  EXPECT_EQ(model::ReasonOf(Read(Answer(payload_.substr(1)))), model::kBadLength);
  EXPECT_EQ(model::ReasonOf(Read(whole + std::string("\x10\x01", 2))), model::kChecksum)
      << "a field of a later version";
  EXPECT_FALSE(Read("\x7a" + std::string(20, '\xff')).ok()) << "a length without an end";
}

TEST_F(PullReaderTest, SharedMemoryStandsForAPayload) {
  const absl::Span<const std::byte> shared(reinterpret_cast<const std::byte*>(payload_.data()), payload_.size());
  ASSERT_EQ(Read(Answer(""), 1000, shared), absl::OkStatus());
  EXPECT_EQ(to_, payload_);
  std::string other = payload_;
  other[5] = static_cast<char>(other[5] ^ 1);
  const absl::Span<const std::byte> changed(reinterpret_cast<const std::byte*>(other.data()), other.size());
  EXPECT_EQ(model::ReasonOf(Read(Answer(""), 1000, changed)), model::kChecksum);
  EXPECT_EQ(model::ReasonOf(Read(Answer(""))), model::kBadLength) << "no memory is shared";
}

TEST(AdmissionsTest, AWaiterWaitsForWhatWasQueuedBeforeIt) {
  const auto admissions = std::make_shared<Admissions>();
  admissions->Await();
  admissions->Queue();
  admissions->Queue();
  const std::function<void()> waiter = admissions->Waiter();
  admissions->Queue();  // behind the waiter
  absl::Notification done;
  std::thread thread([&] {
    waiter();
    done.Notify();
  });
  EXPECT_FALSE(done.WaitForNotificationWithTimeout(absl::Milliseconds(50)));
  admissions->Admit();
  EXPECT_FALSE(done.HasBeenNotified());
  admissions->Admit();
  thread.join();
  admissions->Admit();
  admissions->Await();
}

TEST(AdmissionsTest, AWaiterOutlivesTheRouter) {
  auto admissions = std::make_shared<Admissions>();
  const std::function<void()> waiter = admissions->Waiter();
  admissions.reset();
  waiter();
}

TEST(SharingTest, OneAsksAtATimeAndNotAgainAtOnce) {
  Sharing sharing;
  EXPECT_EQ(sharing.slots(), nullptr);
  EXPECT_TRUE(sharing.Begin(/*at_once=*/false));
  EXPECT_FALSE(sharing.Begin(/*at_once=*/true)) << "somebody asks already";
  sharing.End(model::Error(absl::StatusCode::kFailedPrecondition, model::kUnsupported, "another host"));
  EXPECT_EQ(sharing.slots(), nullptr);
  EXPECT_FALSE(sharing.Begin(/*at_once=*/false));
  EXPECT_TRUE(sharing.Begin(/*at_once=*/true));
  sharing.End(absl::UnavailableError("down"));
}

TEST(SharingTest, ACancelEndsTheHandOverWheneverItsSocketComes) {
  for (const bool before : {true, false}) {
    int pair[2] = {};
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
    const model::Descriptor mine(pair[0]), server(pair[1]);
    Sharing sharing;
    ASSERT_TRUE(sharing.Begin(true));
    if (before) sharing.Cancel();
    sharing.Watch(mine.get());
    if (!before) sharing.Cancel();
    char byte = 0;
    EXPECT_EQ(::recv(mine.get(), &byte, 1, 0), 0) << "a server that says nothing holds up nobody";
    sharing.End(absl::CancelledError("by the caller"));
  }
}

}  // namespace
}  // namespace ballast::client
