// Mistakes of trainers, over the wire. Each gets a code, a reason and a message with the bad value, and changes
// nothing.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>

#include "ballast/kernels/kernels.h"
#include "ballast/proto/base/memory_socket.h"
#include "ballast/proto/model/protocol.h"
#include "ballast/services/counters/counters.h"
#include "ballast/tests/services/gateway/rpc_fixture.h"

namespace ballast::services {
namespace {

using Stub = v1::StateService::Stub;

float Ones(uint32_t, uint64_t) { return 1.0f; }

class BadInput : public RpcTest {
 protected:
  void SetUp() override {
    RpcTest::SetUp();
    ASSERT_EQ(group_.Start(), absl::OkStatus());
    ASSERT_EQ(group_.Initialise(Ones), absl::OkStatus());
    push_ = PushOf(group_, 0);
  }
  void TearDown() override {
    // Whatever came before: the server is well, and the step goes through.
    ASSERT_EQ(group_.PushAll(v1::SLICE_KIND_GRADIENT, AllTensors(4), Ones), absl::OkStatus());
    EXPECT_EQ(group_.Finish(UpdateHeader(4)).status(), absl::OkStatus());
    EXPECT_TRUE(group_.Read(0, v1::CONTENT_WORKING, group_.step() - 1).ok());
  }
  static v1::PushRequest PushOf(const TrainerGroup& group, uint32_t slice) {
    const std::string payload = group.Payload(slice, v1::SLICE_KIND_GRADIENT, Ones);
    v1::PushRequest push = group.PushHeader(slice, v1::SLICE_KIND_GRADIENT, payload);
    push.set_payload(payload);
    return push;
  }
  absl::Status Push(const v1::PushRequest& push) {
    v1::PushResponse response;
    return Call(&Stub::Push, push, &response);
  }
  absl::Status SendOpen(const v1::OpenRequest& open) {
    v1::OpenResponse response;
    return Call(&Stub::Open, open, &response);
  }
  // With the digest of whatever the spec has become.
  absl::Status Open(v1::OpenRequest open) {
    open.set_spec_digest(model::SpecDigest(open.spec()));
    open.set_protocol_version(model::kProtocolVersion);
    return SendOpen(open);
  }
  // An Open of a job of its own, whose epoch is promised.
  v1::OpenRequest FencedOpen(const std::string& job) {
    TrainerGroup other({server_.get()}, MakeSpec(job, SmallModel()), 2);
    std::vector<v1::GetJobResponse> answers;
    EXPECT_EQ(other.Fence(&answers), absl::OkStatus());
    return other.open_request(-1, std::nullopt);
  }
  static void Expect(const absl::Status& status, absl::StatusCode code, const char* reason,
                     const std::vector<std::string>& texts) {
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_EQ(model::ReasonOf(status), reason) << status;
    for (const std::string& text : texts)
      EXPECT_NE(status.message().find(text), absl::string_view::npos) << text << " in " << status;
  }

  TrainerGroup group_{{server_.get()}, MakeSpec("job", SmallModel()), 2};
  v1::PushRequest push_;
};

constexpr absl::StatusCode kInvalid = absl::StatusCode::kInvalidArgument;
constexpr absl::StatusCode kPrecondition = absl::StatusCode::kFailedPrecondition;

TEST_F(BadInput, SharedMemoryThatIsNotThere) {
  const auto expect = [](const absl::Status& status, absl::StatusCode code, const char* reason) {
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_EQ(model::ReasonOf(status), reason) << status;
  };
  v1::PushRequest push = push_;
  push.mutable_shared()->set_ticket("of nobody");
  push.mutable_shared()->set_bytes(push.payload().size());
  expect(Push(push), absl::StatusCode::kUnavailable, model::kMemoryGone);
  push.clear_payload();
  expect(Push(push), absl::StatusCode::kUnavailable, model::kMemoryGone);
  v1::PullRequest pull;
  pull.set_job(push.job());
  pull.set_content(v1::CONTENT_WORKING);
  pull.set_end(1);
  pull.mutable_shared();
  v1::PullResponse answer;
  expect(Call(&Stub::Pull, pull, &answer), absl::StatusCode::kUnavailable, model::kMemoryGone);
}

TEST_F(BadInput, SharedMemoryOfAnotherSize) {
  v1::IdentifyRequest ask;
  ask.set_shares_memory(true);
  v1::IdentifyResponse identity;
  ASSERT_EQ(Call(&Stub::Identify, ask, &identity), absl::OkStatus());
  const auto socket = model::ConnectToMemorySocket(identity.memory().socket());
  ASSERT_TRUE(socket.ok()) << socket.status();
  const auto soon = [] { return absl::Now() + absl::Seconds(30); };
  ASSERT_EQ(model::SendSocketMessage(socket->get(), identity.memory().ticket()), absl::OkStatus());
  ASSERT_EQ(model::ReceiveSocketMessage(socket->get(), soon())->text, identity.memory().proof());
  model::Descriptor memfd;
  const auto memory = model::SharedMapping::Make(&memfd);
  ASSERT_TRUE(memory.ok()) << memory.status();
  ASSERT_EQ(model::SendSocketMessage(socket->get(), "memory", memfd.get()), absl::OkStatus());
  ASSERT_EQ(model::ReceiveSocketMessage(socket->get(), soon())->text, model::kTaken);

  const auto expect = [](const absl::Status& status, const char* reason) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_EQ(model::ReasonOf(status), reason) << status;
  };
  v1::PushRequest push = push_;
  v1::SharedPlace* const place = push.mutable_shared();
  place->set_ticket(identity.memory().ticket());
  place->set_bytes(push.payload().size());
  expect(Push(push), model::kBadRequest);  // two payloads
  push.clear_payload();
  place->set_bytes(push_.payload().size() - 2);
  expect(Push(push), model::kBadLength);
  place->set_offset(model::kSharedBytes);
  expect(Push(push), model::kBadRange);
  // Other bytes than the checksum's.
  *place = v1::SharedPlace();
  place->set_ticket(identity.memory().ticket());
  place->set_bytes(push_.payload().size());
  const absl::Status damaged = Push(push);
  EXPECT_EQ(damaged.code(), absl::StatusCode::kUnavailable) << damaged;
  EXPECT_EQ(model::ReasonOf(damaged), model::kChecksum) << damaged;
  std::memcpy(memory->bytes().data(), push_.payload().data(), push_.payload().size());
  EXPECT_EQ(Push(push), absl::OkStatus());

  v1::PullRequest pull;
  pull.set_job(push.job());
  pull.set_content(v1::CONTENT_WORKING);
  pull.set_end(100);
  *pull.mutable_shared() = *place;
  pull.mutable_shared()->set_bytes(198);
  std::fill(memory->bytes().begin(), memory->bytes().end(), std::byte{0x55});
  v1::PullResponse answer;
  expect(Call(&Stub::Pull, pull, &answer), model::kBadLength);
  EXPECT_TRUE(
      std::all_of(memory->bytes().begin(), memory->bytes().end(), [](std::byte b) { return b == std::byte{0x55}; }));
  pull.mutable_shared()->set_bytes(200);
  ASSERT_EQ(Call(&Stub::Pull, pull, &answer), absl::OkStatus());
  EXPECT_EQ(answer.payload(), "");
  EXPECT_EQ(answer.crc32c(), kernels::Crc32c(memory->bytes().first(200)));
  EXPECT_EQ(memory->bytes()[200], std::byte{0x55});
}

TEST_F(BadInput, UnknownJob) {
  push_.set_job("nobody");
  Expect(Push(push_), absl::StatusCode::kNotFound, model::kUnknownJob, {"has no job 'nobody'"});
  v1::PullRequest pull;
  pull.set_job("nobody");
  v1::PullResponse response;
  Expect(Call(&Stub::Pull, pull, &response), absl::StatusCode::kNotFound, model::kUnknownJob, {"nobody"});
}

TEST_F(BadInput, UnknownUnit) {
  push_.set_unit(77);
  Expect(Push(push_), absl::StatusCode::kNotFound, model::kUnknownUnit, {"unit 77"});
}

TEST_F(BadInput, RangeOutsideTheUnit) {
  push_.set_begin(push_.begin() + (1 << 30));
  push_.set_end(push_.end() + (1 << 30));
  Expect(Push(push_), kInvalid, model::kBadRange, {absl::StrCat(push_.end())});
}

TEST_F(BadInput, RangeThatIsNoWholeSlice) {
  push_.set_end(push_.end() - 256);
  push_.mutable_payload()->resize((push_.end() - push_.begin()) * 2);
  Expect(Push(push_), kInvalid, model::kOverlap, {"only whole slices"});
}

TEST_F(BadInput, WrongLengthAndDtype) {
  const uint64_t elements = push_.end() - push_.begin();
  push_.mutable_payload()->append("x");
  Expect(Push(push_), kInvalid, model::kBadLength,
         {absl::StrCat("expected ", elements, " elements of DTYPE_BF16"), "is the dtype right?"});
  push_.mutable_payload()->resize(elements * 4);
  Expect(Push(push_), kInvalid, model::kBadLength, {absl::StrCat("got ", elements * 4, " bytes")});
  push_.set_kind(v1::SLICE_KIND_UNSPECIFIED);
  Expect(Push(push_), kInvalid, model::kBadRequest, {"kind"});
}

TEST_F(BadInput, WrongDtypeInTheSpec) {
  v1::OpenRequest open = FencedOpen("one");
  open.mutable_spec()->set_gradient_dtype(static_cast<v1::Dtype>(17));
  Expect(Open(open), kInvalid, model::kBadDtype, {"gradients must be", "DTYPE_BF16", "17"});
  Expect(Open(open), absl::StatusCode::kNotFound, model::kUnknownJob, {"somebody dropped it"});  // forgotten
  open = FencedOpen("two");
  open.mutable_spec()->set_moment_format(static_cast<v1::MomentFormat>(9));
  Expect(Open(open), kInvalid, model::kBadDtype, {"I8 or F8", "9"});
  open = FencedOpen("three");
  open.mutable_spec()->set_moment_format(v1::MOMENT_FORMAT_F8);
  open.mutable_spec()->set_nesterov(true);
  Expect(Open(open), kInvalid, model::kBadSpec, {"adamw", "nesterov needs momentum"});
  open = FencedOpen("four");
  open.mutable_spec()->set_optimizer(static_cast<v1::Optimizer>(77));
  Expect(Open(open), absl::StatusCode::kUnimplemented, model::kUnsupported, {"optimizer 77", "AdamW, Adam, SGD"});
}

// Another optimizer would read the state as something that it is not.
TEST_F(BadInput, AnotherOptimizerForAJobWithState) {
  v1::OpenRequest open = group_.open_request(group_.step() - 1, std::nullopt);
  open.mutable_spec()->set_moment_format(v1::MOMENT_FORMAT_I8);
  open.set_dry_run(true);
  Expect(Open(open), kInvalid, model::kBadSpec, {"has state for adamw, f32 moments", "is for adamw, i8 moments"});
}

// After a dry run nothing is taken for the job, so its spec may still change.
TEST_F(BadInput, AnotherOptimizerAfterADryRun) {
  v1::OpenRequest open = FencedOpen("other");
  open.set_dry_run(true);
  EXPECT_EQ(Open(open), absl::OkStatus());
  open.set_dry_run(false);
  open.mutable_spec()->set_moment_format(v1::MOMENT_FORMAT_I8);
  EXPECT_EQ(Open(open), absl::OkStatus());
}

constexpr char kFix[] = "run the same version of Ballast on all servers and trainers";

// The bytes of a later version's message: field 99, a varint.
void AddLaterField(google::protobuf::Message* message) {
  std::string bytes = message->SerializeAsString();
  bytes += "\x98\x06\x01";
  ASSERT_TRUE(message->ParseFromString(bytes));
}

TEST_F(BadInput, AnOpenWithAFieldOfALaterVersion) {
  const std::pair<const char*, std::function<google::protobuf::Message*(v1::OpenRequest*)>> places[] = {
      {"ballast.v1.OpenRequest", [](auto* open) { return open; }},
      {"ballast.v1.JobSpec", [](auto* open) { return open->mutable_spec(); }},
      {"ballast.v1.TensorSpec",
       [](auto* open) { return open->mutable_spec()->mutable_registrations(0)->mutable_tensors(1); }},
      {"ballast.v1.Tiling", [](auto* open) { return open->mutable_tiling(); }},
  };
  const v1::OpenRequest good = FencedOpen("other");
  for (const bool dry_run : {true, false}) {
    for (const auto& [name, place] : places) {
      v1::OpenRequest open = good;
      open.set_dry_run(dry_run);
      AddLaterField(place(&open));
      Expect(SendOpen(open), kInvalid, model::kVersionsDiffer, {absl::StrCat("a ", name, " came with field 99"), kFix});
    }
  }
  EXPECT_EQ(SendOpen(FencedOpen("other")), absl::OkStatus());
}

TEST_F(BadInput, AnOpenWithoutTheDigestOfItsSpecOrWithAnother) {
  for (const bool dry_run : {true, false}) {
    v1::OpenRequest open = FencedOpen("other");
    open.set_dry_run(dry_run);
    open.clear_spec_digest();
    Expect(SendOpen(open), kInvalid, model::kVersionsDiffer, {"job 'other' came without spec_digest", kFix});
    (void)FencedOpen("other");  // the server has forgotten the job
    open.set_spec_digest(std::string(32, 'd'));
    Expect(SendOpen(open), kInvalid, model::kVersionsDiffer, {"job 'other'", "not the digest of its spec", kFix});
  }
  EXPECT_EQ(SendOpen(FencedOpen("other")), absl::OkStatus());
}

TEST_F(BadInput, FencesAndOpensOfOtherVersions) {
  for (const uint32_t version : {uint32_t{0}, model::kProtocolVersion + 1}) {
    const std::string shown = version == 0 ? "version 4 or before" : absl::StrCat("protocol version ", version);
    v1::OpenRequest open = FencedOpen("other");
    open.set_protocol_version(version);
    Expect(SendOpen(open), kInvalid, model::kVersionsDiffer, {"the Open of job 'other'", shown, kFix});
    v1::FenceRequest fence;
    fence.set_job("other");
    fence.mutable_epoch()->set_counter(7);
    fence.set_protocol_version(version);
    v1::FenceResponse fenced;
    Expect(Call(&Stub::Fence, fence, &fenced), kInvalid, model::kVersionsDiffer,
           {"the fence of job 'other'", shown, kFix});
  }
}

TEST_F(BadInput, StepsWithFieldsOfALaterVersion) {
  ASSERT_EQ(group_.PushAll(v1::SLICE_KIND_GRADIENT, AllTensors(4), Ones), absl::OkStatus());
  const auto seal = [&](const std::function<google::protobuf::Message*(v1::SealRequest*)>& place, const char* name) {
    v1::SealRequest request = group_.SealOf(0, UpdateHeader(4), 0);
    AddLaterField(place(&request));
    v1::SealResponse response;
    Expect(Call(&Stub::Seal, request, &response), kInvalid, model::kVersionsDiffer,
           {absl::StrCat("a ", name, " came with field 99"), kFix});
  };
  seal([](auto* request) { return request; }, "ballast.v1.SealRequest");
  seal([](auto* request) { return request->mutable_header(); }, "ballast.v1.StepHeader");
  seal([](auto* request) { return request->mutable_header()->mutable_groups(0); }, "ballast.v1.GroupHyper");
  v1::CommitRequest commit;
  commit.set_job("job");
  AddLaterField(commit.mutable_decision()->mutable_verdict());
  v1::CommitResponse committed;
  Expect(Call(&Stub::Commit, commit, &committed), kInvalid, model::kVersionsDiffer,
         {"a ballast.v1.Verdict came with field 99", kFix});
  AddLaterField(&push_);
  Expect(Push(push_), kInvalid, model::kVersionsDiffer, {"a ballast.v1.PushRequest came with field 99", kFix});
}

TEST_F(BadInput, PullOfAMomentThatTheOptimizerHasNot) {
  v1::PullRequest pull;
  pull.set_job("job");
  pull.set_content(v1::CONTENT_MOMENT3);
  pull.set_end(8);
  v1::PullResponse response;
  Expect(Call(&Stub::Pull, pull, &response), kInvalid, model::kBadRequest,
         {"neither WORKING nor MASTER", "2 moment(s) of adamw"});
}

TEST_F(BadInput, DamagedPayload) {
  (*push_.mutable_payload())[5] ^= 1;
  Expect(Push(push_), absl::StatusCode::kUnavailable, model::kChecksum, {"CRC32C", absl::StrCat(push_.crc32c())});
}

TEST_F(BadInput, OldStep) {
  push_.set_step(0);
  Expect(Push(push_), kPrecondition, model::kOldStep, {"step 0"});
}

TEST_F(BadInput, StepTooFarAhead) {
  push_.set_step(9);
  Expect(Push(push_), kPrecondition, model::kBehind, {"step 9"});
}

TEST_F(BadInput, OldEpoch) {
  push_.mutable_epoch()->set_nonce(1);
  Expect(Push(push_), kPrecondition, model::kStaleEpoch, {"resume=auto"});
}

TEST_F(BadInput, UnknownRank) {
  push_.set_rank(7);
  Expect(Push(push_), kInvalid, model::kBadRequest, {"rank 7", "world size 2"});
}

TEST_F(BadInput, OverlappingRangesInOpen) {
  v1::OpenRequest open = FencedOpen("other");
  open.mutable_tiling()->set_division(v1::DIVISION_UNSPECIFIED);
  for (const uint64_t begin : {0, 256}) {
    v1::RankRange* range = open.mutable_tiling()->add_ranges();
    range->set_begin(begin);
    range->set_end(512);
  }
  Expect(Open(open), kInvalid, model::kOverlap, {"u0"});
}

TEST_F(BadInput, OpenOfAnEpochNobodyPromised) {
  v1::OpenRequest open = FencedOpen("other");
  open.mutable_epoch()->set_counter(50);
  Expect(Open(open), kInvalid, model::kBadRequest, {"never promised", "send Fence first"});
}

TEST_F(BadInput, OpenWithoutThisServer) {
  v1::OpenRequest open = FencedOpen("other");
  open.mutable_members(0)->set_server_id("somebody-else");
  EXPECT_EQ(Open(open).code(), absl::StatusCode::kNotFound);
}

TEST_F(BadInput, EpochZero) {
  v1::FenceRequest fence;
  fence.set_job("job");
  v1::FenceResponse response;
  Expect(Call(&Stub::Fence, fence, &response), kInvalid, model::kBadRequest, {"counts from 1"});
}

TEST_F(BadInput, GradientsThatAreNotFinite) {
  const auto infinite = [](uint32_t tensor, uint64_t i) {
    return tensor == 3 && i == 7 ? std::numeric_limits<float>::infinity() : 1.0f;
  };
  ASSERT_EQ(group_.PushAll(v1::SLICE_KIND_GRADIENT, AllTensors(4), infinite), absl::OkStatus());
  const auto decision = group_.Finish(UpdateHeader(4));
  ASSERT_TRUE(decision.ok()) << decision.status();
  EXPECT_TRUE(decision->verdict().skip());
  grpc::ClientContext context;
  v1::GetServerStatusResponse status;
  ASSERT_TRUE(admin_->GetServerStatus(&context, {}, &status).ok());
  EXPECT_EQ(status.jobs(0).skipped_steps(), 1u);
  EXPECT_EQ(group_.Read(3, v1::CONTENT_MASTER, 1).value(), std::vector<float>(300, 1.0f));
}

TEST_F(BadInput, ValuesThatAreNotFinite) {
  for (const float bad : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    const auto fill = [&](uint32_t tensor, uint64_t i) { return tensor == 0 && i == 70 ? bad : 1.0f; };
    const absl::Status status = group_.PushSlice(0, v1::SLICE_KIND_VALUE, fill);
    Expect(status, kInvalid, model::kBadRequest,
           {absl::StrCat("element 70 of tensor 'embed' is ", bad), "initial values and edits must be finite"});
  }
  // Padding between tensors belongs to no tensor: NaN there does no harm.
  const auto& tensors = group_.plan().layout().tensors();
  for (uint32_t i = 0; i < group_.plan().slices().size(); ++i) {
    const model::Slice& s = group_.plan().slices()[i];
    std::string payload = group_.Payload(i, v1::SLICE_KIND_VALUE, Ones);
    for (uint64_t at = s.range.begin; at < s.range.end; ++at) {
      const bool padding = std::none_of(tensors.begin(), tensors.end(), [&](const model::Tensor& t) {
        return t.unit == s.unit && t.range.begin <= at && at < t.range.end;
      });
      const float nan = std::numeric_limits<float>::quiet_NaN();
      if (padding) std::memcpy(payload.data() + (at - s.range.begin) * 4, &nan, sizeof nan);
    }
    v1::PushRequest push = group_.PushHeader(i, v1::SLICE_KIND_VALUE, payload);
    push.set_payload(payload);
    EXPECT_EQ(Push(push), absl::OkStatus()) << "slice " << i;
  }
}

TEST_F(BadInput, ErrorsAreCountedByReason) {
  push_.set_step(0);
  Push(push_).IgnoreError();
  Push(push_).IgnoreError();
  const auto errors = server_->counters().errors.Get();
  EXPECT_EQ(errors.at({services::Call::kPush, model::kOldStep}), 2u);
}

TEST_F(BadInput, MessagesOverTheLimit) {
  push_.mutable_payload()->resize(model::kMessageBytesMax + (65 << 10));
  const absl::Status status = Push(push_);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_NE(status.message().find("larger than max"), absl::string_view::npos) << status;
}

TEST_F(BadInput, PullsThatAreNoFewNumbers) {
  v1::PullRequest pull;
  pull.set_job(std::string(5000, 'j'));
  v1::PullResponse response;
  Expect(Call(&Stub::Pull, pull, &response), kInvalid, model::kBadRequest,
         {absl::StrCat("a PullRequest has at most 4096 bytes, got ", pull.ByteSizeLong())});
}

TEST_F(BadInput, BytesThatAreNoMessage) {
  for (const char* method : {"/ballast.v1.StateService/Push", "/ballast.v1.StateService/Pull"}) {
    std::string response;
    const grpc::Status status = RawCall(channel_, method, "\xff\xff\xff\xff garbage", &response);
    Expect(FromGrpc(status), kInvalid, model::kBadRequest, {"the bytes that came are no ballast.v1.P"});
  }
}

}  // namespace
}  // namespace ballast::services
