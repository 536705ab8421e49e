#include "ballast/services/step/step_machine.h"

#include "ballast/proto/model/protocol.h"
#include "ballast/proto/model/tiling.h"
#include "ballast/tests/step/step_fixture.h"

namespace ballast::services {
namespace {

using absl::StatusCode;

TEST_F(StepMachineTest, AJobIsCreatedByTransactionZero) {
  EXPECT_FALSE(machine_->Describe().exists());
  EXPECT_EQ(machine_->committed(), -1);
  Start(1);
  EXPECT_EQ(host_.opened, 1);
  RunStep(0, Values());
  EXPECT_EQ(machine_->committed(), 0);
  ASSERT_EQ(host_.applied.size(), 1u);
  EXPECT_EQ(host_.applied[0].first.header().kind(), v1::STEP_KIND_VALUES);
  EXPECT_TRUE(machine_->Describe().exists());
}

// --- rule 9: the fence

TEST_F(StepMachineTest, AFenceAnswersOnceItsPromiseIsDurable) {
  const auto waiting = machine_->Fence(MakeFence(1));
  ASSERT_TRUE(waiting.ok());
  EXPECT_FALSE(waiting->has_value());
  EXPECT_EQ(host_.sync_wanted, host_.log.size());
  SyncAll();
  const auto answer = machine_->Fence(MakeFence(1));
  ASSERT_TRUE(answer.ok() && answer->has_value());
  EXPECT_EQ((*answer)->job().promised().counter(), 1u);
  EXPECT_EQ(host_.log.size(), 1u) << "the repeated request wrote the promise again";
}

TEST_F(StepMachineTest, AFenceOfAnOlderEpochIsStale) {
  Start(5);
  EXPECT_THAT(machine_->Fence(MakeFence(4)).status(),
              Fails(StatusCode::kFailedPrecondition, model::kStaleEpoch, "promised epoch 5.7"));
}

// Or one fence would leave no numbers for the groups to come.
TEST_F(StepMachineTest, AFenceSkipsABoundedNumberOfEpochs) {
  constexpr uint64_t kSkipped = uint64_t{1} << 32;
  Start(5);
  for (const uint64_t counter : {6 + kSkipped, uint64_t{1} << 62, ~uint64_t{0}}) {
    EXPECT_THAT(machine_->Fence(MakeFence(counter)).status(),
                Fails(StatusCode::kInvalidArgument, model::kBadRequest, "one above what GetJob tells is enough"))
        << counter;
  }
  EXPECT_EQ(machine_->Describe().promised().counter(), 5u);
  EXPECT_TRUE(machine_->Fence(MakeFence(5 + kSkipped)).ok());
  SyncAll();
  EXPECT_TRUE(machine_->Fence(MakeFence(6 + kSkipped)).ok()) << "the next group goes on from there";
}

TEST_F(StepMachineTest, EqualCountersAreOrderedByNonce) {
  Start(1);
  v1::FenceRequest fence = MakeFence(1);
  fence.mutable_epoch()->set_nonce(6);
  EXPECT_THAT(machine_->Fence(fence).status(),
              Fails(StatusCode::kFailedPrecondition, model::kStaleEpoch, "epoch 1.6 comes too late"));
  fence.mutable_epoch()->set_nonce(8);
  EXPECT_TRUE(machine_->Fence(fence).ok());
}

TEST_F(StepMachineTest, ExpectEmptyRefusesAnExistingJobWithoutAPromise) {
  Start(1);
  RunStep(0, Values());
  const size_t records = host_.log.size();
  const absl::Status status = machine_->Fence(MakeFence(2, /*expect_empty=*/true)).status();
  EXPECT_THAT(status, Fails(StatusCode::kAlreadyExists, model::kJobExists, "resume=never"));
  EXPECT_THAT(std::string(status.message()),
              testing::AllOf(testing::HasSubstr("resume=auto"), testing::HasSubstr("resume=must")));
  EXPECT_EQ(host_.log.size(), records);
  EXPECT_EQ(machine_->Describe().promised().counter(), 1u);
}

TEST_F(StepMachineTest, APrepareInFlightIsReportedByTheFence) {
  Start(1);
  PrepareStep(0, 0, Values());
  EXPECT_FALSE(machine_->Describe().has_prepared()) << "not durable: nobody may decide by it";
  ASSERT_FALSE(machine_->Fence(MakeFence(2))->has_value());
  SyncAll();
  const auto answer = machine_->Fence(MakeFence(2));
  ASSERT_TRUE(answer.ok() && answer->has_value());
  EXPECT_EQ((*answer)->job().prepared().step(), 0);
  EXPECT_THAT(machine_->Seal(MakeSeal(0, 0, 0, Values())).status(),
              Fails(StatusCode::kFailedPrecondition, model::kStaleEpoch, "open the job again with resume=auto"));
}

TEST_F(StepMachineTest, NothingIsPreparedAfterAHigherPromise) {
  Start(1);
  PushAll(0, 0, 0, Values());
  PushAll(1, 0, 0, Values());
  ASSERT_TRUE(machine_->Seal(MakeSeal(0, 0, 0, Values())).ok());
  const v1::SealRequest last = MakeSeal(1, 0, 0, Values());
  ASSERT_TRUE(machine_->Fence(MakeFence(2)).ok());
  EXPECT_FALSE(machine_->Seal(last).ok());
  SyncAll();
  EXPECT_FALSE(machine_->Describe().has_prepared());
}

// --- rule 11: open

TEST_F(StepMachineTest, OpenNeedsAPromise) {
  EXPECT_THAT(machine_->Open(MakeOpen(3, -1)).status(),
              Fails(StatusCode::kInvalidArgument, model::kBadRequest, "send Fence first"));
}

TEST_F(StepMachineTest, OpenMayBeRepeated) {
  Start(1);
  RunStep(0, Values());
  const auto again = machine_->Open(MakeOpen(1, -1));
  EXPECT_TRUE(again.ok() && again->has_value());
  EXPECT_EQ(host_.opened, 1);
  EXPECT_EQ(machine_->committed(), 0);
}

TEST_F(StepMachineTest, OpenOfAFencedEpochIsStale) {
  Start(1);
  ASSERT_TRUE(machine_->Fence(MakeFence(2)).ok());
  EXPECT_THAT(machine_->Open(MakeOpen(1, -1)).status(),
              Fails(StatusCode::kFailedPrecondition, model::kStaleEpoch, "fenced by epoch 2.7"));
}

TEST_F(StepMachineTest, OpenAtTheNextBaseCommitsWhatIsPreparedHere) {
  Start(1);
  PrepareStep(0, 0, Values());
  SyncAll();
  const v1::Decision decision = DecisionOf(machine_->Describe().prepared());
  ASSERT_TRUE(machine_->Fence(MakeFence(2)).ok());
  SyncAll();
  v1::OpenRequest open = MakeOpen(2, 0);
  *open.mutable_base_decision() = decision;
  ASSERT_TRUE(machine_->Open(open).ok());
  EXPECT_EQ(machine_->committed(), 0);
  EXPECT_EQ(host_.applied.size(), 1u);
}

TEST_F(StepMachineTest, OpenAtTheNextBaseNeedsTheVeryKeyThatIsPreparedHere) {
  Start(1);
  PrepareStep(0, 0, Values());
  SyncAll();
  v1::OpenRequest open = MakeOpen(2, 0);
  *open.mutable_base_decision() = DecisionOf(machine_->Describe().prepared());
  open.mutable_base_decision()->mutable_epoch()->set_nonce(8);
  ASSERT_TRUE(machine_->Fence(MakeFence(2)).ok());
  SyncAll();
  EXPECT_THAT(machine_->Open(open).status(), Fails(StatusCode::kDataLoss, model::kDiverged, "epoch 1.7, attempt 0"));
  EXPECT_TRUE(host_.applied.empty());
}

TEST_F(StepMachineTest, OpenFromAnotherDecisionOrAFarBaseIsDataLoss) {
  Start(1);
  RunStep(0, Values());
  const v1::Decision decision = machine_->Describe().decision();
  ASSERT_TRUE(machine_->Fence(MakeFence(2)).ok());
  SyncAll();
  v1::OpenRequest open = MakeOpen(2, 0);
  *open.mutable_base_decision() = decision;
  open.mutable_base_decision()->set_attempt(1);
  EXPECT_THAT(machine_->Open(open).status(), Fails(StatusCode::kDataLoss, model::kDiverged, "two histories"));
  open.set_base(2);
  open.mutable_base_decision()->set_step(2);
  EXPECT_THAT(machine_->Open(open).status(), Fails(StatusCode::kDataLoss, model::kDiverged, "is at step 0"));
  open.set_base(1);
  EXPECT_THAT(machine_->Open(open).status(), Fails(StatusCode::kInvalidArgument, model::kBadRequest, "that of step 2"));
}

TEST_F(StepMachineTest, OpenVoidsSlicesAndPreparedOfOlderEpochs) {
  Start(1);
  PrepareStep(0, 0, Values());
  SyncAll();
  Start(2);
  EXPECT_FALSE(machine_->Describe().has_prepared());
  const auto sealed = machine_->Seal(MakeSeal(0, 0, 0, Values()));
  ASSERT_TRUE(sealed.ok() && *sealed == nullptr);
  EXPECT_EQ(machine_->Pending(0).pending().missing_count(), 4u);
  EXPECT_THAT(machine_->Pending(0).pending().unsealed_ranks(), testing::ElementsAre(1));
}

TEST_F(StepMachineTest, TheWorldSizeMayChangeAtAFence) {
  Start(1, 2);
  RunStep(0, Values());
  Start(2, 1);
  RunStep(1, Update());
  Start(3, 3);
  RunStep(2, Update());
  EXPECT_EQ(machine_->committed(), 2);
}

TEST_F(StepMachineTest, TheSpecMayGrowAndNotChange) {
  Start(1);
  RunStep(0, Values());
  ASSERT_TRUE(machine_->Fence(MakeFence(2)).ok());
  SyncAll();
  v1::OpenRequest open = MakeOpen(2, 0);
  *open.mutable_base_decision() = machine_->Describe().decision();
  v1::OpenRequest other = open;
  other.mutable_spec()->mutable_registrations(0)->mutable_tensors(0)->set_shape(0, 2048);
  EXPECT_THAT(machine_->Open(other).status(), Fails(StatusCode::kInvalidArgument, model::kBadSpec, "may only grow"));
  // No field of the spec but its registrations.
  const google::protobuf::Reflection& spec = *v1::JobSpec::GetReflection();
  for (int i = 0; i < v1::JobSpec::descriptor()->field_count(); ++i) {
    const google::protobuf::FieldDescriptor* field = v1::JobSpec::descriptor()->field(i);
    if (field->is_repeated() || field->name() == "name" || field->name() == "chunk_elements") continue;
    other = open;
    v1::JobSpec* changed = other.mutable_spec();
    switch (field->cpp_type()) {
      case google::protobuf::FieldDescriptor::CPPTYPE_BOOL:
        spec.SetBool(changed, field, !spec.GetBool(*changed, field));
        break;
      case google::protobuf::FieldDescriptor::CPPTYPE_ENUM:
        spec.SetEnumValue(changed, field, spec.GetEnumValue(*changed, field) == 1 ? 2 : 1);
        break;
      case google::protobuf::FieldDescriptor::CPPTYPE_UINT32:
        spec.SetUInt32(changed, field, spec.GetUInt32(*changed, field) + 1);
        break;
      case google::protobuf::FieldDescriptor::CPPTYPE_UINT64:
        spec.SetUInt64(changed, field, spec.GetUInt64(*changed, field) + 1);
        break;
      default:
        FAIL() << "a field that this test does not change: " << field->name();
    }
    EXPECT_THAT(machine_->Open(other).status(), Fails(StatusCode::kInvalidArgument, model::kBadSpec, "may only grow"))
        << field->name();
  }
  other = open;
  other.mutable_members(0)->set_server_id("elsewhere");
  EXPECT_THAT(machine_->Open(other).status(), Fails(StatusCode::kUnimplemented, model::kUnsupported, "members"));
  v1::Registration* later = open.mutable_spec()->add_registrations();
  later->set_version(5);
  v1::TensorSpec* third = later->add_tensors();
  third->set_name("third");
  third->set_unit("third");
  third->add_shape(256);
  *open.mutable_tiling() = model::EvenTiling(2);
  EXPECT_THAT(machine_->Open(open).status(),
              Fails(StatusCode::kInvalidArgument, model::kBadSpec, "says version 5; expected the epoch's base, 0"));
  later->set_version(0);
  EXPECT_THAT(machine_->Open(open).status(),
              Fails(StatusCode::kInvalidArgument, model::kVersionsDiffer, "not the digest of its spec"));
  open.set_spec_digest(model::SpecDigest(open.spec()));
  ASSERT_TRUE(machine_->Open(open).ok());
  EXPECT_TRUE(machine_->Open(open).ok());
  v1::OpenRequest again = open;
  *again.mutable_tiling() = model::EvenTiling(1);
  EXPECT_THAT(machine_->Open(again).status(),
              Fails(StatusCode::kInvalidArgument, model::kBadRequest, "an epoch is opened once"));
  EXPECT_EQ(machine_->Describe().tensor_steps_size(), 3);
}

}  // namespace
}  // namespace ballast::services
