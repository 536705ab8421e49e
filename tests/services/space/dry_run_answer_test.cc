// What a dry run answers, from an Open's need: functions, without a server.
#include "ballast/services/space/dry_run_answer.h"

#include <gtest/gtest.h>

#include <memory>

#include "ballast/tests/services/job_state.h"

namespace ballast::services {
namespace {

class DryRunAnswerTest : public testing::Test {
 protected:
  DryRunAnswerTest() {
    state_.job = "job";
    state_.server_id = "s";
  }
  std::shared_ptr<storage::ChunkStore> MakeStore() const {
    return std::make_shared<storage::ChunkStore>(job_.tiers.get(), storage::StateLayout(*model::OptimizerOf(spec_)));
  }
  static const v1::PlannedTier& TierOf(const v1::OpenResponse& answer, storage::TierKind kind) {
    return answer.tiers(static_cast<int>(kind));
  }

  const JobMemory job_;
  const v1::JobSpec spec_ = MakeSpec("job", SmallModel());
  const std::shared_ptr<const model::EpochPlan> plan_ = PlanOf(spec_);
  SpaceState state_;
};

TEST_F(DryRunAnswerTest, MissingChunksCountWhereTheyArePlacedAndTakeNothing) {
  const absl::StatusOr<SpaceNeed> need = Need(state_, *plan_);
  ASSERT_TRUE(need.ok()) << need.status();
  const storage::TierBytes free = FreeOf(job_.tiers->usage(), need->freed);
  const storage::PlanRequest request = RequestOf(*need, *MakeStore(), free);
  const absl::StatusOr<storage::Plan> placed = storage::MakePlan(request);
  ASSERT_TRUE(placed.ok()) << placed.status();
  const v1::OpenResponse answer = DryRunAnswer(*need, RetiledBy(state_, *need, *plan_, free.dram), request, *placed);
  ASSERT_EQ(answer.tiers_size(), storage::kTierKinds);
  const v1::PlannedTier& dram = TierOf(answer, storage::TierKind::kDram);
  EXPECT_EQ(dram.state_bytes(), placed->state.dram);
  EXPECT_GE(dram.other_bytes(), placed->slice_bytes);
  EXPECT_EQ(dram.free_bytes(), uint64_t{64} << 20);
  EXPECT_EQ(job_.tiers->used().dram, 0u);
}

TEST_F(DryRunAnswerTest, ExtentsOfDurableChunksCountAsStateOnNvme) {
  storage::Plan placed;
  placed.state.dram = 100;
  placed.working.dram = 40;
  placed.durable_bytes = 7;
  storage::PlanRequest request;
  request.nvme_fixed_bytes = 3;
  const v1::OpenResponse answer = DryRunAnswer(SpaceNeed(), {.journal_bytes = 5}, request, placed);
  EXPECT_EQ(TierOf(answer, storage::TierKind::kDram).state_bytes(), 100u);
  EXPECT_EQ(TierOf(answer, storage::TierKind::kDram).working_bytes(), 40u);
  EXPECT_EQ(TierOf(answer, storage::TierKind::kNvme).state_bytes(), 7u);
  EXPECT_EQ(TierOf(answer, storage::TierKind::kNvme).other_bytes(), 8u);
}

TEST_F(DryRunAnswerTest, WithoutMissingChunksTheJournalAndSlicesAreAllThatIsTaken) {
  const v1::OpenResponse answer = DryRunAnswer({.slice_bytes = 3, .journal_bytes = 5}, {.dram = 10, .nvme = 20});
  ASSERT_EQ(answer.tiers_size(), storage::kTierKinds);
  const v1::PlannedTier& dram = TierOf(answer, storage::TierKind::kDram);
  const v1::PlannedTier& nvme = TierOf(answer, storage::TierKind::kNvme);
  EXPECT_EQ(dram.state_bytes() + dram.working_bytes() + nvme.state_bytes() + nvme.working_bytes(), 0u);
  EXPECT_EQ(dram.other_bytes(), 3u);
  EXPECT_EQ(dram.free_bytes(), 10u);
  EXPECT_EQ(nvme.other_bytes(), 5u);
  EXPECT_EQ(nvme.free_bytes(), 20u);
}

TEST_F(DryRunAnswerTest, SlicesOfAnotherTilingTakeAtMostWhatIsFree) {
  state_.plan = plan_;
  state_.chunks = std::make_shared<const HeldChunks>(job_.ChunksOf(*plan_));
  state_.store = MakeStore();
  state_.memory = job_.memory;
  state_.read_back_bytes = 4096;
  const std::shared_ptr<const model::EpochPlan> next = PlanOf(spec_, 2);
  const absl::StatusOr<SpaceNeed> need = Need(state_, *next);
  ASSERT_TRUE(need.ok()) << need.status();
  const uint64_t all = SliceBytes(state_.store->layout(), 4096, *next, *state_.chunks, {});
  EXPECT_EQ(RetiledBy(state_, *need, *next, all + 1).slice_bytes, all);
  EXPECT_EQ(RetiledBy(state_, *need, *next, 1000).slice_bytes, 1000u) << "state and working copies make room";
}

}  // namespace
}  // namespace ballast::services
