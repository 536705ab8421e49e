// Every Transport keeps the same promises: one parameterised test over gRPC (a state server behind a socket) and the
// embedded one (the same server in this process).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <thread>

#include "absl/synchronization/blocking_counter.h"
#include "absl/synchronization/mutex.h"
#include "ballast/proto/base/memory_socket.h"
#include "ballast/proto/model/protocol.h"
#include "ballast/tests/adamw_step.h"
#include "ballast/tests/contract/transport_fixture.h"

namespace ballast {
namespace {

using ::testing::HasSubstr;

float Initial(uint64_t i) { return std::sin(static_cast<float>(i) * 0.01f); }

TEST_P(TransportContract, TellsItsName) {
  EXPECT_EQ(transport_->name(), GetParam() == Wire::kEmbedded ? "embedded" : rpc_->address());
}

TEST_P(TransportContract, UnknownJobDoesNotExist) {
  v1::GetJobRequest request;
  request.set_job("nobody");
  const auto job = Call(&client::Transport::GetJob, request);
  ASSERT_TRUE(job.ok()) << job.status();
  EXPECT_FALSE(job->exists());
  EXPECT_EQ(job->server_id(), "s0");
}

TEST_P(TransportContract, IdentifiesTheServerWhateverItsJobs) {
  for (const bool with_job : {false, true}) {
    if (with_job) OpenJob(1000, 65536);
    const auto answer = Call(&client::Transport::Identify, v1::IdentifyRequest());
    ASSERT_TRUE(answer.ok()) << answer.status();
    EXPECT_EQ(answer->server_id(), "s0");
    EXPECT_EQ(answer->protocol_version(), model::kProtocolVersion);
    EXPECT_LT(answer->ByteSizeLong(), 80u);
  }
}

TEST_P(TransportContract, AJobIsToldWithItsOpenOrWithout) {
  OpenJob(1000, 65536);
  v1::GetJobRequest request;
  request.set_job(kJob);
  for (const bool without : {false, true}) {
    request.set_without_open(without);
    const auto job = Call(&client::Transport::GetJob, request);
    ASSERT_TRUE(job.ok()) << job.status();
    EXPECT_EQ(job->has_open(), !without);
    EXPECT_TRUE(job->exists());
    EXPECT_EQ(job->tensor_steps_size(), 1);
  }
}

TEST_P(TransportContract, FieldsOfALaterVersionAreRefused) {
  OpenJob(1000, 65536);
  const auto refused = [](const absl::Status& status, const char* message) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_EQ(model::ReasonOf(status), model::kVersionsDiffer) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(absl::StrCat("a ", message, " came with field 99")));
  };
  v1::OpenRequest open = open_;
  open.mutable_spec()->GetReflection()->MutableUnknownFields(open.mutable_spec())->AddVarint(99, 1);
  refused(Call(&client::Transport::Open, open).status(), "ballast.v1.JobSpec");
  v1::SealRequest seal = SealOf(0, v1::STEP_KIND_VALUES);
  seal.mutable_header()->GetReflection()->MutableUnknownFields(seal.mutable_header())->AddVarint(99, 1);
  refused(Call(&client::Transport::Seal, seal).status(), "ballast.v1.StepHeader");
  v1::PushRequest push = PushOf(plan_->slices()[0], v1::SLICE_KIND_VALUE, 0, {});
  push.GetReflection()->MutableUnknownFields(&push)->AddVarint(99, 1);
  refused(Push(push, {}), "ballast.v1.PushRequest");
}

TEST_P(TransportContract, CarriesAWholeStep) {
  OpenJob(3 * 65536 + 1000, 65536);
  Create(Initial);
  std::vector<uint16_t> gradient(plan_->layout().units()[0].elements, 0);
  for (size_t i = 0; i < 3 * 65536 + 1000; ++i) gradient[i] = kernels::ToBf16(std::cos(static_cast<float>(i)));
  double squared = 0;
  for (const model::Slice& slice : plan_->slices()) {
    const std::vector<uint16_t> part(gradient.begin() + slice.range.begin, gradient.begin() + slice.range.end);
    ASSERT_EQ(Push(PushOf(slice, v1::SLICE_KIND_GRADIENT, 1, BytesOf(part)), BytesOf(part)), absl::OkStatus());
    // The same slice again is the same slice.
    ASSERT_EQ(Push(PushOf(slice, v1::SLICE_KIND_GRADIENT, 1, BytesOf(part)), BytesOf(part)), absl::OkStatus());
  }
  for (const model::Chunk& c : plan_->layout().chunks()) {
    const auto& s = c.segments[0].in_chunk;
    squared +=
        kernels::SquaredNorm(absl::MakeConstSpan(gradient).subspan(c.range.begin + s.begin, s.size())).squared_norm;
  }
  v1::NormRequest ask;
  ask.set_job(kJob);
  *ask.mutable_epoch() = open_.epoch();
  ask.set_step(1);
  ask.set_gradient_presence(model::MakeBitmap(1, {0}));
  const auto norms = Call(&client::Transport::Norm, ask);
  ASSERT_TRUE(norms.ok()) << norms.status();
  ASSERT_EQ(norms->norms_size(), 4);
  std::vector<const v1::ChunkNorm*> list;
  for (const auto& norm : norms->norms()) list.push_back(&norm);
  EXPECT_EQ(*model::GlobalSquaredNorm(list), squared);

  const auto decision = SealStep(1, v1::STEP_KIND_UPDATE);
  ASSERT_TRUE(decision.ok()) << decision.status();
  EXPECT_FALSE(decision->verdict().skip());
  EXPECT_EQ(decision->verdict().norm(), std::sqrt(squared));
  EXPECT_EQ(decision->blobs(0), "cursor");
  ASSERT_EQ(CommitStep(*decision), absl::OkStatus());

  const auto again = Call(&client::Transport::Seal, SealOf(1, v1::STEP_KIND_UPDATE));
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->decided().SerializeAsString(), decision->SerializeAsString());

  const kernels::Coefficients c = kernels::MakeCoefficients({}, {0.01, 0.9, 0.999, 1e-8, 0.1}, 1, 1.0f);
  for (const model::Chunk& at : plan_->layout().chunks()) {
    const auto& s = at.segments[0].in_chunk;
    std::vector<float> master(s.size()), m(s.size(), 0), v(s.size(), 0);
    std::vector<uint16_t> working(s.size());
    for (size_t i = 0; i < master.size(); ++i) master[i] = Initial(at.range.begin + i);
    AdamwStep(c, absl::MakeConstSpan(gradient).subspan(at.range.begin, s.size()), absl::MakeSpan(master),
              absl::MakeSpan(m), absl::MakeSpan(v), absl::MakeSpan(working));
    auto pulled = PullAll<float>(at, v1::CONTENT_MASTER, 1);
    ASSERT_TRUE(pulled.ok()) << pulled.status();
    EXPECT_EQ(0, std::memcmp(pulled->data(), master.data(), master.size() * sizeof(float)));
    pulled = PullAll<float>(at, v1::CONTENT_MOMENT2, 1);
    ASSERT_TRUE(pulled.ok()) << pulled.status();
    EXPECT_EQ(0, std::memcmp(pulled->data(), v.data(), v.size() * sizeof(float)));
    const auto narrow = PullAll<uint16_t>(at, v1::CONTENT_WORKING, 1);
    ASSERT_TRUE(narrow.ok()) << narrow.status();
    EXPECT_EQ(0, std::memcmp(narrow->data(), working.data(), working.size() * sizeof(uint16_t)));
  }
}

TEST_P(TransportContract, PinsAndUnpins) {
  OpenJob(60000, 65536);
  Create(Initial);
  v1::PinRequest pin;
  pin.set_job(kJob);
  pin.set_version(0);
  const auto pinned = Call(&client::Transport::Pin, pin);
  ASSERT_TRUE(pinned.ok()) << pinned.status();
  EXPECT_THAT(pinned->tensor_steps(), ::testing::ElementsAre(0));
  const auto values = PullAll<float>(chunk(0), v1::CONTENT_MASTER, 0);
  ASSERT_TRUE(values.ok()) << values.status();
  EXPECT_EQ((*values)[4321], Initial(4321));
  v1::UnpinRequest unpin;
  unpin.set_job(kJob);
  unpin.set_version(0);
  EXPECT_TRUE(Call(&client::Transport::Unpin, unpin).ok());
}

TEST_P(TransportContract, LargestSliceFits) {
  OpenJob(uint64_t{1} << 20, uint64_t{1} << 20);
  Create(Initial);  // one push of 4 MiB
  const auto values = PullAll<float>(chunk(0), v1::CONTENT_MASTER, 0);
  ASSERT_TRUE(values.ok()) << values.status();
  EXPECT_EQ(values->back(), Initial((uint64_t{1} << 20) - 1));
}

// Within a process there is nothing to check. To anywhere else the transport sends the checksum of what it sends.
TEST_P(TransportContract, APushWithoutAChecksumGetsItOnItsWay) {
  OpenJob(60000, 65536);
  Create(Initial);
  const model::Slice slice = plan_->slices()[0];
  std::vector<uint16_t> gradient(slice.range.size(), 0x3f80);
  const v1::PushRequest whole = PushOf(slice, v1::SLICE_KIND_GRADIENT, 1, BytesOf(gradient));
  v1::PushRequest push = whole;
  push.clear_crc32c();
  EXPECT_EQ(Push(push, BytesOf(gradient)), absl::OkStatus());
  EXPECT_EQ(Push(push, BytesOf(gradient)), absl::OkStatus()) << "the slice is there";
  const absl::Status same = Push(whole, BytesOf(gradient));
  gradient[7] = 0x4000;
  const absl::Status other = Push(push, BytesOf(gradient));
  if (GetParam() == Wire::kEmbedded) {
    EXPECT_EQ(model::ReasonOf(same), model::kDigestConflict) << "it was taken with a checksum";
    EXPECT_EQ(other, absl::OkStatus());
  } else {
    EXPECT_EQ(same, absl::OkStatus());
    EXPECT_EQ(model::ReasonOf(other), model::kDigestConflict) << other;
  }
}

// Its owner may do that, and then drop the step. The second mapping is what a thread checker does not see through.
TEST_P(TransportContract, ASharedPushOfMemoryThatChangesIsOfOneCopy) {
  if (GetParam() != Wire::kShared) return;
  OpenJob(60000, 65536);
  Create(Initial);
  const model::Slice slice = plan_->slices()[0];
  const uint64_t bytes = slice.range.size() * sizeof(uint16_t);
  model::Descriptor memfd;
  const auto memory = model::SharedMapping::Make(&memfd);
  const auto owners = model::SharedMapping::Map(memfd);
  ASSERT_TRUE(memory.ok() && owners.ok()) << memory.status() << owners.status();
  v1::PushRequest push = PushOf(slice, v1::SLICE_KIND_GRADIENT, 1, memory->bytes().first(bytes));
  push.clear_crc32c();
  std::atomic<bool> ends = false;
  std::thread owner([&] {
    for (uint64_t at = 0; !ends; at = (at + 64) % bytes) {
      owners->bytes()[at] = std::byte{static_cast<uint8_t>(std::to_integer<uint8_t>(owners->bytes()[at]) ^ 1)};
    }
  });
  absl::Status status;
  for (uint64_t attempt = 1; attempt <= 300 && status.ok(); ++attempt) {
    push.set_attempt(attempt);
    status = Push(push, memory->bytes().first(bytes));
  }
  ends = true;
  owner.join();
  EXPECT_EQ(status, absl::OkStatus());
  EXPECT_GE(shared().in_bytes, 300 * bytes);
}

TEST_P(TransportContract, ErrorsCarryReasonAndMessage) {
  OpenJob(60000, 65536);
  Create(Initial);
  const model::Slice slice = plan_->slices()[0];
  const std::vector<uint16_t> gradient(slice.range.size(), 0x3f80);
  const v1::PushRequest good = PushOf(slice, v1::SLICE_KIND_GRADIENT, 1, BytesOf(gradient));
  const auto expect = [](const absl::Status& status, absl::StatusCode code, const char* reason, const char* text) {
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_EQ(model::ReasonOf(status), reason) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(text));
  };

  v1::PushRequest bad = good;
  expect(Push(bad, BytesOf(gradient).subspan(2)), absl::StatusCode::kInvalidArgument, model::kBadLength, "expected");
  bad.set_crc32c(good.crc32c() ^ 1);
  expect(Push(bad, BytesOf(gradient)), absl::StatusCode::kUnavailable, model::kChecksum, "CRC32C");
  bad = good;
  bad.set_job("nobody");
  expect(Push(bad, BytesOf(gradient)), absl::StatusCode::kNotFound, model::kUnknownJob, "nobody");
  bad = good;
  bad.set_step(0);
  expect(Push(bad, BytesOf(gradient)), absl::StatusCode::kFailedPrecondition, model::kOldStep, "0");
  bad = good;
  bad.mutable_epoch()->set_nonce(6);
  const absl::Status stale = Push(bad, BytesOf(gradient));
  expect(stale, absl::StatusCode::kFailedPrecondition, model::kStaleEpoch, "epoch");
  const model::Details promised = {{model::kPromised, absl::StrCat(good.epoch().counter(), ".", good.epoch().nonce())},
                                   {model::kGroup, ""}};
  EXPECT_EQ(model::DetailsOf(stale), promised);
  bad = good;
  bad.set_end(good.end() - 256);
  expect(Push(bad, BytesOf(gradient).subspan(512)), absl::StatusCode::kInvalidArgument, model::kOverlap,
         "whole slices");
  EXPECT_EQ(Push(good, BytesOf(gradient)), absl::OkStatus());
  const std::vector<uint16_t> other(slice.range.size(), 0x4000);
  expect(Push(PushOf(slice, v1::SLICE_KIND_GRADIENT, 1, BytesOf(other)), BytesOf(other)),
         absl::StatusCode::kAlreadyExists, model::kDigestConflict, "Drop");

  v1::FenceRequest fence;
  fence.set_job(kJob);
  fence.mutable_epoch()->set_counter(9);
  fence.set_protocol_version(model::kProtocolVersion);
  fence.set_expect_empty(true);
  expect(Call(&client::Transport::Fence, fence).status(), absl::StatusCode::kAlreadyExists, model::kJobExists, "never");

  std::vector<std::byte> few(10);
  expect(Pull(PullOf(chunk(0), v1::CONTENT_MASTER, 0), absl::MakeSpan(few)), absl::StatusCode::kInvalidArgument,
         model::kBadLength, "expected 10 bytes");
}

TEST_P(TransportContract, DeadlinesBoundWaiting) {
  OpenJob(60000, 65536);
  Create(Initial);
  std::vector<uint16_t> to(chunk(0).range.size());
  const auto bytes = absl::MakeSpan(reinterpret_cast<std::byte*>(to.data()), to.size() * sizeof(uint16_t));
  const absl::Time start = absl::Now();
  const absl::Status status = Pull(PullOf(chunk(0), v1::CONTENT_WORKING, 1), bytes, start + absl::Milliseconds(200));
  EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
  EXPECT_GE(absl::Now() - start, absl::Milliseconds(150));
  EXPECT_LT(absl::Now() - start, absl::Seconds(20));

  v1::SealRequest seal = SealOf(1, v1::STEP_KIND_UPDATE);
  seal.set_wait_ms(50);
  const auto pending = Call(&client::Transport::Seal, seal);
  ASSERT_TRUE(pending.ok()) << pending.status();
  ASSERT_TRUE(pending->has_pending()) << pending->ShortDebugString();
  EXPECT_EQ(pending->pending().missing_count(), 1u);
  EXPECT_THAT(pending->pending().unsealed_ranks(), ::testing::IsEmpty());
}

TEST_P(TransportContract, PullWaitsForItsVersion) {
  OpenJob(60000, 65536);
  Create(Initial);
  std::vector<uint16_t> to(chunk(0).range.size());
  absl::Notification done;
  absl::Status result;
  transport_->Pull(PullOf(chunk(0), v1::CONTENT_WORKING, 1),
                   absl::MakeSpan(reinterpret_cast<std::byte*>(to.data()), to.size() * sizeof(uint16_t)), Soon(),
                   [&](absl::Status status) {
                     result = std::move(status);
                     done.Notify();
                   });
  const model::Slice slice = plan_->slices()[0];
  const std::vector<uint16_t> gradient(slice.range.size(), 0x3f80);
  ASSERT_EQ(Push(PushOf(slice, v1::SLICE_KIND_GRADIENT, 1, BytesOf(gradient)), BytesOf(gradient)), absl::OkStatus());
  const auto decision = SealStep(1, v1::STEP_KIND_UPDATE);
  ASSERT_TRUE(decision.ok()) << decision.status();
  EXPECT_FALSE(done.HasBeenNotified());
  ASSERT_EQ(CommitStep(*decision), absl::OkStatus());
  done.WaitForNotification();
  EXPECT_EQ(result, absl::OkStatus());
  const auto now = PullAll<uint16_t>(chunk(0), v1::CONTENT_WORKING, 1);
  ASSERT_TRUE(now.ok()) << now.status();
  EXPECT_EQ(to, *now);
}

TEST_P(TransportContract, CallsBackExactlyOnceUnderConcurrency) {
  OpenJob(4 * 65536, 65536);
  Create(Initial);
  constexpr int kThreads = 4, kCalls = 100;
  std::vector<std::atomic<int>> calls(kThreads * kCalls);
  std::atomic<int> wrong{0};
  absl::BlockingCounter left(kThreads * kCalls);
  std::vector<std::thread> threads;
  std::vector<std::vector<float>> to(kThreads * kCalls, std::vector<float>(256));
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int i = t * kCalls; i < (t + 1) * kCalls; ++i) {
        const uint64_t begin = static_cast<uint64_t>(i) * 512 % (4 * 65536);
        v1::PullRequest pull = PullOf(chunk(0), v1::CONTENT_MASTER, 0);
        pull.set_begin(begin);
        pull.set_end(begin + 256);
        transport_->Pull(pull, absl::MakeSpan(reinterpret_cast<std::byte*>(to[i].data()), 1024), Soon(),
                         [&, i, begin](const absl::Status& status) {
                           if (!status.ok() || to[i][255] != Initial(begin + 255)) wrong.fetch_add(1);
                           calls[i].fetch_add(1);
                           left.DecrementCount();
                         });
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  left.Wait();
  transport_.reset();  // no callback can come after this
  EXPECT_EQ(wrong, 0);
  for (const auto& count : calls) EXPECT_EQ(count, 1);
}

TEST_P(TransportContract, DestructorWaitsForOutstandingCalls) {
  OpenJob(60000, 65536);
  Create(Initial);
  constexpr int kCalls = 20;
  std::vector<std::atomic<int>> calls(kCalls);
  std::vector<std::vector<std::byte>> to(kCalls, std::vector<std::byte>(chunk(0).range.size() * sizeof(uint16_t)));
  std::atomic<int> ok{0};
  for (int i = 0; i < kCalls; ++i) {
    // Version 1 never comes.
    transport_->Pull(PullOf(chunk(0), v1::CONTENT_WORKING, 1), absl::MakeSpan(to[i]), absl::Now() + absl::Seconds(1),
                     [&, i](const absl::Status& status) {
                       if (status.ok()) ok.fetch_add(1);
                       calls[i].fetch_add(1);
                     });
  }
  transport_.reset();
  EXPECT_EQ(ok, 0);
  for (const auto& count : calls) EXPECT_EQ(count, 1);
}

TEST_P(TransportContract, LargeSlicesGoThroughSharedMemoryAlone) {
  OpenJob(60000, 65536);
  Create(Initial);
  ASSERT_TRUE(PullAll<uint16_t>(chunk(0), v1::CONTENT_WORKING, 0).ok());
  const bool is_shared = GetParam() == Wire::kShared;
  EXPECT_EQ(shared().in_bytes, is_shared ? chunk(0).range.size() * sizeof(float) : 0u);
  EXPECT_EQ(shared().out_bytes, is_shared ? chunk(0).range.size() * sizeof(uint16_t) : 0u);
  transport_.reset();
  // The server hears of a client's end from the socket.
  for (const absl::Time end = Soon(); shared().mapped_bytes > 0 && absl::Now() < end;) {
    absl::SleepFor(absl::Milliseconds(1));
  }
  EXPECT_EQ(shared().mapped_bytes, 0u);
}

// Nobody knows whether the server still answers a cancelled call: the answer must go nowhere where it does harm.
TEST_P(TransportContract, ACancelledPullSpoilsNoLaterOne) {
  OpenJob(60000, 65536);
  Create(Initial);
  const uint64_t bytes = chunk(0).range.size() * sizeof(uint16_t);
  std::vector<std::byte> to(bytes);
  absl::Notification cancelled;
  // Version 1 never comes.
  transport_->Pull(PullOf(chunk(0), v1::CONTENT_WORKING, 1), absl::MakeSpan(to), absl::Now() + absl::Seconds(1),
                   [&](const absl::Status& status) {
                     EXPECT_FALSE(status.ok());
                     cancelled.Notify();
                   });
  transport_->Cancel();
  cancelled.WaitForNotification();
  const auto pull = [&] {
    const auto values = PullAll<uint16_t>(chunk(0), v1::CONTENT_WORKING, 0);
    ASSERT_TRUE(values.ok()) << values.status();
    for (size_t i = 0; i < 60000; ++i) ASSERT_EQ((*values)[i], kernels::ToBf16(Initial(i))) << i;
  };
  pull();
  EXPECT_EQ(shared().out_bytes, GetParam() == Wire::kShared ? bytes : 0u);
}

std::string NameOf(const ::testing::TestParamInfo<Wire>& wire) {
  if (wire.param == Wire::kGrpc) return "Grpc";
  return wire.param == Wire::kShared ? "Shared" : "Embedded";
}

INSTANTIATE_TEST_SUITE_P(Wires, TransportContract, ::testing::Values(Wire::kGrpc, Wire::kShared, Wire::kEmbedded),
                         NameOf);

TEST(GrpcTransport, ServerThatIsDownIsUnavailable) {
  // Port 1 of the loopback interface: nobody listens there.
  const auto transport = client::MakeGrpcTransport("127.0.0.1:1");
  absl::Notification done;
  absl::Status result;
  transport->GetJob({}, absl::Now() + absl::Seconds(20), [&](const absl::StatusOr<v1::GetJobResponse>& answer) {
    result = answer.status();
    done.Notify();
  });
  done.WaitForNotification();
  EXPECT_TRUE(absl::IsUnavailable(result)) << result;
  EXPECT_EQ(model::ReasonOf(result), model::kServerDown);
}

}  // namespace
}  // namespace ballast
