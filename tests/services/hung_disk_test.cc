// A disk that hangs under one job: other jobs go on with all they do, and the job itself does what needs no disk.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <deque>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ballast/proto/model/status.h"
#include "ballast/tests/services/gated_disk.h"
#include "ballast/tests/services/trainer_group.h"

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
  v1::SetBudgetRequest budget;
  budget.set_dram_bytes(24 * kMiB);
  Answer<v1::SetBudgetResponse> changed;
  server_->SetBudget(budget, changed.reply());
  EXPECT_EQ(changed.Wait().status(), absl::OkStatus());
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
  v1::SetBudgetRequest budget;
  budget.set_dram_bytes(13 * kMiB / 2);
  Answer<v1::SetBudgetResponse> changed;
  server_->SetBudget(budget, changed.reply());
  ASSERT_EQ(changed.Wait().status(), absl::OkStatus());
  TrainerGroup hung({server_.get()}, Spec("hung", v1::DURABILITY_NONE), 1);
  ASSERT_EQ(hung.Start(), absl::OkStatus());
  ASSERT_EQ(hung.Initialise(Ones), absl::OkStatus());
  ASSERT_EQ(Step(hung), absl::OkStatus());
  ASSERT_EQ(NvmeStateBytes(server_.get(), "other"), 0u);
  ASSERT_GT(NvmeStateBytes(server_.get(), "hung"), 0u);
  disk_.Hold([](const std::string& path, GatedOperation operation, uint64_t) {
    return absl::EndsWith(path, "/nvme.tier") && operation == GatedOperation::kRead;
  });
  // Several, more than there are threads for reads.
  std::deque<std::string> bytes;
  std::vector<Answer<uint32_t>> reads;
  for (int i = 0; i < 4; ++i) {
    for (const model::Chunk& chunk : hung.plan().layout().chunks()) {
      v1::PullRequest pull;
      pull.set_job("hung");
      pull.set_version(hung.step() - 1);
      pull.set_content(v1::CONTENT_MASTER);
      pull.set_unit(chunk.unit);
      pull.set_begin(chunk.range.begin);
      pull.set_end(chunk.range.begin + 1);
      reads.push_back(hung.Pull(server_.get(), pull, absl::InfiniteFuture(), &bytes.emplace_back()));
    }
  }
  disk_.AwaitWaiting();
  ExpectGoesOn(other);
  disk_.Release();
  for (Answer<uint32_t>& read : reads) EXPECT_EQ(read.Wait().status(), absl::OkStatus());
}

class HungUpdateTest : public HungDiskTest, public ::testing::WithParamInterface<v1::Durability> {
 protected:
  HungUpdateTest() : first_({server_.get()}, Spec("job", GetParam()), 1) {}

  // Step 1 is decided, and its update waits for the disk.
  void Hang() {
    v1::SetBudgetRequest budget;
    budget.set_dram_bytes(3 * kMiB);
    Answer<v1::SetBudgetResponse> changed;
    server_->SetBudget(budget, changed.reply());
    ASSERT_EQ(changed.Wait().status(), absl::OkStatus());
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

}  // namespace
}  // namespace ballast::services
