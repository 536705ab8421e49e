// Decided steps on the worker: chunks get their versions in the order of decisions.
#include "ballast/services/job/updates.h"

#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "ballast/proto/base/status.h"
#include "ballast/services/job/damaged_chunks.h"
#include "ballast/services/job/filling.h"
#include "ballast/services/job/kept_copies.h"
#include "ballast/services/job/kept_versions.h"
#include "ballast/services/job/read_pins.h"
#include "ballast/services/journal/flushes.h"
#include "ballast/services/space/chunk_moves.h"
#include "ballast/services/space/prediction.h"
#include "ballast/storage/tier/dram_tier.h"
#include "ballast/storage/tier/nvme_tier.h"
#include "ballast/tests/services/job_part.h"

namespace ballast::services {
namespace {

class UpdatesTest : public JobPartTest {
 protected:
  // StepHost: as a job does.
  void Apply(const v1::PreparedRecord& prepared, const v1::Decision& decision) override {
    core_.mu.AssertHeld();
    updates_.Post(updates_.Prepare(prepared, decision));
  }
  // All slices of the step, its seal and its decision; the worker has not run.
  void Decide(const v1::StepHeader& header, float value) {
    const auto kind = header.kind() == v1::STEP_KIND_VALUES ? v1::SLICE_KIND_VALUE : v1::SLICE_KIND_GRADIENT;
    for (uint32_t i = 0; i < plan().slices().size(); ++i) ASSERT_EQ(PushSlice(i, kind, value), absl::OkStatus());
    const std::optional<v1::PreparedRecord> record = Prepare(header);
    ASSERT_TRUE(record.has_value());
    const auto decision = model::Decide({*record});
    ASSERT_TRUE(decision.ok()) << decision.status();
    Locked([&] {
      v1::CommitRequest commit;
      *commit.mutable_decision() = *decision;
      ASSERT_TRUE(core_.machine->Commit(commit).ok());
    });
    ++step_;
  }
  bool Shows(int64_t version, std::optional<uint32_t> unit = std::nullopt) {
    JobMutexLock lock(&core_.mu);
    return updates_.Show(version, unit);
  }
  int Queued() {
    JobMutexLock lock(&core_.mu);
    return updates_.queued();
  }
  float Master(uint64_t chunk) {
    float value = 0;
    JobMutexLock lock(&core_.mu);
    EXPECT_EQ(core_.state.store()->ReadState(chunk, storage::StateArray::kMaster, 0, {&value, 1}), absl::OkStatus());
    return value;
  }
  std::shared_ptr<const void> Lease(uint64_t chunk) {
    JobMutexLock lock(&core_.mu);
    return core_.leases->Take(chunks_[chunk], nullptr);
  }
  std::string LeaseWait() {
    JobMutexLock lock(&core_.mu);
    return core_.LeaseWait();
  }
  void AwaitVersion(uint64_t chunk, int64_t version) {
    JobMutexLock lock(&core_.mu);
    const auto shows = [&] { return *chunks_[chunk]->version() >= version; };
    core_.mu.Await(absl::Condition(&shows));
  }

  Flushes flushes_{&core_, &journal_};
  ReadPins pins_{&core_};
  Prediction prediction_{&core_};
  ChunkMoves moves_{&core_, &flushes_, &prediction_};
  KeptCopies kept_copies_{&core_, &journal_};
  KeptVersions kept_versions_{&core_, &journal_, &flushes_, &kept_copies_};
  Filling filling_{&core_, &kept_copies_, &kept_versions_};
  DamagedChunks damaged_{&core_, &filling_, &kept_copies_};
  Updates updates_{&core_, &journal_, &room_, &flushes_, &pins_, &moves_, &damaged_};
};

TEST_F(UpdatesTest, AStepIsShownOnceTheWorkerHasAppliedIt) {
  Open();
  Decide(ValuesHeader(tensors()), 3);
  EXPECT_EQ(Queued(), 1);
  EXPECT_FALSE(Shows(0));
  EXPECT_EQ(Master(0), 0);
  RunAll();
  EXPECT_EQ(Queued(), 0);
  EXPECT_TRUE(Shows(0));
  EXPECT_FALSE(Shows(1));
  EXPECT_TRUE(Shows(0, /*unit=*/1));
  for (uint64_t chunk = 0; chunk < chunks_.size(); ++chunk) {
    EXPECT_EQ(Master(chunk), 3);
    EXPECT_EQ(chunks_[chunk]->version(), 0);
    EXPECT_FALSE(chunks_[chunk]->awaits_update());
  }
  EXPECT_EQ(flushes_.applied(), 0);
}

TEST_F(UpdatesTest, ASliceOfTheNextStepWaitsForItsChunk) {
  Open();
  Decide(ValuesHeader(tensors()), 3);
  Push next = PushOf(0, v1::SLICE_KIND_VALUE, 4);
  Send(&next);
  EXPECT_FALSE(next.answer.arrived());
  RunAll();
  EXPECT_EQ(next.answer.Wait().status(), absl::OkStatus());
  EXPECT_EQ(Master(0), 3);
}

TEST_F(UpdatesTest, AnUpdateWaitsForTheLeasesOfItsChunk) {
  Open();
  Decide(ValuesHeader(tensors()), 3);
  RunAll();
  std::shared_ptr<const void> first = Lease(0), second = Lease(2);
  Decide(ValuesHeader(tensors()), 4);
  std::thread worker([this] { RunAll(); });
  // The leased chunks come last, each once its own lease has ended.
  for (uint64_t chunk = 0; chunk < chunks_.size(); ++chunk) {
    if (chunk != 0 && chunk != 2) AwaitVersion(chunk, 1);
  }
  EXPECT_EQ(Master(0), 3);
  EXPECT_EQ(Master(2), 3);
  EXPECT_THAT(LeaseWait(), ::testing::HasSubstr("the update waits for 2 leases"));
  EXPECT_THAT(LeaseWait(), ::testing::HasSubstr("chunk 0 of unit 0 has been leased for"));
  second.reset();
  AwaitVersion(2, 1);
  EXPECT_EQ(Master(0), 3);
  EXPECT_THAT(LeaseWait(), ::testing::HasSubstr("the update waits for 1 lease "));
  first.reset();
  worker.join();
  EXPECT_EQ(Master(0), 4);
  EXPECT_TRUE(Shows(1));
  EXPECT_EQ(LeaseWait(), "");
}

TEST_F(UpdatesTest, AStoppedJobWaitsForNoLease) {
  Open();
  Decide(ValuesHeader(tensors()), 3);
  RunAll();
  const std::shared_ptr<const void> lease = Lease(0);
  Decide(ValuesHeader(tensors()), 4);
  std::thread worker([this] { RunAll(); });
  AwaitVersion(chunks_.size() - 1, 1);
  Locked([&](Replies* replies) { core_.Refuse(absl::CancelledError("dropped"), replies); });
  worker.join();
  EXPECT_EQ(Master(0), 3) << "what is leased has not changed";
}

TEST_F(UpdatesTest, TheOldestPinYieldsWhereACopyFindsNoRoom) {
  Open();
  Decide(ValuesHeader(tensors()), 3);
  RunAll();
  v1::PinRequest request;
  request.set_version(0);
  uint64_t waits = 0;
  Locked([&] { ASSERT_TRUE(pins_.Pin(request, &waits).ok()); });
  RunAll();
  Locked([&] { ASSERT_TRUE(*pins_.Readable(0)); });
  // A copy goes to the disk, else to memory: neither has room.
  const storage::NvmeRoom disk = *tiers_->nvme()->Promise(tiers_->budget().nvme - tiers_->used().nvme, "all");
  const uint64_t slices = uint64_t{8} << 20;
  const storage::DramBlock memory =
      *tiers_->dram()->Allocate(tiers_->budget().dram - tiers_->used().dram - slices, "nearly all");
  Decide(ValuesHeader(tensors()), 4);
  const storage::DramBlock rest = *tiers_->dram()->Allocate(tiers_->budget().dram - tiers_->used().dram, "the rest");
  RunAll();
  JobMutexLock lock(&core_.mu);
  EXPECT_EQ(core_.failure(), absl::OkStatus()) << "training goes on";
  EXPECT_EQ(model::ReasonOf(pins_.Readable(0).status()), model::kVersionGone);
  EXPECT_EQ(chunks_.back()->version(), 1);
}

TEST_F(UpdatesTest, AnUpdateThatFailsStopsTheJob) {
  Open();
  Decide(ValuesHeader(tensors()), 3);
  RunAll();
  Locked([&] { ASSERT_EQ(core_.state.store()->Move(0, storage::TierKind::kNvme), absl::OkStatus()); });
  Decide(ValuesHeader(tensors()), 4);
  disk_.FailNext(storage::SimOperation::kWrite, 1, storage::SimFault::kEio);
  RunAll();
  JobMutexLock lock(&core_.mu);
  EXPECT_EQ(model::ReasonOf(core_.failure()), model::kIo) << core_.failure();
  EXPECT_THAT(core_.failure().ToString(), ::testing::HasSubstr("step 1 could not be applied to its chunks"));
}

TEST_F(UpdatesTest, AReplayWithoutAllSlicesIsToldBeforeItIsApplied) {
  Open();
  v1::PreparedRecord prepared;
  prepared.set_step(0);
  *prepared.mutable_header() = ValuesHeader(tensors());
  JobMutexLock lock(&core_.mu);
  EXPECT_EQ(model::ReasonOf(updates_.CheckHeld(*chunks_[0], prepared)), model::kDiverged);
  chunks_[0]->Reach(0);
  EXPECT_EQ(updates_.CheckHeld(*chunks_[0], prepared), absl::OkStatus()) << "the disk has it";
}

}  // namespace
}  // namespace ballast::services
