#include "ballast/storage/placement/state_layout.h"

#include "gtest/gtest.h"

namespace ballast::storage {
namespace {

constexpr uint64_t kPage = 4096;

TEST(StateLayoutTest, ArraysBeginAtPagesAndTheLabelIsBehind) {
  const StateLayout layout;  // AdamW: a master and two moments, fp32; bf16 working copies
  EXPECT_EQ(layout.array_count(), 3);
  // 1025 elements of 4 bytes take two pages.
  EXPECT_EQ(layout.UsedBytes(StateArray::kMaster, 1025), 4100u);
  EXPECT_EQ(layout.ArrayBytes(StateArray::kMaster, 1025), 2 * kPage);
  EXPECT_EQ(layout.ArrayAt(StateArray::kMaster, 1025), 0u);
  EXPECT_EQ(layout.ArrayAt(StateArray::kMoment1, 1025), 2 * kPage);
  EXPECT_EQ(layout.ArrayAt(StateArray::kMoment2, 1025), 4 * kPage);
  EXPECT_EQ(layout.LabelAt(1025), 6 * kPage);
  EXPECT_EQ(layout.StateBytes(1025), 7 * kPage);
  EXPECT_EQ(layout.WorkingBytes(1025), kPage);
}

TEST(StateLayoutTest, ScalesOfEightBitMomentsAreBehindTheValues) {
  const StateLayout layout({.moments = kernels::MomentFormat::kI8});
  const uint64_t elements = 3 * kernels::kMomentBlock - 1;
  EXPECT_EQ(layout.ValueBytes(StateArray::kMoment1, elements), elements);
  EXPECT_EQ(layout.ScaleBytes(StateArray::kMoment1, elements), 3 * sizeof(float));
  EXPECT_EQ(layout.ScalesAt(StateArray::kMoment1, elements), 3 * kernels::kMomentBlock) << "at a multiple of 64";
  EXPECT_EQ(layout.UsedBytes(StateArray::kMoment1, elements), 3 * kernels::kMomentBlock + 12);
}

TEST(StateLayoutTest, AFrozenChunkIsItsWorkingCopyAlone) {
  const StateLayout layout = StateLayout().Of(StateForm::kWorking);
  EXPECT_EQ(layout.array_count(), 1);
  EXPECT_FALSE(layout.working_copies());
  EXPECT_EQ(layout.WorkingBytes(4096), 0u);
  EXPECT_EQ(layout.StateBytes(4096), 2 * kPage + kPage);
}

TEST(StateLayoutTest, ARemainderNeedsItsWorkingCopy) {
  const StateLayout layout({.master = kernels::MasterFormat::kRemainder});
  EXPECT_TRUE(layout.keeps_remainder());
  EXPECT_EQ(layout.ValueBytes(StateArray::kMaster, 800), 1600u);
  EXPECT_EQ(layout.ScaleBytes(StateArray::kMaster, 800), 100u) << "a carry of one bit";
  const StateLayout whole = layout.Of(StateForm::kFull, {.state = TierKind::kNvme, .working = std::nullopt});
  EXPECT_FALSE(whole.keeps_remainder());
  EXPECT_EQ(whole.ValueBytes(StateArray::kMaster, 800), 3200u);
  EXPECT_EQ(layout.Whole().StateBytes(800), whole.StateBytes(800));
}

TEST(StateLayoutTest, ALentMasterTakesNoBytes) {
  const StateLayout layout({.master = kernels::MasterFormat::kLent, .working = kernels::Dtype::kF32}, false);
  EXPECT_TRUE(layout.lends_master());
  EXPECT_EQ(layout.ArrayBytes(StateArray::kMaster, 1024), 0u);
  EXPECT_EQ(layout.ArrayAt(StateArray::kMoment1, 1024), 0u);
  EXPECT_EQ(layout.StateBytes(1024), 3 * kPage);
}

}  // namespace
}  // namespace ballast::storage
