// Wrong bytes from the disk are refused, never served.
#include <fcntl.h>
#include <unistd.h>

#include <map>

#include "absl/strings/str_cat.h"
#include "ballast/proto/model/status.h"
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

// A durable store whose chunk lives in HBM, on a simulated disk.
class HbmFlushFaultTest : public ::testing::Test {
 protected:
  static constexpr uint64_t kElements = 65536;

  void SetUp() override {
    ASSERT_TRUE(Open({}).ok());
    Plan plan;
    plan.chunks = {{.state = TierKind::kHbm}};
    ASSERT_EQ(store_->Add(std::vector<ChunkToAdd>{{.elements = kElements, .id = 0}}, plan), absl::OkStatus());
    ASSERT_EQ(Flush(0), absl::OkStatus());
    ASSERT_EQ(store_->Harden(), absl::OkStatus());
  }

  absl::Status Open(std::vector<ExtentPlace> kept) {
    store_.reset();
    tiers_.reset();
    BALLAST_ASSIGN_OR_RETURN(tiers_, Tiers::Open({.budget = {16 * kMiB, 16 * kMiB, 16 * kMiB},
                                                  .directory = directory_.path(),
                                                  .staging_bytes = StoreOnTiers::StagingBytes(2),
                                                  .open_hbm = TestHbm(),
                                                  .disk = &disk_,
                                                  .kept = std::move(kept)}));
    store_ = std::make_unique<ChunkStore>(
        tiers_.get(), kernels::OptimizerSpec(), nullptr,
        DurableOptions{.job = "job", .record = [this](absl::Span<const DurableChunk> chunks) {
                         for (const DurableChunk& chunk : chunks) recorded_[chunk.id] = chunk;
                         return absl::OkStatus();
                       }});
    return absl::OkStatus();
  }

  absl::Status Flush(int64_t version) {
    StepUpdates step(static_cast<uint64_t>(version) + 1);
    step.AddValues(0, kElements);
    std::vector<ChunkUpdate> updates(step.updates().begin(), step.updates().end());
    updates[0].version = version;
    updates[0].flush = true;
    return store_->Run(updates, [](size_t) {});
  }

  void FailFlush(uint64_t write) {
    disk_.FailNext(SimOperation::kWrite, write, SimFault::kEio);
    const absl::Status status = Flush(1);
    ASSERT_EQ(status.code(), absl::StatusCode::kInternal) << status;
  }

  SimDisk disk_{1};
  ScratchDirectory directory_;
  std::unique_ptr<Tiers> tiers_;
  std::map<uint64_t, DurableChunk> recorded_;
  std::unique_ptr<ChunkStore> store_;
};

// Writes of a flush: the state's first MiB, the label.
TEST_F(HbmFlushFaultTest, WhatAFailedFlushLeftGoesWithTheDiscardedStore) {
  for (const uint64_t write : {1, 2}) {
    SCOPED_TRACE(write);
    if (write > 1) {
      recorded_.clear();
      SetUp();
    }
    FailFlush(write);
    store_->Discard();
    store_.reset();
    EXPECT_EQ(tiers_->used().nvme, 0u);
  }
}

TEST_F(HbmFlushFaultTest, TheVersionBeforeAFailedFlushIsThereAfterARestart) {
  FailFlush(1);
  const DurableChunk before = recorded_.at(0);
  ASSERT_EQ(before.version, 0);
  ASSERT_TRUE(Open({{before.offset, before.bytes}}).ok());
  Plan plan;
  plan.chunks = {{.state = TierKind::kHbm}};
  ASSERT_EQ(store_->Add(std::vector<ChunkToAdd>{{.elements = kElements, .id = 0, .durable = before}}, plan),
            absl::OkStatus());
  ReferenceChunk reference(kElements);
  StepUpdates step(1);
  step.AddValues(0, kElements);
  reference.Apply(step.updates()[0]);
  EXPECT_TRUE(Holds(*store_, 0, reference));
}

}  // namespace
}  // namespace ballast::storage
