#include "ballast/storage/store/store_chunks.h"

#include <optional>
#include <utility>
#include <vector>

#include "ballast/proto/base/status.h"
#include "gtest/gtest.h"

namespace ballast::storage {
namespace {

class StoreChunksTest : public ::testing::Test {
 protected:
  static constexpr uint64_t kElements = 512;

  // Adds chunks without memory, as many as `tiers`.
  std::vector<StoredChunk*> Append(const std::vector<TierKind>& tiers) {
    std::vector<NewChunk> added;
    for (const TierKind tier : tiers)
      added.push_back({layout_, kElements, 10, ChunkMemory({.state = tier}, {}, {}), {}});
    return chunks_.Append(std::move(added));
  }

  const StateLayout layout_{kernels::OptimizerSpec()};
  const uint64_t state_ = layout_.StateBytes(kElements), working_ = layout_.WorkingBytes(kElements);
  StoreChunks chunks_;
};

TEST_F(StoreChunksTest, ChunksAreFoundByTheirIndex) {
  const std::vector<StoredChunk*> first = Append({TierKind::kDram, TierKind::kNvme});
  const std::vector<StoredChunk*> more = Append(std::vector<TierKind>(100, TierKind::kDram));
  EXPECT_EQ(chunks_.count(), 102u);
  EXPECT_EQ(chunks_.All().size(), 102u);
  EXPECT_EQ(*chunks_.Find(1), first[1]) << "an address stays";
  EXPECT_EQ(*chunks_.Find(2), more[0]);
  EXPECT_EQ(more[0]->index, 2u);
  EXPECT_EQ(model::ReasonOf(chunks_.Find(102).status()), model::kBadRange);
}

TEST_F(StoreChunksTest, BytesAreCountedWhereChunksLive) {
  const std::vector<StoredChunk*> chunks = Append({TierKind::kDram, TierKind::kNvme});
  EXPECT_EQ(chunks_.residency().state.dram, state_);
  EXPECT_EQ(chunks_.residency().state.nvme, state_);
  EXPECT_EQ(chunks_.residency().working.dram, 2 * working_);

  OwnMemory none;
  chunks[0]->memory.MoveTo(TierKind::kNvme, &none);
  chunks_.Replace(*chunks[0]);
  EXPECT_EQ(chunks_.residency().state.dram, 0u);
  EXPECT_EQ(chunks_.residency().state.nvme, 2 * state_);
  EXPECT_EQ(chunks_.placed()[0].placement.state, TierKind::kNvme);

  chunks[1]->memory.DropWorking();
  chunks_.Replace(*chunks[1]);
  EXPECT_EQ(chunks_.residency().working.dram, working_);
  EXPECT_EQ(chunks_.placed()[1].placement.working, std::nullopt);
  EXPECT_EQ(chunks_.placed()[1].elements, kElements);
}

TEST_F(StoreChunksTest, ARemovedChunkIsAGapThatNothingCounts) {
  const std::vector<StoredChunk*> chunks = Append({TierKind::kDram, TierKind::kNvme, TierKind::kDram});
  chunks_.Remove(*chunks[1]);
  EXPECT_EQ(chunks_.count(), 3u);
  EXPECT_EQ(chunks_.present(), 2u);
  EXPECT_EQ(model::ReasonOf(chunks_.Find(1).status()), model::kBadRange);
  EXPECT_EQ(chunks_.All(), (std::vector<StoredChunk*>{chunks[0], chunks[2]}));
  EXPECT_TRUE(chunks_.placed()[1].gap());
  EXPECT_EQ(layout_.Of(chunks_.placed()[1].form, chunks_.placed()[1].placement).StateBytes(0), 0u);
  EXPECT_EQ(chunks_.residency().state.nvme, 0u);
  EXPECT_EQ(chunks_.residency().working.dram, 2 * working_);
  EXPECT_EQ(Append({TierKind::kDram})[0]->index, 3u);
}

}  // namespace
}  // namespace ballast::storage
