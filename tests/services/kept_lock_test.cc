// A job whose lock somebody keeps: no call stands at it, so the threads that all jobs share stay free.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/protocol.h"
#include "ballast/services/counters/counters.h"
#include "ballast/tests/services/shut_executors.h"
#include "ballast/tests/services/trainer_group.h"

namespace ballast::services {
namespace {

class KeptLock : public ::testing::Test {
 protected:
  KeptLock() {
    server.options().foundation = &machine;
    server.options().waiting_requests_max = 64;
    server.Restart();
    group = std::make_unique<TrainerGroup>(std::vector<StateServer*>{server.get()}, MakeSpec("job", SmallModel()), 1);
    EXPECT_EQ(group->Start(), absl::OkStatus());
    EXPECT_EQ(group->Initialise(Ones), absl::OkStatus());
    AwaitIdle(server.get(), "job");  // the next task that is posted is the fence's
  }
  // A fence keeps the job's lock until the machine opens.
  void KeepLock() {
    machine.Shut();
    fence.set_job("job");
    fence.mutable_epoch()->set_counter(9);
    fence.set_protocol_version(model::kProtocolVersion);
    keeper = std::thread([this] { server->Fence(fence, patience, fenced.reply()); });
    machine.AwaitTask();  // under the job's lock
  }

  const absl::Time patience = absl::Now() + absl::Minutes(1);
  ShutExecutors machine;
  TestServer server{"s"};
  std::unique_ptr<TrainerGroup> group;
  v1::FenceRequest fence;
  Answer<v1::FenceResponse> fenced;
  std::thread keeper;
};

TEST_F(KeptLock, KeepsNoCall) {
  KeepLock();

  v1::GetJobRequest get_job;
  get_job.set_job("job");
  v1::NormRequest norm;
  norm.set_job("job");
  v1::CommitRequest commit;
  commit.set_job("job");
  commit.mutable_decision()->set_step(-1);  // decided long ago
  v1::PullRequest pull;
  pull.set_job("job");
  pull.set_content(v1::CONTENT_WORKING);
  pull.set_end(10);
  Answer<v1::GetJobResponse> got;
  Answer<v1::NormResponse> normed;
  Answer<v1::CommitResponse> committed;
  Answer<v1::SealResponse> sealed;
  Answer<v1::PushResponse> pushed;
  Answer<uint32_t> pulled;
  Answer<v1::GetServerStatusResponse> looked;
  // An Open that is refused asks whether its job should be forgotten.
  v1::OpenRequest open = group->open_request(-1, std::nullopt);
  open.set_spec_digest("another");
  Answer<v1::OpenResponse> opened, refused;
  std::string to;
  absl::Notification all_back;
  std::thread caller([&] {
    server->GetJob(get_job, got.reply());
    server->Norm(norm, normed.reply());
    server->Commit(commit, committed.reply());
    server->Seal(group->SealOf(0, UpdateHeader(4), 0), patience, sealed.reply());
    pushed = group->BeginPushSlice(0, v1::SLICE_KIND_GRADIENT, Ones);
    pulled = group->Pull(server.get(), pull, patience, &to);
    server->GetServerStatus(looked.reply());
    server->Open(open, patience, opened.reply());
    server->RefuseOpen(open, model::Error(absl::StatusCode::kResourceExhausted, model::kQuota, "no"), refused.reply());
    all_back.Notify();
  });
  const bool back = all_back.WaitForNotificationWithTimeout(absl::Minutes(1));
  EXPECT_TRUE(back) << "a call stood at the lock of its job";
  if (back) {
    EXPECT_FALSE(got.arrived() || normed.arrived() || sealed.arrived() || pushed.arrived() || pulled.arrived() ||
                 looked.arrived());
  }
  machine.Open();
  keeper.join();
  caller.join();
  EXPECT_EQ(fenced.Wait().status(), absl::OkStatus());
  EXPECT_EQ(got.Wait().status(), absl::OkStatus());
  EXPECT_EQ(model::ReasonOf(normed.Wait().status()), model::kStaleEpoch);
  EXPECT_EQ(committed.Wait().status(), absl::OkStatus());
  EXPECT_EQ(model::ReasonOf(sealed.Wait().status()), model::kStaleEpoch);
  EXPECT_EQ(model::ReasonOf(pushed.Wait().status()), model::kStaleEpoch);
  EXPECT_EQ(pulled.Wait().status(), absl::OkStatus());
  EXPECT_EQ(looked.Wait().status(), absl::OkStatus());
  EXPECT_FALSE(opened.Wait().ok());
  EXPECT_EQ(model::ReasonOf(refused.Wait().status()), model::kQuota);
}

// Of the bound a job alone may hold half: of each kind of call, those that come later are told at once.
TEST_F(KeptLock, CallsThatItKeepsAreBounded) {
  constexpr int kHalf = 32;
  KeepLock();
  v1::GetJobRequest get_job;
  get_job.set_job("job");
  std::vector<Answer<v1::GetJobResponse>> got(kHalf);
  const auto waiting = [&] { return server->counters().waiting_requests.load(); };
  server->GetJob(get_job, got[0].reply());
  // The job's thread takes it and stands at the lock; the fence waits.
  for (const absl::Time end = absl::Now() + absl::Minutes(1); waiting() != 1 && absl::Now() < end;) {
    absl::SleepFor(absl::Milliseconds(1));
  }
  EXPECT_EQ(waiting(), 1u);
  for (int i = 1; i < kHalf; ++i) server->GetJob(get_job, got[i].reply());
  EXPECT_EQ(waiting(), static_cast<uint64_t>(kHalf));
  v1::NormRequest norm;
  norm.set_job("job");
  v1::PullRequest pull;
  pull.set_job("job");
  pull.set_content(v1::CONTENT_WORKING);
  pull.set_end(10);
  Answer<v1::NormResponse> normed;
  Answer<v1::SealResponse> sealed;
  std::string to;
  server->Norm(norm, normed.reply());
  server->Seal(group->SealOf(0, UpdateHeader(4), 0), patience, sealed.reply());
  Answer<v1::PushResponse> pushed = group->BeginPushSlice(0, v1::SLICE_KIND_GRADIENT, Ones);
  Answer<uint32_t> pulled = group->Pull(server.get(), pull, patience, &to);
  EXPECT_EQ(model::ReasonOf(normed.Wait().status()), model::kBusy);
  EXPECT_EQ(model::ReasonOf(sealed.Wait().status()), model::kBusy);
  EXPECT_EQ(model::ReasonOf(pushed.Wait().status()), model::kBusy);
  EXPECT_EQ(model::ReasonOf(pulled.Wait().status()), model::kBusy);
  machine.Open();
  keeper.join();
  EXPECT_EQ(fenced.Wait().status(), absl::OkStatus());
  for (Answer<v1::GetJobResponse>& answer : got) EXPECT_EQ(answer.Wait().status(), absl::OkStatus());
  EXPECT_EQ(server->counters().waiting_requests, 0u);
}

}  // namespace
}  // namespace ballast::services
