#include "ballast/storage/store/chunk_memory.h"

#include <memory>
#include <optional>
#include <utility>

#include "ballast/storage/placement/tier_kind.h"
#include "ballast/storage/tier/tiers.h"
#include "ballast/tests/scratch_directory.h"
#include "ballast/tests/storage/tier/test_hbm.h"
#include "gtest/gtest.h"

namespace ballast::storage {
namespace {

class ChunkMemoryTest : public ::testing::Test {
 protected:
  static constexpr uint64_t kBytes = 64 << 10;
  DramBlock Dram(uint64_t bytes) { return *tiers_->dram()->Allocate(bytes, "a test"); }
  HbmBlock Hbm() { return *tiers_->hbm()->Allocate(kBytes, "a test"); }

  ScratchDirectory directory_;
  std::unique_ptr<Tiers> tiers_ = *Tiers::Open(
      {.budget = {.hbm = 64 << 20, .dram = 64 * kBytes}, .directory = directory_.path(), .open_hbm = TestHbm()});
};

TEST_F(ChunkMemoryTest, AStateOfASharedBlockGivesItsPartBack) {
  DramBlock block = Dram(2 * kBytes);
  std::byte* const begin = block.bytes().data();
  ChunkMemory memory({.state = TierKind::kDram, .working = std::nullopt}, {}, {.block = &block, .state = begin});
  EXPECT_EQ(memory.state(), begin);
  EXPECT_EQ(memory.working(), nullptr);
  const uint64_t used = tiers_->used().dram;
  OwnMemory none;
  memory.MoveTo(TierKind::kNvme, &none);
  EXPECT_EQ(memory.tier(), TierKind::kNvme);
  EXPECT_EQ(memory.state(), nullptr);
  memory.shared()->GiveBack({begin, kBytes});
  EXPECT_EQ(tiers_->used().dram, used - kBytes);
}

TEST_F(ChunkMemoryTest, ADroppedCopyGivesItsPartBack) {
  DramBlock block = Dram(2 * kBytes);
  block.MarkRest(kBytes, TierPart::kWorking);
  std::byte* const copy = block.bytes().data() + kBytes;
  ChunkMemory memory({.state = TierKind::kDram, .working = TierKind::kDram}, {},
                     {.block = &block, .state = block.bytes().data(), .working = copy});
  const uint64_t used = tiers_->used().dram;
  EXPECT_EQ(memory.DropWorking(), copy);
  EXPECT_EQ(memory.working(), nullptr);
  EXPECT_EQ(memory.placement().working, std::nullopt);
  EXPECT_EQ(memory.state(), block.bytes().data());
  memory.shared()->GiveBackOfRest({copy, kBytes});
  EXPECT_EQ(tiers_->used().dram, used - kBytes);
}

TEST_F(ChunkMemoryTest, AWorkingCopyLeavesHbmWithItsState) {
  OwnMemory own;
  own.hbm = Hbm();
  own.hbm_working = Hbm();
  std::byte* const state = own.hbm.data();
  std::byte* const working = own.hbm_working.data();
  ChunkMemory memory({.state = TierKind::kHbm, .working = TierKind::kHbm}, std::move(own), {});
  EXPECT_EQ(memory.state(), state);
  EXPECT_EQ(memory.WorkingOfDevice(2).device, working + 2);

  OwnMemory next;
  next.dram = Dram(kBytes);
  next.dram_working = Dram(kBytes);
  std::byte* const state_in_dram = next.dram.bytes().data();
  std::byte* const working_in_dram = next.dram_working.bytes().data();
  memory.MoveTo(TierKind::kDram, &next);
  EXPECT_EQ(memory.tier(), TierKind::kDram);
  EXPECT_EQ(memory.state(), state_in_dram);
  EXPECT_EQ(memory.placement().working, TierKind::kDram);
  EXPECT_EQ(memory.working(), working_in_dram);
  EXPECT_EQ(next.hbm.data(), state) << "the caller frees what the chunk has left";
  EXPECT_EQ(next.hbm_working.data(), working);

  OwnMemory back;
  back.hbm = Hbm();
  memory.MoveTo(TierKind::kHbm, &back);
  EXPECT_EQ(memory.working(), working_in_dram) << "a copy never comes back to hbm";
  EXPECT_EQ(memory.WorkingOfDevice().host, working_in_dram);
  EXPECT_EQ(memory.WorkingOfDevice().device, nullptr);
}

}  // namespace
}  // namespace ballast::storage
