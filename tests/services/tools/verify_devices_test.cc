// `ballastctl verify` where the state of a job lies on several devices.
#include <filesystem>
#include <fstream>
#include <set>
#include <string>

#include "ballast/tests/services/tools/verify_fixture.h"

namespace ballast::services {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

class VerifyDevicesTest : public VerifyTest {
 protected:
  void SetUp() override {
    for (const std::string& disk : {a_, b_}) std::filesystem::create_directories(disk);
    constexpr uint64_t kShare = uint64_t{128} << 20;
    devices_ = {{directory_.path(), 2 * kShare}, {a_, kShare}, {b_, kShare}};
    Train(20);
    for (const storage::DurableChunk& chunk : Chunks()) files_.insert(chunk.file);
    ASSERT_EQ(files_.size(), 3u) << "state on each disk";
  }
  ScratchDirectory disks_;
  const std::string a_ = disks_ / "a", b_ = disks_ / "b";
  std::set<storage::NvmeFileId> files_;
};

TEST_F(VerifyDevicesTest, FindsNothingInCleanOnesAndDamageInEach) {
  EXPECT_THAT(Scrub().findings, IsEmpty());
  for (const storage::DurableChunk& chunk : Chunks()) {
    auto opened = DataDirectory::Open(directory_.path());
    const std::string path = (*opened)->TierPath(chunk.file);
    opened->reset();
    std::fstream stream(path, std::ios::in | std::ios::out | std::ios::binary);
    stream.seekp(static_cast<std::streamoff>(chunk.offset + 77));
    stream.put('!');
    stream.close();
    const ScrubReport report = Scrub();
    EXPECT_EQ(report.worst(), Harm::kJobRefused);
    EXPECT_THAT(report.findings.back().file, ::testing::AnyOf(path, HasSubstr("nvme.tier")));
  }
  EXPECT_EQ(Scrub().findings.size(), Chunks().size());
}

TEST_F(VerifyDevicesTest, RebuildsFromTheLabelsOnAll) {
  std::filesystem::remove_all(directory_ / "catalog");
  ExpectFound(Harm::kServerRefused, "the catalog cannot be opened");
  server_id_.clear();
  nvme_ = {a_, b_};
  ExpectRebuilt();
  nvme_.clear();  // the rebuilt catalog knows them
  EXPECT_THAT(Scrub().findings, IsEmpty());
}

TEST_F(VerifyDevicesTest, NamesADiskThatIsNotThereAndRebuildsNothingWithoutIt) {
  std::filesystem::rename(b_, disks_ / "elsewhere");
  const ScrubReport report = Scrub();
  ASSERT_EQ(report.findings.size(), 1u);
  EXPECT_EQ(report.worst(), Harm::kJobRefused);
  EXPECT_EQ(report.findings[0].file, b_ + "/nvme.tier");
  EXPECT_THAT(report.findings[0].expected, HasSubstr("extents of the job"));
  ExpectNotRebuilt("which is not there: bring the disk back");
  // At another path.
  nvme_ = {disks_ / "elsewhere"};
  EXPECT_THAT(Scrub().findings, IsEmpty());
  devices_.back().directory = nvme_.front();
  ExpectRecovered();
  nvme_ = {disks_ / "nowhere"};
  EXPECT_THAT(Verify(directory_.path(), nullptr, nvme_).status().message(), HasSubstr("holds no nvme.tier"));
}

}  // namespace
}  // namespace ballast::services
