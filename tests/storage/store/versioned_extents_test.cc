// New versions of chunks: until the new one is recorded, the old one stays.
#include "ballast/storage/store/versioned_extents.h"

#include <filesystem>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "ballast/storage/tier/tiers.h"
#include "ballast/tests/sim_disk/sim_disk.h"
#include "gtest/gtest.h"

namespace ballast::storage {
namespace {

class VersionedExtentsTest : public ::testing::Test {
 protected:
  static constexpr uint64_t kVersionBytes = 64 << 10;

  VersionedExtentsTest() { Use(/*records=*/true, /*spares=*/2); }
  void Use(bool records, uint64_t spares) {
    extents_.reset();
    DurableOptions options{.job = "job", .life = 3};
    if (records) {
      options.record = [this](absl::Span<const DurableChunk> entries) {
        synced_before_record_ = disk_.operations(SimOperation::kSync);
        for (const DurableChunk& entry : entries) recorded_.push_back(entry.version);
        return recording_;
      };
    }
    extents_.emplace(tiers_->nvme(), std::move(options));
    extents_->AddRoom(*tiers_->nvme()->Promise(spares * kVersionBytes, "a test"), spares * kVersionBytes);
  }
  // The chunk's next version goes to a fresh extent; the extent before is given to `extents_`.
  void Write(int64_t version, NvmeExtent* current) {
    absl::StatusOr<NvmeExtent> fresh = extents_->Take(kVersionBytes);
    ASSERT_TRUE(fresh.ok()) << fresh.status();
    const DurableChunk entry{
        .version = version, .offset = fresh->offset(), .bytes = kVersionBytes, .file = fresh->file_id()};
    extents_->Written(entry, std::exchange(*current, *std::move(fresh)));
  }
  uint64_t used(TierPart part) const { return tiers_->usage().parts[static_cast<size_t>(part)].nvme; }

  SimDisk disk_{1};
  std::unique_ptr<Tiers> tiers_ = *Tiers::Open({.budget = {.dram = 1 << 20, .nvme = 1 << 20},
                                                .directory = std::filesystem::temp_directory_path(),
                                                .disk = &disk_});
  std::vector<int64_t> recorded_;
  uint64_t synced_before_record_ = 0;
  absl::Status recording_;
  std::optional<VersionedExtents> extents_;
};

TEST_F(VersionedExtentsTest, AQuarterOfTheChunksMayBeWrittenBeforeARunStops) {
  EXPECT_EQ(VersionedExtents::Spares(3), 3);
  EXPECT_EQ(VersionedExtents::Spares(16), 16);
  EXPECT_EQ(VersionedExtents::Spares(40), 16);
  EXPECT_EQ(VersionedExtents::Spares(100), 25);
  EXPECT_EQ(VersionedExtents::Spares(10000), 128);
  EXPECT_EQ(extents_->SpareBytesMissing(100, kVersionBytes), 23 * kVersionBytes) << "two are there";
  EXPECT_EQ(extents_->SpareBytesMissing(1, kVersionBytes), 0);
}

TEST_F(VersionedExtentsTest, TheOldVersionsExtentIsFreeOnceTheNewIsSyncedAndRecorded) {
  NvmeExtent chunk;
  Write(1, &chunk);
  const uint64_t first = chunk.offset();
  Write(2, &chunk);
  EXPECT_FALSE(extents_->HasBytes(1)) << "both versions have their extents";
  const uint64_t syncs = disk_.operations(SimOperation::kSync);
  ASSERT_EQ(extents_->Harden(), absl::OkStatus());
  EXPECT_EQ(recorded_, (std::vector<int64_t>{1, 2}));
  EXPECT_GT(synced_before_record_, syncs) << "a record of bytes that a crash may lose";
  EXPECT_TRUE(extents_->HasRoom(kVersionBytes));
  EXPECT_FALSE(extents_->HasBytes(kVersionBytes + 1)) << "the first version had no extent before";
  EXPECT_EQ(extents_->Take(kVersionBytes)->offset(), first);
  ASSERT_EQ(extents_->Harden(), absl::OkStatus());
  EXPECT_EQ(recorded_.size(), 2) << "nothing was written since";
}

TEST_F(VersionedExtentsTest, AFailedRecordKeepsTheOldVersionAndEndsTheStore) {
  NvmeExtent chunk;
  Write(1, &chunk);
  ASSERT_EQ(extents_->Harden(), absl::OkStatus());
  Write(2, &chunk);
  recording_ = absl::InternalError("the catalog failed");
  EXPECT_EQ(extents_->Harden(), recording_);
  EXPECT_FALSE(extents_->HasBytes(1)) << "a restart looks for version 1";
  recording_ = absl::OkStatus();
  EXPECT_EQ(extents_->Harden(), absl::InternalError("the catalog failed"));
  EXPECT_EQ(recorded_, (std::vector<int64_t>{1, 2})) << "no second try";
}

TEST_F(VersionedExtentsTest, AFailedSyncIsRecordedByNobody) {
  NvmeExtent chunk;
  Write(1, &chunk);
  disk_.FailNext(SimOperation::kSync, 1, SimFault::kEio);
  const absl::Status failed = extents_->Harden();
  EXPECT_FALSE(failed.ok());
  EXPECT_TRUE(recorded_.empty());
  EXPECT_EQ(extents_->Harden(), failed);
}

TEST_F(VersionedExtentsTest, RunsShareARecordWhileTheNextOneFindsRoom) {
  Use(/*records=*/true, /*spares=*/8);
  NvmeExtent chunk;
  EXPECT_FALSE(extents_->EndRun()) << "nothing was written";
  Write(1, &chunk);
  EXPECT_FALSE(extents_->EndRun());
  Write(2, &chunk);
  EXPECT_FALSE(extents_->EndRun());
  Write(3, &chunk);
  EXPECT_FALSE(extents_->EndRun());
  Write(4, &chunk);
  EXPECT_TRUE(extents_->EndRun()) << "after four runs";
  ASSERT_EQ(extents_->Harden(), absl::OkStatus());
  for (int64_t version = 5; version < 10; ++version) Write(version, &chunk);
  EXPECT_TRUE(extents_->EndRun()) << "five of eight: a next run of five would lack room";
}

TEST_F(VersionedExtentsTest, AStoreThatRecordsNothingFreesAfterEachRun) {
  Use(/*records=*/false, /*spares=*/2);
  NvmeExtent chunk;
  Write(1, &chunk);
  Write(2, &chunk);
  EXPECT_TRUE(extents_->EndRun());
  const uint64_t syncs = disk_.operations(SimOperation::kSync);
  ASSERT_EQ(extents_->Harden(), absl::OkStatus());
  EXPECT_EQ(disk_.operations(SimOperation::kSync), syncs);
  EXPECT_TRUE(extents_->HasRoom(kVersionBytes));
}

TEST_F(VersionedExtentsTest, AnUnrecordedVersionLeavesTheOldOneForARestart) {
  NvmeExtent chunk;
  Write(1, &chunk);
  ASSERT_EQ(extents_->Harden(), absl::OkStatus());
  const uint64_t offset = chunk.offset();
  const NvmeFileId file = chunk.file_id();
  Write(2, &chunk);
  extents_.reset();
  EXPECT_EQ(used(TierPart::kSpare), 0) << "promises have ended";
  const auto old = tiers_->nvme()->TakeKept(offset, file);
  ASSERT_TRUE(old.ok()) << old.status();
  EXPECT_EQ(old->bytes(), kVersionBytes);
}

TEST_F(VersionedExtentsTest, ADiscardedStoreFreesTheOldVersions) {
  NvmeExtent chunk;
  Write(1, &chunk);
  const uint64_t offset = chunk.offset();
  const NvmeFileId file = chunk.file_id();
  Write(2, &chunk);
  extents_->Discard();
  extents_.reset();
  chunk = NvmeExtent();
  EXPECT_FALSE(tiers_->nvme()->TakeKept(offset, file).ok());
  EXPECT_EQ(tiers_->used().nvme, 0);
}

TEST_F(VersionedExtentsTest, WhatIsForgottenIsNotRecordedAndItsOldExtentIsFree) {
  NvmeExtent current;
  Write(1, &current);
  ASSERT_EQ(extents_->Harden(), absl::OkStatus());
  Write(2, &current);
  extents_->Forget(0);
  EXPECT_FALSE(extents_->HasRoom(kVersionBytes)) << "not yet";
  ASSERT_EQ(extents_->Harden(), absl::OkStatus());
  EXPECT_EQ(recorded_, (std::vector<int64_t>{1}));
  EXPECT_TRUE(extents_->HasRoom(kVersionBytes));
}

TEST_F(VersionedExtentsTest, ChunksThatGoLeaveNoRoomBehind) {
  const uint64_t before = used(TierPart::kSpare);
  const uint64_t more = extents_->SpareBytesMissing(5, kVersionBytes);
  ASSERT_EQ(more, 3 * kVersionBytes);
  extents_->AddRoom(*tiers_->nvme()->Promise(more + kVersionBytes, "a test"), more);
  extents_->GiveBack(kVersionBytes, 2, kVersionBytes);
  EXPECT_EQ(used(TierPart::kSpare), before);
  EXPECT_EQ(extents_->SpareBytesMissing(5, kVersionBytes), more);
  extents_->GiveBack(0, 0, 0);
  EXPECT_EQ(used(TierPart::kSpare), 0);
}

}  // namespace
}  // namespace ballast::storage
