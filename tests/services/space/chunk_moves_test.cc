// Chunks on their way to where new budgets want them, between the tasks of a job's worker.
#include "ballast/services/space/chunk_moves.h"

#include <memory>
#include <optional>

#include "ballast/services/journal/flushes.h"
#include "ballast/services/space/prediction.h"
#include "ballast/storage/tier/nvme_tier.h"
#include "ballast/tests/services/job_part.h"

namespace ballast::services {
namespace {

using storage::TierKind;

class ChunkMovesTest : public JobPartTest {
 protected:
  std::shared_ptr<storage::ChunkStore> store() {
    JobMutexLock lock(&core_.mu);
    return core_.state.store();
  }
  v1::JobMoves MoveAll(TierKind to) {
    storage::Plan plan;
    for (const storage::PlacedChunk& chunk : store()->placed()) {
      plan.chunks.push_back({.state = to, .working = chunk.placement.working});
    }
    v1::JobMoves answer;
    moves_.MoveTo(plan, &answer);
    return answer;
  }
  size_t In(TierKind tier) {
    size_t count = 0;
    for (const storage::PlacedChunk& chunk : store()->placed()) count += chunk.placement.state == tier ? 1 : 0;
    return count;
  }
  uint64_t Left() {
    JobMutexLock lock(&core_.mu);
    return moves_.left();
  }
  float Value(uint64_t chunk) {
    float value = 0;
    EXPECT_EQ(store()->ReadState(chunk, storage::StateArray::kMaster, 0, {&value, 1}), absl::OkStatus());
    return value;
  }

  Prediction prediction_{&core_};
  Flushes flushes_{&core_, &journal_};
  ChunkMoves moves_{&core_, &flushes_, &prediction_};
};

TEST_F(ChunkMovesTest, AllChunksMoveInBatchesAndKeepTheirState) {
  Open();
  ASSERT_GT(chunks_.size(), 4u) << "more than a batch";
  StepOfValues(3);
  const v1::JobMoves answer = MoveAll(TierKind::kNvme);
  EXPECT_EQ(answer.chunks_to_nvme(), chunks_.size());
  EXPECT_EQ(answer.chunks_to_dram(), 0);
  EXPECT_EQ(In(TierKind::kNvme), 0) << "the worker moves them";
  RunAll();
  EXPECT_EQ(In(TierKind::kNvme), chunks_.size());
  EXPECT_EQ(Left(), 0);
  for (uint64_t chunk = 0; chunk < chunks_.size(); ++chunk) EXPECT_EQ(Value(chunk), 3);
  StepOfValues(4);
  EXPECT_EQ(MoveAll(TierKind::kDram).chunks_to_dram(), chunks_.size());
  RunAll();
  EXPECT_EQ(In(TierKind::kDram), chunks_.size());
  for (uint64_t chunk = 0; chunk < chunks_.size(); ++chunk) EXPECT_EQ(Value(chunk), 4);
  JobMutexLock lock(&core_.mu);
  EXPECT_EQ(moves_.moved(), 2 * chunks_.size());
}

TEST_F(ChunkMovesTest, AChunkThatWasRemovedIsPassedOver) {
  Open();
  StepOfValues(3);
  ASSERT_EQ(store()->Remove({0, 2}), absl::OkStatus());
  EXPECT_EQ(MoveAll(TierKind::kNvme).chunks_to_nvme(), chunks_.size() - 2);
  RunAll();
  EXPECT_EQ(In(TierKind::kNvme), chunks_.size() - 2);
  EXPECT_EQ(Left(), 0);
  EXPECT_EQ(Value(1), 3);
}

TEST_F(ChunkMovesTest, APlanKeepsMovesOutUntilItEnds) {
  Open();
  StepOfValues(3);
  {
    const MoveGate::KeptShut plan(&moving_);
    (void)MoveAll(TierKind::kNvme);
    RunAll();
    EXPECT_EQ(In(TierKind::kNvme), 0);
    EXPECT_EQ(Left(), chunks_.size());
  }
  RunAll();
  EXPECT_EQ(In(TierKind::kNvme), chunks_.size());
}

TEST_F(ChunkMovesTest, LaterBudgetsReplaceTheMovesOfEarlierOnes) {
  Open();
  StepOfValues(3);
  (void)MoveAll(TierKind::kNvme);
  EXPECT_EQ(MoveAll(TierKind::kDram).chunks_to_dram(), 0) << "they lie there";
  RunAll();
  EXPECT_EQ(In(TierKind::kDram), chunks_.size());
}

TEST_F(ChunkMovesTest, MovesThatFindNoRoomWaitForTheNextStep) {
  Open();
  StepOfValues(3);
  std::optional<storage::NvmeRoom> all =
      *tiers_->nvme()->Promise(tiers_->budget().nvme - tiers_->used().nvme, "all that is left");
  (void)MoveAll(TierKind::kNvme);
  RunAll();
  EXPECT_EQ(In(TierKind::kNvme), 0);
  EXPECT_EQ(Left(), chunks_.size());
  EXPECT_EQ(Value(0), 3);
  all.reset();
  RunAll();
  EXPECT_EQ(In(TierKind::kNvme), 0);
  Locked([&] { moves_.Resume(); });  // as after a step
  RunAll();
  EXPECT_EQ(In(TierKind::kNvme), chunks_.size());
}

// Budgets that were lowered take effect as soon as the last lease has ended, whether steps follow or not.
TEST_F(ChunkMovesTest, WorkingCopiesAreDroppedOnceNoneIsLeased) {
  Open();
  StepOfValues(3);
  const auto lease = [this](uint64_t chunk) {
    JobMutexLock lock(&core_.mu);
    return core_.leases->Take(chunks_[chunk], nullptr);
  };
  std::shared_ptr<const void> first = lease(0), second = lease(1);
  storage::Plan plan;
  plan.chunks.assign(chunks_.size(), {.state = TierKind::kDram, .working = std::nullopt});
  v1::JobMoves answer;
  moves_.MoveTo(plan, &answer);
  EXPECT_EQ(answer.working_copies_dropped(), chunks_.size());
  RunAll();
  EXPECT_EQ(Left(), chunks_.size());
  EXPECT_TRUE(store()->has_working_copy(0));
  EXPECT_EQ(lease(2), nullptr) << "or they would never be dropped";
  {
    const MoveGate::KeptShut plans_do_not_wait(&moving_);
    first.reset();
    RunAll();
    EXPECT_EQ(Left(), chunks_.size());
  }
  second.reset();
  RunAll();
  EXPECT_EQ(Left(), 0);
  for (uint64_t chunk = 0; chunk < chunks_.size(); ++chunk) EXPECT_FALSE(store()->has_working_copy(chunk));
  EXPECT_NE(lease(2), nullptr);
}

TEST_F(ChunkMovesTest, AStoppedJobMovesNothing) {
  Open();
  StepOfValues(3);
  EXPECT_TRUE(moves_.Holding().has_value());
  (void)MoveAll(TierKind::kNvme);
  Locked([&](Replies* replies) { core_.Refuse(absl::CancelledError("dropped"), replies); });
  RunAll();
  EXPECT_EQ(In(TierKind::kNvme), 0);
  EXPECT_FALSE(moves_.Holding().has_value());
}

TEST_F(ChunkMovesTest, WhatAJobHoldsIsItsChunksInOrder) {
  EXPECT_FALSE(moves_.Holding().has_value()) << "it has no chunks yet";
  Open();
  const std::optional<storage::JobHolding> holding = moves_.Holding();
  ASSERT_TRUE(holding.has_value());
  EXPECT_EQ(holding->name, "job");
  ASSERT_EQ(holding->chunks.size(), chunks_.size());
  for (size_t i = 0; i < chunks_.size(); ++i) EXPECT_EQ(holding->chunks[i].elements, chunks_[i]->elements);
  EXPECT_FALSE(holding->durable);
}

}  // namespace
}  // namespace ballast::services
