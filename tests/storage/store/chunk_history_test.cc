#include "ballast/storage/store/chunk_history.h"

#include <utility>
#include <vector>

#include "gtest/gtest.h"

namespace ballast::storage {
namespace {

class ChunkHistoryTest : public ::testing::Test {
 protected:
  ChunkHistoryTest() {
    Replace(3, "of run 0");
    Replace(5, "of run 3");
  }
  // Run `run` replaces a state that a pin keeps.
  void Replace(uint64_t run, const char* state) {
    history_.Keep({.layout = StateLayout(kernels::OptimizerSpec()), .lost = absl::DataLossError(state)}, run);
    history_.Update(run);
  }
  // The state that a pin after `runs` runs reads; empty: the present one.
  absl::string_view Found(uint64_t runs) const {
    const PinnedCopy* const copy = history_.Find(runs);
    return copy == nullptr ? "" : copy->lost.message();
  }

  ChunkHistory history_;
};

TEST_F(ChunkHistoryTest, AStateIsZeroUntilItsFirstUpdate) {
  ChunkHistory fresh;
  EXPECT_TRUE(fresh.zero());
  fresh.Update(2);
  EXPECT_FALSE(fresh.zero());
  EXPECT_EQ(fresh.updated_in(), 2u);
}

TEST_F(ChunkHistoryTest, APinReadsTheStateOfItsTime) {
  EXPECT_EQ(Found(0), "of run 0");
  EXPECT_EQ(Found(2), "of run 0");
  EXPECT_EQ(Found(3), "of run 3");
  EXPECT_EQ(Found(4), "of run 3");
  EXPECT_EQ(Found(5), "");
}

TEST_F(ChunkHistoryTest, CopiesThatServeNoPinAreDropped) {
  const std::vector<uint64_t> pins = {4, 9};
  history_.DropUnused(pins);
  EXPECT_EQ(Found(2), "");
  EXPECT_EQ(Found(4), "of run 3");
  history_.DropUnused({});
  EXPECT_EQ(Found(4), "");
  EXPECT_EQ(history_.updated_in(), 5u);
}

}  // namespace
}  // namespace ballast::storage
