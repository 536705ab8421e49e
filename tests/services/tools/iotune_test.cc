#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <filesystem>
#include <thread>

#include "ballast/storage/placement/profile_file.h"
#include "ballast/tests/scratch_directory.h"
#include "ballast/tests/services/daemon.h"

namespace ballast::services {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<std::string> Files(const std::string& directory) {
  std::vector<std::string> files;
  for (const auto& entry : fs::directory_iterator(directory)) files.push_back(entry.path().filename().string());
  return files;
}

TEST(Iotune, MeasuresAndLeavesOnlyItsProfile) {
  ScratchDirectory directory;
  const Finished tuned =
      RunProcess({CtlPath(), "iotune", "--directory", directory.path(), "--seconds", "0.5", "--json"});
  ASSERT_EQ(tuned.code, 0) << tuned.err;
  EXPECT_THAT(tuned.out, HasSubstr("{\"profile\":{\"threads\":"));
  EXPECT_THAT(tuned.err, HasSubstr("measuring disk mixed at depth 8"));
  EXPECT_THAT(Files(directory.path()), ElementsAre("ballast-profile.yaml"));
  const auto profile = storage::ReadProfile(directory / "ballast-profile.yaml");
  ASSERT_TRUE(profile.ok()) << profile.status();
  EXPECT_GT(profile->dram_copy_bytes_per_s.one_thread, 0u);
  EXPECT_GT(profile->update_f32_elements_per_s.one_thread, 0u);
  EXPECT_GT(profile->update_f8_elements_per_s.all_threads, 0u);
  EXPECT_GT(profile->digest_bytes_per_s.all_threads, 0u);
  EXPECT_GT(profile->disk_read_bytes_per_s, 0u);
  EXPECT_GT(profile->disk_write_bytes_per_s, 0u);
  EXPECT_GT(profile->disk_mixed_bytes_per_s, 0u);
  EXPECT_GE(profile->disk_append_p99_us, profile->disk_append_p50_us);
}

TEST(Iotune, LeavesNothingBehindWhenItIsInterrupted) {
  ScratchDirectory directory;
  Process process({CtlPath(), "iotune", "--directory", directory.path(), "--seconds", "60"});
  std::this_thread::sleep_for(std::chrono::seconds(1));
  EXPECT_TRUE(Files(directory.path()).empty());  // the file that it measures has no name
  process.Signal(SIGINT);
  EXPECT_EQ(process.Wait().code, -1);
  EXPECT_TRUE(Files(directory.path()).empty());
}

TEST(Iotune, SaysWhatItCannotDo) {
  EXPECT_EQ(RunProcess({CtlPath(), "iotune", "--directory", "/nowhere"}).code, 2);
  EXPECT_EQ(RunProcess({CtlPath(), "iotune", "--seconds", "-1"}).code, 2);
  ScratchDirectory directory;
  const Finished unwritten = RunProcess(
      {CtlPath(), "iotune", "--directory", directory.path(), "--seconds", "0.2", "--out", directory / "no/p.yaml"});
  EXPECT_EQ(unwritten.code, 1);
  EXPECT_THAT(unwritten.err, HasSubstr("no/p.yaml"));
  EXPECT_TRUE(Files(directory.path()).empty());
}

}  // namespace
}  // namespace ballast::services
