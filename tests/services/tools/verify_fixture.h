// A data directory written by a real server with a durable job, for tests to damage and verify.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ballast/services/tools/verify/verify.h"
#include "ballast/storage/io/disk.h"
#include "ballast/tests/scratch_directory.h"
#include "ballast/tests/services/trainer_group.h"

namespace ballast::services {

inline constexpr uint32_t kTensors = 4;

inline float Values(uint32_t tensor, uint64_t element) {
  return 0.01f * static_cast<float>((tensor * 7919 + element * 104729) % 1000) - 5.0f;
}
inline Fill Gradients(int64_t step) {
  return [step](uint32_t tensor, uint64_t element) {
    return 0.001f * static_cast<float>((tensor * 31 + element * 17 + static_cast<uint64_t>(step) * 101) % 997) - 0.5f;
  };
}

class VerifyTest : public ::testing::Test {
 protected:
  VerifyTest() { spec_.set_durability(v1::DURABILITY_STEP); }

  StateServerOptions Options() const {
    StateServerOptions options;
    options.data_directory = directory_.path();
    options.budget = {0, uint64_t{64} << 20, uint64_t{512} << 20};
    options.nvme_devices = devices_;
    options.server_id = server_id_;
    options.staging_bytes = uint64_t{4} << 20;
    return options;
  }
  void StartServer() {
    auto started = StateServer::Start(Options());
    ASSERT_TRUE(started.ok()) << started.status();
    server_ = *std::move(started);
    group_ = std::make_unique<TrainerGroup>(std::vector<StateServer*>{server_.get()}, spec_, 2, ++epoch_);
    ASSERT_EQ(group_->Start(), absl::OkStatus());
  }
  // Starts a server, runs transaction 0 and `steps` steps, and stops the server.
  void Train(int steps) {
    StartServer();
    ASSERT_EQ(group_->Initialise(Values), absl::OkStatus());
    Continue(steps);
    StopServer();
  }
  void Continue(int steps) {
    for (int i = 0; i < steps; ++i) {
      const absl::Status pushed =
          group_->PushAll(v1::SLICE_KIND_GRADIENT, AllTensors(kTensors), Gradients(group_->step()));
      ASSERT_EQ(pushed, absl::OkStatus());
      ASSERT_EQ(group_->Finish(UpdateHeader(kTensors)).status(), absl::OkStatus());
    }
    step_after_ = group_->step();
    content_ = Content();
  }
  void PinDurably(int64_t version) {
    ASSERT_EQ(services::PinDurably(server_.get(), "job", group_->epoch(), version), absl::OkStatus());
  }
  // Drops the job, then trains a new job of the same name for `steps` steps.
  void DropAndTrain(int steps) {
    StartServer();
    v1::DropJobRequest request;
    request.set_job("job");
    *request.mutable_epoch() = group_->epoch();
    Answer<v1::DropJobResponse> dropped;
    server_->DropJob(request, dropped.reply());
    ASSERT_EQ(dropped.Wait().status(), absl::OkStatus());
    StopServer();
    Train(steps);
  }
  void StopServer() {
    group_.reset();
    server_.reset();
  }
  std::vector<std::vector<float>> Content() {
    std::vector<std::vector<float>> content;
    for (uint32_t tensor = 0; tensor < kTensors; ++tensor) {
      for (const v1::Content what : {v1::CONTENT_MASTER, v1::CONTENT_MOMENT1, v1::CONTENT_MOMENT2}) {
        auto read = group_->Read(tensor, what, group_->step() - 1);
        EXPECT_TRUE(read.ok()) << read.status();
        content.push_back(read.ok() ? *std::move(read) : std::vector<float>());
      }
    }
    return content;
  }
  // Expects a server to start and refuse the job.
  void ExpectRefusedAtStart(const std::string& why) {
    auto started = StateServer::Start(Options());
    ASSERT_TRUE(started.ok()) << started.status();
    TrainerGroup group({started->get()}, spec_, 2, 1000);
    const absl::Status status = group.Start();
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
    EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr(why));
    const v1::GetServerStatusResponse report = (*started)->Status();
    ASSERT_EQ(report.jobs_size(), 1);
    EXPECT_TRUE(report.jobs(0).state_lost());
    EXPECT_THAT(report.jobs(0).failure(), ::testing::HasSubstr(why));
  }
  // Expects the job to recover with its old bits.
  void ExpectRecovered() {
    const auto before = content_;
    const int64_t step = step_after_;
    StartServer();
    if (HasFatalFailure()) return;
    EXPECT_EQ(group_->step(), step);
    EXPECT_TRUE(Content() == before);
    Continue(2);
    StopServer();
    EXPECT_THAT(Scrub().findings, ::testing::IsEmpty());
  }

  ScrubReport Scrub() {
    auto report = Verify(directory_.path(), nullptr, nvme_);
    EXPECT_TRUE(report.ok()) << report.status();
    return report.ok() ? *std::move(report) : ScrubReport();
  }
  RebuildResult Remake() {
    auto result = Rebuild(directory_.path(), nullptr, nvme_);
    EXPECT_TRUE(result.ok()) << result.status();
    return result.ok() ? *std::move(result) : RebuildResult();
  }
  std::vector<storage::DurableChunk> Chunks() {
    auto opened = DataDirectory::Open(directory_.path());
    EXPECT_TRUE(opened.ok()) << opened.status();
    std::vector<Finding> findings;
    return (*opened)->ReadJobs(&findings)->at("job").entry.chunks;
  }
  void Put(const std::string& key, const std::string& value) {
    auto catalog = storage::Catalog::Open(directory_.path());
    ASSERT_TRUE(catalog.ok()) << catalog.status();
    ASSERT_EQ((*catalog)->Put(key, value), absl::OkStatus());
  }
  void Erase(const std::string& prefix) {
    auto catalog = storage::Catalog::Open(directory_.path());
    ASSERT_TRUE(catalog.ok()) << catalog.status();
    ASSERT_EQ((*catalog)->ErasePrefix(prefix), absl::OkStatus());
  }
  void Flip(const std::string& file, uint64_t offset) {
    std::fstream stream(directory_ / file, std::ios::in | std::ios::out | std::ios::binary);
    stream.seekg(static_cast<std::streamoff>(offset));
    const int byte = stream.get();
    stream.seekp(static_cast<std::streamoff>(offset));
    stream.put(static_cast<char>(byte ^ 0x40));
    ASSERT_TRUE(stream.good());
  }

  // Places in the log of job "job": the payloads, and the first copy of the newest durable batch's head.
  LogReplay Payloads() {
    auto file = storage::SystemDisk()->Open(directory_ / "log-job", storage::Disk::Mode::kShared);
    EXPECT_TRUE(file.ok()) << file.status();
    auto log = ReadJobLog(*std::move(file), "job");
    EXPECT_TRUE(log.ok()) << log.status();
    DurableStates durable;
    for (const storage::DurableChunk& chunk : Chunks()) durable.versions[chunk.id] = chunk.version;
    std::vector<Finding> findings;
    return Replay(*log, "one", durable, "", &findings);
  }
  uint64_t NewestDurableBatch() {
    auto file = storage::SystemDisk()->Open(directory_ / "log-job", storage::Disk::Mode::kShared);
    EXPECT_TRUE(file.ok()) << file.status();
    const auto scanned = storage::ScanLog(**file);
    EXPECT_TRUE(scanned.ok()) << scanned.status();
    const uint64_t bytes = *(*file)->Size();
    alignas(4096) static std::byte block[4096];
    for (uint64_t at = storage::kLogFirstSegment; at < bytes; at += sizeof(block)) {
      EXPECT_EQ((*file)->Read(at, block), absl::OkStatus());
      storage::BatchHead head;
      if (storage::DecodeBatchHead(block, at, bytes, &head) && head.batch == scanned->synced_batch && head.copy == 0) {
        return at;
      }
    }
    ADD_FAILURE() << "no batch " << scanned->synced_batch;
    return 0;
  }
  // Expects findings, the worst of harm `worst`, and the text of some finding to contain `what`.
  void ExpectFound(Harm worst, const std::string& what) {
    const ScrubReport report = Scrub();
    EXPECT_EQ(report.worst(), worst);
    std::string all;
    for (const Finding& finding : report.findings) {
      absl::StrAppend(&all, finding.what, ": ", finding.expected, ", found ", finding.found, "\n");
    }
    EXPECT_THAT(all, ::testing::HasSubstr(what));
  }
  void ExpectRebuilt() {
    const RebuildResult result = Remake();
    EXPECT_TRUE(result.written);
    EXPECT_THAT(result.refused, ::testing::IsEmpty());
    EXPECT_THAT(result.after.findings, ::testing::IsEmpty());
    ExpectRecovered();
  }
  void ExpectNotRebuilt(const std::string& why) {
    const RebuildResult result = Remake();
    EXPECT_FALSE(result.written);
    EXPECT_THAT(result.refused, ::testing::Contains(::testing::HasSubstr(why)));
  }

  ScratchDirectory directory_;
  std::vector<storage::NvmeDevice> devices_;
  std::vector<std::string> nvme_;  // as told to the scrub
  std::string server_id_ = "one";
  v1::JobSpec spec_ = MakeSpec("job", SmallModel());
  uint64_t epoch_ = 0;
  int64_t step_after_ = -1;
  std::unique_ptr<StateServer> server_;
  std::unique_ptr<TrainerGroup> group_;
  std::vector<std::vector<float>> content_;
};

}  // namespace ballast::services
