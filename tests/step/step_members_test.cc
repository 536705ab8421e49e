// Rules 25 to 28, 30 and 33: Opens of other tables, chunks that are being filled, and slices that a group keeps.
#include <map>

#include "absl/strings/escaping.h"
#include "ballast/proto/model/layout.h"
#include "ballast/tests/step/step_fixture.h"

namespace ballast::services {
namespace {

using absl::StatusCode;
using testing::ElementsAre;
using testing::IsEmpty;
using testing::Pair;

class ChangingHost : public RecordingHost {
 public:
  bool ChangesChunks() const override { return true; }
  bool KeepsSlices() const override { return true; }
  void Opened(std::shared_ptr<const model::EpochPlan> plan, const OpenChange& change) override {
    last_change = change;
    RecordingHost::Opened(std::move(plan), change);
  }
  void TableDurable() override { ++tables; }
  OpenChange last_change;
  int tables = 0;
};

// Chunk c lies on shard c of two. Servers "a" (this one) and "b".
class StepMembersTest : public StepMachineTest {
 protected:
  StepMembersTest() { machine_ = std::make_unique<StepMachine>("a", kDisk, &changing_, &changing_); }

  static v1::Shard MakeShard(std::vector<uint32_t> holders, std::vector<uint32_t> fillers) {
    v1::Shard shard;
    shard.mutable_holders()->Assign(holders.begin(), holders.end());
    shard.mutable_fillers()->Assign(fillers.begin(), fillers.end());
    return shard;
  }
  v1::OpenRequest Open(uint64_t counter, int64_t base, std::vector<v1::Shard> shards, const std::string& group = "g") {
    v1::OpenRequest open = MakeOpen(counter, base);
    open.clear_members();
    for (const char* id : {"a", "b"}) {
      v1::Member* const member = open.mutable_table()->add_members();
      member->set_server_id(id);
      member->set_weight(1);
      member->set_disk(id[0] == 'a' ? kDisk : 5);
    }
    open.mutable_table()->set_replicas(1);
    for (v1::Shard& shard : shards) *open.mutable_table()->add_shards() = shard;
    open.set_group(group);
    if (base >= 0) *open.mutable_base_decision() = machine_->Describe().decision();
    return open;
  }
  // Fences, sends the Open, syncs, and sends it again.
  absl::Status Begin(const v1::OpenRequest& open) {
    v1::FenceRequest fence;
    *fence.mutable_epoch() = open.epoch();
    fence.set_group(open.group());
    if (const auto fenced = machine_->Fence(fence); !fenced.ok()) return fenced.status();
    Synced();
    const auto opened = machine_->Open(open);
    if (!opened.ok()) return opened.status();
    if (!opened->has_value()) {
      Synced();
      const auto again = machine_->Open(open);
      if (!again.ok()) return again.status();
      EXPECT_TRUE(again->has_value());
    }
    return absl::OkStatus();
  }
  void Synced() { machine_->Synced(changing_.log.size()); }
  void RunHere(int64_t step, const v1::StepHeader& header) {
    PrepareStep(step, 0, header);
    Synced();
    ASSERT_TRUE(Commit(DecisionOf(machine_->Describe().prepared())).ok());
  }
  void RestartHere() {
    machine_ = std::make_unique<StepMachine>("a", kDisk, &changing_, &changing_);
    const std::vector<StepRecord> log = changing_.log;
    for (const StepRecord& record : log) ASSERT_EQ(machine_->Replay(record), absl::OkStatus());
    machine_->Synced(log.size());
  }
  // "a" holds chunk 0 alone, up to step 1; then it fills chunk 1 too, from base 1.
  void Fill() {
    ASSERT_EQ(Begin(Open(1, -1, {MakeShard({0}, {}), MakeShard({1}, {})})), absl::OkStatus());
    RunHere(0, Values());
    RunHere(1, Update());
    ASSERT_EQ(Begin(Open(2, 1, {MakeShard({0}, {}), MakeShard({1}, {0})})), absl::OkStatus());
  }
  // All slices but those of chunk 1, and the seals.
  void PrepareWithoutChunk1(int64_t step) {
    for (uint32_t rank = 0; rank < 2; ++rank) {
      for (const v1::PushRequest& slice : Slices(rank, step, 0, v1::SLICE_KIND_GRADIENT)) {
        ASSERT_EQ(slice.unit() == 0 ? Push(slice) : absl::OkStatus(), absl::OkStatus());
      }
      ASSERT_TRUE(machine_->Seal(MakeSeal(rank, step, 0, Update())).ok());
    }
  }

  ChangingHost changing_;
};

TEST_F(StepMembersTest, AnOpenOfAnotherTableIsSyncedBeforeAnythingGoes) {
  ASSERT_EQ(Begin(Open(1, -1, {MakeShard({0}, {}), MakeShard({0}, {})})), absl::OkStatus());
  RunHere(0, Values());
  EXPECT_EQ(changing_.tables, 1) << "the first table";
  ASSERT_TRUE(machine_->Fence(MakeFence(2)).ok());
  Synced();
  const v1::OpenRequest open = Open(2, 0, {MakeShard({0}, {}), MakeShard({1}, {})});
  const auto opened = machine_->Open(open);
  ASSERT_TRUE(opened.ok()) << opened.status();
  EXPECT_FALSE(opened->has_value());
  EXPECT_FALSE(machine_->Open(open)->has_value());
  EXPECT_EQ(changing_.tables, 1);
  EXPECT_FALSE(machine_->may_import());
  Synced();
  EXPECT_EQ(changing_.tables, 2);
  EXPECT_TRUE(machine_->Open(open)->has_value());
  // The same table again is not synced.
  ASSERT_TRUE(machine_->Fence(MakeFence(3)).ok());
  Synced();
  EXPECT_TRUE(machine_->Open(Open(3, 0, {MakeShard({0}, {}), MakeShard({1}, {})}))->has_value());
  EXPECT_EQ(changing_.tables, 2);
}

TEST_F(StepMembersTest, AHostThatCannotChangeChunksRefusesByName) {
  machine_ = std::make_unique<StepMachine>("a", kDisk, &host_, &host_);
  const auto begin = [&](const v1::OpenRequest& open) {
    v1::FenceRequest fence;
    *fence.mutable_epoch() = open.epoch();
    EXPECT_TRUE(machine_->Fence(fence).ok());
    SyncAll();
    const auto opened = machine_->Open(open);
    SyncAll();
    return opened.status();
  };
  ASSERT_EQ(begin(Open(1, -1, {MakeShard({0}, {}), MakeShard({1}, {})})), absl::OkStatus());
  PrepareStep(0, 0, Values());
  SyncAll();
  ASSERT_TRUE(Commit(DecisionOf(machine_->Describe().prepared())).ok());
  EXPECT_THAT(begin(Open(2, 0, {MakeShard({0}, {}), MakeShard({1}, {0})})),
              Fails(StatusCode::kUnimplemented, model::kUnsupported, "copy 1 chunk(s) and give up 0"));
  EXPECT_THAT(begin(Open(2, 0, {MakeShard({1}, {}), MakeShard({0}, {})})),
              Fails(StatusCode::kDataLoss, model::kDiverged, "lacks it"));
  EXPECT_EQ(machine_->plan()->open().epoch().counter(), 1u);
  EXPECT_EQ(begin(Open(2, 0, {MakeShard({0}, {}), MakeShard({1}, {})})), absl::OkStatus());
}

TEST_F(StepMembersTest, AnotherDiskIsAnotherServer) {
  v1::OpenRequest open = Open(1, -1, {MakeShard({0}, {}), MakeShard({1}, {})});
  open.mutable_table()->mutable_members(0)->set_disk(9);
  EXPECT_THAT(Begin(open), Fails(StatusCode::kFailedPrecondition, model::kOtherServer, "directory was replaced"));
}

TEST_F(StepMembersTest, AChunkThatIsBeingFilledAsksForNoSlices) {
  Fill();
  EXPECT_THAT(machine_->unfilled(), ElementsAre(Pair(1, 1)));
  EXPECT_EQ(machine_->Describe().filled_shards(), "\x01");
  PrepareWithoutChunk1(2);
  Synced();
  const v1::PreparedRecord record = machine_->Describe().prepared();
  ASSERT_EQ(record.step(), 2);
  ASSERT_EQ(record.norms_size(), 1);
  EXPECT_EQ(record.norms(0).chunk(), 0u);
  EXPECT_THAT(machine_->unfilled(), ElementsAre(Pair(1, 2))) << "an import must contain step 2";
  EXPECT_THAT(machine_->MarkFilled(1, 1),
              Fails(StatusCode::kFailedPrecondition, model::kVersionGone, "version 2 or later"));
  EXPECT_THAT(machine_->CheckImport(1, 2), Fails(StatusCode::kFailedPrecondition, model::kBehind, "is at step 1"));
  ASSERT_TRUE(Commit(DecisionOf(record)).ok());
  EXPECT_THAT(machine_->CheckImport(1, 2), Fails(StatusCode::kUnavailable, model::kBusy, "not durable"));
  Synced();
  EXPECT_EQ(machine_->CheckImport(1, 2), absl::OkStatus());
  EXPECT_EQ(machine_->MarkFilled(1, 2), absl::OkStatus());
  EXPECT_THAT(machine_->unfilled(), IsEmpty());
  EXPECT_EQ(machine_->Describe().filled_shards(), "\x03");
  // From here on it is a chunk like any other.
  PrepareWithoutChunk1(3);
  EXPECT_FALSE(machine_->prepared());
  EXPECT_EQ(machine_->Pending(0).pending().missing_count(), 2u);
}

TEST_F(StepMembersTest, WithAllItsSlicesItsNormIsToldAndOlderImportsFit) {
  Fill();
  PrepareStep(2, 0, Update());
  EXPECT_THAT(machine_->unfilled(), ElementsAre(Pair(1, 1)));
  Synced();
  EXPECT_EQ(machine_->Describe().prepared().norms_size(), 2);
  EXPECT_EQ(machine_->MarkFilled(1, 1), absl::OkStatus());
}

TEST_F(StepMembersTest, ARestartKnowsWhatAnImportMustContain) {
  Fill();
  PrepareWithoutChunk1(2);
  Synced();
  RestartHere();
  EXPECT_THAT(machine_->unfilled(), ElementsAre(Pair(1, 2)));
  EXPECT_THAT(machine_->MarkFilled(1, 1), Fails(StatusCode::kFailedPrecondition, model::kVersionGone, "version 2"));
  // By a snapshot too.
  const v1::LogSnapshot snapshot = machine_->Snapshot();
  changing_.log = {SnapshotRecord{snapshot}};
  RestartHere();
  EXPECT_THAT(machine_->unfilled(), ElementsAre(Pair(1, 2)));
}

TEST_F(StepMembersTest, AHolderMustHaveIt) {
  Fill();
  EXPECT_THAT(Begin(Open(3, 1, {MakeShard({0}, {}), MakeShard({0}, {})})),
              Fails(StatusCode::kDataLoss, model::kDiverged, "chunk 1"));
  ASSERT_EQ(machine_->MarkFilled(1, 1), absl::OkStatus());
  EXPECT_EQ(Begin(Open(3, 1, {MakeShard({0}, {}), MakeShard({0}, {})})), absl::OkStatus());
  RestartHere();
  EXPECT_THAT(machine_->unfilled(), IsEmpty()) << "the log shows that it held it";
}

// Rule 33.
TEST_F(StepMembersTest, AHolderThatLostAChunkIsFilledAgain) {
  const v1::Shard both = MakeShard({0, 1}, {}), here = MakeShard({0}, {});
  ASSERT_EQ(Begin(Open(1, -1, {both, both})), absl::OkStatus());
  RunHere(0, Values());
  RunHere(1, Update());
  ASSERT_TRUE(machine_->HasOtherHolder(1));
  machine_->MarkUnfilled(1, 1);
  EXPECT_THAT(machine_->unfilled(), ElementsAre(Pair(1, 1)));
  EXPECT_EQ(machine_->Describe().filled_shards(), "\x01");
  PrepareWithoutChunk1(2);
  EXPECT_THAT(machine_->unfilled(), ElementsAre(Pair(1, 2)));
  Synced();
  // The log does not know; the server finds it without a state again.
  RestartHere();
  EXPECT_THAT(machine_->unfilled(), IsEmpty());
  machine_->MarkUnfilled(1, 1);
  EXPECT_THAT(machine_->unfilled(), ElementsAre(Pair(1, 2))) << "its slices of step 2 are not there";
  ASSERT_TRUE(Commit(DecisionOf(machine_->Describe().prepared())).ok());
  // Who fenced before it was lost calls this server a holder still. But it may not be the only one.
  EXPECT_EQ(Begin(Open(2, 2, {both, both})), absl::OkStatus());
  EXPECT_THAT(machine_->unfilled(), ElementsAre(Pair(1, 2)));
  EXPECT_THAT(Begin(Open(3, 2, {both, here})), Fails(StatusCode::kDataLoss, model::kDiverged, "chunk 1"));
  EXPECT_EQ(Begin(Open(3, 2, {both, MakeShard({1}, {0})})), absl::OkStatus());
  EXPECT_THAT(machine_->unfilled(), ElementsAre(Pair(1, 2)));
  EXPECT_FALSE(machine_->IsHolder(1));
  EXPECT_EQ(machine_->MarkFilled(1, 2), absl::OkStatus());
}

TEST_F(StepMembersTest, NobodyElseHoldsTheChunk) {
  ASSERT_EQ(Begin(Open(1, -1, {MakeShard({0}, {}), MakeShard({1}, {})})), absl::OkStatus());
  EXPECT_TRUE(machine_->IsHolder(0));
  EXPECT_FALSE(machine_->HasOtherHolder(0));
  EXPECT_TRUE(machine_->HasOtherHolder(1));
  EXPECT_FALSE(machine_->IsHolder(1));
  EXPECT_FALSE(machine_->HasOtherHolder(2)) << "there is no such chunk";
}

TEST_F(StepMembersTest, AFillerWithoutStateBeginsAtTheBase) {
  v1::OpenRequest open = Open(4, -1, {MakeShard({1}, {0}), MakeShard({1}, {})});
  open.set_base(7);
  v1::Decision decision;
  decision.set_step(7);
  *decision.mutable_epoch() = MakeEpoch(3);
  *open.mutable_base_decision() = decision;
  EXPECT_THAT(Begin(open), Fails(StatusCode::kInvalidArgument, model::kBadRequest, "step counts of 2 tensors"));
  open.add_tensor_steps(6);
  open.add_tensor_steps(5);
  ASSERT_EQ(Begin(open), absl::OkStatus());
  EXPECT_TRUE(changing_.last_change.forgets);
  EXPECT_EQ(machine_->committed(), 7);
  EXPECT_THAT(machine_->tensor_steps(), ElementsAre(6, 5));
  EXPECT_THAT(machine_->unfilled(), ElementsAre(Pair(0, 7)));
  RestartHere();
  EXPECT_EQ(machine_->committed(), 7);
  EXPECT_THAT(machine_->tensor_steps(), ElementsAre(6, 5));
  EXPECT_THAT(machine_->unfilled(), ElementsAre(Pair(0, 7)));
}

TEST_F(StepMembersTest, OneThatWasLeftOutForgetsWhatItHad) {
  Fill();
  ASSERT_EQ(machine_->MarkFilled(1, 1), absl::OkStatus());
  v1::OpenRequest open = Open(9, 1, {MakeShard({1}, {0}), MakeShard({1}, {})});
  open.set_base(6);
  open.mutable_base_decision()->set_step(6);
  open.add_tensor_steps(3);
  open.add_tensor_steps(3);
  ASSERT_EQ(Begin(open), absl::OkStatus());
  EXPECT_TRUE(changing_.last_change.forgets) << "its states of before";
  EXPECT_THAT(machine_->unfilled(), ElementsAre(Pair(0, 6)));
  // A holder cannot: the table says that it has the chunk.
  v1::OpenRequest holds = Open(10, 1, {MakeShard({0}, {}), MakeShard({1}, {})});
  holds.set_base(8);
  holds.mutable_base_decision()->set_step(8);
  EXPECT_THAT(Begin(holds), Fails(StatusCode::kDataLoss, model::kDiverged, "cannot start from"));
}

TEST_F(StepMembersTest, TheGroupsOwnNextEpochKeepsSlices) {
  const std::vector<v1::Shard> table = {MakeShard({0}, {}), MakeShard({0}, {})};
  ASSERT_EQ(Begin(Open(1, -1, table)), absl::OkStatus());
  RunHere(0, Values());
  PrepareStep(1, 0, Update());
  Synced();
  ASSERT_EQ(Begin(Open(2, 0, table)), absl::OkStatus());
  EXPECT_TRUE(changing_.last_change.keeps_slices);
  EXPECT_FALSE(machine_->prepared()) << "void";
  EXPECT_EQ(machine_->unsealed_count(), 2u);
  for (uint32_t rank = 0; rank < 2; ++rank) {
    ASSERT_TRUE(machine_->Seal(MakeSeal(rank, 1, 0, Update())).ok());
  }
  EXPECT_TRUE(machine_->prepared()) << "with the slices of before";
  Synced();
  RestartHere();
  EXPECT_TRUE(machine_->prepared());
  ASSERT_EQ(Begin(Open(3, 0, table, "another group")), absl::OkStatus());
  EXPECT_FALSE(changing_.last_change.keeps_slices);
  ASSERT_TRUE(machine_->Seal(MakeSeal(0, 1, 0, Update())).ok());
  EXPECT_EQ(machine_->Pending(0).pending().missing_count(), 4u);
}

TEST_F(StepMembersTest, ARefusedRankLearnsTheGroup) {
  const std::vector<v1::Shard> table = {MakeShard({0}, {}), MakeShard({0}, {})};
  ASSERT_EQ(Begin(Open(1, -1, table)), absl::OkStatus());
  const v1::SealRequest seal = MakeSeal(0, 0, 0, Values());
  RunHere(0, Values());
  ASSERT_EQ(Begin(Open(2, 0, table)), absl::OkStatus());
  const auto decided = machine_->Seal(seal);
  ASSERT_TRUE(decided.ok()) << "a decided step is answered whatever the epoch: " << decided.status();
  EXPECT_TRUE((**decided)->has_decided());
  v1::SealRequest late = seal;
  late.set_step(1);
  const absl::Status stale = machine_->Seal(late).status();
  EXPECT_EQ(model::ReasonOf(stale), model::kStaleEpoch);
  const model::Details details = model::DetailsOf(stale);
  EXPECT_EQ(details.at(model::kPromised), "2.7");
  EXPECT_EQ(details.at(model::kGroup), absl::BytesToHexString("g"));
}

}  // namespace
}  // namespace ballast::services
