// Memory of slices: few mappings, within the reservation, and whole again when all buffers are back.
#include "ballast/services/job_state/slice_memory.h"

#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "ballast/tests/scratch_directory.h"

namespace ballast::services {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;

size_t Mappings() {
  std::ifstream maps("/proc/self/maps");
  size_t lines = 0;
  for (std::string line; std::getline(maps, line);) ++lines;
  return lines;
}

class SliceMemoryTest : public testing::Test {
 protected:
  std::shared_ptr<SliceMemory::Buffer> Allocate(uint64_t bytes) {
    auto buffer = SliceMemory::Allocate(memory_, bytes);
    EXPECT_TRUE(buffer.ok()) << buffer.status();
    return buffer.ok() ? *buffer : nullptr;
  }

  ScratchDirectory directory_;
  std::unique_ptr<storage::Tiers> tiers_ =
      *storage::Tiers::Open({.budget = {.dram = 256 * kMiB}, .directory = directory_.path()});
  std::shared_ptr<SliceMemory> memory_ = std::make_shared<SliceMemory>(tiers_.get());
};

// Of 65,530 mappings that a process may have, 128 GiB in buffers of 2 MiB took all.
TEST_F(SliceMemoryTest, ManyBuffersTakeFewMappings) {
  ASSERT_TRUE(memory_->Reserve(200 * kMiB).ok());
  const size_t before = Mappings();
  std::vector<std::shared_ptr<SliceMemory::Buffer>> buffers;
  for (int i = 0; i < 100; ++i) buffers.push_back(Allocate(2 * kMiB));
  EXPECT_LT(Mappings(), before + 20);
  for (size_t i = 0; i < buffers.size(); ++i) std::memset(buffers[i]->data(), static_cast<int>(i), 2 * kMiB);
  for (size_t i = 0; i < buffers.size(); ++i) {
    ASSERT_EQ(buffers[i]->data()[0], static_cast<std::byte>(i));
    ASSERT_EQ(buffers[i]->data()[2 * kMiB - 1], static_cast<std::byte>(i));
  }
  EXPECT_FALSE(memory_->Fits(1));
  buffers.clear();
  EXPECT_TRUE(memory_->Fits(200 * kMiB));
  EXPECT_EQ(tiers_->used().dram, 200 * kMiB);
}

TEST_F(SliceMemoryTest, BuffersBeyondTheReservationTakeBudgetWhileTheyLive) {
  ASSERT_TRUE(memory_->Reserve(8 * kMiB).ok());
  {
    const auto inside = Allocate(8 * kMiB), beyond = Allocate(4 * kMiB);
    EXPECT_EQ(tiers_->used().dram, 12 * kMiB);
    const auto refused = SliceMemory::Allocate(memory_, 512 * kMiB);
    EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted) << refused.status();
  }
  EXPECT_EQ(tiers_->used().dram, 8 * kMiB);
}

// Whatever sizes came before: the reservation is there for whoever comes.
TEST_F(SliceMemoryTest, AllSizesFindTheirPlaceWithinTheReservation) {
  const uint32_t seed = 20261125;
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  ASSERT_TRUE(memory_->Reserve(64 * kMiB).ok());
  std::vector<std::shared_ptr<SliceMemory::Buffer>> buffers;
  for (int i = 0; i < 2000; ++i) {
    const uint64_t bytes = (1 + random() % 12) * kMiB + random() % 3 * 4096;
    if (memory_->Fits(bytes) && random() % 3 != 0) {
      buffers.push_back(Allocate(bytes));
      buffers.back()->data()[bytes - 1] = std::byte{1};
    } else if (!buffers.empty()) {
      std::swap(buffers[random() % buffers.size()], buffers.back());
      buffers.pop_back();
    }
    ASSERT_EQ(tiers_->used().dram, 64 * kMiB);
  }
  buffers.clear();
  EXPECT_EQ(Allocate(64 * kMiB)->bytes(), 64 * kMiB);
  memory_->Unreserve(64 * kMiB);
  EXPECT_EQ(tiers_->used().dram, 0);
}

}  // namespace
}  // namespace ballast::services
