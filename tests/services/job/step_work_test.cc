// What a decided step does to chunks: a function of the job's state, without a server.
#include "ballast/services/job/step_work.h"

#include <gtest/gtest.h>

#include <bit>
#include <cstring>

#include "ballast/tests/services/job_state.h"

namespace ballast::services {
namespace {

constexpr uint64_t kAttempt = 3;

class StepWorkTest : public testing::Test {
 protected:
  StepWorkTest() : chunks_(job_.ChunksOf(*plan_)) { tensor_steps_.assign(SmallModel().size(), 1); }

  // All slices of `kind`, filled with zeros.
  void Push(v1::SliceKind kind) {
    for (const auto& chunk : chunks_) {
      for (const uint32_t slice : plan_->slices_of_chunk(chunk->id)) {
        absl::StatusOr<Intake::Receipt> receipt = chunk->intake.BeginReceive(slice, kind, kAttempt);
        ASSERT_TRUE(receipt.ok()) << receipt.status();
        std::memset(receipt->to, 0, receipt->range.size() * (kind == v1::SLICE_KIND_VALUE ? sizeof(float) : 2));
        std::vector<Intake::Completed> completed = chunk->intake.EndReceive(*receipt, true);
        if (!completed.empty()) chunk->intake.StoreNorms(*receipt, completed);
      }
    }
  }
  StepWork Work(const v1::StepHeader& header, bool skip = false) {
    prepared_.set_step(step_);
    prepared_.set_attempt(kAttempt);
    *prepared_.mutable_header() = header;
    v1::Decision decision;
    decision.set_step(step_);
    decision.mutable_verdict()->set_skip(skip);
    decision.mutable_verdict()->set_factor_bits(std::bit_cast<uint32_t>(1.0f));
    return WorkOf({.chunks = chunks_,
                   .layout = &layout_,
                   .seed = 17,
                   .tensor_steps = tensor_steps_,
                   .lent = nullptr,
                   .logged = logged_,
                   .has_copies = has_copies_},
                  prepared_, decision);
  }

  const uint32_t tensors_ = static_cast<uint32_t>(SmallModel().size());
  const std::shared_ptr<const model::EpochPlan> plan_ = PlanOf(MakeSpec("job", SmallModel()), 2);
  const storage::StateLayout layout_{*model::OptimizerOf(plan_->open().spec())};
  const JobMemory job_;
  std::vector<std::shared_ptr<HeldChunk>> chunks_;
  std::vector<uint64_t> tensor_steps_;
  v1::PreparedRecord prepared_;
  int64_t step_ = 0;
  bool logged_ = false;
  bool has_copies_ = false;
};

TEST_F(StepWorkTest, AnUpdateTouchesEachChunkAndChangesNothingBeforeItIsCommitted) {
  Push(v1::SLICE_KIND_GRADIENT);
  const StepWork work = Work(UpdateHeader(tensors_));
  ASSERT_EQ(work.touched, chunks_);
  EXPECT_EQ(work.changed, chunks_);
  EXPECT_TRUE(work.untouched.empty());
  for (size_t i = 0; i < chunks_.size(); ++i) {
    const storage::ChunkUpdate& update = work.updates[i];
    EXPECT_EQ(update.chunk, chunks_[i]->store_index);
    EXPECT_EQ(update.version, step_);
    EXPECT_EQ(update.random.seed, 17u);
    EXPECT_EQ(update.segments.size(), chunks_[i]->layout().segments.size());
    EXPECT_EQ(update.gradient.size(), chunks_[i]->elements * layout_.gradient_element_bytes());
    EXPECT_EQ(chunks_[i]->changed(), -1);
    EXPECT_FALSE(chunks_[i]->awaits_update());
    EXPECT_TRUE(chunks_[i]->intake.Holds(prepared_.header(), kAttempt));
  }
  EXPECT_EQ(Commit(work, chunks_, /*release_idle=*/false), chunks_.size());  // a buffer of each chunk comes back
  for (const auto& chunk : chunks_) {
    EXPECT_EQ(chunk->changed(), step_);
    EXPECT_TRUE(chunk->awaits_update());
    EXPECT_FALSE(chunk->intake.Holds(prepared_.header(), kAttempt));
  }
}

TEST_F(StepWorkTest, OfAJobWithCopiesTheChunksWhoseTurnItIsAreDigested) {
  Push(v1::SLICE_KIND_GRADIENT);
  step_ = 66;
  const auto digested = [&] {
    const StepWork work = Work(UpdateHeader(tensors_));
    std::vector<uint64_t> ids;
    for (size_t i = 0; i < work.updates.size(); ++i) {
      if (work.updates[i].digests == nullptr) continue;
      EXPECT_EQ(work.updates[i].digests, &work.digests[ids.size()]);
      ids.push_back(work.touched[i]->id);
    }
    EXPECT_EQ(work.digests.size(), ids.size());
    return ids;
  };
  EXPECT_EQ(digested(), std::vector<uint64_t>());
  has_copies_ = true;
  EXPECT_EQ(digested(), std::vector<uint64_t>{2});
  step_ = 63;
  EXPECT_EQ(digested(), std::vector<uint64_t>());
}

TEST_F(StepWorkTest, AStepThatIsSkippedTouchesNoChunk) {
  Push(v1::SLICE_KIND_GRADIENT);
  const StepWork work = Work(UpdateHeader(tensors_), /*skip=*/true);
  EXPECT_EQ(work.untouched, chunks_);
  EXPECT_TRUE(work.updates.empty());
  EXPECT_TRUE(work.changed.empty());
  EXPECT_EQ(Commit(work, chunks_, /*release_idle=*/false), 0u);
  EXPECT_FALSE(chunks_[0]->intake.Holds(prepared_.header(), kAttempt));
}

TEST_F(StepWorkTest, AChunkThatIsAheadOfTheLogIsLeftAloneButWasChanged) {
  Push(v1::SLICE_KIND_VALUE);
  chunks_[1]->Reach(step_);
  const StepWork work = Work(ValuesHeader(tensors_));
  EXPECT_EQ(work.changed, chunks_);
  EXPECT_EQ(work.touched.size(), chunks_.size() - 1);
  for (const auto& chunk : work.touched) EXPECT_NE(chunk, chunks_[1]);
  EXPECT_TRUE(work.untouched.empty());
  (void)Commit(work, chunks_, /*release_idle=*/false);
  EXPECT_FALSE(chunks_[1]->awaits_update());
  EXPECT_FALSE(chunks_[1]->intake.Holds(prepared_.header(), kAttempt));
}

TEST_F(StepWorkTest, OnlyChunksOfPresentTensorsAreTouched) {
  Push(v1::SLICE_KIND_GRADIENT);
  v1::StepHeader header = UpdateHeader(tensors_);
  header.set_gradient_presence(model::MakeBitmap(tensors_, {0}));  // "embed", in unit 0
  const StepWork work = Work(header);
  ASSERT_FALSE(work.touched.empty());
  for (const auto& chunk : work.touched) EXPECT_EQ(chunk->layout().unit, 0u);
  for (const auto& chunk : work.untouched) EXPECT_EQ(chunk->changed(), -1);
  EXPECT_EQ(work.touched.size() + work.untouched.size(), chunks_.size());
  EXPECT_EQ(work.changed, work.touched);
}

// A chunk that is being copied has an update if all of its slices came: when the update runs, the state may be there.
TEST_F(StepWorkTest, UpdatesOfChunksThatAreCopiedAreMadeAndRunIfTheStateHasCome) {
  Push(v1::SLICE_KIND_GRADIENT);
  ASSERT_GE(chunks_.size(), 4u);
  for (size_t i = 0; i < 3; ++i) chunks_[i]->Void(step_ - 1);
  chunks_[0]->intake.Clear();
  StepWork work = Work(UpdateHeader(tensors_));
  ASSERT_EQ(work.untouched, std::vector{chunks_[0]});
  ASSERT_EQ(work.touched, std::vector(chunks_.begin() + 1, chunks_.end()));
  const uint64_t buffers = Commit(work, chunks_, /*release_idle=*/false);
  // Before the worker comes to the step: the second chunk's state comes as of the step before, the third's as of this
  // step, and the last one, already in the work, is as it was.
  chunks_[1]->Fill(step_ - 1, step_ - 1);
  chunks_[2]->Fill(step_, step_);
  const PassedOverUpdates passed = PassOverOthers(&work);
  EXPECT_EQ(passed.buffers, 1u) << "of " << buffers;
  EXPECT_EQ(passed.chunks, HeldChunks{chunks_[2]});
  std::vector<std::shared_ptr<HeldChunk>> run = {chunks_[1]};
  run.insert(run.end(), chunks_.begin() + 3, chunks_.end());
  EXPECT_EQ(work.touched, run);
  ASSERT_EQ(work.updates.size(), run.size());
  ASSERT_EQ(work.buffers.size(), run.size());
  for (size_t i = 0; i < run.size(); ++i) {
    EXPECT_EQ(work.updates[i].chunk, run[i]->store_index);
    EXPECT_FALSE(work.buffers[i].empty());
  }
  EXPECT_FALSE(chunks_[2]->awaits_update());
  EXPECT_TRUE(chunks_[1]->awaits_update());
  EXPECT_EQ(chunks_[2]->version(), step_);
}

TEST_F(StepWorkTest, AnUpdateOfAChunkThatIsStillLackedDoesNotRun) {
  Push(v1::SLICE_KIND_GRADIENT);
  chunks_[1]->Void(step_ - 1);
  StepWork work = Work(UpdateHeader(tensors_));
  (void)Commit(work, chunks_, /*release_idle=*/false);
  EXPECT_EQ(PassOverOthers(&work).chunks, HeldChunks{chunks_[1]});
  EXPECT_EQ(work.touched.size(), chunks_.size() - 1);
  EXPECT_EQ(chunks_[1]->version(), step_);
  EXPECT_FALSE(chunks_[1]->filled());
}

// No pin has a chunk that never had a state. With a log a restore is flushed at once: a replay would need its pin.
TEST_F(StepWorkTest, ARestoreBringsBackTheChunksThatHadAState) {
  step_ = 9;
  for (const auto& chunk : chunks_) chunk->Reach(8);
  for (size_t i = 1; i < chunks_.size(); ++i) chunks_[i]->SetChanged(4);
  v1::StepHeader header;
  header.set_kind(v1::STEP_KIND_RESTORE);
  header.set_restored_version(5);
  for (const bool logged : {false, true}) {
    logged_ = logged;
    const StepWork work = Work(header);
    EXPECT_EQ(work.untouched, (std::vector{chunks_[0]}));
    ASSERT_EQ(work.touched.size(), chunks_.size() - 1);
    for (const storage::ChunkUpdate& update : work.updates) {
      EXPECT_EQ(update.restored, 5);
      EXPECT_EQ(update.flush, logged);
      EXPECT_TRUE(update.segments.empty());
    }
  }
}

// Whether a chunk that is being copied had a state, its copy tells.
TEST_F(StepWorkTest, ARestoreBringsBackAChunkWhoseCopyHasCome) {
  ASSERT_GE(chunks_.size(), 3u);
  step_ = 9;
  for (const auto& chunk : chunks_) chunk->Reach(8);
  chunks_[0]->Void(8);
  chunks_[1]->Void(8);
  v1::StepHeader header;
  header.set_kind(v1::STEP_KIND_RESTORE);
  header.set_restored_version(5);
  StepWork work = Work(header);
  ASSERT_EQ(work.touched, std::vector(chunks_.begin(), chunks_.begin() + 2));
  (void)Commit(work, chunks_, /*release_idle=*/false);
  chunks_[0]->Fill(8, 4);  // before the worker comes to the step
  EXPECT_EQ(PassOverOthers(&work).chunks, HeldChunks{chunks_[1]});
  ASSERT_EQ(work.touched, std::vector{chunks_[0]});
  EXPECT_EQ(work.updates[0].restored, 5);
  EXPECT_EQ(chunks_[0]->changed(), 9);
  EXPECT_EQ(chunks_[1]->version(), 9);
}

}  // namespace
}  // namespace ballast::services
