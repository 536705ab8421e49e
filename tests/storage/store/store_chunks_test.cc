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

}  // namespace
}  // namespace ballast::storage
