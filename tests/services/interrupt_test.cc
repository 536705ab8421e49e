// Long work ends at its next piece when its job or server ends.
#include <atomic>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "ballast/proto/base/status.h"
#include "ballast/proto/model/verdict.h"
#include "ballast/tests/services/hung_disk.h"

namespace ballast::services {
namespace {

// Work that takes minutes on a large job ends at its next piece once the job is stopped or dropped, whose waiting
// requests are refused before.
class InterruptTest : public HungDiskTest {
 protected:
  enum class End { kStop, kDrop };

  std::string LogPath(const std::string& job) const { return server_.directory() + "/log-" + job; }
  std::string TierPath() const { return server_.directory() + "/nvme.tier"; }
  int writes(const std::string& path) const { return disk_.passed(path, GatedOperation::kWrite); }
  uint64_t NvmeUsed() { return server_->Status().tiers(2).used_bytes(); }
  // Ends the job, or the server, while an operation waits at the gate, and lets the operation go on. `waiting`: the
  // answer to a request that the end refuses before it waits for the job's threads.
  template <typename Response>
  void EndAndRelease(End end, TrainerGroup& group, Answer<Response>* waiting) {
    Answer<v1::DropJobResponse> dropped;
    std::thread stopping;
    if (end == End::kDrop) {
      server_->DropJob(DropOf(group), dropped.reply());
    } else {
      stopping = std::thread([this] { server_->Stop(); });
    }
    EXPECT_EQ(model::ReasonOf(waiting->Wait().status()), end == End::kDrop ? model::kUnknownJob : model::kServerDown);
    disk_.Release();
    if (end == End::kDrop) {
      EXPECT_EQ(dropped.Wait().status(), absl::OkStatus());
    } else {
      stopping.join();
    }
  }
};

TEST_F(InterruptTest, ALogIsWrittenNoFurther) {
  for (const End end : {End::kDrop, End::kStop}) {
    const std::string name = end == End::kDrop ? "dropped" : "stopped";
    const uint64_t before = NvmeUsed();
    disk_.Hold([&](const std::string& path, GatedOperation operation, uint64_t offset) {
      return path == LogPath(name) && operation == GatedOperation::kWrite && offset > 0;
    });
    TrainerGroup group({server_.get()}, Spec(name, v1::DURABILITY_STEP), 1);
    Answer<v1::OpenResponse> opened;
    ASSERT_NO_FATAL_FAILURE(OpenFirst(group, &opened));
    disk_.AwaitWaiting();
    EXPECT_GT(NvmeUsed(), before);
    EndAndRelease(end, group, &opened);
    EXPECT_EQ(writes(LogPath(name)), 2);
    EXPECT_FALSE(std::filesystem::exists(LogPath(name)));
    if (end == End::kDrop) {
      EXPECT_EQ(NvmeUsed(), before);
    }
    server_.Restart();
    EXPECT_EQ(NvmeUsed(), before);
    TrainerGroup again({server_.get()}, Spec(name, v1::DURABILITY_STEP), 1, 2);
    ASSERT_EQ(again.Start(), absl::OkStatus());
    EXPECT_EQ(again.Initialise(Ones), absl::OkStatus());
    EXPECT_GT(writes(LogPath(name)), 4);
    Answer<v1::DropJobResponse> dropped;
    server_->DropJob(DropOf(again), dropped.reply());
    ASSERT_EQ(dropped.Wait().status(), absl::OkStatus());
  }
}

// A large job, or one on a slow disk, kept all others from being served.
TEST_F(InterruptTest, JobsAreServedAsTheyComeBack) {
  for (const char* const name : {"a", "b"}) {
    TrainerGroup group({server_.get()}, Spec(name, v1::DURABILITY_STEP), 1);
    ASSERT_EQ(group.Start(), absl::OkStatus());
    ASSERT_EQ(group.Initialise(Ones), absl::OkStatus());
  }
  server_.End();
  server_.options().serve_while_recovering = true;
  disk_.Hold([&](const std::string& path, GatedOperation operation, uint64_t) {
    return path == LogPath("b") && operation == GatedOperation::kRead;
  });
  server_.Restart();
  disk_.AwaitWaiting();
  TrainerGroup a({server_.get()}, Spec("a", v1::DURABILITY_STEP), 1, 2);
  EXPECT_EQ(a.Start(), absl::OkStatus());
  EXPECT_EQ(a.step(), 1) << "it goes on where it was";
  const auto expect_busy = [](const absl::Status& status, const std::string& said) {
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
    EXPECT_EQ(model::ReasonOf(status), model::kBusy);
    EXPECT_NE(std::string(status.message()).find(said), std::string::npos) << status;
  };
  TrainerGroup b({server_.get()}, Spec("b", v1::DURABILITY_STEP), 1, 2);
  TrainerGroup fresh({server_.get()}, Spec("fresh", v1::DURABILITY_STEP), 1, 2);
  expect_busy(b.Start(), "job 'b' is not back yet on server");
  expect_busy(fresh.Start(), "new jobs wait");
  Answer<v1::DropJobResponse> dropped;
  server_->DropJob(DropOf(b), dropped.reply());
  expect_busy(dropped.Wait().status(), "job 'b' is not back yet");
  Answer<v1::SetBudgetResponse> budget;
  server_->SetBudget({}, budget.reply());
  expect_busy(budget.Wait().status(), "recovers its jobs");
  EXPECT_EQ(server_->Status().jobs_size(), 2);
  const auto dram_used = [this] {
    uint64_t used = 0;
    const v1::GetServerStatusResponse status = server_->Status();
    for (const v1::TierStatus& tier : status.tiers()) used += tier.tier() == "dram" ? tier.used_bytes() : 0;
    return used;
  };
  const uint64_t with_a = dram_used();
  Answer<v1::DropJobResponse> dropped_a;
  server_->DropJob(DropOf(a), dropped_a.reply());
  EXPECT_EQ(dropped_a.Wait().status(), absl::OkStatus());
  EXPECT_LT(dram_used(), with_a) << "its memory is free before 'b' is back";
  disk_.Release();
  EXPECT_EQ(server_->AwaitRecovered(), absl::OkStatus());
  EXPECT_EQ(b.Start(), absl::OkStatus());
  EXPECT_EQ(b.step(), 1);
  EXPECT_EQ(fresh.Start(), absl::OkStatus());
}

TEST_F(InterruptTest, AServerThatRecoversEnds) {
  {
    TrainerGroup group({server_.get()}, Spec("b", v1::DURABILITY_STEP), 1);
    ASSERT_EQ(group.Start(), absl::OkStatus());
    ASSERT_EQ(group.Initialise(Ones), absl::OkStatus());
  }
  server_.End();
  server_.options().serve_while_recovering = true;
  disk_.Hold([&](const std::string& path, GatedOperation operation, uint64_t) {
    return path == LogPath("b") && operation == GatedOperation::kRead;
  });
  server_.Restart();
  disk_.AwaitWaiting();
  std::thread stopping([this] { server_->Stop(); });
  TrainerGroup group({server_.get()}, Spec("b", v1::DURABILITY_STEP), 1, 2);
  absl::Status refused;
  while (model::ReasonOf(refused) != model::kServerDown) refused = group.Start();
  disk_.Release();
  stopping.join();
  EXPECT_EQ(model::ReasonOf(server_->AwaitRecovered()), model::kServerDown);
  server_.Restart();
  EXPECT_EQ(server_->AwaitRecovered(), absl::OkStatus());
  TrainerGroup next({server_.get()}, Spec("b", v1::DURABILITY_STEP), 1, 3);
  EXPECT_EQ(next.Start(), absl::OkStatus());
}

TEST_F(InterruptTest, APinIsWrittenNoFurther) {
  for (const End end : {End::kDrop, End::kStop}) {
    const std::string name = end == End::kDrop ? "dropped" : "stopped";
    const uint64_t before = NvmeUsed();
    TrainerGroup group({server_.get()}, Spec(name, v1::DURABILITY_STEP), 1);
    ASSERT_EQ(group.Start(), absl::OkStatus());
    ASSERT_EQ(group.Initialise(Ones), absl::OkStatus());
    ASSERT_EQ(group.Read(0, v1::CONTENT_WORKING, 0).status(), absl::OkStatus());
    AwaitIdle(server_.get(), name);  // it flushes nothing of the step any more
    const int chunks = static_cast<int>(group.plan().layout().chunks().size());
    ASSERT_GE(chunks, 3);
    const uint64_t open = NvmeUsed();
    const int written = writes(TierPath());
    HoldTier(GatedOperation::kWrite);
    v1::PinRequest pin;
    pin.set_job(name);
    pin.set_durable(true);
    *pin.mutable_epoch() = group.epoch();
    Answer<v1::PinResponse> pinned;
    server_->Pin(pin, absl::InfiniteFuture(), pinned.reply());
    disk_.AwaitWaiting();
    EndAndRelease(end, group, &pinned);
    EXPECT_EQ(writes(TierPath()), written + 1) << "of " << chunks << " chunks";
    if (end == End::kDrop) {
      EXPECT_EQ(NvmeUsed(), before);
      continue;
    }
    server_.Restart();
    EXPECT_EQ(NvmeUsed(), open);
    v1::GetJobRequest request;
    request.set_job(name);
    Answer<v1::GetJobResponse> job;
    server_->GetJob(request, job.reply());
    EXPECT_EQ(job.Wait()->durable_versions_size(), 0);
    TrainerGroup again({server_.get()}, Spec(name, v1::DURABILITY_STEP), 1, 2);
    ASSERT_EQ(again.Start(), absl::OkStatus());
    EXPECT_EQ(Step(again), absl::OkStatus());
    EXPECT_EQ(PinDurably(server_.get(), name, again.epoch(), again.step() - 1), absl::OkStatus());
  }
}

// The restore is decided, so the next life of the server finishes it.
TEST_F(InterruptTest, ARestoreIsReadNoFurther) {
  TrainerGroup first({server_.get()}, Spec("job", v1::DURABILITY_STEP), 1);
  ASSERT_EQ(first.Start(), absl::OkStatus());
  ASSERT_EQ(first.Initialise(Ones), absl::OkStatus());
  ASSERT_EQ(PinDurably(server_.get(), "job", first.epoch(), 0), absl::OkStatus());
  ASSERT_EQ(Step(first), absl::OkStatus());
  TrainerGroup group({server_.get()}, Spec("job", v1::DURABILITY_STEP), 1, 2);
  ASSERT_EQ(group.Start(), absl::OkStatus());
  v1::StepHeader restore;
  restore.set_kind(v1::STEP_KIND_RESTORE);
  restore.set_restored_version(0);
  restore.set_gradient_presence(std::string(1, 0));
  restore.set_value_presence(std::string(1, 0));
  const auto prepared = group.SealAll(restore);
  ASSERT_TRUE(prepared.ok()) << prepared.status();
  const absl::StatusOr<v1::Decision> decision = model::Decide(*prepared);
  ASSERT_TRUE(decision.ok()) << decision.status();
  const int read = disk_.passed(TierPath(), GatedOperation::kRead);
  HoldTier(GatedOperation::kRead);
  ASSERT_EQ(group.Commit(*decision), absl::OkStatus());
  v1::PullRequest pull;
  pull.set_job("job");
  pull.set_version(2);
  pull.set_content(v1::CONTENT_WORKING);
  pull.set_end(1);
  std::string bytes;
  Answer<uint32_t> pulled = group.Pull(server_.get(), pull, absl::InfiniteFuture(), &bytes);
  disk_.AwaitWaiting();
  EndAndRelease(End::kStop, group, &pulled);
  EXPECT_EQ(disk_.passed(TierPath(), GatedOperation::kRead), read + 1);
  server_.Restart();
  TrainerGroup again({server_.get()}, Spec("job", v1::DURABILITY_STEP), 1, 3);
  ASSERT_EQ(again.Start(), absl::OkStatus());
  ASSERT_EQ(again.step(), 3);
  for (uint32_t tensor = 0; tensor < Tensors(); ++tensor) {
    const auto values = again.Read(tensor, v1::CONTENT_MASTER, 2);
    ASSERT_TRUE(values.ok()) << values.status();
    for (const float value : *values) ASSERT_EQ(value, 1.0f);
  }
  EXPECT_EQ(Step(again), absl::OkStatus());
}

TEST_F(InterruptTest, ReadsThatWaitForAThreadReadNothing) {
  ASSERT_EQ(SetDram(server_.get(), 3 * kMiB), absl::OkStatus());
  TrainerGroup group({server_.get()}, Spec("job", v1::DURABILITY_STEP), 1);
  ASSERT_EQ(group.Start(), absl::OkStatus());
  ASSERT_EQ(group.Initialise(Ones), absl::OkStatus());
  ASSERT_EQ(group.Read(0, v1::CONTENT_WORKING, 0).status(), absl::OkStatus());
  ASSERT_EQ(PinDurably(server_.get(), "job", group.epoch(), 0), absl::OkStatus());  // the worker is idle
  ASSERT_GT(NvmeStateBytes(server_.get(), "job"), 0u);
  const int read = disk_.passed(TierPath(), GatedOperation::kRead);
  HoldTier(GatedOperation::kRead);
  StateReads reads;
  for (int i = 0; i < 4; ++i) reads.Ask(server_.get(), group, 0);
  disk_.AwaitWaiting();
  const v1::PullRequest pull = PullOf(group, group.plan().layout().chunks()[0], v1::CONTENT_MASTER, 1);
  std::string bytes;
  Answer<uint32_t> early = group.Pull(server_.get(), pull, absl::InfiniteFuture(), &bytes);
  EndAndRelease(End::kStop, group, &early);
  EXPECT_EQ(disk_.passed(TierPath(), GatedOperation::kRead), read + 1);
  int refused = 0;
  for (Answer<uint32_t>& answer : reads.answers)
    refused += model::ReasonOf(answer.Wait().status()) == model::kServerDown;
  EXPECT_GT(refused, 0);
}

// As by a signal that comes while the server starts.
TEST_F(InterruptTest, ARecoveryEndsAtItsNextPiece) {
  TrainerGroup group({server_.get()}, Spec("job", v1::DURABILITY_STEP), 1);
  ASSERT_EQ(group.Start(), absl::OkStatus());
  ASSERT_EQ(group.Initialise(Ones), absl::OkStatus());
  ASSERT_EQ(PinDurably(server_.get(), "job", group.epoch(), 0), absl::OkStatus());  // all chunks are on the disk
  ASSERT_EQ(Step(group), absl::OkStatus());
  server_.End();
  std::atomic<int> asked{0};
  StateServerOptions options = server_.options();
  const auto start = [&](int last) {
    asked = 0;
    options.interrupt = [&, last] {
      return ++asked <= last ? absl::OkStatus() : model::Error(absl::StatusCode::kUnavailable, model::kServerDown, "");
    };
    return StateServer::Start(options).status();
  };
  int last = 0;
  for (absl::Status status = start(last); !status.ok(); status = start(++last)) {
    ASSERT_EQ(model::ReasonOf(status), model::kServerDown) << last;
    EXPECT_LE(asked, last + 3) << "the work went on";
  }
  EXPECT_GT(last, static_cast<int>(group.plan().layout().chunks().size()));
  server_.Restart();
  TrainerGroup again({server_.get()}, Spec("job", v1::DURABILITY_STEP), 1, 2);
  ASSERT_EQ(again.Start(), absl::OkStatus());
  EXPECT_EQ(again.step(), 2);
  EXPECT_EQ(Step(again), absl::OkStatus());
}

}  // namespace
}  // namespace ballast::services
