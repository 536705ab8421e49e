// A job whose lock somebody keeps: no call stands at it, so the threads that all jobs share stay free.
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <thread>
#include <utility>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "ballast/proto/model/protocol.h"
#include "ballast/proto/model/status.h"
#include "ballast/tests/services/machine_with_disk.h"
#include "ballast/tests/services/trainer_group.h"

namespace ballast::services {
namespace {

// Its executors take no task while the gate is shut. A job posts a promise under its lock.
class ShutExecutors : public ThisMachine {
 public:
  std::unique_ptr<Executor> MakeExecutor(int threads) override {
    return std::make_unique<Gated>(this, ThisMachine::MakeExecutor(threads));
  }
  // The next task that is posted waits.
  void Shut() { shut_ = true; }
  void AwaitTask() { there_.WaitForNotification(); }
  void Open() { open_.Notify(); }

 private:
  class Gated : public Executor {
   public:
    Gated(ShutExecutors* machine, std::unique_ptr<Executor> executor)
        : machine_(machine), executor_(std::move(executor)) {}
    void Join() override { executor_->Join(); }
    void Post(std::function<void()> work) override {
      if (machine_->shut_.exchange(false)) {
        machine_->there_.Notify();
        machine_->open_.WaitForNotification();
      }
      executor_->Post(std::move(work));
    }

   private:
    ShutExecutors* const machine_;
    const std::unique_ptr<Executor> executor_;
  };
  std::atomic<bool> shut_ = false;
  absl::Notification there_, open_;
};

TEST(KeptLock, KeepsNoCall) {
  ShutExecutors machine;
  TestServer server("s");
  server.options().foundation = &machine;
  server.Restart();
  TrainerGroup group({server.get()}, MakeSpec("job", SmallModel()), 1);
  ASSERT_EQ(group.Start(), absl::OkStatus());
  ASSERT_EQ(group.Initialise(Ones), absl::OkStatus());
  const absl::Time patience = absl::Now() + absl::Minutes(1);

  machine.Shut();
  v1::FenceRequest fence;
  fence.set_job("job");
  fence.mutable_epoch()->set_counter(9);
  fence.set_protocol_version(model::kProtocolVersion);
  Answer<v1::FenceResponse> fenced;
  std::thread keeper([&] { server->Fence(fence, patience, fenced.reply()); });
  machine.AwaitTask();  // under the job's lock

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
  v1::OpenRequest open = group.open_request(-1, std::nullopt);
  open.set_spec_digest("another");
  Answer<v1::OpenResponse> opened, refused;
  std::string to;
  absl::Notification all_back;
  std::thread caller([&] {
    server->GetJob(get_job, got.reply());
    server->Norm(norm, normed.reply());
    server->Commit(commit, committed.reply());
    server->Seal(group.SealOf(0, UpdateHeader(4), 0), patience, sealed.reply());
    pushed = group.BeginPushSlice(0, v1::SLICE_KIND_GRADIENT, Ones);
    pulled = group.Pull(server.get(), pull, patience, &to);
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

}  // namespace
}  // namespace ballast::services
