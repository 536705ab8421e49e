// Push, seal, prepare and commit within an epoch.
#include "ballast/proto/model/step_header.h"
#include "ballast/services/step/step_machine.h"
#include "ballast/tests/step/step_fixture.h"

namespace ballast::services {
namespace {

using absl::StatusCode;
using Admission = StepMachine::Admission;

// --- rule 3: push

TEST_F(StepMachineTest, APushNeedsTheOpenEpoch) {
  Start(1);
  const v1::PushRequest slice = Slices(0, 0, 0, v1::SLICE_KIND_VALUE)[0];
  v1::PushRequest newer = slice;
  *newer.mutable_epoch() = MakeEpoch(2);
  EXPECT_THAT(Push(newer), Fails(StatusCode::kFailedPrecondition, model::kNotOpen, "send Open again"));
  ASSERT_TRUE(machine_->Fence(MakeFence(2)).ok());
  EXPECT_THAT(Push(newer), Fails(StatusCode::kFailedPrecondition, model::kNotOpen, "promised epoch 2.7"));
  EXPECT_THAT(Push(slice), Fails(StatusCode::kFailedPrecondition, model::kStaleEpoch, "epoch 1.7 is over"));
}

TEST_F(StepMachineTest, APushNeedsTheNextStep) {
  Start(1);
  RunStep(0, Values());
  EXPECT_THAT(Push(Slices(0, 0, 0, v1::SLICE_KIND_GRADIENT)[0]),
              Fails(StatusCode::kFailedPrecondition, model::kOldStep, "the next is 1"));
  EXPECT_THAT(Push(Slices(0, 2, 0, v1::SLICE_KIND_GRADIENT)[0]),
              Fails(StatusCode::kFailedPrecondition, model::kBehind, "send it the commit of step 1"));
}

TEST_F(StepMachineTest, OnlyWholeSlicesOfTheirRankAreAccepted) {
  Start(1);
  const v1::PushRequest slice = Slices(0, 0, 0, v1::SLICE_KIND_VALUE)[0];
  v1::PushRequest bad = slice;
  bad.set_unit(9);
  EXPECT_THAT(Push(bad), Fails(StatusCode::kNotFound, model::kUnknownUnit, "has 2 units, the push names unit 9"));
  bad = slice;
  bad.set_begin(1024);
  bad.set_end(4096);
  EXPECT_THAT(Push(bad), Fails(StatusCode::kInvalidArgument, model::kBadRange, "which has 1024 elements"));
  bad = slice;
  bad.set_end(slice.end() - 1);
  EXPECT_THAT(Push(bad), Fails(StatusCode::kInvalidArgument, model::kOverlap, "only whole slices"));
  bad = slice;
  bad.set_rank(1);
  EXPECT_THAT(Push(bad), Fails(StatusCode::kInvalidArgument, model::kBadRange, "belongs to rank 0"));
  bad.set_rank(2);
  EXPECT_THAT(Push(bad), Fails(StatusCode::kInvalidArgument, model::kBadRequest, "world size 2"));
  bad = slice;
  bad.set_kind(v1::SLICE_KIND_UNSPECIFIED);
  EXPECT_THAT(Push(bad), Fails(StatusCode::kInvalidArgument, model::kBadRequest, "GRADIENT or VALUE"));
}

TEST_F(StepMachineTest, ASliceOfAnotherServerIsSentThere) {
  servers_ = {"a", "b"};
  Start(1);
  int refused = 0;
  for (const v1::PushRequest& slice : Slices(0, 0, 0, v1::SLICE_KIND_VALUE)) {
    const absl::Status status = Push(slice);
    if (status.ok()) continue;
    ++refused;
    EXPECT_THAT(status, Fails(StatusCode::kInvalidArgument, model::kBadRequest, "lies on server 'b'"));
  }
  const model::EpochPlan& plan = *machine_->plan();
  int elsewhere = 0;
  for (const model::Chunk& chunk : plan.layout().chunks()) elsewhere += plan.holders_of(chunk.index)[0] == 1;
  EXPECT_EQ(refused, elsewhere);
}

TEST_F(StepMachineTest, ADoubledPushIsHeldAndOtherBytesConflict) {
  Start(1);
  v1::PushRequest slice = Slices(0, 0, 0, v1::SLICE_KIND_VALUE)[0];
  ASSERT_TRUE(Push(slice).ok());
  EXPECT_EQ(*machine_->Admit(slice, [](uint32_t) { return true; }), Admission::kHeld);
  slice.set_crc32c(slice.crc32c() + 1);
  EXPECT_THAT(Push(slice), Fails(StatusCode::kAlreadyExists, model::kDigestConflict, "different bytes"));
}

TEST_F(StepMachineTest, APlaceHasOneWriterAtATime) {
  Start(1);
  const v1::PushRequest slice = Slices(0, 0, 0, v1::SLICE_KIND_VALUE)[0];
  ASSERT_EQ(*machine_->Admit(slice, [](uint32_t) { return true; }), Admission::kReceive);
  EXPECT_THAT(machine_->Admit(slice, [](uint32_t) { return true; }).status(),
              Fails(StatusCode::kUnavailable, model::kBusy, "send this one again"));
  // A new group does not get the place either while old bytes may still come in.
  Start(2, 1);
  EXPECT_THAT(Push(Slices(0, 0, 0, v1::SLICE_KIND_VALUE)[0]),
              Fails(StatusCode::kUnavailable, model::kBusy, "[0, 1024)"));
  EXPECT_THAT(machine_->EndPush(slice, absl::OkStatus()),
              Fails(StatusCode::kFailedPrecondition, model::kStaleEpoch, "epoch 1.7 is over"));
  EXPECT_TRUE(Push(Slices(0, 0, 0, v1::SLICE_KIND_VALUE)[0]).ok());
}

TEST_F(StepMachineTest, DamagedBytesLeaveThePlaceFree) {
  Start(1);
  const v1::PushRequest slice = Slices(0, 0, 0, v1::SLICE_KIND_VALUE)[0];
  ASSERT_EQ(*machine_->Admit(slice, [](uint32_t) { return true; }), Admission::kReceive);
  const absl::Status damaged = model::Error(StatusCode::kDataLoss, model::kChecksum, "damaged");
  EXPECT_EQ(machine_->EndPush(slice, damaged), damaged);
  EXPECT_EQ(*machine_->Admit(slice, [](uint32_t) { return true; }), Admission::kReceive);
}

TEST_F(StepMachineTest, AHigherAttemptReplacesTheRanksSlices) {
  Start(1);
  PushAll(0, 0, 0, Values());
  PushAll(1, 0, 0, Values());
  const auto second = Slices(0, 0, 1, v1::SLICE_KIND_VALUE);
  ASSERT_TRUE(Push(second[0]).ok());
  EXPECT_THAT(Push(Slices(0, 0, 0, v1::SLICE_KIND_VALUE)[1]),
              Fails(StatusCode::kAborted, model::kStaleAttempt, "rank 0 is at attempt 1"));
  // Rank 1 is still at attempt 0, so of attempt 1 only one of four slices is there.
  const auto sealed = machine_->Seal(MakeSeal(0, 0, 1, Values()));
  ASSERT_TRUE(sealed.ok() && *sealed == nullptr);
  EXPECT_EQ(machine_->Pending(0).pending().missing_count(), 3u);
}

TEST_F(StepMachineTest, AnAttemptRaisedWhileBytesCameWins) {
  Start(1);
  const v1::PushRequest old_slice = Slices(0, 0, 0, v1::SLICE_KIND_VALUE)[0];
  ASSERT_EQ(*machine_->Admit(old_slice, [](uint32_t) { return true; }), Admission::kReceive);
  ASSERT_TRUE(Push(Slices(0, 0, 1, v1::SLICE_KIND_VALUE)[1]).ok());
  EXPECT_THAT(machine_->EndPush(old_slice, absl::OkStatus()),
              Fails(StatusCode::kAborted, model::kStaleAttempt, "attempt 0 of step 0 was dropped"));
}

// --- rule 4: norm

TEST_F(StepMachineTest, NormNeedsExactCoverageOfItsAttempt) {
  Start(1);
  RunStep(0, Values());
  v1::NormRequest norm;
  *norm.mutable_epoch() = MakeEpoch(1);
  norm.set_step(1);
  norm.set_gradient_presence("\x01");
  PushAll(0, 1, 0, Update("\x01"));
  EXPECT_THAT(machine_->Norm(norm).status(),
              Fails(StatusCode::kFailedPrecondition, model::kIncomplete, "after every rank has pushed"));
  PushAll(1, 1, 0, Update("\x01"));
  const auto answer = machine_->Norm(norm);
  ASSERT_TRUE(answer.ok()) << answer.status();
  ASSERT_EQ(answer->norms_size(), 1);
  EXPECT_EQ(answer->norms(0).chunk(), 0u);
  norm.set_attempt(1);
  EXPECT_EQ(model::ReasonOf(machine_->Norm(norm).status()), model::kIncomplete);
  norm.set_gradient_presence("");
  EXPECT_THAT(machine_->Norm(norm).status(), Fails(StatusCode::kInvalidArgument, model::kBadRequest, "1 bytes"));
}

// --- rules 5 and 6: seal and prepare

TEST_F(StepMachineTest, PreparedIsAnsweredOnceItIsDurable) {
  Start(1);
  PrepareStep(0, 0, Values());
  const auto waiting = machine_->Seal(MakeSeal(0, 0, 0, Values()));
  ASSERT_TRUE(waiting.ok());
  EXPECT_EQ(*waiting, nullptr);
  machine_->Synced(host_.log.size() - 1);
  EXPECT_EQ(*machine_->Seal(MakeSeal(0, 0, 0, Values())), nullptr);
  EXPECT_EQ(host_.sync_wanted, host_.log.size());
  SyncAll();
  const auto answer = machine_->Seal(MakeSeal(0, 0, 0, Values()));
  ASSERT_TRUE(answer.ok() && *answer != nullptr);
  EXPECT_EQ((**answer)->prepared().blobs(1), "blob of rank 1");
  EXPECT_EQ((**answer)->prepared().epoch().counter(), 1u);
}

// Rank 0's seal has the blobs, and the answers to it; the plan hash stands for them in the others.
TEST_F(StepMachineTest, TheBlobsComeWithRank0) {
  Start(1);
  for (uint32_t rank = 0; rank < 2; ++rank) PushAll(rank, 0, 0, Values());
  v1::SealRequest of_1 = MakeSeal(1, 0, 0, Values());
  of_1.clear_blobs();
  ASSERT_EQ(*machine_->Seal(of_1), nullptr);
  v1::SealRequest of_0 = MakeSeal(0, 0, 0, Values());
  of_0.clear_blobs();
  EXPECT_THAT(machine_->Seal(of_0).status(),
              Fails(StatusCode::kInvalidArgument, model::kBadRequest, "expected those of 2 ranks"));
  of_0 = MakeSeal(0, 0, 0, Values());
  of_0.set_blobs(1, "other blob");
  EXPECT_THAT(machine_->Seal(of_0).status(), Fails(StatusCode::kInvalidArgument, model::kBadRequest, "plan hash"));
  EXPECT_FALSE(machine_->prepared());
  ASSERT_EQ(*machine_->Seal(MakeSeal(0, 0, 0, Values())), nullptr);
  SyncAll();
  const model::SealAnswer first = *machine_->Seal(MakeSeal(0, 0, 0, Values()));
  EXPECT_EQ((*first)->prepared().blobs_size(), 2);
  EXPECT_EQ((*first)->prepared().blobs(1), "blob of rank 1");
  const model::SealAnswer second = *machine_->Seal(of_1);
  EXPECT_EQ((*second)->prepared().blobs_size(), 0);
  EXPECT_EQ(*machine_->Seal(of_1), second) << "made once for all ranks";
  ASSERT_TRUE(Commit(DecisionOf((*second)->prepared())).ok());
  EXPECT_EQ(machine_->Describe().decision().blobs(1), "blob of rank 1");
  EXPECT_EQ((**machine_->Seal(of_1))->decided().blobs_size(), 0);
  EXPECT_EQ((**machine_->Seal(MakeSeal(0, 0, 0, Values())))->decided().blobs_size(), 2);
}

TEST_F(StepMachineTest, BlobsThatRankOneDidNotHashEndTheEpoch) {
  Start(1);
  v1::SealRequest of_1 = MakeSeal(1, 0, 0, Values());
  of_1.clear_blobs();
  ASSERT_EQ(*machine_->Seal(of_1), nullptr);
  v1::SealRequest of_0 = MakeSeal(0, 0, 0, Values());
  of_0.set_blobs(1, "other blob");
  const std::vector<std::string> blobs(of_0.blobs().begin(), of_0.blobs().end());
  of_0.set_plan_hash(model::PlanHash(*machine_->plan(), 0, 0, Values(), blobs));
  EXPECT_THAT(machine_->Seal(of_0).status(),
              Fails(StatusCode::kFailedPrecondition, model::kPlanMismatch, "tensors and blobs"));
  EXPECT_FALSE(machine_->seals_agree());
}

// What was filed may come again as its key alone.
TEST_F(StepMachineTest, AFiledSealNeedsNoHeaderAgain) {
  Start(1);
  v1::SealRequest seal = MakeSeal(0, 0, 0, Values());
  EXPECT_FALSE(machine_->Filed(seal));
  ASSERT_EQ(*machine_->Seal(seal), nullptr);
  EXPECT_TRUE(machine_->Filed(seal));
  seal.clear_header();
  seal.clear_blobs();
  EXPECT_EQ(*machine_->Seal(seal), nullptr);
  for (uint32_t rank = 0; rank < 2; ++rank) PushAll(rank, 0, 0, Values());
  ASSERT_EQ(*machine_->Seal(MakeSeal(1, 0, 0, Values())), nullptr);
  SyncAll();
  EXPECT_EQ((**machine_->Seal(seal))->prepared().header().value_presence(), Values().value_presence());
  Start(2);
  EXPECT_FALSE(machine_->Filed(seal));
}

TEST_F(StepMachineTest, ASealMayComeBeforeTheSlices) {
  Start(1);
  EXPECT_EQ(*machine_->Seal(MakeSeal(1, 0, 0, Values())), nullptr);
  PushAll(1, 0, 0, Values());
  EXPECT_EQ(*machine_->Seal(MakeSeal(0, 0, 0, Values())), nullptr);
  EXPECT_EQ(machine_->Pending(0).pending().missing_count(), 2u);
  PushAll(0, 0, 0, Values());
  SyncAll();
  EXPECT_TRUE((**machine_->Seal(MakeSeal(0, 0, 0, Values())))->has_prepared());
}

TEST_F(StepMachineTest, AfterItsSealARankMayNotDrop) {
  Start(1);
  PushAll(0, 0, 0, Values());
  ASSERT_TRUE(machine_->Seal(MakeSeal(0, 0, 0, Values())).ok());
  EXPECT_THAT(Push(Slices(0, 0, 1, v1::SLICE_KIND_VALUE)[0]),
              Fails(StatusCode::kFailedPrecondition, model::kAlreadySealed, "rank 0 sealed attempt 0"));
  EXPECT_THAT(machine_->Seal(MakeSeal(0, 0, 1, Values())).status(),
              Fails(StatusCode::kFailedPrecondition, model::kAlreadySealed, "cannot drop"));
}

TEST_F(StepMachineTest, NoSliceIsAddedToWhatIsPrepared) {
  Start(1);
  RunStep(0, Values());
  PrepareStep(1, 0, Update("\x01"));
  EXPECT_EQ(*machine_->Admit(Slices(0, 1, 0, v1::SLICE_KIND_GRADIENT)[0], [](uint32_t) { return true; }),
            Admission::kHeld);
  EXPECT_THAT(Push(Slices(0, 1, 0, v1::SLICE_KIND_GRADIENT)[1]),
              Fails(StatusCode::kFailedPrecondition, model::kAlreadySealed, "is prepared on server 'a'"));
}

TEST_F(StepMachineTest, DifferentPlansEndTheEpoch) {
  Start(1);
  RunStep(0, Values());
  v1::StepHeader other = Update();
  other.mutable_groups(0)->set_learning_rate(0.2);
  PushAll(0, 1, 0, Update());
  PushAll(1, 1, 0, Update());
  ASSERT_TRUE(machine_->Seal(MakeSeal(0, 1, 0, Update())).ok());
  EXPECT_THAT(machine_->Seal(MakeSeal(1, 1, 0, other)).status(),
              Fails(StatusCode::kFailedPrecondition, model::kPlanMismatch, "same hyper-parameters, tensors and blobs"));
  EXPECT_THAT(machine_->Seal(MakeSeal(1, 1, 0, Update())).status(),
              Fails(StatusCode::kFailedPrecondition, model::kPlanMismatch, "this epoch is over"));
  SyncAll();
  EXPECT_FALSE(machine_->Describe().has_prepared());
  // A fence heals it.
  Start(2);
  RunStep(1, Update());
  EXPECT_EQ(machine_->committed(), 1);
}

TEST_F(StepMachineTest, APlanHashThatIsNotTheHeadersIsRefused) {
  Start(1);
  v1::SealRequest seal = MakeSeal(0, 0, 0, Values());
  seal.set_plan_hash("nonsense");
  EXPECT_THAT(machine_->Seal(seal).status(), Fails(StatusCode::kInvalidArgument, model::kBadRequest, "plan hash"));
  seal = MakeSeal(0, 0, 0, Values());
  seal.mutable_header()->set_value_presence("\x05");
  EXPECT_THAT(machine_->Seal(seal).status(), Fails(StatusCode::kInvalidArgument, model::kBadRequest, "the job has 2"));
  EXPECT_TRUE(machine_->Seal(MakeSeal(0, 0, 0, Values())).ok()) << "a refused seal must leave no trace";
}

TEST_F(StepMachineTest, OnlyPresentTensorsAreNeeded) {
  Start(1);
  RunStep(0, Values());
  RunStep(1, Update("\x02"));
  RunStep(2, Update("\x03"));
  EXPECT_THAT(machine_->Describe().tensor_steps(), testing::ElementsAre(1, 2));
}

// --- rules 7 and 8: decide and commit

TEST_F(StepMachineTest, ASkippedStepCountsAsATransactionAndNotAsAnUpdate) {
  Start(1);
  RunStep(0, Values());
  host_.overflow = true;
  RunStep(1, Update());
  EXPECT_EQ(machine_->committed(), 1);
  EXPECT_EQ(machine_->skipped_steps(), 1u);
  EXPECT_THAT(machine_->Describe().tensor_steps(), testing::ElementsAre(0, 0));
  EXPECT_TRUE(host_.applied.back().second.verdict().skip());
}

TEST_F(StepMachineTest, ACommitIsAppliedOnce) {
  Start(1);
  RunStep(0, Values());
  const v1::Decision decision = machine_->Describe().decision();
  const auto again = Commit(decision);
  ASSERT_TRUE(again.ok());
  EXPECT_EQ(again->committed(), 0);
  EXPECT_EQ(host_.applied.size(), 1u);
  v1::Decision other = decision;
  other.set_attempt(4);
  EXPECT_THAT(Commit(other).status(), Fails(StatusCode::kDataLoss, model::kDiverged, "a step has one decision"));
}

TEST_F(StepMachineTest, ACommitNeedsTheVeryKeyThatIsPrepared) {
  Start(1);
  RunStep(0, Values());
  PrepareStep(1, 0, Update());
  SyncAll();
  const v1::Decision decision = DecisionOf(machine_->Describe().prepared());
  v1::Decision other = decision;
  other.set_attempt(1);
  EXPECT_THAT(Commit(other).status(), Fails(StatusCode::kDataLoss, model::kDiverged, "of all servers"));
  other = decision;
  *other.mutable_epoch() = MakeEpoch(1, 6);
  EXPECT_THAT(Commit(other).status(), Fails(StatusCode::kFailedPrecondition, model::kStaleEpoch, "epoch 1.6"));
  other = decision;
  other.set_step(2);
  EXPECT_THAT(Commit(other).status(), Fails(StatusCode::kFailedPrecondition, model::kBehind, "commit of step 1"));
  EXPECT_EQ(machine_->committed(), 0);
  // A decision stays one whoever was fenced meanwhile.
  ASSERT_TRUE(machine_->Fence(MakeFence(2)).ok());
  EXPECT_TRUE(Commit(decision).ok());
  EXPECT_EQ(machine_->committed(), 1);
}

TEST_F(StepMachineTest, TheBlobsAreThoseOfTheSeal) {
  Start(1);
  PrepareStep(0, 0, Values());
  SyncAll();
  v1::Decision decision = DecisionOf(machine_->Describe().prepared());
  decision.clear_blobs();
  decision.add_blobs("forged");
  ASSERT_TRUE(Commit(decision).ok());
  EXPECT_THAT(machine_->Describe().decision().blobs(), testing::ElementsAre("blob of rank 0", "blob of rank 1"));
}

TEST_F(StepMachineTest, ASealOfADecidedStepAnswersWithTheDecision) {
  Start(1);
  RunStep(0, Values());
  const auto answer = machine_->Seal(MakeSeal(1, 0, 0, Values()));
  ASSERT_TRUE(answer.ok() && *answer != nullptr);
  EXPECT_EQ((**answer)->decided().step(), 0);
  EXPECT_THAT(machine_->Seal(MakeSeal(1, 0, 1, Values())).status(),
              Fails(StatusCode::kFailedPrecondition, model::kOldStep, "decided already"));
}

}  // namespace
}  // namespace ballast::services
