// A disk that hangs under one job: other jobs go on with all they do, and the job itself does what needs no disk.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/blocking_counter.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "ballast/proto/model/status.h"
#include "ballast/proto/model/verdict.h"
#include "ballast/services/foundation/counters.h"
#include "ballast/tests/services/gated_disk.h"
#include "ballast/tests/services/trainer_group.h"
#include "ballast/tests/storage/tier/test_hbm.h"

namespace ballast::services {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;

uint32_t Tensors() { return static_cast<uint32_t>(SmallModel().size()); }
absl::Time Soon() { return absl::Now() + absl::Seconds(20); }

v1::JobSpec Spec(const std::string& name, v1::Durability durability) {
  v1::JobSpec spec = MakeSpec(name, SmallModel());
  spec.set_durability(durability);
  return spec;
}

absl::Status Step(TrainerGroup& group) {
  BALLAST_RETURN_IF_ERROR(group.PushAll(v1::SLICE_KIND_GRADIENT, AllTensors(Tensors()), Ones));
  BALLAST_RETURN_IF_ERROR(group.Finish(UpdateHeader(Tensors())).status());
  return group.Read(0, v1::CONTENT_WORKING, group.step() - 1).status();
}

uint64_t NvmeStateBytes(StateServer* server, const std::string& job) {
  const v1::GetServerStatusResponse all = server->Status();
  for (const v1::JobStatus& status : all.jobs()) {
    if (status.name() != job) continue;
    for (const v1::TierStatus& tier : status.tiers()) {
      if (tier.tier() == "nvme") return tier.state_bytes();
    }
  }
  return 0;
}

// Of an Open with one tensor more, so that the server has to plan.
absl::Status DryRun(StateServer* server, TrainerGroup& group) {
  v1::JobSpec larger = group.spec();
  Append({{"more", "u9", 256, 0}}, group.step() - 1, &larger);
  const TrainerGroup next({server}, larger, 1, group.epoch().counter());
  v1::OpenRequest request = next.open_request(group.step() - 1, std::nullopt);
  request.set_dry_run(true);
  Answer<v1::OpenResponse> answer;
  server->Open(request, Soon(), answer.reply());
  const auto response = answer.Wait();
  if (response.ok()) {
    EXPECT_THAT(response->plan(), ::testing::HasSubstr("dram holds the state"));
  }
  return response.status();
}

absl::Status Fence(StateServer* server, const std::string& job, uint64_t counter) {
  v1::FenceRequest request;
  request.set_job(job);
  request.mutable_epoch()->set_counter(counter);
  request.mutable_epoch()->set_nonce(7);
  Answer<v1::FenceResponse> answer;
  server->Fence(request, Soon(), answer.reply());
  return answer.Wait().status();
}

absl::Status SetDram(StateServer* server, uint64_t bytes) {
  v1::SetBudgetRequest budget;
  budget.set_dram_bytes(bytes);
  Answer<v1::SetBudgetResponse> changed;
  server->SetBudget(budget, changed.reply());
  return changed.Wait().status();
}

v1::DropJobRequest DropOf(TrainerGroup& group) {
  v1::DropJobRequest drop;
  drop.set_job(group.spec().name());
  *drop.mutable_epoch() = group.epoch();
  return drop;
}

// Of a chunk's first element.
v1::PullRequest PullOf(TrainerGroup& group, const model::Chunk& chunk, v1::Content content, int64_t version) {
  v1::PullRequest pull;
  pull.set_job(group.spec().name());
  pull.set_version(version);
  pull.set_content(content);
  pull.set_unit(chunk.unit);
  pull.set_begin(chunk.range.begin);
  pull.set_end(chunk.range.begin + 1);
  return pull;
}

class HungDiskTest : public ::testing::Test {
 protected:
  HungDiskTest() : server_("s", {0, 16 * kMiB, 256 * kMiB}) {
    server_.options().foundation = &disk_;
    server_.Restart();
  }
  ~HungDiskTest() override { disk_.Release(); }

  // All that a job does with its server, on memory alone.
  void ExpectGoesOn(TrainerGroup& group) {
    EXPECT_EQ(Step(group), absl::OkStatus());
    const absl::Status planned = DryRun(server_.get(), group);
    EXPECT_TRUE(planned.ok() || absl::IsResourceExhausted(planned)) << planned;
    EXPECT_EQ(group.Read(0, v1::CONTENT_MASTER, group.step() - 1).status(), absl::OkStatus());
    // A pull that comes before its version is answered once the version is there.
    v1::PullRequest early;
    early.set_job(group.spec().name());
    early.set_version(group.step());
    early.set_content(v1::CONTENT_WORKING);
    early.set_end(1);
    std::string bytes;
    Answer<uint32_t> pulled = group.Pull(server_.get(), early, Soon(), &bytes);
    EXPECT_EQ(Step(group), absl::OkStatus());
    EXPECT_EQ(pulled.Wait().status(), absl::OkStatus());
    EXPECT_EQ(Fence(server_.get(), group.spec().name(), group.epoch().counter() + 1), absl::OkStatus());
  }

  // From now on no state can be read from the disk.
  void HoldReadsOfState() {
    disk_.Hold([](const std::string& path, GatedOperation operation, uint64_t) {
      return absl::EndsWith(path, "/nvme.tier") && operation == GatedOperation::kRead;
    });
  }
  absl::Status PinForReading(TrainerGroup& group, int64_t version) {
    v1::PinRequest pin;
    pin.set_job(group.spec().name());
    pin.set_version(version);
    Answer<v1::PinResponse> pinned;
    server_->Pin(pin, Soon(), pinned.reply());
    return pinned.Wait().status();
  }

  GatedDisk disk_;
  TestServer server_;
};

TEST_F(HungDiskTest, AJobWhoseLogIsBeingWrittenDelaysNoOther) {
  TrainerGroup other({server_.get()}, Spec("other", v1::DURABILITY_NONE), 1);
  ASSERT_EQ(other.Start(), absl::OkStatus());
  ASSERT_EQ(other.Initialise(Ones), absl::OkStatus());
  disk_.Hold([](const std::string& path, GatedOperation operation, uint64_t) {
    return absl::EndsWith(path, "/log-slow") && operation == GatedOperation::kWrite;
  });
  TrainerGroup slow({server_.get()}, Spec("slow", v1::DURABILITY_STEP), 1);
  std::vector<v1::GetJobResponse> jobs;
  ASSERT_EQ(slow.Fence(&jobs), absl::OkStatus());
  Answer<v1::OpenResponse> opened;
  server_->Open(slow.open_request(-1, std::nullopt), absl::InfiniteFuture(), opened.reply());
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
  HoldReadsOfState();
  // Several, more than there are threads for reads.
  std::deque<std::string> bytes;
  std::vector<Answer<uint32_t>> reads;
  for (int i = 0; i < 4; ++i) {
    for (const model::Chunk& chunk : hung.plan().layout().chunks()) {
      const v1::PullRequest pull = PullOf(hung, chunk, v1::CONTENT_MASTER, hung.step() - 1);
      reads.push_back(hung.Pull(server_.get(), pull, absl::InfiniteFuture(), &bytes.emplace_back()));
    }
  }
  disk_.AwaitWaiting();
  // A plan for more tensors, and new budgets, ask the store whose read hangs. With more memory `other` stays there.
  const absl::Status planned = DryRun(server_.get(), hung);
  EXPECT_TRUE(planned.ok() || absl::IsResourceExhausted(planned)) << planned;
  EXPECT_EQ(SetDram(server_.get(), 24 * kMiB), absl::OkStatus());
  ExpectGoesOn(other);
  disk_.Release();
  for (Answer<uint32_t>& read : reads) EXPECT_EQ(read.Wait().status(), absl::OkStatus());
}

// The move keeps its places in two tiers, and the lock `moving`, until the disk goes on.
TEST_F(HungDiskTest, AMoveThatHangsHoldsUpNoDryRun) {
  const auto set_dram = [this](uint64_t bytes) {
    v1::SetBudgetRequest budget;
    budget.set_dram_bytes(bytes);
    Answer<v1::SetBudgetResponse> changed;
    server_->SetBudget(budget, changed.reply());
    return changed.Wait();
  };
  ASSERT_EQ(set_dram(3 * kMiB).status(), absl::OkStatus());
  TrainerGroup moved({server_.get()}, Spec("moved", v1::DURABILITY_NONE), 1);
  ASSERT_EQ(moved.Start(), absl::OkStatus());
  ASSERT_EQ(moved.Initialise(Ones), absl::OkStatus());
  ASSERT_EQ(moved.Read(0, v1::CONTENT_WORKING, 0).status(), absl::OkStatus());
  disk_.Hold([](const std::string& path, GatedOperation operation, uint64_t) {
    return absl::EndsWith(path, "/nvme.tier") && operation == GatedOperation::kRead;
  });
  const auto moves = set_dram(16 * kMiB);
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

// The worker waits for the read, with what it does next to the chunk; parameters lie in memory.
TEST_F(HungDiskTest, AReadThatHoldsUpAnUnpinHoldsUpNoPullOfParameters) {
  ASSERT_EQ(SetDram(server_.get(), 3 * kMiB), absl::OkStatus());
  TrainerGroup group({server_.get()}, Spec("job", v1::DURABILITY_NONE), 1);
  ASSERT_EQ(group.Start(), absl::OkStatus());
  ASSERT_EQ(group.Initialise(Ones), absl::OkStatus());
  ASSERT_EQ(group.Read(0, v1::CONTENT_WORKING, 0).status(), absl::OkStatus());
  ASSERT_EQ(PinForReading(group, 0), absl::OkStatus());
  HoldReadsOfState();
  std::deque<std::string> bytes;
  std::vector<Answer<uint32_t>> reads;
  for (const model::Chunk& chunk : group.plan().layout().chunks()) {
    reads.push_back(group.Pull(server_.get(), PullOf(group, chunk, v1::CONTENT_MASTER, 0), absl::InfiniteFuture(),
                               &bytes.emplace_back()));
  }
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
  EXPECT_TRUE(pulled.WaitForNotificationWithTimeout(absl::Seconds(20)));
  disk_.Release();
  puller.join();
  for (Answer<uint32_t>& read : reads) EXPECT_EQ(read.Wait().status(), absl::OkStatus());
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
  HoldReadsOfState();
  ASSERT_TRUE(group.Finish(UpdateHeader(Tensors())).ok());
  disk_.AwaitWaiting();  // the update
  updating.Notify();
  EXPECT_TRUE(returned.WaitForNotificationWithTimeout(absl::Seconds(20)));
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
  EXPECT_TRUE(pulled.WaitForNotificationWithTimeout(absl::Seconds(20)));
  EXPECT_FALSE(pinned.arrived());
  disk.Release();
  puller.join();
  EXPECT_EQ(pinned.Wait().status(), absl::OkStatus());
}

class HungUpdateTest : public HungDiskTest, public ::testing::WithParamInterface<v1::Durability> {
 protected:
  HungUpdateTest() : first_({server_.get()}, Spec("job", GetParam()), 1) {}

  // Step 1 is decided, and its update waits for the disk.
  void Hang() {
    ASSERT_EQ(SetDram(server_.get(), 3 * kMiB), absl::OkStatus());
    ASSERT_EQ(first_.Start(), absl::OkStatus());
    ASSERT_EQ(first_.Initialise(Ones), absl::OkStatus());
    ASSERT_GT(NvmeStateBytes(server_.get(), "job"), 0u);
    ASSERT_EQ(first_.PushAll(v1::SLICE_KIND_GRADIENT, AllTensors(Tensors()), Ones), absl::OkStatus());
    disk_.Hold([](const std::string& path, GatedOperation operation, uint64_t) {
      return absl::EndsWith(path, "/nvme.tier") && operation == GatedOperation::kWrite;
    });
    ASSERT_TRUE(first_.Finish(UpdateHeader(Tensors())).ok());
    disk_.AwaitWaiting();
  }

  TrainerGroup first_;
};

INSTANTIATE_TEST_SUITE_P(Durabilities, HungUpdateTest, ::testing::Values(v1::DURABILITY_NONE, v1::DURABILITY_STEP),
                         [](const auto& info) { return v1::Durability_Name(info.param); });

TEST_P(HungUpdateTest, AFenceAndAnOpenDoNotWait) {
  ASSERT_NO_FATAL_FAILURE(Hang());
  ASSERT_EQ(Fence(server_.get(), "job", 2), absl::OkStatus());
  TrainerGroup second({server_.get()}, Spec("job", GetParam()), 1, 2);
  EXPECT_EQ(second.Start(), absl::OkStatus());
  EXPECT_EQ(second.step(), 2);
  disk_.Release();
  EXPECT_EQ(second.Read(0, v1::CONTENT_WORKING, 1).status(), absl::OkStatus());
  EXPECT_EQ(Step(second), absl::OkStatus());
}

TEST_P(HungUpdateTest, APinThatWaitsIsRefusedWhenItIsUnpinned) {
  ASSERT_NO_FATAL_FAILURE(Hang());
  v1::PinRequest pin;
  pin.set_job("job");
  pin.set_version(1);
  Answer<v1::PinResponse> pins[2];
  for (auto& answer : pins) server_->Pin(pin, absl::InfiniteFuture(), answer.reply());
  EXPECT_FALSE(pins[0].arrived());
  v1::UnpinRequest unpin;
  unpin.set_job("job");
  unpin.set_version(1);
  Answer<v1::UnpinResponse> unpinned;
  server_->Unpin(unpin, unpinned.reply());
  ASSERT_EQ(unpinned.Wait().status(), absl::OkStatus());
  for (auto& answer : pins) {
    const absl::Status status = answer.Wait().status();
    EXPECT_EQ(status.code(), absl::StatusCode::kNotFound) << status;
    EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr("version 1 was unpinned meanwhile"));
  }
  Answer<v1::PinResponse> again;
  server_->Pin(pin, absl::InfiniteFuture(), again.reply());
  disk_.Release();
  EXPECT_EQ(again.Wait().status(), absl::OkStatus()) << "another request pins it";
}

TEST_P(HungUpdateTest, ADropThatWaitsHoldsUpNoOtherCall) {
  TrainerGroup other({server_.get()}, MakeSpec("other", {{"small", "u", 256, 0}}), 1);
  ASSERT_EQ(other.Start(), absl::OkStatus());
  ASSERT_NO_FATAL_FAILURE(Hang());
  const auto caller = std::make_shared<Caller>();
  Answer<v1::DropJobResponse> waits, dropped, again;
  server_->DropJob(DropOf(first_), waits.reply(), {absl::InfiniteFuture(), caller});
  server_->DropJob(DropOf(other), dropped.reply());
  EXPECT_EQ(dropped.Wait().status(), absl::OkStatus());
  EXPECT_EQ(SetDram(server_.get(), 3 * kMiB), absl::OkStatus());
  EXPECT_FALSE(waits.arrived());
  EXPECT_EQ(server_->counters().waiting_requests, 1u);
  caller->Leave();
  EXPECT_EQ(waits.Wait().status().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(server_->counters().waiting_requests, 0u);
  server_->DropJob(DropOf(first_), again.reply());
  EXPECT_EQ(model::ReasonOf(again.Wait().status()), model::kBusy) << "the drop goes on";
  disk_.Release();
  absl::Status fenced;
  do {
    absl::SleepFor(absl::Milliseconds(1));
    fenced = Fence(server_.get(), "job", 1);
  } while (model::ReasonOf(fenced) == model::kBusy);
  EXPECT_EQ(fenced, absl::OkStatus()) << "the name is free";
}

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
    std::vector<v1::GetJobResponse> jobs;
    ASSERT_EQ(group.Fence(&jobs), absl::OkStatus());
    Answer<v1::OpenResponse> opened;
    server_->Open(group.open_request(-1, std::nullopt), absl::InfiniteFuture(), opened.reply());
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

TEST_F(InterruptTest, APinIsWrittenNoFurther) {
  for (const End end : {End::kDrop, End::kStop}) {
    const std::string name = end == End::kDrop ? "dropped" : "stopped";
    const uint64_t before = NvmeUsed();
    TrainerGroup group({server_.get()}, Spec(name, v1::DURABILITY_STEP), 1);
    ASSERT_EQ(group.Start(), absl::OkStatus());
    ASSERT_EQ(group.Initialise(Ones), absl::OkStatus());
    ASSERT_EQ(group.Read(0, v1::CONTENT_WORKING, 0).status(), absl::OkStatus());
    const int chunks = static_cast<int>(group.plan().layout().chunks().size());
    ASSERT_GE(chunks, 3);
    const uint64_t open = NvmeUsed();
    const int written = writes(TierPath());
    disk_.Hold([&](const std::string& path, GatedOperation operation, uint64_t) {
      return path == TierPath() && operation == GatedOperation::kWrite;
    });
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
  disk_.Hold([&](const std::string& path, GatedOperation operation, uint64_t) {
    return path == TierPath() && operation == GatedOperation::kRead;
  });
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
  disk_.Hold([&](const std::string& path, GatedOperation operation, uint64_t) {
    return path == TierPath() && operation == GatedOperation::kRead;
  });
  std::deque<std::string> bytes;
  std::vector<Answer<uint32_t>> reads;
  v1::PullRequest pull;
  pull.set_job("job");
  pull.set_content(v1::CONTENT_MASTER);
  for (int i = 0; i < 4; ++i) {
    for (const model::Chunk& chunk : group.plan().layout().chunks()) {
      pull.set_unit(chunk.unit);
      pull.set_begin(chunk.range.begin);
      pull.set_end(chunk.range.begin + 1);
      reads.push_back(group.Pull(server_.get(), pull, absl::InfiniteFuture(), &bytes.emplace_back()));
    }
  }
  disk_.AwaitWaiting();
  pull.set_version(1);
  Answer<uint32_t> early = group.Pull(server_.get(), pull, absl::InfiniteFuture(), &bytes.emplace_back());
  EndAndRelease(End::kStop, group, &early);
  EXPECT_EQ(disk_.passed(TierPath(), GatedOperation::kRead), read + 1);
  int refused = 0;
  for (Answer<uint32_t>& answer : reads) refused += model::ReasonOf(answer.Wait().status()) == model::kServerDown;
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
  int all = 0;
  StateServerOptions options = server_.options();
  const auto start = [&](int last) {
    asked = 0;
    options.interrupt = [&, last] {
      return ++asked <= last ? absl::OkStatus() : model::Error(absl::StatusCode::kUnavailable, model::kServerDown, "");
    };
    return StateServer::Start(options).status();
  };
  ASSERT_EQ(start(1 << 30), absl::OkStatus());
  all = asked;
  EXPECT_GT(all, static_cast<int>(group.plan().layout().chunks().size()));
  for (int last = 0; last < all; ++last) {
    EXPECT_EQ(model::ReasonOf(start(last)), model::kServerDown) << last;
    EXPECT_LE(asked, last + 3) << "the work went on";
  }
  server_.Restart();
  TrainerGroup again({server_.get()}, Spec("job", v1::DURABILITY_STEP), 1, 2);
  ASSERT_EQ(again.Start(), absl::OkStatus());
  EXPECT_EQ(again.step(), 2);
  EXPECT_EQ(Step(again), absl::OkStatus());
}

}  // namespace
}  // namespace ballast::services
