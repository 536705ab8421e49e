// Each fault of the simulated disk, by itself.
#include "ballast/tests/sim_disk/sim_faults.h"

#include <algorithm>
#include <bit>
#include <set>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/tests/sim_disk/blocks.h"
#include "ballast/tests/sim_disk/sim_disk.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ballast::storage {
namespace {

// Bits in which two contents differ.
int Differing(absl::Span<const std::byte> a, absl::Span<const std::byte> b) {
  EXPECT_EQ(a.size(), b.size());
  int bits = 0;
  for (uint64_t i = 0; i < a.size(); ++i) bits += std::popcount(static_cast<uint8_t>(a[i] ^ b[i]));
  return bits;
}

// A file of four blocks of ones, synced.
class SimFaultsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(file_->Write(0, ones_.span()).ok());
    ASSERT_TRUE(file_->Sync().ok());
  }

  std::vector<std::byte> Newest() {
    Blocks all(*file_->Size() / kIoAlignment);
    EXPECT_TRUE(file_->Read(0, all.span()).ok());
    return {all.span().begin(), all.span().end()};
  }

  SimDisk disk_{1};
  std::unique_ptr<BlockFile> file_ = *disk_.Open("f", Disk::Mode::kEmptied);
  Blocks ones_{4, 1};
  Blocks twos_{4, 2};
};

TEST_F(SimFaultsTest, TheKthOperationOfAKindFails) {
  disk_.FailNext(SimOperation::kRead, 3, SimFault::kEio);
  ASSERT_TRUE(file_->Write(0, ones_.span()).ok());
  for (int i = 1; i <= 4; ++i) EXPECT_EQ(file_->Read(0, ones_.span()).ok(), i != 3) << i;
  EXPECT_EQ(disk_.suffered(SimFault::kEio), 1);
}

TEST_F(SimFaultsTest, EioOfEveryKind) {
  for (const SimOperation operation :
       {SimOperation::kOpen, SimOperation::kRemove, SimOperation::kRead, SimOperation::kWrite, SimOperation::kSync,
        SimOperation::kReserve, SimOperation::kTruncate}) {
    disk_.FailNext(operation, 1, SimFault::kEio);
  }
  for (const absl::Status& status :
       {disk_.Open("g", Disk::Mode::kEmptied).status(), disk_.Remove("f"), file_->Read(0, ones_.span()),
        file_->Write(0, twos_.span()), file_->Sync(), file_->Reserve(0, kIoAlignment), file_->Truncate(0)}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << status;
    EXPECT_EQ(model::ReasonOf(status), model::kIo);
  }
  EXPECT_THAT(disk_.List(), ::testing::ElementsAre("f"));
  EXPECT_EQ(*file_->Size(), 4 * kIoAlignment);
}

TEST_F(SimFaultsTest, FailedWriteMayBeThereInPart) {
  bool none = false, some = false, all = false;
  for (int i = 0; i < 100; ++i) {
    ASSERT_TRUE(file_->Write(0, ones_.span()).ok());
    disk_.FailNext(SimOperation::kWrite, 1, SimFault::kEio);
    ASSERT_FALSE(file_->Write(0, twos_.span()).ok());
    const std::vector<std::byte> newest = Newest();
    const auto changed = std::count(newest.begin(), newest.end(), std::byte{2});
    (changed == 0 ? none : changed == 4 * kIoAlignment ? all : some) = true;
  }
  EXPECT_TRUE(none && some && all);
}

TEST_F(SimFaultsTest, Enospc) {
  disk_.FailNext(SimOperation::kWrite, 1, SimFault::kEnospc);
  disk_.FailNext(SimOperation::kReserve, 1, SimFault::kEnospc);
  EXPECT_EQ(file_->Write(0, twos_.span()).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(file_->Reserve(0, kIoAlignment).code(), absl::StatusCode::kResourceExhausted);
}

TEST_F(SimFaultsTest, ShortIsOnlyCounted) {
  disk_.FailNext(SimOperation::kWrite, 1, SimFault::kShort);
  disk_.FailNext(SimOperation::kRead, 1, SimFault::kShort);
  ASSERT_TRUE(file_->Write(0, twos_.span()).ok());
  EXPECT_EQ(Differing(Newest(), twos_.span()), 0);
  EXPECT_EQ(disk_.suffered(SimFault::kShort), 2);
}

TEST_F(SimFaultsTest, StaleReadReturnsWhatWasSynced) {
  ASSERT_TRUE(file_->Write(0, twos_.span()).ok());
  disk_.FailNext(SimOperation::kRead, 1, SimFault::kStale);
  EXPECT_EQ(Differing(Newest(), ones_.span()), 0);
  EXPECT_EQ(Differing(Newest(), twos_.span()), 0);
}

TEST_F(SimFaultsTest, MisdirectedWriteLandsOnOtherBlocksOfTheFile) {
  std::set<uint64_t> places;
  for (int i = 0; i < 100; ++i) {
    ASSERT_TRUE(file_->Write(0, ones_.span()).ok());
    disk_.FailNext(SimOperation::kWrite, 1, SimFault::kMisdirected);
    ASSERT_TRUE(file_->Write(kIoAlignment, twos_.Part(0, kIoAlignment)).ok());
    const std::vector<std::byte> newest = Newest();
    ASSERT_EQ(newest.size(), 4 * kIoAlignment);
    const auto first = std::find(newest.begin(), newest.end(), std::byte{2});
    ASSERT_EQ(std::count(newest.begin(), newest.end(), std::byte{2}), kIoAlignment);
    places.insert((first - newest.begin()) / kIoAlignment);
  }
  EXPECT_THAT(places, ::testing::ElementsAre(0, 2, 3));
}

TEST_F(SimFaultsTest, BitFlipIsInOneReadOnly) {
  disk_.FailNext(SimOperation::kRead, 1, SimFault::kBitFlip);
  EXPECT_EQ(Differing(Newest(), ones_.span()), 1);
  EXPECT_EQ(Differing(Newest(), ones_.span()), 0);
}

TEST_F(SimFaultsTest, RotStays) {
  disk_.FailNext(SimOperation::kRead, 1, SimFault::kRot);
  Blocks read(1);
  ASSERT_TRUE(file_->Read(2 * kIoAlignment, read.span()).ok());
  EXPECT_EQ(Differing(read.span(), ones_.Part(0, kIoAlignment)), 1) << "in the range of the read";
  EXPECT_EQ(Differing(Newest(), ones_.span()), 1);
  EXPECT_EQ(Differing(disk_.DurableContent("f"), ones_.span()), 1);
}

TEST_F(SimFaultsTest, LostWriteSaysOk) {
  disk_.FailNext(SimOperation::kWrite, 1, SimFault::kLostWrite);
  ASSERT_TRUE(file_->Write(2 * kIoAlignment, twos_.span()).ok());
  ASSERT_TRUE(file_->Sync().ok());
  EXPECT_EQ(*file_->Size(), 6 * kIoAlignment);
  const std::vector<std::byte> durable = disk_.DurableContent("f");
  EXPECT_EQ(std::count(durable.begin(), durable.end(), std::byte{2}), 0);
}

TEST_F(SimFaultsTest, LostSyncSaysOkAndTheNextOneCovers) {
  ASSERT_TRUE(file_->Write(0, twos_.span()).ok());
  disk_.FailNext(SimOperation::kSync, 1, SimFault::kLostSync);
  ASSERT_TRUE(file_->Sync().ok());
  EXPECT_EQ(Differing(disk_.DurableContent("f"), ones_.span()), 0);
  ASSERT_TRUE(file_->Sync().ok());
  EXPECT_EQ(Differing(disk_.DurableContent("f"), twos_.span()), 0);
}

TEST_F(SimFaultsTest, WhatAFailedSyncDroppedNoLaterOneSaves) {
  bool dropped = false, kept = false;
  for (int i = 0; i < 50; ++i) {
    ASSERT_TRUE(file_->Write(0, (i % 2 == 0 ? twos_ : ones_).span()).ok());
    disk_.FailNext(SimOperation::kSync, 1, SimFault::kEio);
    ASSERT_FALSE(file_->Sync().ok());
    ASSERT_TRUE(file_->Sync().ok());
    (Differing(disk_.DurableContent("f"), Newest()) == 0 ? kept : dropped) = true;
  }
  EXPECT_TRUE(dropped && kept);
}

TEST_F(SimFaultsTest, ProbabilitiesAreKept) {
  disk_.SetFaultProbability(SimOperation::kRead, SimFault::kEio, 0.25);
  for (int i = 0; i < 1000; ++i) (void)file_->Read(0, ones_.span());
  EXPECT_GT(disk_.suffered(SimFault::kEio), 200);
  EXPECT_LT(disk_.suffered(SimFault::kEio), 300);
  disk_.SetFaultProbability(SimOperation::kRead, SimFault::kEio, 1);
  EXPECT_FALSE(file_->Read(0, ones_.span()).ok());
  disk_.SetFaultProbability(SimOperation::kRead, SimFault::kEio, 0);
  for (int i = 0; i < 100; ++i) EXPECT_TRUE(file_->Read(0, ones_.span()).ok());
}

TEST_F(SimFaultsTest, FaultsReachRequestsOfAQueue) {
  disk_.FailNext(SimOperation::kWrite, 2, SimFault::kEio);
  const auto queue = *disk_.MakeQueue({});
  Blocks large(600, 3);  // several pieces are one operation
  for (uint64_t i = 0; i < 3; ++i) {
    ASSERT_TRUE(queue->Submit({IoRequest::Kind::kWrite, file_.get(), 0, large.span(), i}).ok());
  }
  std::vector<IoCompletion> completions;
  while (queue->in_flight() > 0) queue->Reap(/*wait=*/true, &completions);
  ASSERT_EQ(completions.size(), 3);
  EXPECT_EQ(completions[1].status.code(), absl::StatusCode::kInternal);
  EXPECT_TRUE(completions[0].status.ok() && completions[2].status.ok());
}

TEST_F(SimFaultsTest, DamageAtRest) {
  disk_.FlipBit("f", 8 * kIoAlignment + 1);
  EXPECT_EQ(Newest()[kIoAlignment], std::byte{3});
  disk_.Corrupt("f", kIoAlignment - 10, 20);
  const std::vector<std::byte> newest = Newest();
  EXPECT_NE(newest[kIoAlignment], std::byte{3});
  for (uint64_t i = 0; i < newest.size(); ++i) {
    if (i == kIoAlignment) continue;  // damaged twice
    EXPECT_EQ(newest[i] != std::byte{1}, i >= kIoAlignment - 10 && i < kIoAlignment + 10) << i;
  }
}

TEST_F(SimFaultsTest, ContentIsSetAndCutAtRest) {
  disk_.SetContent("copy", disk_.DurableContent("f"));
  EXPECT_THAT(disk_.List(), ::testing::ElementsAre("copy", "f"));
  disk_.TruncateTo("copy", kIoAlignment + 1);
  EXPECT_EQ(disk_.DurableContent("copy"), std::vector<std::byte>(kIoAlignment + 1, std::byte{1}));
  disk_.Corrupt("copy", 0, 1 << 20);
  EXPECT_EQ(disk_.DurableContent("copy").size(), kIoAlignment + 1);
  EXPECT_TRUE(disk_.DurableContent("missing").empty());
}

TEST(SimFaultPlanTest, WhatCannotBeIsRefused) {
  SimFaultPlan plan;
  EXPECT_FALSE(plan.FailNext(SimOperation::kRead, 1, SimFault::kLostWrite));
  EXPECT_FALSE(plan.FailNext(SimOperation::kRead, 0, SimFault::kEio));
  EXPECT_FALSE(plan.SetProbability(SimOperation::kSync, SimFault::kStale, 1));
  EXPECT_TRUE(plan.FailNext(SimOperation::kSync, 1, SimFault::kLostSync));
}

}  // namespace
}  // namespace ballast::storage
