#include "ballast/storage/placement/profile_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "ballast/storage/placement/machine_profile.h"
#include "ballast/tests/scratch_directory.h"

namespace ballast::storage {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

MachineProfile Numbered() {
  MachineProfile profile;
  uint64_t next = 1'000'000'000'000;
  for (const ProfileKey& key : ProfileKeys()) key.field(profile) = ++next;
  return profile;
}

std::vector<std::string> Files(const std::string& directory) {
  std::vector<std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(directory))
    files.push_back(entry.path().filename().string());
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

// Speeds that earlier versions did not measure.
TEST(MachineProfileTest, AnEarlierProfileIsRead) {
  std::string earlier;
  for (const absl::string_view line : absl::StrSplit(ShowProfile(Numbered()), '\n')) {
    if (!absl::StrContains(line, "_beside_")) absl::StrAppend(&earlier, line, "\n");
  }
  const auto read = ParseProfile(earlier, "p.yaml");
  ASSERT_TRUE(read.ok()) << read.status();
  MachineProfile expected = Numbered();
  expected.update_f32_beside_disk_elements_per_s = expected.disk_mixed_beside_update_bytes_per_s = 0;
  EXPECT_TRUE(*read == expected);
}

TEST(MachineProfileTest, RefusesWhatItDoesNotKnow) {
  const std::string good = ShowProfile(MachineProfile());
  const auto refusal = [](const std::string& text) {
    return std::string(ParseProfile(text, "p.yaml").status().message());
  };
  EXPECT_THAT(refusal("tape_bytes_per_s: 1\n" + good), HasSubstr("p.yaml:1: unknown key 'tape_bytes_per_s'"));
  EXPECT_THAT(refusal(good + "threads: 1\n"), HasSubstr("key 'threads' comes twice"));
  EXPECT_THAT(refusal(absl::StrReplaceAll(good, {{"threads: 0", "threads: many"}})),
              HasSubstr("p.yaml:2: threads: expected a whole number, got 'many'"));
  EXPECT_THAT(refusal(absl::StrReplaceAll(good, {{"threads: 0", "threads: -1"}})), HasSubstr("got '-1'"));
  EXPECT_THAT(refusal(absl::StrReplaceAll(good, {{"threads: 0", "threads:"}})), HasSubstr("got ''"));
  EXPECT_THAT(refusal(absl::StrReplaceAll(good, {{"threads: 0\n", ""}})), HasSubstr("threads is missing"));
  EXPECT_THAT(refusal("just text"), HasSubstr("unknown key 'just text'"));
  EXPECT_THAT(std::string(ReadProfile("/nowhere/p.yaml").status().message()), HasSubstr("cannot be read"));
}

}  // namespace
}  // namespace ballast::storage
