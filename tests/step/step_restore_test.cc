// Restores of pinned versions: refused requests, restored state, and records needed by a restart (rule 13).
#include <algorithm>

#include "ballast/proto/model/step_header.h"
#include "ballast/services/step/step_machine.h"
#include "ballast/tests/step/step_fixture.h"

namespace ballast::services {
namespace {

using absl::StatusCode;
using ::testing::ElementsAre;

// Durability every-K, K = 1.
class StepEveryKTest : public StepMachineTest {
 protected:
  StepEveryKTest() { every_k_ = 1; }
  // The host has pinned the version that the last step made due.
  void PinLast() {
    v1::PinnedVersion pin = machine_->DescribeVersion();
    pin.set_automatic(true);
    pin.set_automatic_since(pin.version());
    machine_->Pinned(pin);
    host_.calls.clear();
  }
};

// If a step cannot be applied, older pins must still be there to restore.
TEST_F(StepEveryKTest, NothingIsLetGoBeforeTheStepIsApplied) {
  Start(1);
  for (int64_t step = 0; step < 3; ++step) {
    RunStep(step, step == 0 ? Values() : Update());
    if (step < 2) PinLast();
  }
  EXPECT_THAT(host_.calls, ElementsAre("apply", "drop 0", "due 2"));
  PinLast();
  Start(2);
  v1::StepHeader restore = Update(std::string(1, '\0'));
  restore.clear_groups();
  restore.set_kind(v1::STEP_KIND_RESTORE);
  restore.set_restored_version(1);
  RunStep(3, restore);
  EXPECT_THAT(host_.calls, ElementsAre("keep 1", "apply", "drop 2", "due 3"));
  const v1::GetJobResponse job = machine_->Describe();
  EXPECT_THAT(job.automatic_versions(), ElementsAre(1));
  EXPECT_THAT(job.automatic_since(), ElementsAre(3)) << "the restore that made it what the job goes on from";
}

// A server whose own pin cannot be read pins its current version before preparing more. After a restart, the new pin
// tells how far the server had come.
TEST_F(StepEveryKTest, AnUnreadablePinIsReplaced) {
  every_k_ = 3;
  Start(1);
  RunStep(0, Values());
  PinLast();
  EXPECT_THAT(machine_->Unpin(0, /*unreadable=*/true),
              Fails(StatusCode::kFailedPrecondition, model::kBusy, "after the next step"));
  RunStep(1, Update());
  host_.calls.clear();
  ASSERT_EQ(machine_->Unpin(0, /*unreadable=*/true), absl::OkStatus());
  EXPECT_THAT(host_.calls, ElementsAre("due 1"));
  PrepareStep(2, 0, Update());
  SyncAll();
  EXPECT_FALSE(machine_->Describe().has_prepared()) << "before the pin is durable";
  PinLast();
  EXPECT_TRUE(machine_->Seal(MakeSeal(0, 2, 0, Update())).ok());
  SyncAll();
  EXPECT_TRUE(machine_->Describe().has_prepared());
}

TEST_F(StepEveryKTest, APinThatSomebodyAskedForTakesItsPlace) {
  every_k_ = 3;
  Start(1);
  RunStep(0, Values());
  PinLast();
  RunStep(1, Update());
  v1::PinnedVersion asked_for = machine_->DescribeVersion();
  asked_for.set_requested(true);
  machine_->Pinned(asked_for);
  host_.calls.clear();
  ASSERT_EQ(machine_->Unpin(0, /*unreadable=*/true), absl::OkStatus());
  EXPECT_THAT(host_.calls, ElementsAre("keep 1"));
  EXPECT_THAT(machine_->Describe().automatic_versions(), ElementsAre(1));
  RunStep(2, Update());
}

class StepRestoreTest : public StepMachineTest {
 protected:
  // Version 1 is pinned, version 2 decided, and epoch 2 open.
  StepRestoreTest() {
    Start(1);
    RunStep(0, Values());
    RunStep(1, Update("\x01"));
    pin_ = machine_->DescribeVersion();
    pin_.mutable_decision()->set_blobs(0, "where version 1 stopped");
    RunStep(2, Update("\x03"));
    machine_->Pinned(pin_);
    Start(2);
  }
  v1::StepHeader Restore(int64_t version) const {
    v1::StepHeader header;
    header.set_kind(v1::STEP_KIND_RESTORE);
    header.set_gradient_scale(1);
    header.set_gradient_presence(std::string(1, '\0'));
    header.set_value_presence(std::string(1, '\0'));
    header.set_restored_version(version);
    return header;
  }
  v1::SealRequest Seal(uint32_t rank, int64_t step, const v1::StepHeader& header) const {
    v1::SealRequest seal = MakeSeal(rank, step, 0, header);
    *seal.mutable_blobs() = pin_.decision().blobs();
    const std::vector<std::string> blobs(seal.blobs().begin(), seal.blobs().end());
    seal.set_plan_hash(model::PlanHash(*machine_->plan(), step, 0, header, blobs));
    return seal;
  }
  std::vector<uint64_t> StepCounts() const {
    return {machine_->tensor_steps().begin(), machine_->tensor_steps().end()};
  }
  v1::PinnedVersion pin_;
};

TEST_F(StepRestoreTest, BringsBackStepCountsAndBlobs) {
  EXPECT_THAT(machine_->Describe().durable_versions(), ElementsAre(1));
  ASSERT_THAT(StepCounts(), ElementsAre(2, 1));
  ASSERT_TRUE(machine_->Seal(Seal(0, 3, Restore(1))).ok());
  ASSERT_TRUE(machine_->Seal(Seal(1, 3, Restore(1))).ok());
  SyncAll();
  const auto sealed = machine_->Seal(Seal(0, 3, Restore(1)));
  ASSERT_TRUE(sealed.ok() && *sealed != nullptr && (**sealed)->has_prepared());
  EXPECT_THAT(machine_->Unpin(1), Fails(StatusCode::kFailedPrecondition, model::kBusy, "prepared a restore"));
  ASSERT_TRUE(Commit(DecisionOf((**sealed)->prepared())).ok());
  EXPECT_EQ(machine_->committed(), 3);
  EXPECT_THAT(StepCounts(), ElementsAre(1, 0));
  const v1::Decision decision = machine_->Describe().decision();
  EXPECT_TRUE(std::equal(decision.blobs().begin(), decision.blobs().end(), pin_.decision().blobs().begin(),
                         pin_.decision().blobs().end()));
  EXPECT_FALSE(decision.verdict().skip());
  EXPECT_EQ(host_.applied.back().first.header().restored_version(), 1);
  EXPECT_EQ(machine_->Unpin(1), absl::OkStatus());
  // Replayed without the pin, too.
  Restart(host_.log.size());
  EXPECT_EQ(machine_->committed(), 3);
  EXPECT_THAT(StepCounts(), ElementsAre(1, 0));
}

TEST_F(StepRestoreTest, IsRefusedWhereItMakesNoSense) {
  EXPECT_THAT(machine_->Seal(Seal(0, 3, Restore(0))).status(),
              Fails(StatusCode::kFailedPrecondition, model::kVersionGone, "no durable pin of version 0"));
  EXPECT_THAT(machine_->Seal(Seal(0, 3, Restore(3))).status(),
              Fails(StatusCode::kFailedPrecondition, model::kVersionGone, "no durable pin of version 3"));
  EXPECT_THAT(machine_->Seal(MakeSeal(0, 3, 0, Restore(1))).status(),
              Fails(StatusCode::kInvalidArgument, model::kBadRequest, "must seal that version's"));
  v1::StepHeader with_slices = Restore(1);
  with_slices.set_gradient_presence("\x01");
  EXPECT_THAT(machine_->Seal(Seal(0, 3, with_slices)).status(),
              Fails(StatusCode::kInvalidArgument, model::kBadRequest, "has no slices"));
  RunStep(3, Update("\x03"));
  EXPECT_THAT(machine_->Seal(Seal(0, 4, Restore(1))).status(),
              Fails(StatusCode::kInvalidArgument, model::kBadRequest, "first transaction of an epoch"));
}

TEST_F(StepRestoreTest, WaitsForNobodyOnceThePinIsGone) {
  ASSERT_TRUE(machine_->Seal(Seal(0, 3, Restore(1))).ok());
  ASSERT_EQ(machine_->Unpin(1), absl::OkStatus());
  EXPECT_THAT(machine_->Seal(Seal(1, 3, Restore(1))).status(),
              Fails(StatusCode::kFailedPrecondition, model::kVersionGone, "no durable pin of version 1"));
  EXPECT_FALSE(machine_->Describe().has_prepared());
}

TEST_F(StepRestoreTest, TensorsRegisteredSinceHaveNoStateToGoBackTo) {
  v1::PinnedVersion older = pin_;
  older.set_registration_count(pin_.registration_count() - 1);
  machine_->Pinned(older);
  EXPECT_THAT(machine_->Seal(Seal(0, 3, Restore(1))).status(),
              Fails(StatusCode::kFailedPrecondition, model::kBadSpec, "registered since"));
}

}  // namespace
}  // namespace ballast::services
