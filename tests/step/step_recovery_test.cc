#include "absl/strings/escaping.h"
#include "ballast/tests/step/step_fixture.h"

namespace ballast::services {
namespace {

using absl::StatusCode;

TEST_F(StepMachineTest, EveryDurablePrefixRecovers) {
  Start(1);
  RunStep(0, Values());
  RunStep(1, Update());
  Start(2, 1);
  PrepareStep(2, 0, Update());
  const std::vector<StepRecord> log = host_.log;
  for (size_t records = 0; records <= log.size(); ++records) {
    host_.log = log;
    Restart(records);
    int64_t decisions = 0;
    for (const StepRecord& record : host_.log) decisions += std::holds_alternative<DecisionRecord>(record);
    EXPECT_EQ(machine_->committed(), decisions - 1);
    EXPECT_EQ(host_.applied.size(), static_cast<size_t>(decisions)) << "decisions are applied again, no more";
  }
}

TEST_F(StepMachineTest, ALostDecisionLeavesTheStepPrepared) {
  Start(1);
  RunStep(0, Values());
  const v1::Decision decision = machine_->Describe().decision();
  Restart(host_.log.size() - 1);
  EXPECT_EQ(machine_->committed(), -1) << "recovery never presumes a commit";
  EXPECT_EQ(machine_->Describe().prepared().step(), 0);
  // No seal survived; the prepared record speaks for them.
  const auto sealed = machine_->Seal(MakeSeal(0, 0, 0, Values()));
  ASSERT_TRUE(sealed.ok() && *sealed != nullptr);
  EXPECT_TRUE((**sealed)->has_prepared());
  ASSERT_TRUE(Commit(decision).ok());
  EXPECT_EQ(machine_->committed(), 0);
}

TEST_F(StepMachineTest, PreparedCoversTheDecisionBeforeIt) {
  Start(1);
  RunStep(0, Values());
  PrepareStep(1, 0, Update());
  Restart(host_.sync_wanted);
  EXPECT_EQ(machine_->committed(), 0);
  EXPECT_EQ(machine_->Describe().prepared().step(), 1);
}

TEST_F(StepMachineTest, LostSlicesAreNamedAndPushedAgain) {
  Start(1);
  PushAll(0, 0, 1, Values());
  PushAll(1, 0, 1, Values());
  Restart(host_.log.size() - 1);
  auto sealed = machine_->Seal(MakeSeal(0, 0, 1, Values()));
  ASSERT_TRUE(sealed.ok() && *sealed == nullptr);
  const v1::SealResponse waiting = machine_->Pending(0);
  EXPECT_EQ(waiting.pending().missing_count(), 1u);
  EXPECT_EQ(waiting.pending().missing(0).rank(), 1u);
  EXPECT_THAT(Push(Slices(0, 0, 0, v1::SLICE_KIND_VALUE)[0]),
              Fails(StatusCode::kAborted, model::kStaleAttempt, "attempt 0"));
  PushAll(1, 0, 1, Values());
  ASSERT_TRUE(machine_->Seal(MakeSeal(1, 0, 1, Values())).ok());
  SyncAll();
  EXPECT_TRUE(machine_->Describe().has_prepared());
}

TEST_F(StepMachineTest, ALostOpenAsksForItAgain) {
  Start(1);
  const v1::PushRequest slice = Slices(0, 0, 0, v1::SLICE_KIND_VALUE)[0];
  Restart(host_.log.size() - 1);
  EXPECT_EQ(machine_->Describe().promised().counter(), 1u) << "the promise was durable";
  EXPECT_THAT(Push(slice), Fails(StatusCode::kFailedPrecondition, model::kNotOpen, "send Open again"));
  ASSERT_TRUE(machine_->Open(MakeOpen(1, -1)).ok());
  EXPECT_TRUE(Push(slice).ok());
}

TEST_F(StepMachineTest, ALogWithAGapIsDataLoss) {
  Start(1);
  RunStep(0, Values());
  const std::vector<StepRecord> log = host_.log;
  StepMachine gap("a", kDisk, &host_, &host_);
  absl::Status status;
  for (size_t i = 0; i < log.size() && status.ok(); ++i) {
    if (!std::holds_alternative<PreparedStepRecord>(log[i])) status = gap.Replay(log[i]);
  }
  EXPECT_THAT(status, Fails(StatusCode::kDataLoss, model::kDiverged, "without having prepared it"));
}

TEST_F(StepMachineTest, APreparedRecordThatDoesNotFitItsEpochIsDataLoss) {
  Start(1);
  RunStep(0, Values());
  for (const bool snapshot : {false, true}) {
    for (const bool header : {false, true}) {
      StepMachine other("a", kDisk, &host_, &host_);
      absl::Status status;
      for (StepRecord record : host_.log) {
        auto* found = std::get_if<PreparedStepRecord>(&record);
        if (found == nullptr) {
          status.Update(other.Replay(record));
          continue;
        }
        if (header) found->prepared.mutable_header()->set_value_presence("much too long");
        if (!header) found->prepared.set_plan_hash("another");
        v1::LogSnapshot before = other.Snapshot();
        *before.mutable_prepared() = found->prepared;
        StepMachine fresh("a", kDisk, &host_, &host_);
        status = snapshot ? fresh.Replay(SnapshotRecord{before}) : other.Replay(record);
        break;
      }
      EXPECT_THAT(status, Fails(StatusCode::kDataLoss, model::kDiverged,
                                header ? "value_presence must have" : "its plan hash is another"));
    }
  }
}

// Step counts that came with values: of the tensors that these are of, once the transaction is decided, and whatever is
// replayed, pinned or begins with a snapshot.
TEST_F(StepMachineTest, StepCountsComeWithValues) {
  Start(1);
  RunStep(0, Values());
  RunStep(1, Update("\x03"));
  v1::StepHeader moments = Values();
  moments.set_value_presence("\x02");
  moments.set_value_array(2);
  moments.add_value_tensor_steps(70);
  moments.add_value_tensor_steps(80);
  PrepareStep(2, 0, moments);
  const auto counts = [this] {
    return std::vector<uint64_t>(machine_->tensor_steps().begin(), machine_->tensor_steps().end());
  };
  EXPECT_EQ(counts(), (std::vector<uint64_t>{1, 1}));
  SyncAll();
  const auto sealed = machine_->Seal(MakeSeal(0, 2, 0, moments));
  ASSERT_TRUE(sealed.ok() && *sealed != nullptr && (**sealed)->has_prepared());
  ASSERT_TRUE(Commit(DecisionOf((**sealed)->prepared())).ok());
  EXPECT_EQ(counts(), (std::vector<uint64_t>{1, 80}));
  EXPECT_EQ(host_.applied.back().first.header().value_array(), 2u);
  RunStep(3, Update("\x03"));
  EXPECT_EQ(counts(), (std::vector<uint64_t>{2, 81}));
  EXPECT_EQ(machine_->DescribeVersion().tensor_steps(1), 81u);
  Restart(host_.log.size());
  EXPECT_EQ(counts(), (std::vector<uint64_t>{2, 81}));
}

// As version 0 wrote the log: neither spec_digest nor protocol version in Opens and in plan hashes.
TEST_F(StepMachineTest, ALogFromBeforeTheSpecsDigestRecovers) {
  const auto open_as_before = [this](uint64_t counter, int64_t base) {
    v1::FenceRequest fence = MakeFence(counter);
    ASSERT_TRUE(machine_->Fence(fence).ok());
    SyncAll();
    v1::OpenRequest open = MakeOpen(counter, base);
    open.clear_spec_digest();
    open.clear_protocol_version();
    if (base >= 0) *open.mutable_base_decision() = machine_->Describe().decision();
    ASSERT_TRUE(machine_->Open(open).ok());
  };
  open_as_before(1, -1);
  RunStep(0, Values());
  RunStep(1, Update());
  const std::string before = machine_->Describe().decision().plan_hash();
  ASSERT_EQ(absl::BytesToHexString(before), "3e19bcef7697f8fcad76b77e2e384128023683e69bd5c6e2aa394a317686a693")
      << "version 0 wrote another";
  open_as_before(2, 1);
  PrepareStep(2, 0, Update());
  const std::vector<StepRecord> log = host_.log;
  Restart(log.size());
  EXPECT_EQ(machine_->committed(), 1);
  ASSERT_TRUE(machine_->Describe().has_prepared());
  EXPECT_TRUE(machine_->Describe().open().spec_digest().empty());
  EXPECT_EQ(machine_->Describe().decision().plan_hash(), before);
  // A snapshot of this version begins a log that goes on from there.
  const v1::LogSnapshot snapshot = machine_->Snapshot();
  StepMachine other("a", kDisk, &host_, &host_);
  EXPECT_EQ(other.Replay(SnapshotRecord{snapshot}), absl::OkStatus());
  // The next group decides what is prepared, and opens by the new rule.
  const v1::Decision decision = DecisionOf(machine_->Describe().prepared());
  ASSERT_TRUE(machine_->Fence(MakeFence(3)).ok());
  SyncAll();
  v1::OpenRequest open = MakeOpen(3, 2);
  *open.mutable_base_decision() = decision;
  ASSERT_TRUE(machine_->Open(open).ok());
  EXPECT_EQ(machine_->committed(), 2);
  RunStep(3, Update());
  Restart(host_.log.size());
  EXPECT_EQ(machine_->committed(), 3);
  EXPECT_EQ(machine_->Describe().open().spec_digest().size(), 32u);
}

// Read without its unknown field, the spec would be of another job.
TEST_F(StepMachineTest, ALogOfALaterVersionsSpecIsRefused) {
  Start(1);
  RunStep(0, Values());
  for (const bool snapshot : {false, true}) {
    for (const bool dropped : {false, true}) {
      v1::OpenRequest open = MakeOpen(1, -1);
      v1::JobSpec* spec = open.mutable_spec();
      if (dropped) open.set_spec_digest(std::string(32, 'd'));
      if (!dropped) spec->GetReflection()->MutableUnknownFields(spec)->AddVarint(99, 1);
      v1::LogSnapshot before;
      *before.mutable_promised() = open.epoch();
      *before.mutable_open() = open;
      before.set_committed(-1);
      StepMachine other("a", kDisk, &host_, &host_);
      const absl::Status status = snapshot ? other.Replay(SnapshotRecord{before})
                                           : other.Replay(OpenRecord{std::make_shared<const v1::OpenRequest>(open)});
      EXPECT_THAT(status, Fails(StatusCode::kInvalidArgument, model::kVersionsDiffer,
                                dropped ? "not the digest of its spec" : "a ballast.v1.JobSpec came with field 99"));
    }
  }
}

}  // namespace
}  // namespace ballast::services
