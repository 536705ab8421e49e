// Wrong bytes from the disk are refused, never served.
#include <fcntl.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "ballast/proto/model/status.h"
#include "ballast/tests/storage/store/store_on_tiers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ballast::storage {
namespace {

using ::testing::HasSubstr;

class StoreFaultTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(s_.store->Add(Sizes(), s_.PlanOf({TierKind::kNvme})).ok());
    ASSERT_TRUE(s_.RunValues(1).ok());
  }

  // The chunks lie in the file in the order they were added.
  static uint64_t OffsetOf(uint64_t chunk) {
    uint64_t offset = 0;
    for (uint64_t i = 0; i < chunk; ++i) offset += StateLayout().StateBytes(Sizes()[i]);
    return offset;
  }

  void FlipByte(uint64_t offset) {
    const int fd = open((s_.directory / "nvme.tier").c_str(), O_RDWR);
    ASSERT_GE(fd, 0);
    char byte;
    ASSERT_EQ(pread(fd, &byte, 1, static_cast<off_t>(offset)), 1);
    byte ^= 0x10;
    ASSERT_EQ(pwrite(fd, &byte, 1, static_cast<off_t>(offset)), 1);
    ASSERT_EQ(fsync(fd), 0);
    close(fd);
  }

  StoreOnTiers s_{{.dram = 16 * kMiB, .nvme = 16 * kMiB}, 3};
};

TEST_F(StoreFaultTest, CorruptionIsFoundByTheNextStep) {
  const uint64_t array = StateLayout().ArrayBytes(StateArray::kMaster, 65536);
  FlipByte(OffsetOf(4) + array + 12345);
  size_t done = 0;
  StepUpdates step(2);
  for (size_t i = 0; i < Sizes().size(); ++i) step.AddSegments(i, Sizes()[i], 1);
  const absl::Status status = s_.store->Run(step.updates(), [&](size_t) { ++done; });
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
  EXPECT_EQ(model::ReasonOf(status), model::kChecksum);
  EXPECT_THAT(status.ToString(), HasSubstr(absl::StrCat("chunk 4: moment1 in ", s_.directory / "nvme.tier",
                                                        " at offset ", OffsetOf(4) + array)));
  EXPECT_EQ(done, 4);
  // The chunks before it were updated and can be read; the store takes no further step.
  for (size_t i = 0; i < 4; ++i) s_.reference[i].Apply(step.updates()[i]);
  for (size_t i = 0; i < 4; ++i) EXPECT_TRUE(Holds(*s_.store, i, s_.reference[i])) << i;
  EXPECT_EQ(s_.store->Run({}, [](size_t) {}).code(), absl::StatusCode::kDataLoss);
}

TEST_F(StoreFaultTest, ChunksThatAreAddedAfterAnErrorDoNotClearTheError) {
  FlipByte(OffsetOf(4) + 12345);
  StepUpdates step(2);
  for (size_t i = 0; i < Sizes().size(); ++i) step.AddSegments(i, Sizes()[i], 1);
  ASSERT_EQ(s_.store->Run(step.updates(), [](size_t) {}).code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(s_.store->Add(Sizes(), s_.PlanOf({TierKind::kDram})).code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(s_.store->chunk_count(), Sizes().size());
  EXPECT_EQ(s_.store->Run({}, [](size_t) {}).code(), absl::StatusCode::kDataLoss);
}

TEST_F(StoreFaultTest, CorruptionIsFoundByARead) {
  FlipByte(OffsetOf(2) + 5);
  std::vector<float> to(16);
  // Even an intact part is refused, because the store cannot know that it is intact.
  const absl::Status status = s_.store->ReadState(2, StateArray::kMaster, 1000, absl::MakeSpan(to));
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
  EXPECT_EQ(model::ReasonOf(status), model::kChecksum);
  EXPECT_TRUE(s_.store->ReadState(2, StateArray::kMoment1, 1000, absl::MakeSpan(to)).ok());
  EXPECT_TRUE(s_.store->ReadState(3, StateArray::kMaster, 1000, absl::MakeSpan(to)).ok());
}

TEST_F(StoreFaultTest, CorruptionOfAPinnedCopyIsFound) {
  ASSERT_TRUE(s_.store->Pin(1).ok());
  ASSERT_TRUE(s_.RunSegments(1).ok());
  FlipByte(OffsetOf(0) + 5);  // the pin kept the old extent
  std::vector<float> to(16);
  EXPECT_EQ(s_.store->ReadPinnedState(1, 0, StateArray::kMaster, 0, absl::MakeSpan(to)).code(),
            absl::StatusCode::kDataLoss);
  EXPECT_TRUE(Holds(*s_.store, 0, s_.reference[0]));
}

TEST_F(StoreFaultTest, TruncatedFileIsFound) {
  ASSERT_EQ(truncate((s_.directory / "nvme.tier").c_str(), static_cast<off_t>(OffsetOf(3))), 0);
  const absl::Status status = s_.RunSegments(1);
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
  EXPECT_THAT(status.ToString(), HasSubstr("nvme.tier moved no more: the file ends there"));
}

}  // namespace
}  // namespace ballast::storage
