#include <gtest/gtest.h>

#include "absl/strings/escaping.h"
#include "absl/synchronization/notification.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/step_header.h"
#include "ballast/services/counters/counters.h"
#include "ballast/services/counters/job_counters.h"
#include "ballast/tests/services/trainer_group.h"

namespace ballast::services {
namespace {

class JobSeal : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(group_.Start(), absl::OkStatus());
    ASSERT_EQ(group_.Initialise(Ones), absl::OkStatus());
    AwaitIdle(server_.get(), "job");
  }
  Answer<v1::SealResponse> Seal(uint32_t rank, uint32_t wait_ms,
                                absl::Time deadline = absl::Now() + absl::Seconds(55)) {
    Answer<v1::SealResponse> answer;
    server_->Seal(group_.SealOf(rank, UpdateHeader(4), wait_ms), deadline, answer.reply());
    return answer;
  }

  TestServer server_{"s"};
  TrainerGroup group_{{server_.get()}, MakeSpec("job", SmallModel()), 2};
};

TEST_F(JobSeal, IsHeldUntilTheLastSliceAndTheLastRank) {
  Answer<v1::SealResponse> first = Seal(0, 50'000);
  EXPECT_FALSE(first.arrived());
  ASSERT_EQ(group_.PushAll(v1::SLICE_KIND_GRADIENT, AllTensors(4), Ones), absl::OkStatus());
  EXPECT_FALSE(first.arrived());
  // Nothing of step 1 waits for a disk, so the last seal needs no patience.
  Answer<v1::SealResponse> second = Seal(1, 0);
  ASSERT_TRUE(first.Wait().ok());
  EXPECT_TRUE(first.Wait()->has_prepared());
  // It is asked before the sync is reported, though: it may have to be sent once more.
  ASSERT_TRUE(second.Wait().ok());
  const auto again = Seal(0, 0).Wait();
  ASSERT_TRUE(again.ok()) << again.status();
  ASSERT_TRUE(again->has_prepared());
  EXPECT_EQ(again->prepared().SerializeAsString(), first.Wait()->prepared().SerializeAsString());
  EXPECT_FALSE(second.Wait()->has_pending() && second.Wait()->pending().unsealed_ranks_size() > 0);
}

TEST_F(JobSeal, SaysWhatIsMissingWhenItsPatienceEnds) {
  ASSERT_EQ(group_.PushSlice(0, v1::SLICE_KIND_GRADIENT, Ones), absl::OkStatus());
  const auto response = Seal(0, 30).Wait();
  ASSERT_TRUE(response.ok()) << response.status();
  ASSERT_TRUE(response->has_pending());
  EXPECT_EQ(response->pending().unsealed_ranks_size(), 1);
  EXPECT_EQ(response->pending().unsealed_ranks(0), 1u);
  EXPECT_EQ(response->pending().missing_count(), group_.plan().slices().size() - 1);
}

TEST_F(JobSeal, StatusTellsHowFarTheStepIs) {
  const auto in_flight = [&] { return server_->Status().jobs(0).in_flight(); };
  v1::StepInFlight step = in_flight();
  EXPECT_EQ(step.step(), 1);
  EXPECT_FALSE(step.has_seconds_since_first_slice() || step.has_seconds_since_first_seal());
  ASSERT_EQ(group_.PushSlice(0, v1::SLICE_KIND_GRADIENT, Ones), absl::OkStatus());
  step = in_flight();
  EXPECT_TRUE(step.has_seconds_since_first_slice());
  EXPECT_FALSE(step.has_seconds_since_first_seal());
  EXPECT_EQ(step.unsealed_count(), 2u);
  ASSERT_TRUE(Seal(0, 0).Wait().ok());
  absl::SleepFor(absl::Milliseconds(20));
  step = in_flight();
  EXPECT_GE(step.seconds_since_first_seal(), 0.01);
  EXPECT_FALSE(step.has_seconds_since_complete() || step.has_seconds_since_prepared());
  ASSERT_EQ(step.unsealed_ranks_size(), 1);
  EXPECT_EQ(step.unsealed_ranks(0), 1u);
  EXPECT_EQ(step.unsealed_count(), 1u);
  ASSERT_EQ(group_.PushAll(v1::SLICE_KIND_GRADIENT, AllTensors(4), Ones), absl::OkStatus());
  const auto last = Seal(1, 50'000).Wait();
  ASSERT_TRUE(last.ok()) << last.status();
  ASSERT_TRUE(last->has_prepared());
  step = in_flight();
  EXPECT_FALSE(step.has_seconds_since_complete()) << "there is no log to wait for";
  EXPECT_TRUE(step.has_seconds_since_prepared());
  EXPECT_EQ(step.unsealed_count(), 0u);
}

TEST_F(JobSeal, StatusForgetsTheStepOfAnEarlierGroup) {
  ASSERT_EQ(group_.PushSlice(0, v1::SLICE_KIND_GRADIENT, Ones), absl::OkStatus());
  ASSERT_TRUE(Seal(0, 0).Wait().ok());
  TrainerGroup next({server_.get()}, MakeSpec("job", SmallModel()), 3, 2);
  ASSERT_EQ(next.Start(), absl::OkStatus());
  const v1::StepInFlight step = server_->Status().jobs(0).in_flight();
  EXPECT_EQ(step.step(), 1);
  EXPECT_FALSE(step.has_seconds_since_first_slice() || step.has_seconds_since_first_seal());
}

TEST_F(JobSeal, HonoursItsDeadline) {
  const auto response = Seal(0, 50'000, absl::Now() + absl::Milliseconds(30)).Wait();
  EXPECT_EQ(response.status().code(), absl::StatusCode::kDeadlineExceeded);
}

// The reply to a seal whose deadline passes blocks: deadlines of other requests pass all the same.
TEST(JobDeadlines, AreNotHeldUpByAReplyThatBlocks) {
  TestServer server("s");
  server.options().answer_threads = 2;  // as many replies may run at a time
  server.Restart();
  TrainerGroup group({server.get()}, MakeSpec("job", SmallModel()), 2);
  ASSERT_EQ(group.Start(), absl::OkStatus());
  ASSERT_EQ(group.Initialise(Ones), absl::OkStatus());
  absl::Notification replying, let_go;
  server->Seal(group.SealOf(0, UpdateHeader(4), 50'000), absl::Now() + absl::Milliseconds(30),
               [&](const absl::StatusOr<model::SealAnswer>&) {
                 replying.Notify();
                 let_go.WaitForNotification();
               });
  replying.WaitForNotification();
  Answer<v1::SealResponse> second;
  server->Seal(group.SealOf(1, UpdateHeader(4), 50'000), absl::Now() + absl::Milliseconds(30), second.reply());
  const absl::Status passed = second.Wait().status();
  EXPECT_EQ(model::ReasonOf(passed), model::kBusy) << passed;
  let_go.Notify();
  server.End();
}

TEST_F(JobSeal, IsVoidAfterAFence) {
  Answer<v1::SealResponse> held = Seal(0, 50'000);
  TrainerGroup next({server_.get()}, MakeSpec("job", SmallModel()), 2, 2);
  ASSERT_EQ(next.Start(), absl::OkStatus());
  EXPECT_EQ(model::ReasonOf(held.Wait().status()), model::kStaleEpoch);
}

// The worker waits for a lease, and no further step is taken: a seal that waits for that is told of the fence all the
// same.
TEST_F(JobSeal, IsVoidAfterAFenceAlsoWhenTheUpdateQueueIsFull) {
  v1::PullRequest read;
  read.set_job("job");
  read.set_content(v1::CONTENT_WORKING);
  read.set_end(8);
  Answer<model::LeasedBytes> leased;
  server_->Lease(read, absl::InfiniteFuture(), leased.reply());
  ASSERT_TRUE(leased.Wait().ok()) << leased.Wait().status();
  model::LeasedBytes lease = *leased.Wait();
  leased = {};
  ASSERT_EQ(group_.PushAll(v1::SLICE_KIND_GRADIENT, AllTensors(4), Ones), absl::OkStatus());
  ASSERT_TRUE(group_.Finish(UpdateHeader(4)).ok());
  v1::StepHeader nothing = UpdateHeader(4);
  nothing.set_gradient_presence(model::MakeBitmap(4, {}));
  for (int step = 1; step < kQueuedStepsMax; ++step) ASSERT_TRUE(group_.Finish(nothing).ok()) << step;
  const auto seal = [&](uint32_t wait_ms) {
    Answer<v1::SealResponse> answer;
    server_->Seal(group_.SealOf(0, nothing, wait_ms), absl::Now() + absl::Seconds(55), answer.reply());
    return answer;
  };
  EXPECT_EQ(model::ReasonOf(seal(0).Wait().status()), model::kBusy);
  Answer<v1::SealResponse> held = seal(50'000);
  EXPECT_FALSE(held.arrived());
  TrainerGroup next({server_.get()}, MakeSpec("job", SmallModel()), 2, 2);
  std::vector<v1::GetJobResponse> answers;
  ASSERT_EQ(next.Fence(&answers), absl::OkStatus());
  const absl::Status stale = held.Wait().status();
  EXPECT_EQ(model::ReasonOf(stale), model::kStaleEpoch) << stale;
  EXPECT_EQ(model::DetailsOf(stale).at(model::kGroup), absl::BytesToHexString("group 2"));
  lease = {};
}

TEST_F(JobSeal, IsRefusedForAllRanksWhenPlansDiffer) {
  Answer<v1::SealResponse> held = Seal(0, 50'000);
  v1::StepHeader other = UpdateHeader(4);
  other.set_max_norm(2);
  Answer<v1::SealResponse> differs;
  server_->Seal(group_.SealOf(1, other, 50'000), absl::Now() + absl::Seconds(55), differs.reply());
  EXPECT_EQ(model::ReasonOf(differs.Wait().status()), model::kPlanMismatch);
  EXPECT_EQ(model::ReasonOf(held.Wait().status()), model::kPlanMismatch);
}

TEST_F(JobSeal, HeldSealsAreCountedAsTheyAre) {
  Answer<v1::SealResponse> first = Seal(0, 50'000);
  const uint64_t key = server_->counters().waiting_request_bytes;
  v1::SealRequest request = group_.SealOf(0, UpdateHeader(4), 50'000);
  EXPECT_LT(key, request.ByteSizeLong() - request.header().ByteSizeLong()) << "header and blobs are the job's";
  // What a filed seal brings is not looked at, and not kept.
  request.set_blobs(0, std::string(1'000'000, 'b'));
  std::vector<Answer<v1::SealResponse>> held(68);
  for (auto& answer : held) server_->Seal(request, absl::Now() + absl::Seconds(55), answer.reply());
  EXPECT_EQ(server_->counters().waiting_requests, 69u);
  EXPECT_EQ(server_->counters().waiting_request_bytes, 69 * key);
  server_->Stop();
  EXPECT_EQ(model::ReasonOf(held[0].Wait().status()), model::kServerDown);
  EXPECT_EQ(server_->counters().waiting_request_bytes, 0u);
}

TEST_F(JobSeal, NormNeedsAllSlicesAndIgnoresAbsentTensors) {
  v1::NormRequest request;
  request.set_job("job");
  *request.mutable_epoch() = group_.epoch();
  request.set_step(1);
  request.set_gradient_presence(AllTensors(4));
  Answer<v1::NormResponse> early;
  server_->Norm(request, early.reply());
  EXPECT_EQ(model::ReasonOf(early.Wait().status()), model::kIncomplete);
  ASSERT_EQ(group_.PushAll(v1::SLICE_KIND_GRADIENT, AllTensors(4), Ones), absl::OkStatus());
  for (const auto& [tensors, expected] : std::vector<std::pair<std::vector<uint32_t>, double>>{
           {{0, 1, 2, 3}, 70000 + 100 + 140000 + 300}, {{1}, 100}, {{1, 2}, 100 + 140000}}) {
    request.set_gradient_presence(model::MakeBitmap(4, tensors));
    Answer<v1::NormResponse> answer;
    server_->Norm(request, answer.reply());
    const auto response = answer.Wait();
    ASSERT_TRUE(response.ok()) << response.status();
    double sum = 0;
    for (const v1::ChunkNorm& norm : response->norms()) sum += model::ChunkSquaredNorm(norm);
    EXPECT_EQ(sum, expected);
  }
}

}  // namespace
}  // namespace ballast::services
