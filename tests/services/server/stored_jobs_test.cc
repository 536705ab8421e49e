// What a server finds of its jobs and devices when it starts, and what it tells of steps.
#include "ballast/services/server/stored_jobs.h"

#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/services/counters/step_log.h"
#include "ballast/services/journal/data_files.h"
#include "ballast/services/server/job_steps.h"
#include "ballast/services/server/nvme_devices.h"
#include "ballast/storage/log/gradient_log.h"
#include "ballast/tests/scratch_directory.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ballast::services {
namespace {

using ::testing::HasSubstr;

class StoredJobsTest : public ::testing::Test {
 protected:
  // A log without a step.
  void MakeLog(const std::string& job) {
    const auto log = storage::GradientLog::Create(
        storage::SystemDisk(),
        {.path = LogPath(directory_.path(), job), .job = job, .segment_bytes = uint64_t{1} << 20, .segment_count = 3});
    ASSERT_TRUE(log.ok()) << log.status();
  }

  ScratchDirectory directory_;
};

TEST_F(StoredJobsTest, EntriesAreReadByJob) {
  const auto catalog = *storage::Catalog::Open(directory_ / "catalog");
  const storage::DurableChunk chunk{.life = 3, .id = 5, .version = 7, .offset = 4096, .bytes = 8192, .elements = 256};
  const std::vector<CatalogPair> pairs = {LogPair("a", 3), ChunkPair("a", chunk), CommittedPair("b", 9)};
  ASSERT_EQ(catalog->PutAll(pairs), absl::OkStatus());
  const auto entries = ReadEntries(*catalog);
  ASSERT_TRUE(entries.ok()) << entries.status();
  ASSERT_EQ(entries->size(), 2u);
  EXPECT_EQ(entries->at("a").life, 3u);
  ASSERT_EQ(entries->at("a").chunks.size(), 1u);
  EXPECT_EQ(entries->at("a").chunks[0].Encode(), chunk.Encode());
  EXPECT_EQ(entries->at("b").committed, 9);
  EXPECT_EQ(BytesToRecover(directory_.path(), *entries), 8192u) << "a log that is not there takes no time";
  MakeLog("a");
  const std::optional<uint64_t> log = LogBytes(directory_.path(), "a");
  ASSERT_TRUE(log.has_value());
  EXPECT_EQ(BytesToRecover(directory_.path(), *entries), 8192u + *log);
}

TEST_F(StoredJobsTest, AKeyOfALaterVersionRefusesTheStart) {
  const auto catalog = *storage::Catalog::Open(directory_ / "catalog");
  ASSERT_EQ(catalog->Put("job/a/of_a_later_version", "x"), absl::OkStatus());
  EXPECT_EQ(model::ReasonOf(ReadEntries(*catalog).status()), model::kLaterVersion);
}

TEST_F(StoredJobsTest, OnlyALogWithStepsIsAnOrphan) {
  StoredJobs jobs;
  FindOrphans(directory_ / "nowhere", storage::SystemDisk(), &jobs);
  MakeLog("unused");
  std::ofstream(LogPath(directory_.path(), "rubbish")) << std::string(100'000, 'x');
  std::ofstream(directory_ / "another file") << "x";
  FindOrphans(directory_.path(), storage::SystemDisk(), &jobs);
  EXPECT_TRUE(jobs.orphans.empty()) << jobs.orphans.begin()->second;
  // A job that is known, but not as one with a log: its log cannot be what it says.
  jobs.entries["rubbish"].committed = 3;
  FindOrphans(directory_.path(), storage::SystemDisk(), &jobs);
  ASSERT_EQ(jobs.orphans.size(), 1u);
  EXPECT_EQ(jobs.orphans.begin()->first, "rubbish");
  EXPECT_EQ(jobs.orphans.begin()->second.code(), absl::StatusCode::kDataLoss);
}

TEST_F(StoredJobsTest, DevicesAreDirectoriesOfTheirOwn) {
  StateServerOptions options;
  options.data_directory = directory_ / "data";
  for (const char* name : {"data", "fast", "other"}) std::filesystem::create_directory(directory_ / name);
  EXPECT_TRUE(DevicesOf(options)->empty()) << "the data directory alone";
  options.nvme_devices = {{directory_ / "fast", 100, 0}, {directory_ / "data/../data", 50, 0}};
  const auto devices = DevicesOf(options);
  ASSERT_TRUE(devices.ok()) << devices.status();
  ASSERT_EQ(devices->size(), 2u);
  EXPECT_EQ((*devices)[0].directory, options.data_directory);
  EXPECT_EQ((*devices)[0].budget, 50u);
  EXPECT_EQ((*devices)[1].budget, 100u);
  const auto refused = [&](const std::vector<storage::NvmeDevice>& named, const char* words) {
    options.nvme_devices = named;
    const absl::Status status = DevicesOf(options).status();
    EXPECT_EQ(model::ReasonOf(status), model::kBadConfig) << status;
    EXPECT_THAT(status.ToString(), HasSubstr(words));
  };
  refused({{directory_ / "fast", 1, 0}, {directory_ / "fast/", 1, 0}}, "are one directory");
  refused({{directory_ / "data", 1, 0}, {directory_ / "data", 1, 0}}, "is the data directory, which came before");
  std::filesystem::create_directory_symlink(directory_ / "fast", directory_ / "link");
  refused({{directory_ / "fast", 1, 0}, {directory_ / "link", 1, 0}}, "are one directory");
  std::ofstream(directory_ / "other/LOCK.ballast") << "x";
  refused({{directory_ / "other", 1, 0}}, "the data directory of another server");
}

TEST(WithDevicesTest, TheDisksSpeedsAddUpIfAllWereMeasured) {
  storage::MachineProfile profile;
  profile.disk_read_bytes_per_s = 300;
  profile.disk_write_bytes_per_s = 200;
  profile.disk_mixed_bytes_per_s = 100;
  const storage::MachineProfile together = WithDevices(profile, {{"a", 1, 100}, {"b", 1, 150}, {"unused", 0, 999}});
  EXPECT_EQ(together.disk_read_bytes_per_s, 750u);
  EXPECT_EQ(together.disk_write_bytes_per_s, 500u);
  EXPECT_EQ(together.disk_mixed_bytes_per_s, 250u);
  EXPECT_EQ(WithDevices(profile, {{"a", 1, 100}, {"b", 1, 0}}).disk_read_bytes_per_s, 300u) << "one was not measured";
}

TEST_F(StoredJobsTest, FilesElsewhereAreRememberedByTheirIds) {
  const auto catalog = *storage::Catalog::Open(directory_ / "catalog");
  auto known = ReadKnownFiles(catalog.get(), "s");
  ASSERT_TRUE(known.ok()) << known.status();
  EXPECT_TRUE(known->paths.empty());
  EXPECT_EQ(known->owner, "s");
  ASSERT_EQ(known->remember(77, "/fast/nvme.tier"), absl::OkStatus());
  known = ReadKnownFiles(catalog.get(), "s");
  ASSERT_TRUE(known.ok()) << known.status();
  EXPECT_EQ(known->paths.at(77), "/fast/nvme.tier");
}

TEST(ShowStepsTest, TheLastStepsAreTold) {
  StepLog log;
  EXPECT_EQ(ShowSteps("job", log, 0).steps_size(), 0);
  EXPECT_EQ(ShowSteps("job", log, 0).job(), "job");
}

}  // namespace
}  // namespace ballast::services
