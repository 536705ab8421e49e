// Durable jobs in rare shapes: a server without chunks, tensors that never had state, pins without state.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <limits>

#include "ballast/proto/base/status.h"
#include "ballast/tests/services/trainer_group.h"
#include "ballast/tests/services/training_bits.h"

namespace ballast::services {
namespace {

using ::testing::HasSubstr;

constexpr storage::TierBytes kBudget{0, uint64_t{64} << 20, uint64_t{256} << 20};

v1::StepHeader RestoreOf(int64_t version) {
  v1::StepHeader header;
  header.set_kind(v1::STEP_KIND_RESTORE);
  header.set_restored_version(version);
  header.set_gradient_presence(std::string(1, 0));
  header.set_value_presence(std::string(1, 0));
  return header;
}

class DurableJobTest : public ::testing::Test {
 protected:
  DurableJobTest() : server_("s", kBudget), spec_(MakeSpec("job", SmallModel())) {
    spec_.set_durability(v1::DURABILITY_STEP);
  }
  void NextGroup() {
    group_ = std::make_unique<TrainerGroup>(std::vector<StateServer*>{server_.get()}, spec_, 2, ++epoch_);
    ASSERT_EQ(group_->Start(), absl::OkStatus());
  }
  void Step() {
    const auto count = static_cast<uint32_t>(SmallModel().size());
    ASSERT_EQ(group_->PushAll(v1::SLICE_KIND_GRADIENT, AllTensors(count), Initial), absl::OkStatus());
    ASSERT_EQ(group_->Finish(UpdateHeader(count)).status(), absl::OkStatus());
  }
  absl::Status PinDurably(int64_t version) { return PinDurably(group_->epoch(), version); }
  absl::Status PinDurably(const std::optional<v1::Epoch>& epoch, int64_t version) {
    return services::PinDurably(server_.get(), "job", epoch, version);
  }
  absl::Status UnpinDurably(const std::optional<v1::Epoch>& epoch, int64_t version) {
    return services::UnpinDurably(server_.get(), "job", epoch, version);
  }
  TestServer server_;
  v1::JobSpec spec_;
  std::unique_ptr<TrainerGroup> group_;
  uint64_t epoch_ = 0;
};

TEST_F(DurableJobTest, AServerWithoutAChunkComesBackToo) {
  TestServer other("t", kBudget);
  v1::JobSpec spec = MakeSpec("job", {{"w", "u", 1000, 0}});
  spec.set_group_count(1);
  spec.set_durability(v1::DURABILITY_STEP);
  for (uint64_t epoch = 1; epoch <= 3; ++epoch) {
    TrainerGroup group({server_.get(), other.get()}, spec, 1, epoch);
    ASSERT_EQ(group.Start(), absl::OkStatus());
    ASSERT_EQ(group.step(), epoch == 1 ? 0 : 1);
    if (epoch == 1) {
      ASSERT_EQ(group.Initialise(Initial), absl::OkStatus());
    }
    server_.Restart();
    other.Restart();
  }
  for (TestServer* server : {&server_, &other}) {
    EXPECT_EQ((*server)->Status().jobs(0).committed(), 0);
    EXPECT_FALSE((*server)->Status().jobs(0).state_lost());
  }
}

// A tensor that was registered and replaced before it got values has chunks, and no state in them.
TEST_F(DurableJobTest, ARestoreLeavesAloneWhatNeverHadAState) {
  NextGroup();
  ASSERT_EQ(group_->Initialise(Initial), absl::OkStatus());
  for (const uint64_t elements : {140000, 200000}) {
    group_.reset();
    Append({{"head", "u9", elements, 0}}, 0, &spec_);
    NextGroup();
  }
  v1::StepHeader values = ValuesHeader(6);
  const std::string head(1, static_cast<char>(1 << 5));
  values.set_value_presence(head);
  values.set_gradient_presence(std::string(1, 0));
  ASSERT_EQ(group_->PushAll(v1::SLICE_KIND_VALUE, head, Initial), absl::OkStatus());
  ASSERT_EQ(group_->Finish(values).status(), absl::OkStatus());
  ASSERT_EQ(PinDurably(1), absl::OkStatus());
  NextGroup();
  ASSERT_EQ(group_->Finish(RestoreOf(1)).status(), absl::OkStatus());
  const auto before = group_->Read(5, v1::CONTENT_MASTER, 2);
  ASSERT_TRUE(before.ok()) << before.status();
  group_.reset();
  server_.Restart();
  NextGroup();
  EXPECT_EQ(group_->step(), 3);
  const auto after = group_->Read(5, v1::CONTENT_MASTER, 2);
  ASSERT_TRUE(after.ok()) << after.status();
  EXPECT_EQ(*before, *after);
}

// The first job's log wants more at each restart, where the budget is what both have.
TEST_F(DurableJobTest, RestartsInARowTakeNothingThatAnotherJobComesBackWith) {
  v1::JobSpec other = MakeSpec("other", SmallModel());
  other.set_durability(v1::DURABILITY_STEP);
  {
    NextGroup();
    ASSERT_EQ(group_->Initialise(Initial), absl::OkStatus());
    TrainerGroup second({server_.get()}, other, 1);
    ASSERT_EQ(second.Start(), absl::OkStatus());
    ASSERT_EQ(second.Initialise(Initial), absl::OkStatus());
    NextGroup();
  }
  v1::GetJobRequest request;
  request.set_job("job");
  const std::string log = server_.directory() + "/log-job";
  const uint64_t log_bytes = std::filesystem::file_size(log);
  server_.options().budget.nvme = server_->Status().tiers(2).used_bytes();
  for (uint32_t slice = 0; slice < group_->plan().slices().size(); ++slice) {
    server_.Restart();
    const v1::GetServerStatusResponse status = server_->Status();
    for (const v1::JobStatus& job : status.jobs()) EXPECT_EQ(job.failure(), "") << job.name();
    Answer<v1::GetJobResponse> asked;
    server_->GetJob(request, asked.reply());
    const auto job = asked.Wait();
    ASSERT_TRUE(job.ok()) << job.status();
    group_ = std::make_unique<TrainerGroup>(std::vector<StateServer*>{server_.get()}, spec_, 2, epoch_);
    ASSERT_EQ(group_->Open(0, job->decision()), absl::OkStatus());
    ASSERT_EQ(group_->PushSlice(slice, v1::SLICE_KIND_GRADIENT, Initial), absl::OkStatus());
  }
  EXPECT_EQ(std::filesystem::file_size(log), log_bytes);
  // With space on NVMe, the log grows, unless a flush was quick enough to make room; then at a later restart.
  server_.options().budget = kBudget;
  for (int i = 0; i < 20 && std::filesystem::file_size(log) == log_bytes; ++i) server_.Restart();
  EXPECT_GT(std::filesystem::file_size(log), log_bytes);
}

// A group dies between its Open and its first step, again and again.
TEST_F(DurableJobTest, OpensWithoutStepsDoNotFillTheLog) {
  NextGroup();
  ASSERT_EQ(group_->Initialise(Initial), absl::OkStatus());
  Step();
  const uint64_t log_bytes = std::filesystem::file_size(server_.directory() + "/log-job");
  // Each appends a promise and an Open, of a block and the block of its metas each, twice.
  const uint64_t opens = log_bytes / (4 * 4096);
  for (uint64_t i = 0; i < opens && !HasFatalFailure(); ++i) NextGroup();
  Step();
  EXPECT_EQ(group_->step(), 3);
}

// Jobs recover in the order of their names, and each takes as much DRAM as it can use.
TEST_F(DurableJobTest, JobsLeaveEachOtherTheMemoryThatTheyCameFrom) {
  server_.options().budget.dram = uint64_t{24} << 20;
  server_.options().budget.nvme = uint64_t{512} << 20;
  server_.options().staging_bytes = uint64_t{4} << 20;
  for (const v1::Durability durability : {v1::DURABILITY_STEP, v1::DURABILITY_EVERY_K}) {
    server_.Restart();
    v1::JobSpec first = MakeSpec("z", SmallModel());
    v1::JobSpec second = MakeSpec("a", {{"large", "u", uint64_t{2} << 20, 0}});
    second.set_group_count(1);
    for (v1::JobSpec* spec : {&first, &second}) {
      spec->set_durability(durability);
      if (durability == v1::DURABILITY_EVERY_K) spec->set_pin_interval(1);
      TrainerGroup group({server_.get()}, *spec, 1);
      ASSERT_EQ(group.Start(), absl::OkStatus());
      ASSERT_EQ(group.Initialise(Initial), absl::OkStatus());
    }
    for (int i = 0; i < 2; ++i) {
      server_.Restart();
      const v1::GetServerStatusResponse status = server_->Status();
      ASSERT_EQ(status.jobs_size(), 2);
      for (const v1::JobStatus& job : status.jobs()) EXPECT_EQ(job.failure(), "") << job.name();
      EXPECT_GT(status.tiers(1).state_bytes(), 0u);
      EXPECT_GT(status.tiers(2).state_bytes(), 0u);
    }
    const v1::GetServerStatusResponse status = server_->Status();
    for (const v1::JobStatus& job : status.jobs()) {
      v1::DropJobRequest drop;
      drop.set_job(job.name());
      *drop.mutable_epoch() = job.epoch();
      Answer<v1::DropJobResponse> dropped;
      server_->DropJob(drop, dropped.reply());
      ASSERT_EQ(dropped.Wait().status(), absl::OkStatus());
    }
  }
}

// Chunks that the pin does not have had no state when it was made.
TEST_F(DurableJobTest, APinFromBeforeTheFirstValuesBringsBackZeros) {
  NextGroup();
  const auto count = static_cast<uint32_t>(SmallModel().size());
  v1::StepHeader skipped = UpdateHeader(count);
  skipped.set_value_presence(AllTensors(count));
  ASSERT_EQ(group_->PushAll(v1::SLICE_KIND_VALUE, AllTensors(count), Initial), absl::OkStatus());
  const auto infinite = [](uint32_t, uint64_t) { return std::numeric_limits<float>::infinity(); };
  ASSERT_EQ(group_->PushAll(v1::SLICE_KIND_GRADIENT, AllTensors(count), infinite), absl::OkStatus());
  ASSERT_EQ(group_->Finish(skipped).status(), absl::OkStatus());
  ASSERT_EQ(PinDurably(0), absl::OkStatus());
  Step();
  NextGroup();
  ASSERT_EQ(group_->Finish(RestoreOf(0)).status(), absl::OkStatus());
  const auto expect_zeros = [&] {
    for (const v1::Content content : {v1::CONTENT_MASTER, v1::CONTENT_MOMENT2, v1::CONTENT_WORKING}) {
      const auto read = group_->Read(0, content, 2);
      ASSERT_TRUE(read.ok()) << read.status();
      EXPECT_THAT(*read, ::testing::Each(0.0f));
    }
  };
  expect_zeros();
  // Neither what the pin lacks nor the restore is anywhere but in the log and in the catalog.
  server_.Restart();
  NextGroup();
  expect_zeros();
  Step();
}

// The zombie is a group fenced without its knowledge.
TEST_F(DurableJobTest, AZombieNeitherPinsNorUnpins) {
  NextGroup();
  ASSERT_EQ(group_->Initialise(Initial), absl::OkStatus());
  Step();
  ASSERT_EQ(PinDurably(1), absl::OkStatus());
  const v1::Epoch zombie = group_->epoch();
  group_ = std::make_unique<TrainerGroup>(std::vector<StateServer*>{server_.get()}, spec_, 2, ++epoch_);
  std::vector<v1::GetJobResponse> answers;
  ASSERT_EQ(group_->Fence(&answers), absl::OkStatus());
  // Between fence and Open the promise decides: an operator may have to make room for the Open.
  EXPECT_EQ(model::ReasonOf(UnpinDurably(zombie, 1)), model::kStaleEpoch);
  EXPECT_EQ(model::ReasonOf(PinDurably(group_->epoch(), 1)), model::kNotOpen);
  ASSERT_EQ(group_->Open(1, answers[0].decision()), absl::OkStatus());
  EXPECT_EQ(model::ReasonOf(PinDurably(zombie, 1)), model::kStaleEpoch);
  EXPECT_EQ(model::ReasonOf(UnpinDurably(zombie, 1)), model::kStaleEpoch);
  EXPECT_EQ(model::ReasonOf(UnpinDurably(std::nullopt, 1)), model::kBadRequest);
  EXPECT_THAT(server_->Status().jobs(0).durable_versions(), ::testing::ElementsAre(1));
  EXPECT_EQ(UnpinDurably(group_->epoch(), 1), absl::OkStatus());
  EXPECT_THAT(server_->Status().jobs(0).durable_versions(), ::testing::IsEmpty());
}

TEST_F(DurableJobTest, RanksThatRestoreDifferentVersionsAreToldSoAfterOneReadingOfEach) {
  NextGroup();
  ASSERT_EQ(group_->Initialise(Initial), absl::OkStatus());
  ASSERT_EQ(PinDurably(0), absl::OkStatus());
  Step();
  ASSERT_EQ(PinDurably(1), absl::OkStatus());
  Step();
  NextGroup();
  const uint64_t read = server_->traffic().read.nvme;
  std::vector<Answer<v1::SealResponse>> answers(2);
  for (uint32_t rank = 0; rank < 2; ++rank) {
    v1::SealRequest seal = group_->SealOf(rank, RestoreOf(rank), 10000);
    server_->Seal(seal, absl::Now() + absl::Seconds(20), answers[rank].reply());
  }
  int mismatches = 0;
  for (Answer<v1::SealResponse>& answer : answers) {
    mismatches += model::ReasonOf(answer.Wait().status()) == model::kPlanMismatch;
  }
  EXPECT_GT(mismatches, 0);
  const uint64_t state_bytes = server_->Status().tiers(1).state_bytes();
  EXPECT_LE(server_->traffic().read.nvme - read, 3 * state_bytes);
}

// Moments and step counts that were written come back from the log, and go with a pin like all state.
TEST_F(DurableJobTest, WrittenMomentsSurviveARestart) {
  NextGroup();
  ASSERT_EQ(group_->Initialise(Initial), absl::OkStatus());
  Step();
  const auto count = static_cast<uint32_t>(SmallModel().size());
  const auto moment = [](uint32_t tensor, uint64_t element) {
    return 1.0f + static_cast<float>(tensor) + static_cast<float>(element % 977) / 1024;
  };
  v1::StepHeader header = ValuesHeader(count);
  const std::string presence(1, static_cast<char>(0b0110));
  header.set_value_presence(presence);
  header.set_gradient_presence(std::string(1, 0));
  header.set_value_array(2);
  for (uint32_t tensor = 0; tensor < count; ++tensor) header.add_value_tensor_steps(100 + tensor);
  const auto expect = [&](absl::string_view when) {
    const int64_t version = group_->step() - 1;
    Answer<v1::GetJobResponse> asked;
    v1::GetJobRequest request;
    request.set_job("job");
    server_->GetJob(request, asked.reply());
    const auto job = asked.Wait();
    ASSERT_TRUE(job.ok()) << when;
    for (uint32_t tensor = 0; tensor < count; ++tensor) {
      const bool written = model::HasBit(presence, tensor);
      EXPECT_EQ(job->tensor_steps(static_cast<int>(tensor)), written ? 100 + tensor : 1) << when;
      const auto found = group_->Read(tensor, v1::CONTENT_MOMENT2, version);
      ASSERT_TRUE(found.ok()) << when << ": " << found.status();
      for (uint64_t i = 0; i < found->size(); ++i) {
        ASSERT_EQ((*found)[i] == moment(tensor, i), written) << when << ": " << tensor << " " << i;
      }
    }
  };
  const auto master = group_->Read(1, v1::CONTENT_MASTER, 1);
  const auto first = group_->Read(1, v1::CONTENT_MOMENT1, 1);
  const auto working = group_->Read(1, v1::CONTENT_WORKING, 1);
  ASSERT_EQ(group_->PushAll(v1::SLICE_KIND_VALUE, presence, moment), absl::OkStatus());
  ASSERT_EQ(group_->Finish(header).status(), absl::OkStatus());
  expect("written");
  EXPECT_EQ(*group_->Read(1, v1::CONTENT_MASTER, 2), *master);
  EXPECT_EQ(*group_->Read(1, v1::CONTENT_MOMENT1, 2), *first);
  EXPECT_EQ(*group_->Read(1, v1::CONTENT_WORKING, 2), *working);
  group_.reset();
  server_.Restart();
  NextGroup();
  ASSERT_EQ(group_->step(), 3);
  expect("after a restart");
  ASSERT_EQ(PinDurably(2), absl::OkStatus());
  Step();
  NextGroup();
  ASSERT_EQ(group_->Finish(RestoreOf(2)).status(), absl::OkStatus());
  expect("restored");
}

}  // namespace
}  // namespace ballast::services
