// State in GPU memory: the bits of the CPU's kernels.
#include "ballast/storage/tier/hbm_tier.h"

#include "ballast/tests/storage/store/store_on_tiers.h"
#include "gtest/gtest.h"

namespace ballast::storage {
namespace {

class HbmTierTest : public ::testing::Test {
 protected:
  void Train(const std::vector<TierKind>& kinds, TierKind working) {
    StoreOnTiers s({.hbm = 64 * kMiB, .dram = 16 * kMiB, .nvme = 16 * kMiB}, 2);
    Plan plan = s.PlanOf(kinds);
    for (ChunkPlacement& chunk : plan.chunks) {
      if (chunk.state == TierKind::kHbm) chunk.working = working;
    }
    const absl::Status added = s.store->Add(Sizes(), plan);
    ASSERT_TRUE(added.ok()) << added;
    ASSERT_TRUE(s.RunValues(1).ok());
    ASSERT_TRUE(s.RunSegments(1).ok());
    ASSERT_TRUE(s.store->Pin(1).ok());
    const std::vector<ReferenceChunk> pinned = s.reference;
    for (uint64_t t = 2; t <= 3; ++t) {
      const absl::Status status = s.RunSegments(t);
      ASSERT_TRUE(status.ok()) << status;
    }
    for (size_t i = 0; i < Sizes().size(); ++i) {
      EXPECT_TRUE(Holds(*s.store, i, s.reference[i])) << i;
      EXPECT_TRUE(HoldsPinned(*s.store, 1, i, pinned[i])) << i;
    }
  }
};

TEST_F(HbmTierTest, StateAndWorkingInHbm) { Train({TierKind::kHbm}, TierKind::kHbm); }
TEST_F(HbmTierTest, WorkingCopiesInDram) { Train({TierKind::kHbm}, TierKind::kDram); }
TEST_F(HbmTierTest, AllThreeTiers) { Train({TierKind::kHbm, TierKind::kDram, TierKind::kNvme}, TierKind::kHbm); }

TEST_F(HbmTierTest, BudgetIsKept) {
  ScratchDirectory directory;
  auto tiers = *Tiers::Open(
      {.budget = {.hbm = 8 * kMiB + kHbmScratchBytes}, .directory = directory.path(), .open_hbm = TestHbm()});
  EXPECT_EQ(tiers->used().hbm, kHbmScratchBytes);
  EXPECT_EQ(tiers->hbm()->Allocate(9 * kMiB, "test").status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(tiers->hbm()->Allocate(8 * kMiB, "test").ok());
  EXPECT_EQ(tiers->used().hbm, kHbmScratchBytes);
}

}  // namespace
}  // namespace ballast::storage
