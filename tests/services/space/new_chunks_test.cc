// What the chunks that an Open adds need beside their own places.
#include "ballast/services/space/new_chunks.h"

#include <memory>
#include <vector>

#include "ballast/tests/services/job_state.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ballast::services {
namespace {

using ::testing::HasSubstr;

class NewChunksTest : public ::testing::Test {
 protected:
  NewChunksTest() {
    added_.spec = spec_;
    added_.optimizer = *model::OptimizerOf(spec_);
    added_.log_steps = 6;
    added_.log_steps_max = 6;
  }

  v1::JobSpec spec_ = MakeSpec("job", SmallModel());
  NewChunks added_;
};

TEST_F(NewChunksTest, AServersChunksAreThoseThatThePlanGivesIt) {
  const auto plan = PlanOf(spec_);
  EXPECT_EQ(ChunksOf(*plan, "s").size(), plan->layout().chunks().size());
  EXPECT_TRUE(ChunksOf(*plan, "another").empty());
}

TEST_F(NewChunksTest, ASliceTakesItsGradientOrItsValue) {
  kernels::OptimizerSpec optimizer;
  optimizer.gradient = kernels::Dtype::kBf16;
  EXPECT_EQ(SliceBytesPerElement(optimizer), 4);
  optimizer.gradient = kernels::Dtype::kF32;
  EXPECT_EQ(SliceBytesPerElement(optimizer), 6);
  const LargestSlices largest(spec_, added_.optimizer);
  EXPECT_EQ(largest.values_bytes, 65536 * 4);
  EXPECT_EQ(largest.gradient_bytes, 65536 * 2);
}

TEST_F(NewChunksTest, ASpillIsSizedBySlicesAndALogByChunks) {
  const auto plan = PlanOf(spec_, /*world_size=*/2);
  uint64_t slices = 0, elements = 0;
  for (const model::Chunk& chunk : plan->layout().chunks()) {
    added_.AddSpilt(*plan, chunk.index);
    added_.all.Of(chunk)->push_back(chunk.range.size());
    slices += plan->slices_of_chunk(chunk.index).size();
  }
  ASSERT_EQ(added_.spilt.trained.size(), slices);
  for (const uint64_t n : added_.spilt.trained) elements += n;
  uint64_t all = 0;
  for (const uint64_t n : added_.all.trained) all += n;
  EXPECT_EQ(elements, all) << "slices cover their chunks";
  const JournalSize spill = added_.journal_size(0);
  added_.spec.set_durability(v1::DURABILITY_STEP);
  const JournalSize log = added_.journal_size(0);
  EXPECT_GT(log.segment_count, spill.segment_count);
  EXPECT_EQ(added_.journal_size(uint64_t{8} << 20).segment_bytes, uint64_t{8} << 20);
  added_.log_steps = 1000;  // beyond the least that a log has
  EXPECT_GT(added_.journal_size(0).bytes(), log.bytes());
}

TEST_F(NewChunksTest, DurabilitySaysWhatStaysOnTheDisk) {
  EXPECT_FALSE(added_.logged() || added_.durable());
  EXPECT_FALSE(added_.LogsValues(storage::StateForm::kQ8));
  added_.spec.set_durability(v1::DURABILITY_EVERY_K);
  EXPECT_FALSE(added_.logged());
  EXPECT_TRUE(added_.durable());
  added_.spec.set_durability(v1::DURABILITY_STEP);
  EXPECT_TRUE(added_.logged() && added_.durable());
  EXPECT_TRUE(added_.LogsValues(storage::StateForm::kQ8));
  EXPECT_FALSE(added_.LogsValues(storage::StateForm::kFull));
}

TEST_F(NewChunksTest, PeopleHearHowLongTheLogIsAndBecomes) {
  added_.spec.set_durability(v1::DURABILITY_STEP);
  EXPECT_THAT(added_.ExplainLog(), HasSubstr("The gradient log holds 6 steps and takes"));
  EXPECT_THAT(added_.ExplainLog(), ::testing::Not(HasSubstr("longer")));
  added_.log_steps_max = 16;
  EXPECT_THAT(added_.ExplainLog(), HasSubstr("it gets longer, up to 16 steps"));
}

TEST_F(NewChunksTest, ReadingBackNeedsTwoValuesAndAGradientAtLeast) {
  added_.shared_elements = 1000;
  const storage::PlanRequest::ReadBack read_back = added_.read_back();
  EXPECT_EQ(read_back.shared_bytes, 2000);
  EXPECT_EQ(read_back.buffer_bytes_min, 2 * 65536 * 4 + 65536 * 2);
  EXPECT_GT(read_back.buffer_bytes_max, read_back.buffer_bytes_min);
}

}  // namespace
}  // namespace ballast::services
