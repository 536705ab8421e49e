#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <filesystem>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "ballast/services/ctl/machine_measure.h"
#include "ballast/services/ctl/machine_profile.h"
#include "ballast/tests/scratch_directory.h"
#include "ballast/tests/services/daemon.h"

namespace ballast::services {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

MachineProfile Numbered() {
  MachineProfile profile;
  uint64_t next = 1'000'000'000'000;
  for (const ProfileKey& key : ProfileKeys()) profile.*key.field = ++next;
  return profile;
}

std::vector<std::string> Files(const std::string& directory) {
  std::vector<std::string> files;
  for (const auto& entry : fs::directory_iterator(directory)) files.push_back(entry.path().filename().string());
  return files;
}

TEST(MachineProfileTest, ComesBackAsItWasWritten) {
  // Every field has a key.
  EXPECT_EQ(ProfileKeys().size() * sizeof(uint64_t), sizeof(MachineProfile));
  const auto parsed = ParseProfile(ShowProfile(Numbered()), "p.yaml");
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_TRUE(*parsed == Numbered());

  ScratchDirectory directory;
  ASSERT_EQ(WriteProfile(Numbered(), directory / "p.yaml"), absl::OkStatus());
  const auto read = ReadProfile(directory / "p.yaml");
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_TRUE(*read == Numbered());
  EXPECT_THAT(Files(directory.path()), ElementsAre("p.yaml"));
}

TEST(MachineProfileTest, RefusesWhatItDoesNotKnow) {
  const std::string good = ShowProfile(MachineProfile());
  const auto refusal = [](const std::string& text) {
    return std::string(ParseProfile(text, "p.yaml").status().message());
  };
  EXPECT_THAT(refusal("tape_bytes_per_s: 1\n" + good), HasSubstr("p.yaml:1: unknown key 'tape_bytes_per_s'"));
  EXPECT_THAT(refusal(good + "threads: 1\n"), HasSubstr("key 'threads' comes twice"));
  EXPECT_THAT(refusal(absl::StrReplaceAll(good, {{"threads: 0", "threads: many"}})),
              HasSubstr("p.yaml:2: threads: expected a whole number; came 'many'"));
  EXPECT_THAT(refusal(absl::StrReplaceAll(good, {{"threads: 0", "threads: -1"}})), HasSubstr("came '-1'"));
  EXPECT_THAT(refusal(absl::StrReplaceAll(good, {{"threads: 0", "threads:"}})), HasSubstr("came ''"));
  EXPECT_THAT(refusal(absl::StrReplaceAll(good, {{"threads: 0\n", ""}})), HasSubstr("threads is missing"));
  EXPECT_THAT(refusal("just text"), HasSubstr("unknown key 'just text'"));
  EXPECT_THAT(std::string(ReadProfile("/nowhere/p.yaml").status().message()), HasSubstr("cannot be read"));
}

TEST(Iotune, MeasuresAndLeavesOnlyItsProfile) {
  ScratchDirectory directory;
  const Finished tuned =
      RunProcess({CtlPath(), "iotune", "--directory", directory.path(), "--seconds", "0.5", "--json"});
  ASSERT_EQ(tuned.code, 0) << tuned.err;
  EXPECT_THAT(tuned.out, HasSubstr("{\"profile\":{\"threads\":"));
  EXPECT_THAT(tuned.err, HasSubstr("measuring disk mixed at depth 8"));
  EXPECT_THAT(Files(directory.path()), ElementsAre("ballast-profile.yaml"));
  const auto profile = ReadProfile(directory / "ballast-profile.yaml");
  ASSERT_TRUE(profile.ok()) << profile.status();
  EXPECT_GT(profile->dram_copy_1_thread_bytes_per_s, 0u);
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
