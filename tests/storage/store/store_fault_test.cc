// Wrong bytes from the disk are refused, never served.
#include <fcntl.h>
#include <unistd.h>

#include <map>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/tests/sim_disk/sim_disk.h"
#include "ballast/tests/storage/store/store_on_tiers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ballast::storage {
namespace {

using ::testing::HasSubstr;

class StoreFaultTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(s_.store->Add(Sizes(), s_.PlanOf({TierKind::kNvme})).ok());
    ASSERT_TRUE(s_.RunValues(1).ok());
  }

  // The chunks lie in the file in the order they were added.
  static uint64_t OffsetOf(uint64_t chunk) {
    uint64_t offset = 0;
    for (uint64_t i = 0; i < chunk; ++i) offset += StateLayout().StateBytes(Sizes()[i]);
    return offset;
  }

  void FlipByte(uint64_t offset) {
    const int fd = open((s_.directory / "nvme.tier").c_str(), O_RDWR);
    ASSERT_GE(fd, 0);
    char byte;
    ASSERT_EQ(pread(fd, &byte, 1, static_cast<off_t>(offset)), 1);
    byte ^= 0x10;
    ASSERT_EQ(pwrite(fd, &byte, 1, static_cast<off_t>(offset)), 1);
    ASSERT_EQ(fsync(fd), 0);
    close(fd);
  }

  StoreOnTiers s_{{.dram = 16 * kMiB, .nvme = 16 * kMiB}, 3};
};

TEST_F(StoreFaultTest, CorruptionIsFoundByTheNextStep) {
  const uint64_t array = StateLayout().ArrayBytes(StateArray::kMaster, 65536);
  FlipByte(OffsetOf(4) + array + 12345);
  size_t done = 0;
  StepUpdates step(2);
  for (size_t i = 0; i < Sizes().size(); ++i) step.AddSegments(i, Sizes()[i], 1);
  const absl::Status status = s_.store->Run(step.updates(), [&](size_t) { ++done; });
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
  EXPECT_EQ(model::ReasonOf(status), model::kChecksum);
  EXPECT_THAT(status.ToString(), HasSubstr(absl::StrCat("chunk 4: moment1 in ", s_.directory / "nvme.tier",
                                                        " at offset ", OffsetOf(4) + array)));
  EXPECT_EQ(done, 4);
  // The chunks before it were updated and can be read; the store takes no further step.
  for (size_t i = 0; i < 4; ++i) s_.reference[i].Apply(step.updates()[i]);
  for (size_t i = 0; i < 4; ++i) EXPECT_TRUE(Holds(*s_.store, i, s_.reference[i])) << i;
  EXPECT_EQ(s_.store->Run({}, [](size_t) {}).code(), absl::StatusCode::kDataLoss);
}

TEST_F(StoreFaultTest, ChunksThatAreAddedAfterAnErrorDoNotClearTheError) {
  FlipByte(OffsetOf(4) + 12345);
  StepUpdates step(2);
  for (size_t i = 0; i < Sizes().size(); ++i) step.AddSegments(i, Sizes()[i], 1);
  ASSERT_EQ(s_.store->Run(step.updates(), [](size_t) {}).code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(s_.store->Add(Sizes(), s_.PlanOf({TierKind::kDram})).code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(s_.store->chunk_count(), Sizes().size());
  EXPECT_EQ(s_.store->Run({}, [](size_t) {}).code(), absl::StatusCode::kDataLoss);
}

TEST_F(StoreFaultTest, CorruptionIsFoundByARead) {
  FlipByte(OffsetOf(2) + 5);
  std::vector<float> to(16);
  // Even an intact part is refused, because the store cannot know that it is intact.
  const absl::Status status = s_.store->ReadState(2, StateArray::kMaster, 1000, absl::MakeSpan(to));
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
  EXPECT_EQ(model::ReasonOf(status), model::kChecksum);
  EXPECT_TRUE(s_.store->ReadState(2, StateArray::kMoment1, 1000, absl::MakeSpan(to)).ok());
  EXPECT_TRUE(s_.store->ReadState(3, StateArray::kMaster, 1000, absl::MakeSpan(to)).ok());
}

TEST_F(StoreFaultTest, CorruptionOfAPinnedCopyIsFound) {
  ASSERT_TRUE(s_.store->Pin(1).ok());
  ASSERT_TRUE(s_.RunSegments(1).ok());
  FlipByte(OffsetOf(0) + 5);  // the pin kept the old extent
  std::vector<float> to(16);
  EXPECT_EQ(s_.store->ReadPinnedState(1, 0, StateArray::kMaster, 0, absl::MakeSpan(to)).code(),
            absl::StatusCode::kDataLoss);
  EXPECT_TRUE(Holds(*s_.store, 0, s_.reference[0]));
}

TEST_F(StoreFaultTest, TruncatedFileIsFound) {
  ASSERT_EQ(truncate((s_.directory / "nvme.tier").c_str(), static_cast<off_t>(OffsetOf(3))), 0);
  const absl::Status status = s_.RunSegments(1);
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
  EXPECT_THAT(status.ToString(), HasSubstr("nvme.tier moved no more: the file ends there"));
}

// Durable stores of two chunks each, on a simulated disk.
class DurableFaultTest : public ::testing::Test {
 protected:
  static constexpr uint64_t kElements = 65536, kChunks = 2;

  struct Job {
    std::map<uint64_t, DurableChunk> recorded;
    std::unique_ptr<ChunkStore> store;
  };

  absl::Status Open(std::vector<ExtentPlace> kept = {}) {
    job_.store.reset();
    tiers_.reset();
    BALLAST_ASSIGN_OR_RETURN(tiers_, Tiers::Open({.budget = {64 * kMiB, 64 * kMiB, 64 * kMiB},
                                                  .directory = directory_.path(),
                                                  .staging_bytes = StoreOnTiers::StagingBytes(2),
                                                  .open_hbm = TestHbm(),
                                                  .disk = &disk_,
                                                  .kept = std::move(kept)}));
    return absl::OkStatus();
  }

  // `job`'s chunks, as it recorded them, or new ones.
  absl::Status Add(Job* job, TierKind tier) {
    job->store =
        std::make_unique<ChunkStore>(tiers_.get(), kernels::OptimizerSpec(), nullptr,
                                     DurableOptions{.job = "job", .record = [job](absl::Span<const DurableChunk> all) {
                                                      for (const DurableChunk& chunk : all)
                                                        job->recorded[chunk.id] = chunk;
                                                      return absl::OkStatus();
                                                    }});
    Plan plan;
    std::vector<ChunkToAdd> added;
    for (uint64_t i = 0; i < kChunks; ++i) {
      plan.chunks.push_back({.state = tier});
      ChunkToAdd& chunk = added.emplace_back(ChunkToAdd{.elements = kElements, .id = i});
      if (job->recorded.contains(i)) chunk.durable = job->recorded[i];
    }
    return job->store->Add(added, plan);
  }

  static absl::Status Flush(Job* job, int64_t version) {
    StepUpdates step(static_cast<uint64_t>(version) + 1);
    for (uint64_t i = 0; i < kChunks; ++i) step.AddValues(i, kElements);
    std::vector<ChunkUpdate> updates(step.updates().begin(), step.updates().end());
    for (ChunkUpdate& update : updates) {
      update.version = version;
      update.flush = true;
    }
    return job->store->Run(updates, [](size_t) {});
  }

  // The chunks hold the version.
  static void ExpectHolds(const Job& job, int64_t version) {
    StepUpdates step(static_cast<uint64_t>(version) + 1);
    for (uint64_t i = 0; i < kChunks; ++i) step.AddValues(i, kElements);
    for (uint64_t i = 0; i < kChunks; ++i) {
      ReferenceChunk reference(kElements);
      reference.Apply(step.updates()[i]);
      EXPECT_TRUE(Holds(*job.store, i, reference)) << i;
    }
  }

  std::vector<ExtentPlace> Recorded() const {
    std::vector<ExtentPlace> places;
    for (const auto& [id, chunk] : job_.recorded) places.push_back({chunk.offset, chunk.bytes});
    return places;
  }

  SimDisk disk_{1};
  ScratchDirectory directory_;
  std::unique_ptr<Tiers> tiers_;
  Job job_;
};

class HbmFlushFaultTest : public DurableFaultTest {
 protected:
  void SetUp() override {
    ASSERT_EQ(Open(), absl::OkStatus());
    ASSERT_EQ(Add(&job_, TierKind::kHbm), absl::OkStatus());
    ASSERT_EQ(Flush(&job_, 0), absl::OkStatus());
    ASSERT_EQ(job_.store->Harden(), absl::OkStatus());
  }

  void FailFlush(uint64_t write) {
    disk_.FailNext(SimOperation::kWrite, write, SimFault::kEio);
    const absl::Status status = Flush(&job_, 1);
    ASSERT_EQ(status.code(), absl::StatusCode::kInternal) << status;
  }
};

// Writes of a flush: each array's, the label.
TEST_F(HbmFlushFaultTest, WhatAFailedFlushLeftGoesWithTheDiscardedStore) {
  for (uint64_t write = 1; write <= 8; ++write) {
    SCOPED_TRACE(write);
    if (write > 1) {
      job_.recorded.clear();
      SetUp();
    }
    FailFlush(write);
    job_.store->Discard();
    job_.store.reset();
    EXPECT_EQ(tiers_->used().nvme, 0u);
  }
}

TEST_F(HbmFlushFaultTest, TheVersionBeforeAFailedFlushIsThereAfterARestart) {
  FailFlush(1);
  ASSERT_EQ(job_.recorded.at(0).version, 0);
  ASSERT_EQ(Open(Recorded()), absl::OkStatus());
  ASSERT_EQ(Add(&job_, TierKind::kHbm), absl::OkStatus());
  ExpectHolds(job_, 0);
}

// The budget is larger than the disk, and others fill the disk. Whatever needs more space is refused, and no step is.
class FullDiskStoreTest : public DurableFaultTest, public ::testing::WithParamInterface<TierKind> {
 protected:
  void SetUp() override {
    ASSERT_EQ(Open(), absl::OkStatus());
    ASSERT_EQ(Add(&job_, GetParam()), absl::OkStatus());
  }
  void FillDisk() { disk_.set_capacity_bytes(disk_.used_bytes()); }
  static void ExpectFull(const absl::Status& status) {
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
    EXPECT_EQ(model::ReasonOf(status), model::kDiskFull) << status;
  }
  void ExpectSteps(int64_t from, int64_t to) {
    for (int64_t version = from; version < to; ++version) {
      ASSERT_EQ(Flush(&job_, version), absl::OkStatus()) << "version " << version;
      ExpectHolds(job_, version);
    }
  }
};
INSTANTIATE_TEST_SUITE_P(Tiers, FullDiskStoreTest, ::testing::Values(TierKind::kHbm, TierKind::kDram, TierKind::kNvme),
                         [](const auto& info) { return std::string(TierName(info.param)); });

TEST_P(FullDiskStoreTest, AnotherJobIsRefusedAndStepsGoOn) {
  FillDisk();
  const uint64_t used = tiers_->used().nvme;
  Job other;
  ExpectFull(Add(&other, GetParam()));
  other.store.reset();
  EXPECT_EQ(tiers_->used().nvme, used);
  ExpectSteps(0, 12);
}

TEST_P(FullDiskStoreTest, ADurablePinIsRefusedAndStepsGoOn) {
  ExpectSteps(0, 3);
  FillDisk();
  ExpectFull(job_.store->PinDurably(2).status());
  ExpectSteps(3, 12);
}

TEST_P(FullDiskStoreTest, ADurablePinThatWasMadeStaysAndStepsGoOn) {
  ExpectSteps(0, 3);
  const auto kept = job_.store->PinDurably(2);
  ASSERT_TRUE(kept.ok()) << kept.status();
  FillDisk();
  ExpectSteps(3, 12);
  EXPECT_EQ(job_.store->VerifyPin(2, [] { return absl::OkStatus(); }), absl::OkStatus());
  // What it gives up is enough for the next.
  job_.store->UnpinDurably(2);
  EXPECT_TRUE(job_.store->PinDurably(11).ok());
  ExpectSteps(12, 20);
}

TEST_P(FullDiskStoreTest, ARestartFindsItsSpace) {
  ExpectSteps(0, 6);
  ASSERT_EQ(job_.store->Harden(), absl::OkStatus());
  FillDisk();
  ASSERT_EQ(Open(Recorded()), absl::OkStatus());
  ASSERT_EQ(Add(&job_, GetParam()), absl::OkStatus());
  ExpectHolds(job_, 5);
  ExpectSteps(6, 18);
}

// A pin for reading has no space of its own: its copy goes to memory, and a step fails only where that is full as well.
TEST_P(FullDiskStoreTest, AReadingPinTakesMemoryThen) {
  ExpectSteps(0, 3);
  FillDisk();
  ASSERT_EQ(job_.store->Pin(2), absl::OkStatus());
  ExpectSteps(3, 6);
  ASSERT_EQ(job_.store->Pin(5), absl::OkStatus());
  ASSERT_EQ(tiers_->SetBudget({64 * kMiB, tiers_->used().dram, 64 * kMiB}), absl::OkStatus());
  const absl::Status status = Flush(&job_, 6);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_THAT(status.ToString(), HasSubstr("free space on that file system; and in dram instead: dram is short of"));
  ExpectHolds(job_, 5);
  job_.store->Unpin(5);
  ExpectSteps(6, 9);
}

// A restart reads masters and labels. Moments are read, and checked, by whoever needs them first.
class RestartTest : public DurableFaultTest, public ::testing::WithParamInterface<TierKind> {
 protected:
  void SetUp() override {
    ASSERT_EQ(Open(), absl::OkStatus());
    ASSERT_EQ(Add(&job_, GetParam()), absl::OkStatus());
    ASSERT_EQ(Update(0), absl::OkStatus());
    ASSERT_EQ(Update(1), absl::OkStatus());
    ASSERT_EQ(job_.store->Harden(), absl::OkStatus());
  }
  absl::Status Restart() {
    BALLAST_RETURN_IF_ERROR(Open(Recorded()));
    const uint64_t before = tiers_->traffic().read.nvme;
    BALLAST_RETURN_IF_ERROR(Add(&job_, GetParam()));
    read_ = tiers_->traffic().read.nvme - before;
    return absl::OkStatus();
  }
  // Values, then steps that need the moments of the one before.
  absl::Status Update(int64_t version) {
    StepUpdates step(static_cast<uint64_t>(version));
    for (uint64_t i = 0; i < kChunks; ++i) {
      if (version == 0) step.AddValues(i, kElements);
      if (version > 0) step.AddSegments(i, kElements, static_cast<uint64_t>(version));
    }
    std::vector<ChunkUpdate> updates(step.updates().begin(), step.updates().end());
    for (ChunkUpdate& update : updates) {
      update.version = version;
      update.flush = true;
    }
    const absl::Status status = job_.store->Run(updates, [](size_t) {});
    if (status.ok()) step.ApplyTo(reference_);
    return status;
  }
  void ExpectRight() const {
    for (uint64_t i = 0; i < kChunks; ++i) EXPECT_TRUE(Holds(*job_.store, i, reference_[i])) << i;
  }
  absl::Status Read(uint64_t chunk, StateArray array) const {
    std::vector<float> to(16);
    return job_.store->ReadState(chunk, array, 1000, absl::MakeSpan(to));
  }

  uint64_t read_ = 0;
  std::vector<ReferenceChunk> reference_ = std::vector<ReferenceChunk>(kChunks, ReferenceChunk(kElements));
};
INSTANTIATE_TEST_SUITE_P(Tiers, RestartTest, ::testing::Values(TierKind::kDram, TierKind::kNvme),
                         [](const auto& info) { return std::string(TierName(info.param)); });

TEST_P(RestartTest, MomentsAreReadByTheFirstUpdate) {
  ASSERT_EQ(Restart(), absl::OkStatus());
  EXPECT_EQ(read_, kChunks * (kElements * sizeof(float) + StateLayout::kLabelBytes));
  ExpectRight();  // also moments, from the disk
  const uint64_t before = tiers_->traffic().read.nvme;
  ASSERT_EQ(Update(2), absl::OkStatus());
  EXPECT_GE(tiers_->traffic().read.nvme - before, kChunks * 2 * kElements * sizeof(float));
  ExpectRight();
  const uint64_t then = tiers_->traffic().read.nvme;
  ASSERT_EQ(Update(3), absl::OkStatus());
  const uint64_t again = tiers_->traffic().read.nvme - then;
  EXPECT_EQ(again == 0, GetParam() == TierKind::kDram) << again;  // in DRAM they stay
  ExpectRight();
}

TEST_P(RestartTest, RottenMomentsAreRefusedByNameWhenTheyAreNeeded) {
  const uint64_t at = job_.recorded.at(1).offset + StateLayout().ArrayAt(StateArray::kMoment1, kElements);
  job_.store.reset();
  tiers_.reset();
  disk_.FlipBit(directory_ / "nvme.tier", (at + 4321) * 8);
  ASSERT_EQ(Restart(), absl::OkStatus());
  EXPECT_EQ(Read(1, StateArray::kMaster), absl::OkStatus());
  EXPECT_EQ(Read(0, StateArray::kMoment1), absl::OkStatus());
  const std::string named = absl::StrCat("chunk 1: moment1 in ", directory_ / "nvme.tier", " at offset ", at);
  for (const absl::Status& status : {Read(1, StateArray::kMoment1), Update(2)}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
    EXPECT_EQ(model::ReasonOf(status), model::kChecksum);
    EXPECT_THAT(status.ToString(), HasSubstr(named));
  }
  EXPECT_EQ(job_.store->Run({}, [](size_t) {}).code(), absl::StatusCode::kDataLoss) << "the store takes no more steps";
  // The disk still has what it had.
  disk_.FlipBit(directory_ / "nvme.tier", (at + 4321) * 8);
  ASSERT_EQ(Restart(), absl::OkStatus());
  EXPECT_TRUE(Holds(*job_.store, 1, reference_[1]));
}

TEST_P(RestartTest, AnInterruptedReadOfMomentsChangesNothing) {
  ASSERT_EQ(Restart(), absl::OkStatus());
  StepUpdates step(2);
  for (uint64_t i = 0; i < kChunks; ++i) step.AddSegments(i, kElements, 2);
  int asked = 0;
  const auto second = [&] { return ++asked == 2 ? absl::CancelledError("stopped") : absl::OkStatus(); };
  const absl::Status status = job_.store->Run(
      step.updates(), [](size_t) {}, {}, second);
  EXPECT_EQ(status.code(), absl::StatusCode::kCancelled) << status;
  if (GetParam() == TierKind::kDram) ExpectRight();
  EXPECT_EQ(job_.store->Run({}, [](size_t) {}), absl::OkStatus()) << "the store goes on";
}

TEST_P(RestartTest, ChunksMoveWithTheirMoments) {
  ASSERT_EQ(Restart(), absl::OkStatus());
  const TierKind other = GetParam() == TierKind::kDram ? TierKind::kNvme : TierKind::kDram;
  ASSERT_EQ(job_.store->Move(0, other), absl::OkStatus());
  ASSERT_EQ(job_.store->Move(1, TierKind::kHbm), absl::OkStatus());
  ExpectRight();
  ASSERT_EQ(Update(2), absl::OkStatus());
  ExpectRight();
}

// A restore of version 1 over version 2 that no update has read since the restart. Pin 9 is of version 2.
class RestoreTest : public RestartTest {
 protected:
  void SetUp() override {
    RestartTest::SetUp();
    KeepDurably(1);
    at_one_ = reference_;
    ASSERT_EQ(Update(2), absl::OkStatus());
    KeepDurably(2);
    ASSERT_EQ(job_.store->Harden(), absl::OkStatus());
  }
  void KeepDurably(int64_t version) {
    const absl::StatusOr<std::vector<DurableChunk>> kept = job_.store->PinDurably(version);
    ASSERT_TRUE(kept.ok()) << kept.status();
    kept_[version] = *kept;
  }
  // Version 2 is no kept version if `keep` says so: its extents are then the chunks' alone.
  void RestartAndPin(bool keep_two) {
    if (!keep_two) kept_.erase(2);
    std::vector<ExtentPlace> places = Recorded();
    for (const DurableChunk& chunk : kept_[1]) places.push_back({chunk.offset, chunk.bytes});
    ASSERT_EQ(Open(places), absl::OkStatus());
    ASSERT_EQ(Add(&job_, GetParam()), absl::OkStatus());
    for (const auto& [version, chunks] : kept_) {
      for (uint64_t i = 0; i < kChunks; ++i) {
        ASSERT_EQ(job_.store->TakeBackPin(version, i, chunks[i]), absl::OkStatus());
      }
    }
    ASSERT_EQ(job_.store->Pin(9), absl::OkStatus());
  }
  void Rot(uint64_t chunk, StateArray array) {
    const uint64_t at = job_.recorded.at(chunk).offset + StateLayout().ArrayAt(array, kElements);
    disk_.FlipBit(directory_ / "nvme.tier", (at + 4321) * 8);
  }
  absl::Status Restore() {
    std::vector<ChunkUpdate> updates(kChunks);
    for (uint64_t i = 0; i < kChunks; ++i) {
      updates[i].chunk = i;
      updates[i].version = 3;
      updates[i].flush = true;
      updates[i].restored = 1;
    }
    return job_.store->Run(updates, [](size_t) {});
  }
  absl::Status ReadPinned(uint64_t chunk, StateArray array) const {
    std::vector<float> to(16);
    return job_.store->ReadPinnedState(9, chunk, array, 1000, absl::MakeSpan(to));
  }
  // All chunks hold version 1, also after the next steps and a restart.
  void ExpectRestored() {
    reference_ = at_one_;
    ExpectRight();
    ASSERT_EQ(Update(4), absl::OkStatus());
    ExpectRight();
    ASSERT_EQ(job_.store->Harden(), absl::OkStatus());
    ASSERT_EQ(Restart(), absl::OkStatus());
    ExpectRight();
  }
  void ExpectLost(uint64_t chunk, const std::string& why) const {
    for (const StateArray array : {StateArray::kMaster, StateArray::kMoment1}) {
      const absl::Status status = ReadPinned(chunk, array);
      EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
      EXPECT_THAT(status.ToString(), HasSubstr(absl::StrCat("chunk ", chunk, " of pinned version 9 is lost")));
      EXPECT_THAT(status.ToString(), HasSubstr(why));
    }
  }

  void RestoreOverRot(bool keep_two) {
    RestartAndPin(keep_two);
    Rot(1, StateArray::kMoment2);
    ASSERT_EQ(Restore(), absl::OkStatus());
    ExpectLost(1, "chunk 1: moment2 in");
    EXPECT_TRUE(HoldsPinned(*job_.store, 9, 0, reference_[0]));
  }

  std::map<int64_t, std::vector<DurableChunk>> kept_;
  std::vector<ReferenceChunk> at_one_;
};
INSTANTIATE_TEST_SUITE_P(Tiers, RestoreTest, ::testing::Values(TierKind::kDram, TierKind::kNvme),
                         [](const auto& info) { return std::string(TierName(info.param)); });

// The restore has no use for moments that nobody has read since the restart. A pin has.
TEST_P(RestoreTest, APinHasTheMomentsThatARestoreOverwrites) {
  RestartAndPin(/*keep_two=*/false);
  ASSERT_EQ(Restore(), absl::OkStatus());
  for (uint64_t i = 0; i < kChunks; ++i) EXPECT_TRUE(HoldsPinned(*job_.store, 9, i, reference_[i])) << i;
  ExpectRestored();
}

TEST_P(RestoreTest, APinLosesTheChunkThatCannotBeReadAndTheRestoreGoesOn) {
  ASSERT_NO_FATAL_FAILURE(RestoreOverRot(/*keep_two=*/false));
  ExpectRestored();
}

// A kept version has the rotten extent as it is, and says so before it is restored.
TEST_P(RestoreTest, AKeptVersionStaysAndIsRefusedByName) {
  ASSERT_NO_FATAL_FAILURE(RestoreOverRot(/*keep_two=*/true));
  EXPECT_EQ(job_.store->VerifyPin(1, Uninterrupted), absl::OkStatus());
  const absl::Status two = job_.store->VerifyPin(2, Uninterrupted);
  EXPECT_EQ(two.code(), absl::StatusCode::kDataLoss) << two;
  EXPECT_THAT(two.ToString(), HasSubstr("chunk 1: moment2 in"));
  reference_ = at_one_;
  ExpectRight();
}

TEST_P(RestoreTest, SoDoesAPinWhoseChunkTheDiskDoesNotRead) {
  RestartAndPin(/*keep_two=*/false);
  disk_.FailNext(SimOperation::kRead, 1, SimFault::kEio);  // the first chunk's
  ASSERT_EQ(Restore(), absl::OkStatus());
  ASSERT_EQ(disk_.suffered(SimFault::kEio), 1u);
  EXPECT_EQ(ReadPinned(0, StateArray::kMaster).code(), absl::StatusCode::kDataLoss);
  ExpectLost(0, "nvme.tier");
  EXPECT_TRUE(HoldsPinned(*job_.store, 9, 1, reference_[1]));
  ExpectRestored();
}

// Any other update needs the state for itself.
TEST_P(RestoreTest, AnUpdateUnderAPinIsStillRefused) {
  RestartAndPin(/*keep_two=*/false);
  Rot(1, StateArray::kMoment2);
  EXPECT_EQ(Update(3).code(), absl::StatusCode::kDataLoss);
}

TEST_P(RestartTest, StepsReserveNoBlocks) {
  ASSERT_EQ(Restart(), absl::OkStatus());
  disk_.FailNext(SimOperation::kReserve, 1, SimFault::kEio);
  for (int64_t version = 2; version < 12; ++version) ASSERT_EQ(Update(version), absl::OkStatus());
  EXPECT_EQ(disk_.suffered(SimFault::kEio), 0u) << "a reservation waits for all transfers of the file";
  ExpectRight();
}

}  // namespace
}  // namespace ballast::storage
