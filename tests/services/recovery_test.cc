// A state server with durable jobs ends and starts again: its state is there, bit for bit, from whichever tier.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ballast/proto/base/status.h"
#include "ballast/services/journal/journal.h"
#include "ballast/storage/catalog/catalog.h"
#include "ballast/storage/io/disk.h"
#include "ballast/storage/log/log_reader.h"
#include "ballast/tests/services/logged_slices.h"
#include "ballast/tests/services/trainer_group.h"
#include "ballast/tests/services/training_bits.h"

namespace ballast::services {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kMiB = uint64_t{1} << 20;

v1::JobSpec Spec(v1::Durability durability) {
  v1::JobSpec spec = MakeSpec("job", SmallModel());
  spec.set_durability(durability);
  return spec;
}

// The same steps on a server that nobody disturbs.
class Reference {
 public:
  Reference() : server_("reference"), group_({server_.get()}, Spec(v1::DURABILITY_NONE), 1) {
    EXPECT_EQ(group_.Start(), absl::OkStatus());
    EXPECT_EQ(group_.Initialise(Initial), absl::OkStatus());
  }
  void Step(int64_t step) {
    EXPECT_EQ(group_.PushAll(v1::SLICE_KIND_GRADIENT, AllTensors(Tensors()), GradientOf(step)), absl::OkStatus());
    EXPECT_TRUE(group_.Finish(UpdateHeader(Tensors())).ok());
  }
  void ExpectSame(TrainerGroup& other, int64_t version) { services::ExpectSame(group_, other, version); }
  static uint32_t Tensors() { return static_cast<uint32_t>(SmallModel().size()); }

 private:
  TestServer server_;
  TrainerGroup group_;
};

absl::Status PushStep(TrainerGroup& group, int64_t step) {
  return group.PushAll(v1::SLICE_KIND_GRADIENT, AllTensors(Reference::Tensors()), GradientOf(step));
}

struct Budget {
  const char* name;
  storage::TierBytes bytes;
};

class RecoveryTest : public ::testing::TestWithParam<Budget> {
 protected:
  // Several threads: slices are read beside updates.
  RecoveryTest() : server_("s", GetParam().bytes) {
    server_.options().compute_threads = 3;
    server_.Restart();
  }
  // The group that follows whoever was there.
  std::unique_ptr<TrainerGroup> NewGroup() {
    auto group = std::make_unique<TrainerGroup>(std::vector<StateServer*>{server_.get()}, Spec(v1::DURABILITY_STEP), 1,
                                                ++epochs_);
    EXPECT_EQ(group->Start(), absl::OkStatus());
    return group;
  }
  TestServer server_;
  uint64_t epochs_ = 0;
};

// More steps than the log takes, so that it wraps, chunks are flushed and segments recycled.
TEST_P(RecoveryTest, RestartsBetweenStepsChangeNoBit) {
  Reference reference;
  // Small steps: in a short log of few segments a restart's own segment counts.
  server_.options().log_steps = 16;
  server_.Restart();
  auto group = NewGroup();
  ASSERT_EQ(group->Initialise(Initial), absl::OkStatus());
  const uint64_t log_bytes = std::filesystem::file_size(server_.directory() + "/log-job");
  for (int64_t step = 1; step <= 40; ++step) {
    if (step % 7 == 0 || step == 1) {
      group.reset();
      server_.Restart();
      group = NewGroup();
      ASSERT_EQ(group->step(), step) << "the step in flight";
    }
    ASSERT_EQ(PushStep(*group, step), absl::OkStatus());
    ASSERT_TRUE(group->Finish(UpdateHeader(Reference::Tensors())).ok());
    reference.Step(step);
  }
  server_.Restart();
  group = NewGroup();
  reference.ExpectSame(*group, 40);
  EXPECT_EQ(std::filesystem::file_size(server_.directory() + "/log-job"), log_bytes) << "the log grew";
  const v1::GetServerStatusResponse status = server_->Status();
  EXPECT_EQ(status.tiers(2).state_bytes() > 0, std::string(GetParam().name) != "Dram");
  EXPECT_EQ(status.tiers(1).state_bytes() > 0, std::string(GetParam().name) != "ReadBack");
}

TEST_P(RecoveryTest, WhatWasPreparedIsFinishedByTheNextGroup) {
  Reference reference;
  auto group = NewGroup();
  ASSERT_EQ(group->Initialise(Initial), absl::OkStatus());
  ASSERT_EQ(PushStep(*group, 1), absl::OkStatus());
  ASSERT_TRUE(group->SealAll(UpdateHeader(Reference::Tensors())).ok());
  group.reset();
  server_.Restart();
  group = NewGroup();
  EXPECT_EQ(group->step(), 2);
  reference.Step(1);
  reference.ExpectSame(*group, 1);
}

// As many as the log could never hold together.
TEST_P(RecoveryTest, DropsInARowDoNotFillTheLog) {
  Reference reference;
  auto group = NewGroup();
  ASSERT_EQ(group->Initialise(Initial), absl::OkStatus());
  const uint64_t log_bytes = std::filesystem::file_size(server_.directory() + "/log-job");
  uint64_t step_bytes = 0;
  for (const auto& tensor : SmallModel()) step_bytes += tensor.elements * 2;
  for (uint64_t attempt = 0; attempt * step_bytes < 2 * log_bytes; ++attempt) {
    group->set_attempt(attempt);
    ASSERT_EQ(PushStep(*group, 1000 + static_cast<int64_t>(attempt)), absl::OkStatus());
  }
  EXPECT_EQ(std::filesystem::file_size(server_.directory() + "/log-job"), log_bytes) << "the log grew";
  group.reset();
  server_.Restart();
  group = NewGroup();
  ASSERT_EQ(PushStep(*group, 1), absl::OkStatus());
  ASSERT_TRUE(group->Finish(UpdateHeader(Reference::Tensors())).ok());
  reference.Step(1);
  reference.ExpectSame(*group, 1);
}

TEST_P(RecoveryTest, AStepThatWasNotPreparedIsVoid) {
  Reference reference;
  auto group = NewGroup();
  ASSERT_EQ(group->Initialise(Initial), absl::OkStatus());
  ASSERT_EQ(PushStep(*group, 77), absl::OkStatus());
  group.reset();
  server_.Restart();
  group = NewGroup();
  EXPECT_EQ(group->step(), 1);
  reference.ExpectSame(*group, 0);
  ASSERT_EQ(PushStep(*group, 1), absl::OkStatus());
  ASSERT_TRUE(group->Finish(UpdateHeader(Reference::Tensors())).ok());
  reference.Step(1);
  reference.ExpectSame(*group, 1);
}

TEST_P(RecoveryTest, ASkippedStepIsSkippedAgain) {
  Reference reference;
  auto group = NewGroup();
  ASSERT_EQ(group->Initialise(Initial), absl::OkStatus());
  const Fill infinite = [](uint32_t, uint64_t) { return std::numeric_limits<float>::infinity(); };
  ASSERT_EQ(group->PushAll(v1::SLICE_KIND_GRADIENT, AllTensors(Reference::Tensors()), infinite), absl::OkStatus());
  const auto decision = group->Finish(UpdateHeader(Reference::Tensors()));
  ASSERT_TRUE(decision.ok() && decision->verdict().skip());
  group.reset();
  server_.Restart();
  group = NewGroup();
  EXPECT_EQ(server_->Status().jobs(0).skipped_steps(), 1u);
  const auto master = group->Read(0, v1::CONTENT_MASTER, 1);
  ASSERT_TRUE(master.ok()) << master.status();
  EXPECT_EQ((*master)[1], Initial(0, 1));
}

TEST_P(RecoveryTest, ADroppedJobLeavesNothingOnTheDisk) {
  auto group = NewGroup();
  ASSERT_EQ(group->Initialise(Initial), absl::OkStatus());
  v1::DropJobRequest request;
  request.set_job("job");
  *request.mutable_epoch() = group->epoch();
  Answer<v1::DropJobResponse> dropped;
  server_->DropJob(request, dropped.reply());
  ASSERT_EQ(dropped.Wait().status(), absl::OkStatus());
  EXPECT_FALSE(std::filesystem::exists(server_.directory() + "/log-job"));
  const v1::GetServerStatusResponse status = server_->Status();
  for (const v1::TierStatus& tier : status.tiers()) EXPECT_EQ(tier.used_bytes(), 0u) << tier.tier();
  server_.Restart();
  EXPECT_EQ(server_->Status().jobs_size(), 0);
  EXPECT_EQ(std::filesystem::file_size(server_.directory() + "/nvme.tier"), 0u);
}

// Or a new job of that name would have the old one's chunks and pins in its catalog.
TEST_P(RecoveryTest, ADropThatFailedMidwayLeavesAJobToBeDroppedAgain) {
  auto group = NewGroup();
  ASSERT_EQ(group->Initialise(Initial), absl::OkStatus());
  const std::string log = server_.directory() + "/log-job";
  std::filesystem::remove(log);
  std::filesystem::create_directories(log + "/not a file");
  v1::DropJobRequest request;
  request.set_job("job");
  *request.mutable_epoch() = group->epoch();
  const auto drop = [&] {
    Answer<v1::DropJobResponse> dropped;
    server_->DropJob(request, dropped.reply());
    return dropped.Wait().status();
  };
  const absl::Status failed = drop();
  EXPECT_FALSE(failed.ok());
  EXPECT_THAT(std::string(failed.message()), HasSubstr("drop it again"));
  EXPECT_EQ(TrainerGroup({server_.get()}, Spec(v1::DURABILITY_STEP), 1, 9).Start(), failed);
  ASSERT_EQ(server_->Status().jobs_size(), 1);
  EXPECT_EQ(server_->Status().jobs(0).failure(), failed.message());
  std::filesystem::remove_all(log);
  EXPECT_EQ(drop(), absl::OkStatus());
  server_.Restart();  // until then, what was flushed and not recorded yet is held for nobody
  const v1::GetServerStatusResponse status = server_->Status();
  for (const v1::TierStatus& tier : status.tiers()) EXPECT_EQ(tier.used_bytes(), 0u) << tier.tier();
  EXPECT_EQ(NewGroup()->Initialise(Initial), absl::OkStatus());
}

TEST_P(RecoveryTest, ALogThatIsGoneIsNotTakenForANewJob) {
  auto group = NewGroup();
  ASSERT_EQ(group->Initialise(Initial), absl::OkStatus());
  ASSERT_EQ(PushStep(*group, 1), absl::OkStatus());
  ASSERT_TRUE(group->Finish(UpdateHeader(Reference::Tensors())).ok());
  const auto read = group->Read(0, v1::CONTENT_MASTER, 1);  // the step was applied, and the catalog heard of it
  ASSERT_TRUE(read.ok()) << read.status();
  group.reset();
  server_->Stop();
  std::filesystem::remove(server_.directory() + "/log-job");
  server_.Restart();
  TrainerGroup next({server_.get()}, Spec(v1::DURABILITY_STEP), 1, 9);
  const absl::Status status = next.Start();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("no gradient log"));
}

// Only a log that was never cut can replace catalog entries that are lost or too old.
TEST_P(RecoveryTest, CatalogEntriesThatAreLostOrOlderThanTheLogAreRefused) {
  namespace fs = std::filesystem;
  auto group = NewGroup();
  ASSERT_EQ(group->Initialise(Initial), absl::OkStatus());
  const auto run = [&](int64_t steps) {
    for (int64_t i = 0; i < steps; ++i) {
      ASSERT_EQ(PushStep(*group, group->step()), absl::OkStatus());
      ASSERT_TRUE(group->Finish(UpdateHeader(Reference::Tensors())).ok());
    }
  };
  using Pairs = std::vector<std::pair<std::string, std::string>>;
  const auto entries = [&] {
    auto catalog = storage::Catalog::Open(server_.directory());
    EXPECT_TRUE(catalog.ok()) << catalog.status();
    return *(*catalog)->List("job/job/chunk-");
  };
  const auto set = [&](const Pairs& pairs) {
    auto catalog = storage::Catalog::Open(server_.directory());
    ASSERT_TRUE(catalog.ok()) << catalog.status();
    ASSERT_EQ((*catalog)->ErasePrefix("job/job/chunk-"), absl::OkStatus());
    ASSERT_EQ((*catalog)->PutAll(pairs), absl::OkStatus());
  };
  const auto end = [&] {
    group.reset();
    server_.End();
  };
  const auto expect_refused = [&](const std::string& what) {
    server_.Restart();
    TrainerGroup next({server_.get()}, Spec(v1::DURABILITY_STEP), 1, 1000);
    const absl::Status status = next.Start();
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(what));
    EXPECT_THAT(std::string(status.message()), HasSubstr("ballastctl verify --rebuild"));
    server_.End();
  };
  const std::string tier = server_.directory() + "/nvme.tier", old_tier = server_.directory() + "/kept.tier",
                    new_tier = server_.directory() + "/newest.tier";
  run(10);
  end();
  const Pairs old_entries = entries();
  fs::copy(tier, old_tier);
  server_.Restart();
  group = NewGroup();
  run(30);
  end();
  const Pairs new_entries = entries();
  ASSERT_EQ(new_entries.size(), old_entries.size());
  fs::copy(tier, new_tier);

  Pairs without = new_entries;
  without.erase(without.begin());
  set(without);
  expect_refused("names no state of chunk");
  // As it was some time ago, state and all: every label and digest is right.
  fs::copy(old_tier, tier, fs::copy_options::overwrite_existing);
  set(old_entries);
  expect_refused("names version ");
  // Nothing was changed by the refusals.
  fs::copy(new_tier, tier, fs::copy_options::overwrite_existing);
  set(new_entries);
  server_.Restart();
  group = NewGroup();
  EXPECT_EQ(group->step(), 41);
}

TEST_P(RecoveryTest, AJobThatDoesNotFitAnyMoreIsNotCalledLost) {
  auto group = NewGroup();
  ASSERT_EQ(group->Initialise(Initial), absl::OkStatus());
  group.reset();
  const storage::TierBytes budget = server_.options().budget;
  server_.options().budget.dram = kMiB;
  server_.Restart();
  const v1::JobStatus job = server_->Status().jobs(0);
  EXPECT_FALSE(job.state_lost());
  EXPECT_THAT(job.failure(), HasSubstr("dram is short of "));
  TrainerGroup refused({server_.get()}, Spec(v1::DURABILITY_STEP), 1, 1000);
  EXPECT_EQ(refused.Start().code(), absl::StatusCode::kResourceExhausted);
  Answer<v1::GetJobResponse> asked;
  v1::GetJobRequest request;
  request.set_job("job");
  server_->GetJob(request, asked.reply());
  EXPECT_EQ(asked.Wait().status().code(), absl::StatusCode::kResourceExhausted);
  server_.options().budget = budget;
  server_.Restart();
  EXPECT_EQ(NewGroup()->step(), 1);
}

TEST_P(RecoveryTest, ALostJobThatIsDroppedGivesItsDiskBack) {
  auto group = NewGroup();
  ASSERT_EQ(group->Initialise(Initial), absl::OkStatus());
  for (int64_t step = 1; step <= 30; ++step) {
    ASSERT_EQ(PushStep(*group, step), absl::OkStatus());
    ASSERT_TRUE(group->Finish(UpdateHeader(Reference::Tensors())).ok());
  }
  v1::DropJobRequest request;
  request.set_job("job");
  *request.mutable_epoch() = group->epoch();
  group.reset();
  server_.End();
  {
    auto catalog = storage::Catalog::Open(server_.directory());
    ASSERT_TRUE(catalog.ok()) << catalog.status();
    ASSERT_EQ((*catalog)->ErasePrefix("job/job/chunk-0"), absl::OkStatus());
  }
  server_.Restart();
  ASSERT_TRUE(server_->Status().jobs(0).state_lost());
  EXPECT_GT(server_->Status().tiers(2).used_bytes(), 0u);
  Answer<v1::DropJobResponse> dropped;
  server_->DropJob(request, dropped.reply());
  ASSERT_EQ(dropped.Wait().status(), absl::OkStatus());
  const v1::GetServerStatusResponse status = server_->Status();
  for (const v1::TierStatus& tier : status.tiers()) EXPECT_EQ(tier.used_bytes(), 0u) << tier.tier();
  EXPECT_EQ(NewGroup()->Initialise(Initial), absl::OkStatus());
}

// The place of the step's last slice in the log.
storage::PayloadPlace LastSliceOf(int64_t step, const std::string& path) {
  const std::vector<storage::PayloadPlace> slices = LoggedSlices(step, path);
  EXPECT_FALSE(slices.empty()) << "no slice of step " << step;
  return slices.empty() ? storage::PayloadPlace() : slices.back();
}

// A second time makes the bit whole again.
void FlipBit(const std::string& path, uint64_t place) {
  std::fstream stream(path, std::ios::in | std::ios::out | std::ios::binary);
  stream.seekg(static_cast<std::streamoff>(place));
  const int byte = stream.get();
  stream.seekp(static_cast<std::streamoff>(place));
  stream.put(static_cast<char>(byte ^ 0x10));
  ASSERT_TRUE(stream.good());
}

// A bit of the step's last slice, and another one of the parity from which the slice would be rebuilt.
void RotLastSliceOf(int64_t step, const std::string& path) {
  const storage::PayloadPlace slice = LastSliceOf(step, path);
  FlipBit(path, slice.offset + 100);
  FlipBit(path, slice.parity_offset() + 200);
}

// Nobody has the gradients of a prepared step any more, nor those of a decided one.
TEST_P(RecoveryTest, ARottenBlockOfASliceIsRebuilt) {
  Reference reference;
  const std::string log = server_.directory() + "/log-job";
  auto group = NewGroup();
  ASSERT_EQ(group->Initialise(Initial), absl::OkStatus());
  for (int64_t step = 1; step <= 2; ++step) {
    group = NewGroup();
    ASSERT_EQ(PushStep(*group, step), absl::OkStatus());
    const v1::StepHeader header = UpdateHeader(Reference::Tensors());
    ASSERT_TRUE(step == 1 ? group->Finish(header).ok() : group->SealAll(header).ok());
    reference.Step(step);
  }
  group.reset();
  server_.End();
  for (const int64_t step : {1, 2}) FlipBit(log, LastSliceOf(step, log).offset + 100);
  server_.Restart();
  ASSERT_EQ(server_->Status().jobs(0).failure(), "");
  group = NewGroup();
  EXPECT_EQ(group->step(), 3);
  reference.ExpectSame(*group, 2);
}

TEST_P(RecoveryTest, ARottenSliceIsPushedAgainUnlessItsStepIsPrepared) {
  Reference reference;
  auto group = NewGroup();
  ASSERT_EQ(group->Initialise(Initial), absl::OkStatus());
  group = NewGroup();
  ASSERT_EQ(PushStep(*group, 1), absl::OkStatus());
  const std::string log = server_.directory() + "/log-job";
  // A push is answered before its bytes are in the log, and nothing tells when they are: the file does.
  while (LoggedSlices(1, log).size() < group->plan().slices().size()) absl::SleepFor(absl::Milliseconds(5));
  group.reset();
  server_.End();
  RotLastSliceOf(1, log);
  server_.Restart();
  Answer<v1::GetJobResponse> asked;
  v1::GetJobRequest request;
  request.set_job("job");
  server_->GetJob(request, asked.reply());
  const auto job = asked.Wait();
  ASSERT_TRUE(job.ok()) << job.status();
  ASSERT_EQ(job->committed(), 0);
  // The group that kept its gradients.
  TrainerGroup same({server_.get()}, Spec(v1::DURABILITY_STEP), 1, epochs_);
  ASSERT_EQ(same.Open(0, job->decision()), absl::OkStatus());
  ASSERT_EQ(PushStep(same, 1), absl::OkStatus());
  ASSERT_TRUE(same.SealAll(UpdateHeader(Reference::Tensors())).ok());
  server_.End();
  RotLastSliceOf(1, log);
  server_.Restart();
  TrainerGroup refused({server_.get()}, Spec(v1::DURABILITY_STEP), 1, 1000);
  EXPECT_EQ(refused.Start().code(), absl::StatusCode::kDataLoss);
  server_.End();
  RotLastSliceOf(1, log);  // the same bit: whole again
  server_.Restart();
  group = NewGroup();
  EXPECT_EQ(group->step(), 2);
  reference.Step(1);
  reference.ExpectSame(*group, 1);
}

// Log and catalog are whole, but belong to two different jobs of the same name.
TEST_P(RecoveryTest, TheLogOfAJobThatWasDroppedIsNotTakenForItsSuccessors) {
  namespace fs = std::filesystem;
  const std::string log = server_.directory() + "/log-job", kept = server_.directory() + "/kept";
  const std::string first = server_.directory() + "/first";
  auto group = NewGroup();
  ASSERT_EQ(group->Initialise(Initial), absl::OkStatus());
  v1::DropJobRequest request;
  request.set_job("job");
  *request.mutable_epoch() = group->epoch();
  server_.End();
  fs::copy(log, first);
  server_.Restart();
  Answer<v1::DropJobResponse> dropped;
  server_->DropJob(request, dropped.reply());
  ASSERT_EQ(dropped.Wait().status(), absl::OkStatus());
  group = NewGroup();
  ASSERT_EQ(group->Initialise(Initial), absl::OkStatus());
  group.reset();
  server_.End();
  fs::rename(log, kept);
  fs::copy(first, log);
  server_.Restart();
  TrainerGroup next({server_.get()}, Spec(v1::DURABILITY_STEP), 1, 1000);
  const absl::Status status = next.Start();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("is of life "));
  server_.End();
  fs::rename(kept, log);
  server_.Restart();
  EXPECT_EQ(NewGroup()->step(), 1);
}

INSTANTIATE_TEST_SUITE_P(Tiers, RecoveryTest,
                         ::testing::Values(Budget{"Dram", {0, 64 * kMiB, 128 * kMiB}},
                                           // SmallModel's working copies, slices and staging, and one chunk's state.
                                           Budget{"Mixed", {0, 3'700'000, 128 * kMiB}},
                                           // Not even its slices fit.
                                           Budget{"ReadBack", {0, 2'990'000, 128 * kMiB}}),
                         [](const auto& budget) { return budget.param.name; });

TEST(DurableJob, NeedsAnNvmeBudgetAndSaysHowMuch) {
  TestServer server("s", {0, 64 * kMiB, 0});
  TrainerGroup group({server.get()}, Spec(v1::DURABILITY_STEP), 1);
  const absl::Status status = group.Start();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("nvme is short of "));
  EXPECT_THAT(std::string(status.message()), HasSubstr("the gradient log"));
  EXPECT_FALSE(std::filesystem::exists(server.directory() + "/log-job"));
  EXPECT_EQ(server->Status().tiers(1).used_bytes(), 0u);
}

TEST(DurableJob, TensorsThatWereAddedLaterComeBackToo) {
  TestServer server("s", {0, 64 * kMiB, 128 * kMiB});
  v1::JobSpec spec = Spec(v1::DURABILITY_STEP);
  TrainerGroup first({server.get()}, spec, 1, 1);
  ASSERT_EQ(first.Start(), absl::OkStatus());
  ASSERT_EQ(first.Initialise(Initial), absl::OkStatus());
  Append({{"late", "late", 70000, 0}}, 0, &spec);
  TrainerGroup second({server.get()}, spec, 1, 2);
  ASSERT_EQ(second.Start(), absl::OkStatus());
  const uint32_t late = Reference::Tensors();
  v1::StepHeader values = ValuesHeader(late + 1);
  const std::string presence = model::MakeBitmap(late + 1, std::vector<uint32_t>{late});
  values.set_value_presence(presence);
  ASSERT_EQ(second.PushAll(v1::SLICE_KIND_VALUE, presence, Initial), absl::OkStatus());
  ASSERT_TRUE(second.Finish(values).ok());
  server.Restart();
  TrainerGroup third({server.get()}, spec, 1, 3);
  ASSERT_EQ(third.Start(), absl::OkStatus());
  const auto read = third.Read(late, v1::CONTENT_MASTER, 1);
  ASSERT_TRUE(read.ok()) << read.status();
  ASSERT_EQ(read->size(), 70000u);
  for (uint64_t i = 0; i < read->size(); ++i) ASSERT_EQ((*read)[i], Initial(late, i));
}

}  // namespace
}  // namespace ballast::services
