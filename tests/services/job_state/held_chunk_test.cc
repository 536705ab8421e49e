// What a chunk shows while it is registered, comes back, is lost and is updated.
#include "ballast/services/job_state/held_chunk.h"

#include <gtest/gtest.h>

#include "ballast/tests/services/job_state.h"

namespace ballast::services {
namespace {

class HeldChunkTest : public testing::Test {
 protected:
  HeldChunkTest() : chunk_(MakeChunk()) {}

  HeldChunk MakeChunk() const {
    const model::Chunk& chunk = plan_->layout().chunks()[0];
    return HeldChunk(job_.memory, 0, chunk.index, chunk.range.size(), storage::StateForm::kFull,
                     *model::OptimizerOf(plan_->open().spec()), /*logged=*/false);
  }

  const JobMemory job_;
  const std::shared_ptr<const model::EpochPlan> plan_ = PlanOf(MakeSpec("job", SmallModel()));
  HeldChunk chunk_;
};

TEST_F(HeldChunkTest, ANewChunkIsRegisteredOnce) {
  EXPECT_FALSE(chunk_.version().has_value());
  chunk_.Register(7);
  EXPECT_EQ(chunk_.version(), 7);
  EXPECT_EQ(chunk_.first_version(), 7);
  chunk_.Register(9);
  EXPECT_EQ(chunk_.version(), 7);
  EXPECT_EQ(chunk_.first_version(), 7);
  EXPECT_EQ(chunk_.changed(), -1);
}

TEST_F(HeldChunkTest, AChunkFromTheDiskKeepsItsVersionAndGoesOn) {
  chunk_.ComeBack(5);
  chunk_.Register(3);
  EXPECT_EQ(chunk_.version(), 5);
  EXPECT_EQ(chunk_.first_version(), 0) << "earlier versions may be pinned";
  chunk_.Reach(4);
  EXPECT_EQ(chunk_.version(), 5);
  chunk_.Reach(6);
  EXPECT_EQ(chunk_.version(), 6);
  chunk_.SetChanged(2);
  EXPECT_EQ(chunk_.changed(), 2);
}

TEST_F(HeldChunkTest, NobodyMayReadAVersionThatIsLost) {
  chunk_.Register(-1);
  chunk_.Lose(8);
  EXPECT_EQ(chunk_.version(), 8);
  EXPECT_EQ(chunk_.first_version(), 9);
}

TEST_F(HeldChunkTest, AChunkThatIsCopiedGoesOnWithTheStepsAndHasNoEarlierVersion) {
  chunk_.Register(3);
  chunk_.Void(5);
  EXPECT_FALSE(chunk_.filled());
  EXPECT_EQ(chunk_.version(), 5);
  chunk_.Reach(6);
  chunk_.AwaitUpdate();
  chunk_.PassOverUpdate(7);
  EXPECT_EQ(chunk_.version(), 7);
  EXPECT_FALSE(chunk_.awaits_update());
  chunk_.SetChanged(7);
  chunk_.Fill(9, 6);
  EXPECT_TRUE(chunk_.filled());
  EXPECT_EQ(chunk_.version(), 9);
  EXPECT_EQ(chunk_.first_version(), 9);
  EXPECT_EQ(chunk_.changed(), 7) << "step 7 was decided here";
  EXPECT_FALSE(chunk_.came_back().has_value());
}

// Two decided steps wait for the worker: the gradient is free once both are applied.
TEST_F(HeldChunkTest, UpdatesAreAwaitedUntilAllHaveEnded) {
  chunk_.Register(0);
  EXPECT_FALSE(chunk_.awaits_update());
  chunk_.AwaitUpdate();
  chunk_.AwaitUpdate();
  EXPECT_FALSE(chunk_.update_runs());
  chunk_.BeginUpdate();
  EXPECT_TRUE(chunk_.update_runs());
  EXPECT_EQ(chunk_.version(), 0);
  chunk_.EndUpdate(1);
  EXPECT_EQ(chunk_.version(), 1);
  EXPECT_FALSE(chunk_.update_runs());
  EXPECT_TRUE(chunk_.awaits_update());
  chunk_.BeginUpdate();
  chunk_.EndUpdate(2);
  EXPECT_EQ(chunk_.version(), 2);
  EXPECT_FALSE(chunk_.awaits_update());
}

TEST_F(HeldChunkTest, AnEpochGivesItsLayoutAndVoidsSlices) {
  const model::Chunk& layout = plan_->layout().chunks()[0];
  const uint64_t before = chunk_.intake.generation();
  chunk_.Open(layout, *plan_);
  EXPECT_EQ(chunk_.layout().range, layout.range);
  EXPECT_NE(chunk_.intake.generation(), before);
  const uint32_t slice = plan_->slices_of_chunk(layout.index)[0];
  EXPECT_FALSE(chunk_.intake.LookFor(slice, v1::SLICE_KIND_GRADIENT).busy);
  const absl::StatusOr<Intake::Receipt> receipt = chunk_.intake.BeginReceive(slice, v1::SLICE_KIND_GRADIENT, 1);
  ASSERT_TRUE(receipt.ok()) << receipt.status();
  const Intake::Outlook outlook = chunk_.intake.LookFor(slice, v1::SLICE_KIND_GRADIENT);
  EXPECT_TRUE(outlook.busy);
  EXPECT_FALSE(outlook.logged);
  EXPECT_EQ(outlook.buffer_bytes, 0u) << "the chunk's gradient has its buffer";
}

// The log writes a slice from where its bytes are, so nobody may write there until it has them.
TEST_F(HeldChunkTest, ASlicesElementsAreBusyUntilTheLogHasThemOrNeverWill) {
  const model::Chunk& layout = plan_->layout().chunks()[0];
  chunk_.Open(layout, *plan_);
  const uint32_t slice = plan_->slices_of_chunk(layout.index)[0];
  Intake& intake = chunk_.intake;
  const auto busy = [&] { return intake.LookFor(slice, v1::SLICE_KIND_VALUE).busy; };
  for (const v1::SliceKind kind : {v1::SLICE_KIND_GRADIENT, v1::SLICE_KIND_VALUE}) {
    for (const bool written : {true, false}) {
      const absl::StatusOr<Intake::Receipt> receipt = intake.BeginReceive(slice, kind, 1);
      ASSERT_TRUE(receipt.ok()) << receipt.status();
      const std::vector<Intake::Completed> completed = intake.EndReceive(*receipt, true);
      if (!completed.empty()) intake.StoreNorms(*receipt, completed);
      EXPECT_TRUE(busy());
      if (written) {
        const storage::PayloadPlace place;
        intake.Written(*receipt, &place);
      } else {
        intake.Unlogged(*receipt, /*taken=*/true);
      }
      EXPECT_FALSE(busy());
    }
  }
}

}  // namespace
}  // namespace ballast::services
