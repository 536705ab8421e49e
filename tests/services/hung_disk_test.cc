// A disk that hangs under one job: other jobs go on with all they do, and the job itself does what needs no disk.
#include "ballast/tests/services/hung_disk.h"

#include <algorithm>
#include <atomic>
#include <deque>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/synchronization/blocking_counter.h"
#include "absl/synchronization/notification.h"
#include "ballast/proto/base/status.h"
#include "ballast/tests/storage/tier/test_hbm.h"

namespace ballast::services {
namespace {

TEST_F(HungDiskTest, AJobWhoseLogIsBeingWrittenDelaysNoOther) {
  TrainerGroup other({server_.get()}, Spec("other", v1::DURABILITY_NONE), 1);
  ASSERT_EQ(other.Start(), absl::OkStatus());
  ASSERT_EQ(other.Initialise(Ones), absl::OkStatus());
  HoldLog("slow");
  TrainerGroup slow({server_.get()}, Spec("slow", v1::DURABILITY_STEP), 1);
  Answer<v1::OpenResponse> opened;
  ASSERT_NO_FATAL_FAILURE(OpenFirst(slow, &opened));
  disk_.AwaitWaiting();
  ExpectGoesOn(other);
  // New budgets are planned with what the log takes.
  EXPECT_EQ(SetDram(server_.get(), 24 * kMiB), absl::OkStatus());
  EXPECT_FALSE(opened.arrived());
  disk_.Release();
  EXPECT_EQ(opened.Wait().status(), absl::OkStatus());
  EXPECT_EQ(slow.Open(-1, std::nullopt), absl::OkStatus()) << "a repeat";
  EXPECT_EQ(slow.Initialise(Ones), absl::OkStatus());
}

TEST_F(HungDiskTest, AReadThatHangsHoldsUpNoOtherJob) {
  TrainerGroup other({server_.get()}, Spec("other", v1::DURABILITY_NONE), 1);
  ASSERT_EQ(other.Start(), absl::OkStatus());
  ASSERT_EQ(other.Initialise(Ones), absl::OkStatus());
  ASSERT_EQ(SetDram(server_.get(), 13 * kMiB / 2), absl::OkStatus());
  TrainerGroup hung({server_.get()}, Spec("hung", v1::DURABILITY_NONE), 1);
  ASSERT_EQ(hung.Start(), absl::OkStatus());
  ASSERT_EQ(hung.Initialise(Ones), absl::OkStatus());
  ASSERT_EQ(Step(hung), absl::OkStatus());
  ASSERT_EQ(NvmeStateBytes(server_.get(), "other"), 0u);
  ASSERT_GT(NvmeStateBytes(server_.get(), "hung"), 0u);
  ASSERT_EQ(PinForReading(hung, hung.step() - 1), absl::OkStatus());  // the worker is idle
  HoldTier(GatedOperation::kRead);
  // Several, more than there are threads for reads.
  StateReads reads;
  for (int i = 0; i < 4; ++i) reads.Ask(server_.get(), hung, hung.step() - 1);
  disk_.AwaitWaiting();
  // A plan for more tensors, and new budgets, ask the store whose read hangs. With more memory `other` stays there.
  const absl::Status planned = DryRun(server_.get(), hung);
  EXPECT_TRUE(planned.ok() || absl::IsResourceExhausted(planned)) << planned;
  EXPECT_EQ(SetDram(server_.get(), 24 * kMiB), absl::OkStatus());
  ExpectGoesOn(other);
  disk_.Release();
  reads.ExpectOk();
}

// A client that has gone left a log; the next Open has no use for the log, and the log's last write hangs.
TEST_F(HungDiskTest, ALogThatAnOpenRemovesHoldsUpNoFence) {
  TrainerGroup gone({server_.get()}, Spec("job", v1::DURABILITY_STEP), 1, 1);
  std::vector<v1::GetJobResponse> jobs;
  ASSERT_EQ(gone.Fence(&jobs), absl::OkStatus());
  const auto caller = std::make_shared<Caller>();
  caller->Leave();
  Answer<v1::OpenResponse> refused, opened;
  server_->Open(gone.open_request(-1, std::nullopt), {absl::InfiniteFuture(), caller}, refused.reply());
  ASSERT_EQ(refused.Wait().status().code(), absl::StatusCode::kCancelled);
  while (server_->Status().jobs(0).log_capacity_bytes() == 0) absl::SleepFor(absl::Milliseconds(1));
  HoldLog("job");
  v1::FenceRequest fence;
  fence.set_job("job");
  fence.mutable_epoch()->set_counter(2);
  fence.mutable_epoch()->set_nonce(7);
  fence.set_protocol_version(model::kProtocolVersion);
  Answer<v1::FenceResponse> fenced;
  server_->Fence(fence, Soon(), fenced.reply());
  disk_.AwaitWaiting();
  EXPECT_FALSE(fenced.arrived());
  TrainerGroup next({server_.get()}, Spec("job", v1::DURABILITY_NONE), 1, 2);
  server_->Open(next.open_request(-1, std::nullopt), absl::InfiniteFuture(), opened.reply());
  EXPECT_EQ(fenced.Wait().status(), absl::OkStatus());
  EXPECT_FALSE(opened.arrived());
  disk_.Release();
  EXPECT_EQ(opened.Wait().status(), absl::OkStatus());
}

// The move keeps its places in two tiers, and plans that need their space out, until the disk goes on.
TEST_F(HungDiskTest, AMoveThatHangsHoldsUpNoDryRun) {
  ASSERT_EQ(SetDram(server_.get(), 3 * kMiB), absl::OkStatus());
  TrainerGroup moved({server_.get()}, Spec("moved", v1::DURABILITY_NONE), 1);
  ASSERT_EQ(moved.Start(), absl::OkStatus());
  ASSERT_EQ(moved.Initialise(Ones), absl::OkStatus());
  ASSERT_EQ(moved.Read(0, v1::CONTENT_WORKING, 0).status(), absl::OkStatus());
  HoldTier(GatedOperation::kRead);
  const auto moves = ChangeDram(server_.get(), 16 * kMiB);
  ASSERT_EQ(moves.status(), absl::OkStatus());
  ASSERT_GT(moves->jobs(0).chunks_to_dram(), 0u);
  disk_.AwaitWaiting();
  const auto dry_run = [&](const v1::JobSpec& spec) {
    v1::OpenRequest request = TrainerGroup({server_.get()}, spec, 1).open_request(-1, std::nullopt);
    request.set_dry_run(true);
    Answer<v1::OpenResponse> answer;
    server_->Open(request, Soon(), answer.reply());
    return answer;
  };
  Answer<v1::OpenResponse> large = dry_run(MakeSpec("large", {{"large", "u", uint64_t{1} << 26, 0}}));
  Answer<v1::OpenResponse> small = dry_run(MakeSpec("small", {{"small", "u", 256, 0}}));
  EXPECT_EQ(small.Wait().status(), absl::OkStatus());
  EXPECT_EQ(model::ReasonOf(large.Wait().status()), model::kBudget);
}

// New budgets keep moves out while they wait for the Open.
TEST_F(HungDiskTest, BudgetsThatWaitForAnOpenDelayNoJobWhoseChunksMove) {
  ASSERT_EQ(SetDram(server_.get(), 3 * kMiB), absl::OkStatus());
  TrainerGroup moved({server_.get()}, Spec("moved", v1::DURABILITY_NONE), 1);
  ASSERT_EQ(moved.Start(), absl::OkStatus());
  ASSERT_EQ(moved.Initialise(Ones), absl::OkStatus());
  ASSERT_EQ(moved.Read(0, v1::CONTENT_WORKING, 0).status(), absl::OkStatus());
  disk_.Hold([](const std::string& path, GatedOperation operation, uint64_t) {
    return absl::EndsWith(path, "/nvme.tier") &&
           (operation == GatedOperation::kRead || operation == GatedOperation::kReserve);
  });
  ASSERT_EQ(SetDram(server_.get(), 8 * kMiB), absl::OkStatus());
  disk_.AwaitWaiting();  // a move
  TrainerGroup slow({server_.get()}, Spec("slow", v1::DURABILITY_STEP), 1);
  Answer<v1::OpenResponse> opened;
  ASSERT_NO_FATAL_FAILURE(OpenFirst(slow, &opened));
  disk_.AwaitWaiting(2);
  v1::SetBudgetRequest budget;
  budget.set_dram_bytes(24 * kMiB);
  Answer<v1::SetBudgetResponse> changed;
  server_->SetBudget(budget, changed.reply());
  HoldTier(GatedOperation::kReserve);
  ExpectGoesOn(moved);
  EXPECT_FALSE(changed.arrived());
  disk_.Release();
  EXPECT_EQ(opened.Wait().status(), absl::OkStatus());
  EXPECT_EQ(changed.Wait().status(), absl::OkStatus());
  while (NvmeStateBytes(server_.get(), "moved") > 0) absl::SleepFor(absl::Milliseconds(1));
}

// The worker waits for the read, with what it does next to the chunk; parameters lie in memory.
TEST_F(HungDiskTest, AReadThatHoldsUpAnUnpinHoldsUpNoPullOfParameters) {
  ASSERT_EQ(SetDram(server_.get(), 3 * kMiB), absl::OkStatus());
  TrainerGroup group({server_.get()}, Spec("job", v1::DURABILITY_NONE), 1);
  ASSERT_EQ(group.Start(), absl::OkStatus());
  ASSERT_EQ(group.Initialise(Ones), absl::OkStatus());
  ASSERT_EQ(group.Read(0, v1::CONTENT_WORKING, 0).status(), absl::OkStatus());
  ASSERT_EQ(PinForReading(group, 0), absl::OkStatus());
  HoldTier(GatedOperation::kRead);
  StateReads reads;
  reads.Ask(server_.get(), group, 0);
  disk_.AwaitWaiting();
  v1::UnpinRequest unpin;
  unpin.set_job("job");
  Answer<v1::UnpinResponse> unpinned;
  server_->Unpin(unpin, unpinned.reply());
  ASSERT_EQ(unpinned.Wait().status(), absl::OkStatus());
  // Many times: the worker comes to the chunk some time after the answer.
  absl::Notification pulled;
  std::thread puller([&] {
    for (int i = 0; i < 100; ++i) {
      for (uint32_t t = 0; t < Tensors(); ++t) {
        EXPECT_EQ(group.Read(t, v1::CONTENT_WORKING, 0).status(), absl::OkStatus());
      }
      absl::SleepFor(absl::Milliseconds(1));
    }
    pulled.Notify();
  });
  EXPECT_TRUE(pulled.WaitForNotificationWithTimeout(absl::Minutes(1)));
  disk_.Release();
  puller.join();
  reads.ExpectOk();
}

// The next update begins while parameters are copied, so the pull needs the pinned state, which is on the disk.
TEST_F(HungDiskTest, APullThatMustGoToItsPinGivesItsThreadBack) {
  ASSERT_EQ(SetDram(server_.get(), 3 * kMiB), absl::OkStatus());
  TrainerGroup group({server_.get()}, Spec("job", v1::DURABILITY_NONE), 1);
  ASSERT_EQ(group.Start(), absl::OkStatus());
  ASSERT_EQ(group.Initialise(Ones), absl::OkStatus());
  ASSERT_EQ(group.Read(0, v1::CONTENT_WORKING, 0).status(), absl::OkStatus());
  ASSERT_EQ(PinForReading(group, 0), absl::OkStatus());
  const std::vector<model::Chunk>& chunks = group.plan().layout().chunks();
  absl::BlockingCounter found(static_cast<int>(chunks.size()));
  absl::Notification updating, returned;
  std::atomic<size_t> left{chunks.size()};
  std::vector<std::string> bytes(chunks.size(), std::string(2, 0));  // of a bf16
  std::vector<Answer<uint32_t>> answers(chunks.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < chunks.size(); ++i) {
    threads.emplace_back([&, i] {
      const auto allocate = [&](uint64_t, const AnswerRoom::Lease&) {
        found.DecrementCount();
        updating.WaitForNotification();
        return absl::MakeSpan(reinterpret_cast<std::byte*>(bytes[i].data()), bytes[i].size());
      };
      server_->Pull(PullOf(group, chunks[i], v1::CONTENT_WORKING, 0), absl::InfiniteFuture(), allocate,
                    answers[i].reply());
      if (--left == 0) returned.Notify();
    });
  }
  found.Wait();
  ASSERT_EQ(group.PushAll(v1::SLICE_KIND_GRADIENT, AllTensors(Tensors()), Ones), absl::OkStatus());
  HoldTier(GatedOperation::kRead);
  ASSERT_TRUE(group.Finish(UpdateHeader(Tensors())).ok());
  disk_.AwaitWaiting();  // the update
  updating.Notify();
  EXPECT_TRUE(returned.WaitForNotificationWithTimeout(absl::Minutes(1)));
  EXPECT_TRUE(std::any_of(answers.begin(), answers.end(), [](const auto& answer) { return !answer.arrived(); }));
  disk_.Release();
  for (std::thread& thread : threads) thread.join();
  for (size_t i = 0; i < chunks.size(); ++i) {
    EXPECT_EQ(answers[i].Wait().status(), absl::OkStatus());
    EXPECT_EQ(bytes[i], std::string("\x80\x3f")) << "1 as bf16, which is version 0";
  }
}

// With HBM that the host plays.
class GatedDiskAndHbm : public GatedDisk {
 public:
  storage::HbmOpener hbm() override { return storage::TestHbm(); }
};

// The disk hangs while state on the device is written to it; parameters lie in memory.
TEST(HungHbmTest, AFlushHoldsUpNoPullOfParameters) {
  GatedDiskAndHbm disk;
  TestServer server("s", {0, 16 * kMiB, 256 * kMiB});
  server.options().foundation = &disk;
  server.options().budget.hbm = storage::kHbmScratchBytes + 4 * kMiB;
  server.Restart();
  TrainerGroup group({server.get()}, Spec("job", v1::DURABILITY_STEP), 1);
  ASSERT_EQ(group.Start(), absl::OkStatus());
  ASSERT_EQ(group.Initialise(Ones), absl::OkStatus());
  ASSERT_EQ(group.Read(0, v1::CONTENT_WORKING, 0).status(), absl::OkStatus());
  ASSERT_GT(server->Status().tiers(0).state_bytes(), 0u);
  disk.Hold([](const std::string& path, GatedOperation operation, uint64_t) {
    return absl::EndsWith(path, "/nvme.tier") && operation == GatedOperation::kWrite;
  });
  v1::PinRequest pin;
  pin.set_job("job");
  pin.set_durable(true);
  *pin.mutable_epoch() = group.epoch();
  Answer<v1::PinResponse> pinned;
  server->Pin(pin, absl::InfiniteFuture(), pinned.reply());
  disk.AwaitWaiting();
  absl::Notification pulled;
  std::thread puller([&] {
    for (uint32_t t = 0; t < Tensors(); ++t) {
      EXPECT_EQ(group.Read(t, v1::CONTENT_WORKING, 0).status(), absl::OkStatus());
    }
    pulled.Notify();
  });
  EXPECT_TRUE(pulled.WaitForNotificationWithTimeout(absl::Minutes(1)));
  EXPECT_FALSE(pinned.arrived());
  disk.Release();
  puller.join();
  EXPECT_EQ(pinned.Wait().status(), absl::OkStatus());
}

}  // namespace
}  // namespace ballast::services
