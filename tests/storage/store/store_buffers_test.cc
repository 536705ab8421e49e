#include "ballast/storage/store/store_buffers.h"

#include <filesystem>
#include <memory>

#include "ballast/proto/base/status.h"
#include "ballast/tests/sim_disk/sim_disk.h"
#include "gtest/gtest.h"

namespace ballast::storage {
namespace {

class StoreBuffersTest : public ::testing::Test {
 protected:
  static constexpr uint64_t kReadBytes = ChunkReader::kStagingBytes, kSlotBytes = 64 << 10;
  uint64_t used() const { return tiers_->used().dram; }

  SimDisk disk_{1};
  std::unique_ptr<Tiers> tiers_ = *Tiers::Open({.budget = {.dram = 16 * kReadBytes, .nvme = kReadBytes},
                                                .directory = std::filesystem::temp_directory_path(),
                                                .staging_bytes = kReadBytes + 3 * kSlotBytes,
                                                .disk = &disk_});
  StoreBuffers buffers_{tiers_.get(), nullptr};
};

TEST_F(StoreBuffersTest, StagingIsTakenOnce) {
  EXPECT_EQ(buffers_.staging_bytes_missing(), kReadBytes + 3 * kSlotBytes);
  EXPECT_EQ(buffers_.flush_buffer_bytes_missing(), kReadBytes);
  EXPECT_EQ(buffers_.slot_memory_bytes(), 3 * kSlotBytes);
  ASSERT_EQ(buffers_.TakeStaging(0, DramTier::Limit::kBudget), absl::OkStatus());
  EXPECT_EQ(used(), 0u) << "no state needs moving";
  ASSERT_EQ(buffers_.TakeStaging(kSlotBytes, DramTier::Limit::kBudget), absl::OkStatus());
  EXPECT_EQ(buffers_.staging_bytes_missing(), 0u);
  EXPECT_EQ(buffers_.flush_buffer_bytes_missing(), 0u);
  EXPECT_EQ(used(), kReadBytes + 3 * kSlotBytes);
  ASSERT_EQ(buffers_.TakeStaging(2 * kSlotBytes, DramTier::Limit::kBudget), absl::OkStatus());
  EXPECT_EQ(buffers_.staging.slot_bytes, 2 * kSlotBytes);
  EXPECT_EQ(used(), kReadBytes + 3 * kSlotBytes);
}

TEST_F(StoreBuffersTest, AStateLargerThanTheStagingIsRefused) {
  const absl::Status large = buffers_.TakeStaging(4 * kSlotBytes, DramTier::Limit::kBudget);
  EXPECT_EQ(model::ReasonOf(large), model::kBadConfig);
  EXPECT_EQ(used(), 0u);
}

TEST_F(StoreBuffersTest, AReadersBufferIsMissingNoMore) {
  ASSERT_EQ(buffers_.reader.Prepare(), absl::OkStatus());
  EXPECT_EQ(buffers_.flush_buffer_bytes_missing(), 0u);
  EXPECT_EQ(buffers_.staging_bytes_missing(), 3 * kSlotBytes);
}

TEST_F(StoreBuffersTest, PullsHaveSlotsForAQuarterOfTheChunks) {
  EXPECT_EQ(buffers_.pull_memory_missing(kSlotBytes, 3).slots, 1u);
  EXPECT_EQ(buffers_.pull_memory_missing(kSlotBytes, 1000).slots, 16u);
  const PullMemory wanted = buffers_.pull_memory_missing(kSlotBytes, 20);
  EXPECT_EQ(wanted.slots, 5u);
  EXPECT_EQ(wanted.buffer_bytes, kReadBytes);
  ASSERT_EQ(buffers_.TakePullMemory(wanted), absl::OkStatus());
  EXPECT_EQ(used(), kReadBytes + wanted.bytes()) << "with the reader's own buffer";
  EXPECT_EQ(buffers_.pulled.slot_bytes(), kSlotBytes);
  EXPECT_EQ(buffers_.pull_memory_missing(kSlotBytes, 20).bytes(), 0u);
}

}  // namespace
}  // namespace ballast::storage
