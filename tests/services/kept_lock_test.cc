// A job whose lock somebody keeps: no call stands at it, so the threads that all jobs share stay free.
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
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
  // A fence keeps the lock of `job` until the machine opens.
  void KeepLock(const std::string& job = "job") {
    machine.Shut();
    fence.set_job(job);
    fence.mutable_epoch()->set_counter(9);
    fence.set_protocol_version(model::kProtocolVersion);
    keeper = std::thread([this] { server->Fence(fence, patience, fenced.reply()); });
    machine.AwaitTask();  // under the job's lock
  }

  Answer<v1::FenceResponse> FenceNew(const std::string& job) {
    v1::FenceRequest request;
    request.set_job(job);
    request.mutable_epoch()->set_counter(1);
    request.set_protocol_version(model::kProtocolVersion);
    Answer<v1::FenceResponse> answer;
    server->Fence(request, patience, answer.reply());
    return answer;
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

// Pins, whole chunks for other servers, and what operators ask.
TEST_F(KeptLock, KeepsNoCallOfReadersAndOperators) {
  KeepLock();

  v1::PinRequest read_pin;
  read_pin.set_job("job");
  read_pin.set_holder(7);
  read_pin.set_lease_ms(60'000);
  v1::PinRequest durable_pin;
  durable_pin.set_job("job");
  durable_pin.set_durable(true);
  *durable_pin.mutable_epoch() = group->epoch();
  v1::UnpinRequest read_unpin;
  read_unpin.set_job("job");
  read_unpin.set_version(5);  // nobody pinned it
  read_unpin.set_holder(8);
  v1::UnpinRequest durable_unpin = read_unpin;
  durable_unpin.set_durable(true);
  *durable_unpin.mutable_epoch() = group->epoch();
  v1::ExportRequest want;
  want.set_job("job");
  want.set_life(1);
  v1::DropJobRequest drop;
  drop.set_job("job");
  *drop.mutable_epoch() = group->epoch();  // before the fence's
  v1::SetBudgetRequest budget;
  budget.set_dram_bytes(uint64_t{65} << 20);
  Answer<v1::PinResponse> read_pinned, durably_pinned;
  Answer<v1::UnpinResponse> read_unpinned, durably_unpinned;
  Answer<ExportedChunk> exported;
  Answer<v1::GetStepsResponse> steps;
  Answer<v1::DropJobResponse> dropped;
  Answer<v1::SetBudgetResponse> set;
  absl::Notification all_back;
  std::thread caller([&] {
    server->Pin(read_pin, patience, read_pinned.reply());
    server->Pin(durable_pin, patience, durably_pinned.reply());
    server->Unpin(read_unpin, read_unpinned.reply());
    server->Unpin(durable_unpin, durably_unpinned.reply());
    server->Export(want, patience, exported.reply());
    server->GetSteps(v1::GetStepsRequest(), steps.reply());
    server->DropJob(drop, dropped.reply(), patience);
    server->SetBudget(budget, set.reply(), patience);
    all_back.Notify();
  });
  const bool back = all_back.WaitForNotificationWithTimeout(absl::Minutes(1));
  EXPECT_TRUE(back) << "a call stood at the lock of its job";
  if (back) {
    EXPECT_TRUE(steps.arrived()) << "what is counted needs no lock of a job";
    EXPECT_FALSE(read_pinned.arrived() || durably_pinned.arrived() || read_unpinned.arrived() ||
                 durably_unpinned.arrived() || exported.arrived() || dropped.arrived() || set.arrived());
  }
  machine.Open();
  keeper.join();
  caller.join();
  EXPECT_EQ(fenced.Wait().status(), absl::OkStatus());
  EXPECT_EQ(read_pinned.Wait().status(), absl::OkStatus());
  EXPECT_EQ(model::ReasonOf(durably_pinned.Wait().status()), model::kStaleEpoch);
  EXPECT_EQ(read_unpinned.Wait().status(), absl::OkStatus());
  EXPECT_EQ(model::ReasonOf(durably_unpinned.Wait().status()), model::kStaleEpoch);
  EXPECT_EQ(model::ReasonOf(exported.Wait().status()), model::kUnknownJob);
  EXPECT_EQ(steps.Wait()->jobs_size(), 1);
  EXPECT_EQ(model::ReasonOf(dropped.Wait().status()), model::kStaleEpoch);
  EXPECT_EQ(set.Wait().status(), absl::OkStatus());
}

// One thread forgets jobs that were never opened, for all jobs: it waits for no job's lock either.
TEST_F(KeptLock, KeepsNoOtherJobFromBeingMade) {
  KeepLock();
  for (int i = 0; i < 255; ++i) {
    ASSERT_EQ(FenceNew(absl::StrCat("fenced", i)).Wait().status(), absl::OkStatus()) << i;
  }
  // All places are taken: the oldest job that was never opened yields.
  Answer<v1::FenceResponse> more = FenceNew("more");
  EXPECT_EQ(more.Wait().status(), absl::OkStatus());
  machine.Open();
  keeper.join();
  EXPECT_EQ(fenced.Wait().status(), absl::OkStatus());
  v1::GetJobRequest oldest;
  oldest.set_job("fenced0");
  Answer<v1::GetJobResponse> got;
  server->GetJob(oldest, got.reply());
  EXPECT_FALSE(got.Wait()->exists());
}

// That one job may be forgotten is not known while its lock is kept; which jobs were opened, the catalog knows.
TEST_F(KeptLock, AFullServerIsBusyWhileTheOneJobThatMayYieldIsLocked) {
  for (int i = 0; i < 254; ++i) {
    TrainerGroup opened({server.get()}, MakeSpec(absl::StrCat("opened", i), {{"small", "u", 256, 0}}), 1);
    ASSERT_EQ(opened.Start(), absl::OkStatus()) << i;
  }
  ASSERT_EQ(FenceNew("fenced").Wait().status(), absl::OkStatus());
  AwaitIdle(server.get(), "job");
  KeepLock("fenced");
  Answer<v1::FenceResponse> more = FenceNew("more");
  EXPECT_EQ(model::ReasonOf(more.Wait().status()), model::kBusy) << more.Wait().status();
  EXPECT_TRUE(absl::IsUnavailable(more.Wait().status()));
  machine.Open();
  keeper.join();
  EXPECT_EQ(fenced.Wait().status(), absl::OkStatus());
  EXPECT_EQ(FenceNew("more").Wait().status(), absl::OkStatus());
}

TEST_F(KeptLock, KeepsNoRefusalOfAnOpen) {
  ASSERT_EQ(FenceNew("fenced").Wait().status(), absl::OkStatus());
  AwaitIdle(server.get(), "job");
  // The job is still free as its Open is refused, and is to be forgotten; it is not, as a thread begins to do so.
  ShutExecutors::Gate forgetting;
  machine.Shut(&forgetting);
  v1::OpenRequest open = group->open_request(-1, std::nullopt);
  open.mutable_spec()->set_name("fenced");
  open.mutable_epoch()->set_counter(1);
  open.mutable_epoch()->set_nonce(0);
  Answer<v1::OpenResponse> refused;
  std::thread refuser([&] {
    server->RefuseOpen(open, model::Error(absl::StatusCode::kResourceExhausted, model::kQuota, "no"), refused.reply());
  });
  const bool there = forgetting.there.WaitForNotificationWithTimeout(absl::Minutes(1));
  EXPECT_TRUE(there) << "nobody was to forget the job";
  KeepLock("fenced");
  forgetting.open.Notify();
  EXPECT_EQ(model::ReasonOf(refused.Wait().status()), model::kQuota);
  machine.Open();
  keeper.join();
  refuser.join();
  EXPECT_EQ(fenced.Wait().status(), absl::OkStatus());
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
