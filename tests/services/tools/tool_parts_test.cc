// Parts of the tools: what a terminal shows, what a scrub of a directory concludes.
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ballast/services/tools/cluster.h"
#include "ballast/services/tools/iotune/memory_step.h"
#include "ballast/services/tools/top/styled_line.h"
#include "ballast/services/tools/verify/extents.h"
#include "ballast/services/tools/verify/finding.h"
#include "ballast/services/tools/verify/newest_versions.h"
#include "ballast/services/tools/verify/progress.h"
#include "ballast/storage/memory/arena.h"
#include "ballast/storage/store/state_update.h"
#include "ballast/tests/sim_disk/sim_disk.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ballast::services {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

TEST(StyledLineTest, CutsCharactersNotBytes) {
  EXPECT_EQ(WidthOf("a\xc3\xa9z"), 3);
  EXPECT_EQ(CutTo("a\xc3\xa9z", 2), "a\xc3\xa9");
  EXPECT_EQ(CutTo("ab", 5), "ab");
  EXPECT_EQ(CutTo("ab", 0), "");
  StyledLine line;
  line.Add("job", kBold).Add("\xc3\xa9\xc3\xa9", kBad).PadTo(8);
  EXPECT_EQ(line.width(), 8);
  EXPECT_EQ(line.Show(4, /*colours=*/false), "job\xc3\xa9");
  EXPECT_EQ(line.Show(20, /*colours=*/false), "job\xc3\xa9\xc3\xa9") << "no blanks at the end";
}

TEST(StyledLineTest, AStyleIsEndedWhereItsTextEnds) {
  StyledLine line;
  line.Add("plain").Add("red", kBad);
  EXPECT_EQ(line.Show(20, /*colours=*/true), "plain\x1b[1;31mred\x1b[0m");
  EXPECT_EQ(line.Show(5, /*colours=*/true), "plain");
  line.Add("\x1b[2J");
  EXPECT_THAT(line.Show(40, false), Not(HasSubstr("\x1b"))) << "a name that a stranger chose";
}

TEST(ScrubReportTest, TheWorstHarmCounts) {
  ScrubReport report;
  EXPECT_EQ(report.worst(), Harm::kNone);
  report.findings = {{.harm = Harm::kRepaired}, {.harm = Harm::kUnnoticed}, {.harm = Harm::kJobRefused}};
  EXPECT_EQ(report.worst(), Harm::kUnnoticed);
}

TEST(ProgressTest, ShortWorkSaysNothing) {
  std::vector<std::string> lines;
  Progress progress([&](const std::string& line) { lines.push_back(line); });
  progress.At("reading", 1, 100);
  Progress silent(nullptr);
  silent.At("reading", 1, 100);
  EXPECT_LE(lines.size(), 1);  // a slow machine may have taken two seconds
}

TEST(PerSecondTest, IsWhatWasDoneByTheTime) {
  EXPECT_EQ(PerSecond(1000, absl::Seconds(4)), 250);
  EXPECT_GT(PerSecond(1000, absl::ZeroDuration()), 1000);
}

// Servers as one look shows them: the job on each at one of these versions.
std::vector<ServerView> ClusterAt(const std::vector<int64_t>& versions) {
  std::vector<ServerView> servers;
  for (const int64_t version : versions) {
    ServerView& server = servers.emplace_back();
    server.address = absl::StrCat("s", servers.size(), ":7070");
    server.status.set_server_id(absl::StrCat("s", servers.size()));
    v1::JobStatus* const job = server.status.add_jobs();
    job->set_name("job");
    job->set_committed(version);
  }
  return servers;
}

TEST(JudgeByTwoLooksTest, WhatIsWrongForAMomentIsNoProblem) {
  std::vector<std::vector<ServerView>> looks;
  size_t looked = 0;
  const auto look = [&] { return looks.at(looked++); };
  looks = {ClusterAt({4, 9}), ClusterAt({10, 10})};
  EXPECT_THAT(JudgeByTwoLooks(look).problems, IsEmpty());
  EXPECT_EQ(looked, 2u);
  looked = 0;
  looks = {ClusterAt({4, 9}), ClusterAt({4, 12})};
  EXPECT_THAT(JudgeByTwoLooks(look).problems, Contains(HasSubstr("expected at most one apart")));
  EXPECT_EQ(looked, 2u);
  // Nothing is wrong, or a server does not answer, for which another look would wait as long again.
  looked = 0;
  looks = {ClusterAt({4, 4})};
  EXPECT_THAT(JudgeByTwoLooks(look).problems, IsEmpty());
  EXPECT_EQ(looked, 1u);
  looked = 0;
  looks[0][1].error = absl::UnavailableError("connection refused");
  EXPECT_THAT(JudgeByTwoLooks(look).problems, Contains(HasSubstr("s2:7070")));
  EXPECT_EQ(looked, 1u);
}

// Two versions of a chunk in a file, with their labels.
class ExtentsOfAFileTest : public ::testing::Test {
 protected:
  static constexpr uint64_t kElements = 256;

  // Writes a state in which every byte of the arrays is `value`.
  storage::DurableChunk Write(int64_t version, uint64_t offset, uint8_t value) {
    const uint64_t bytes = layout_.StateBytes(kElements);
    storage::Arena state = *storage::Arena::Map(bytes);
    std::fill_n(state.bytes().data(), layout_.LabelAt(kElements), static_cast<std::byte>(value));
    storage::DurableChunk chunk{
        .life = 9, .id = 4, .version = version, .offset = offset, .bytes = bytes, .elements = kElements};
    chunk.digests = storage::DigestState({&layout_, state.bytes().data(), kElements}, {nullptr, [] {}});
    storage::EncodeLabel(chunk, layout_, "job", state.bytes().subspan(layout_.LabelAt(kElements)));
    content_.resize(std::max<uint64_t>(content_.size(), offset + bytes));
    std::copy_n(state.bytes().data(), bytes, content_.data() + offset);
    return chunk;
  }
  TierFiles Files() {
    disk_.SetContent("nvme.tier", content_);
    TierFiles files;
    files[0] = {*disk_.Open("nvme.tier", storage::Disk::Mode::kShared), content_.size()};
    return files;
  }
  std::vector<Finding> Check(const storage::DurableChunk& chunk) {
    ScrubReport report;
    Progress progress(nullptr);
    const TierFiles files = Files();
    CheckExtent(*files.at(0).file, {.job = "job", .layout = layout_, .chunk = chunk}, &progress, &report);
    return report.findings;
  }

  storage::SimDisk disk_{1};
  const storage::StateLayout layout_{kernels::OptimizerSpec()};
  std::vector<std::byte> content_;
};

TEST_F(ExtentsOfAFileTest, AWholeExtentHasNoFinding) { EXPECT_TRUE(Check(Write(3, 0, 7)).empty()); }

TEST_F(ExtentsOfAFileTest, RotIsFoundInItsArrayAndInTheLabel) {
  const storage::DurableChunk chunk = Write(3, 0, 7);
  content_[layout_.ArrayAt(storage::StateArray::kMoment1, kElements) + 5] ^= std::byte{1};
  std::vector<Finding> findings = Check(chunk);
  ASSERT_EQ(findings.size(), 1);
  EXPECT_EQ(findings[0].harm, Harm::kJobRefused);
  EXPECT_THAT(findings[0].what, HasSubstr("moment 1"));
  (void)Write(3, 0, 7);
  content_[layout_.LabelAt(kElements) + 9] ^= std::byte{1};
  findings = Check(chunk);
  ASSERT_EQ(findings.size(), 1);
  EXPECT_EQ(findings[0].found, "no label, or a damaged one");
}

TEST_F(ExtentsOfAFileTest, PlacesThatOverlapOrLeaveTheFileAreFound) {
  const auto at = [&](uint64_t offset) {
    return NamedExtent{.job = "job", .layout = layout_, .chunk = {.offset = offset, .bytes = 16384}};
  };
  ScrubReport report;
  CheckPlaces({at(0), at(16384), at(32768)}, "nvme.tier", 49152, &report);
  EXPECT_TRUE(report.findings.empty());
  CheckPlaces({at(0), at(12288)}, "nvme.tier", 49152, &report);
  EXPECT_EQ(report.findings.size(), 1);
  CheckPlaces({at(36864)}, "nvme.tier", 49152, &report);
  EXPECT_EQ(report.findings.size(), 2);
  CheckPlaces({at(100)}, "nvme.tier", 49152, &report);
  EXPECT_EQ(report.findings.size(), 3);
}

TEST_F(ExtentsOfAFileTest, TheNewestWholeVersionIsFound) {
  const uint64_t bytes = layout_.StateBytes(kElements);
  const storage::DurableChunk third = Write(3, 0, 7), fourth = Write(4, bytes, 8);
  const std::vector<FoundLabel> labels = {{third, storage::LayoutBits(layout_)},
                                          {fourth, storage::LayoutBits(layout_)}};
  auto newest = NewestVersions(labels, {}, layout_, Files(), /*version_max=*/10);
  ASSERT_TRUE(newest.ok()) << newest.status();
  EXPECT_EQ(newest->at(4).version, 4);
  content_[bytes + 100] ^= std::byte{1};
  newest = NewestVersions(labels, {}, layout_, Files(), 10);
  ASSERT_TRUE(newest.ok()) << newest.status();
  EXPECT_EQ(newest->at(4).version, 3) << "the newer one is rotten";
  EXPECT_EQ(NewestVersions(labels, {}, layout_, Files(), /*version_max=*/3).status().code(),
            absl::StatusCode::kDataLoss)
      << "of a later history";
}

TEST_F(ExtentsOfAFileTest, LabelsAreFoundWithoutACatalog) {
  const uint64_t bytes = layout_.StateBytes(kElements);
  (void)Write(3, 0, 7);
  (void)Write(4, bytes, 8);
  const TierFiles files = Files();
  Progress progress(nullptr);
  const auto found = FindLabels(*files.at(0).file, 0, {{"job", {.layout = layout_, .life = 9}}}, &progress);
  ASSERT_TRUE(found.ok()) << found.status();
  ASSERT_EQ(found->of_jobs.at("job").size(), 2);
  EXPECT_EQ(found->of_other_lives, 0);
  const auto other = FindLabels(*files.at(0).file, 0, {{"job", {.layout = layout_, .life = 8}}}, &progress);
  ASSERT_TRUE(other.ok()) << other.status();
  EXPECT_EQ(other->of_other_lives, 2) << "left by a job of this name that was dropped";
}

}  // namespace
}  // namespace ballast::services
