#include <gtest/gtest.h>

#include <deque>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "ballast/proto/base/status.h"
#include "ballast/services/counters/counters.h"
#include "ballast/tests/services/trainer_group.h"

namespace ballast::services {
namespace {

using ::testing::Test;

float Ones(uint32_t, uint64_t) { return 1.0f; }

class JobPull : public Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(group_.Start(), absl::OkStatus());
    ASSERT_EQ(group_.Initialise(Ones), absl::OkStatus());
    AwaitIdle(server_.get(), "job");  // all chunks are at version 0
    request_.set_job("job");
    request_.set_content(v1::CONTENT_WORKING);
    request_.set_unit(0);
    request_.set_begin(100);
    request_.set_end(200);
    request_.set_version(0);
  }
  absl::Status Step() {
    BALLAST_RETURN_IF_ERROR(group_.PushAll(v1::SLICE_KIND_GRADIENT, AllTensors(4), Ones));
    return group_.Finish(UpdateHeader(4)).status();
  }
  absl::Status PullNow(absl::Time deadline = absl::Now() + absl::Seconds(50)) {
    std::string bytes;
    return group_.Pull(server_.get(), request_, deadline, &bytes).Wait().status();
  }
  absl::StatusOr<v1::PinResponse> Pin(int64_t version) {
    v1::PinRequest request;
    request.set_job("job");
    request.set_version(version);
    Answer<v1::PinResponse> answer;
    server_->Pin(request, absl::Now() + absl::Seconds(50), answer.reply());
    return answer.Wait();
  }
  absl::Status Unpin(int64_t version) {
    v1::UnpinRequest request;
    request.set_job("job");
    request.set_version(version);
    Answer<v1::UnpinResponse> answer;
    server_->Unpin(request, answer.reply());
    return answer.Wait().status();
  }

  TestServer server_{"s"};
  TrainerGroup group_{{server_.get()}, MakeSpec("job", SmallModel()), 2};
  v1::PullRequest request_;
};

TEST_F(JobPull, WaitsUntilTheVersionIsThere) {
  request_.set_version(1);
  std::string bytes;
  Answer<uint32_t> answer = group_.Pull(server_.get(), request_, absl::Now() + absl::Seconds(50), &bytes);
  EXPECT_FALSE(answer.arrived());
  EXPECT_EQ(server_->counters().waiting_requests, 1u);
  ASSERT_EQ(Step(), absl::OkStatus());
  EXPECT_TRUE(answer.Wait().ok());
  EXPECT_EQ(bytes.size(), 200u);
  EXPECT_EQ(server_->counters().waiting_requests, 0u);
}

// Does a step end while the only thread for answers to pulls waits for a client?
bool StepEndsBesideAPull() {
  TestServer server("s", {0, uint64_t{64} << 20, uint64_t{512} << 20});
  server.options().answer_threads = 1;
  server.Restart();
  v1::JobSpec spec = MakeSpec("job", SmallModel());
  spec.set_durability(v1::DURABILITY_STEP);
  TrainerGroup group({server.get()}, spec, 2);
  EXPECT_EQ(group.Start(), absl::OkStatus());
  EXPECT_EQ(group.Initialise(Ones), absl::OkStatus());
  v1::PullRequest request;
  request.set_job("job");
  request.set_content(v1::CONTENT_WORKING);
  request.set_begin(100);
  request.set_end(200);
  request.set_version(1);
  absl::Notification copying, let_go;
  bool let_go_in_time = false;
  std::string bytes(200, '\0');
  Answer<uint32_t> pulled;
  server->Pull(
      request, absl::Now() + absl::Seconds(60),
      [&](uint64_t, const AnswerRoom::Lease&) {
        copying.Notify();
        let_go_in_time = let_go.WaitForNotificationWithTimeout(absl::Seconds(30));
        return absl::MakeSpan(reinterpret_cast<std::byte*>(bytes.data()), bytes.size());
      },
      pulled.reply());
  const auto step = [&] {
    BALLAST_RETURN_IF_ERROR(group.PushAll(v1::SLICE_KIND_GRADIENT, AllTensors(4), Ones));
    return group.Finish(UpdateHeader(4)).status();
  };
  EXPECT_EQ(step(), absl::OkStatus());
  copying.WaitForNotification();  // the thread for pulls is busy from here on
  EXPECT_EQ(step(), absl::OkStatus());
  let_go.Notify();
  (void)pulled.Wait();  // or the version is gone
  server.End();
  return let_go_in_time;
}

// One thread copied for all: a client that was slow to take a pull's bytes, or a long queue of pulls, held up the next
// step's prepared answers.
TEST(JobPulls, DoNotHoldUpPreparedAnswers) {
  // A call that finds the job's lock taken for 5 ms, as on a busy machine, is answered where pulls are; then once more.
  bool ended = false;
  for (int attempt = 0; attempt < 4 && !ended; ++attempt) ended = StepEndsBesideAPull();
  EXPECT_TRUE(ended) << "the step ended only once the pull did";
}

TEST_F(JobPull, AnswersByItselfAtItsDeadline) {
  request_.set_version(5);
  const absl::Status status = PullNow(absl::Now() + absl::Milliseconds(50));
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(status.message(),
            "the deadline passed while chunk 0 of unit 0 was at version 0, asked for 5; is step 5 decided?");
}

TEST_F(JobPull, RefusesAVersionThatIsGone) {
  ASSERT_EQ(Step(), absl::OkStatus());
  request_.set_version(1);
  ASSERT_EQ(PullNow(), absl::OkStatus());
  request_.set_version(0);
  const absl::Status status = PullNow();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(model::ReasonOf(status), model::kVersionGone);
  EXPECT_NE(status.message().find("is past version 0 (at 1)"), absl::string_view::npos) << status;
}

TEST_F(JobPull, ReadsAPinnedVersionWhileStepsGoOn) {
  const auto before = group_.Read(2, v1::CONTENT_MASTER, 0);
  ASSERT_TRUE(before.ok()) << before.status();
  ASSERT_TRUE(Pin(0).ok());
  ASSERT_TRUE(Pin(0).ok()) << "a pin may be sent twice";
  ASSERT_EQ(Step(), absl::OkStatus());
  const auto pin = Pin(1);
  ASSERT_TRUE(pin.ok()) << pin.status();
  EXPECT_EQ(pin->tensor_steps(2), 1u);
  ASSERT_EQ(Step(), absl::OkStatus());
  EXPECT_EQ(group_.Read(2, v1::CONTENT_MASTER, 0).value(), *before);
  EXPECT_NE(group_.Read(2, v1::CONTENT_MASTER, 1).value(), *before);
  EXPECT_TRUE(group_.Read(2, v1::CONTENT_WORKING, 0).ok());
  EXPECT_EQ(model::ReasonOf(Pin(1).status()), "") << "still pinned";
  ASSERT_EQ(Unpin(0), absl::OkStatus());
  ASSERT_EQ(Unpin(0), absl::OkStatus());
  EXPECT_EQ(model::ReasonOf(group_.Read(2, v1::CONTENT_MASTER, 0).status()), model::kVersionGone);
  EXPECT_EQ(model::ReasonOf(Pin(0).status()), model::kVersionGone);
  EXPECT_EQ(model::ReasonOf(Pin(9).status()), model::kBehind);
}

TEST_F(JobPull, RefusesAVersionBeforeTheChunkWasRegistered) {
  ASSERT_TRUE(Pin(0).ok());
  ASSERT_EQ(Step(), absl::OkStatus());
  Append({{"head", "u2", 1000, 0}}, 1, &group_.spec());
  TrainerGroup next({server_.get()}, group_.spec(), 2, 2);
  ASSERT_EQ(next.Start(), absl::OkStatus());
  EXPECT_EQ(next.Read(4, v1::CONTENT_WORKING, 1).status(), absl::OkStatus());
  for (const v1::Content content : {v1::CONTENT_WORKING, v1::CONTENT_MASTER}) {
    const absl::Status status = next.Read(4, content, 0).status();
    EXPECT_EQ(model::ReasonOf(status), model::kVersionGone);
    EXPECT_NE(status.message().find("was registered at version 1 and has no version 0"), absl::string_view::npos)
        << status;
    EXPECT_EQ(next.Read(0, content, 0).status(), absl::OkStatus()) << "what there was then is pinned";
  }
}

TEST_F(JobPull, RefusesWhatIsNoPartOfOneChunk) {
  const auto expect = [&](absl::StatusCode code, const char* reason, const char* text) {
    const absl::Status status = PullNow();
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_EQ(model::ReasonOf(status), reason) << status;
    EXPECT_NE(status.message().find(text), absl::string_view::npos) << status;
  };
  request_.set_unit(9);
  expect(absl::StatusCode::kNotFound, model::kUnknownUnit, "9");
  request_.set_unit(0);
  request_.set_end(1'000'000);
  expect(absl::StatusCode::kInvalidArgument, model::kBadRange, "1000000");
  request_.set_begin(65'000);
  request_.set_end(66'000);
  expect(absl::StatusCode::kInvalidArgument, model::kBadRange, "must lie in one chunk");
  request_.set_end(65'000);
  expect(absl::StatusCode::kInvalidArgument, model::kBadRange, "65000");
  request_.set_end(65'100);
  request_.set_content(v1::CONTENT_UNSPECIFIED);
  expect(absl::StatusCode::kInvalidArgument, model::kBadRequest, "content");
  request_.set_content(v1::CONTENT_WORKING);
  request_.set_version(-1);
  expect(absl::StatusCode::kInvalidArgument, model::kBadRequest, "count from 0");
}

// Answers of 200 bytes, of which two have room and are not sent yet.
class JobPullRoom : public JobPull {
 protected:
  JobPullRoom() {
    server_.options().answer_bytes_max = 800;
    server_.Restart();
    group_.set_server(0, server_.get());
  }
  void SetUp() override {
    JobPull::SetUp();
    ASSERT_EQ(PullNow(), absl::OkStatus());
    for (int i = 0; i < 2; ++i) ASSERT_EQ(Pull(absl::InfiniteFuture()).Wait().status(), absl::OkStatus());
    ASSERT_EQ(unsent_.size(), 2u);
  }
  Answer<uint32_t> Pull(absl::Time deadline) {
    Answer<uint32_t> answer;
    server_->Pull(
        request_, deadline,
        [this](uint64_t bytes, AnswerRoom::Lease room) {
          unsent_.push_back(std::move(room));
          bytes_.emplace_back(bytes);
          return absl::MakeSpan(bytes_.back());
        },
        answer.reply());
    return answer;
  }
  // An answer has been sent.
  void Send() {
    const AnswerRoom::Lease sent = std::move(unsent_.front());
    unsent_.erase(unsent_.begin());  // before others can get the room
  }
  std::vector<AnswerRoom::Lease> unsent_;
  std::deque<std::vector<std::byte>> bytes_;
};

TEST_F(JobPullRoom, WaitsUntilThereIsRoomForTheAnswer) {
  Answer<uint32_t> third = Pull(absl::InfiniteFuture());
  EXPECT_FALSE(third.arrived()) << third.Wait().status();
  EXPECT_EQ(server_->counters().waiting_requests, 1u);
  Send();
  EXPECT_EQ(third.Wait().status(), absl::OkStatus());
  EXPECT_EQ(server_->counters().waiting_requests, 0u);
}

TEST_F(JobPullRoom, AnswersByItselfAtItsDeadlineAndLetsTheNextGo) {
  Answer<uint32_t> third = Pull(absl::Now() + absl::Milliseconds(20));
  const absl::Status status = third.Wait().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  EXPECT_NE(status.message().find("the answer of 200 bytes waited for room"), absl::string_view::npos) << status;
  Answer<uint32_t> fourth = Pull(absl::InfiniteFuture());
  Send();
  EXPECT_EQ(fourth.Wait().status(), absl::OkStatus());
}

TEST_F(JobPullRoom, RefusesAVersionThatWentWhileThePullWaited) {
  Answer<uint32_t> third = Pull(absl::InfiniteFuture());
  ASSERT_EQ(Step(), absl::OkStatus());
  Answer<v1::CommitResponse> applied;
  server_->AwaitApplied("job", 1, std::nullopt, absl::InfiniteFuture(), applied.reply());
  ASSERT_EQ(applied.Wait().status(), absl::OkStatus());
  request_.set_version(1);
  Answer<uint32_t> fourth = Pull(absl::InfiniteFuture());
  EXPECT_FALSE(fourth.arrived());
  Send();
  EXPECT_EQ(model::ReasonOf(third.Wait().status()), model::kVersionGone);
  EXPECT_EQ(fourth.Wait().status(), absl::OkStatus()) << "the room went on to the next";
}

TEST_F(JobPullRoom, APullThatWaitsIsRefusedWhenTheServerStops) {
  Answer<uint32_t> third = Pull(absl::InfiniteFuture());
  server_->Stop();
  EXPECT_EQ(model::ReasonOf(third.Wait().status()), model::kServerDown);
  unsent_.clear();
}

TEST(JobPin, YieldsWhenThereIsNoSpaceForItsCopy) {
  // Room for the job and for a part of a copy.
  TestServer server("s", {0, uint64_t{4'300'000}, 0});
  TrainerGroup group({server.get()}, MakeSpec("job", SmallModel()), 1);
  ASSERT_EQ(group.Start(), absl::OkStatus());
  ASSERT_EQ(group.Initialise(Ones), absl::OkStatus());
  v1::PinRequest pin;
  pin.set_job("job");
  Answer<v1::PinResponse> pinned;
  server->Pin(pin, absl::InfiniteFuture(), pinned.reply());
  ASSERT_TRUE(pinned.Wait().ok());
  for (int64_t step = 1; step <= 2; ++step) {
    ASSERT_EQ(group.PushAll(v1::SLICE_KIND_GRADIENT, AllTensors(4), Ones), absl::OkStatus());
    ASSERT_EQ(group.Finish(UpdateHeader(4)).status(), absl::OkStatus());
    ASSERT_EQ(group.Read(2, v1::CONTENT_MASTER, step).status(), absl::OkStatus());
  }
  const absl::Status gone = group.Read(2, v1::CONTENT_MASTER, 0).status();
  EXPECT_EQ(model::ReasonOf(gone), model::kVersionGone);
  EXPECT_NE(gone.message().find("was given up so that training could go on"), absl::string_view::npos) << gone;
}

TEST(JobPullBound, WaitersBeyondTheBoundAreSentAway) {
  TestServer server("s");
  server.options().waiting_requests_max = 4;  // half of it for a job alone
  server.Restart();
  TrainerGroup group({server.get()}, MakeSpec("job", SmallModel()), 1);
  ASSERT_EQ(group.Start(), absl::OkStatus());
  v1::PullRequest request;
  request.set_job("job");
  request.set_content(v1::CONTENT_WORKING);
  request.set_end(10);
  std::string bytes[3];
  Answer<uint32_t> first = group.Pull(server.get(), request, absl::InfiniteFuture(), &bytes[0]);
  Answer<uint32_t> second = group.Pull(server.get(), request, absl::InfiniteFuture(), &bytes[1]);
  const absl::Status third = group.Pull(server.get(), request, absl::InfiniteFuture(), &bytes[2]).Wait().status();
  EXPECT_EQ(model::ReasonOf(third), model::kBusy);
  EXPECT_NE(third.message().find("already 2 requests of "), absl::string_view::npos) << third;
  EXPECT_FALSE(first.arrived());
  server->Stop();
  EXPECT_EQ(model::ReasonOf(first.Wait().status()), model::kServerDown);
  EXPECT_EQ(model::ReasonOf(second.Wait().status()), model::kServerDown);
}

}  // namespace
}  // namespace ballast::services
