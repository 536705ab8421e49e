// The ring of segments: a segment is free again only when nothing needs it and a durable batch has told of the cut.
#include "ballast/storage/log/segment_ring.h"

#include <limits>

#include "gtest/gtest.h"

namespace ballast::storage {
namespace {

constexpr uint64_t kRingSegmentBytes = 64 * kLogBlock;
constexpr uint64_t kNoIncarnation = std::numeric_limits<uint64_t>::max();
// Of a fresh segment, for one record: the segment's two heads and two cut batches of two blocks are kept free.
constexpr uint64_t kFirstRecordMax = 58 * kLogBlock;

class SegmentRingTest : public ::testing::Test {
 protected:
  explicit SegmentRingTest(uint64_t segments = 3) { ring_.Add(segments); }

  // Begins a segment whose records are needed by transactions up to `keep_for`.
  void Fill(int64_t keep_for, uint64_t cost = 4 * kLogBlock) {
    ASSERT_TRUE(ring_.Roll().has_value());
    ring_.Take(cost, keep_for);
  }
  // The batch that tells of the cut was written and is durable.
  void TellCut() {
    ASSERT_TRUE(ring_.cut_wants_batch());
    ring_.BeginCutBatch();
    ring_.Synced(ring_.oldest(), 0);
  }

  SegmentRing ring_{kRingSegmentBytes};
};

TEST_F(SegmentRingTest, ARingWithoutARollTakesNoRecord) {
  EXPECT_EQ(ring_.count(), 3);
  EXPECT_EQ(ring_.free_count(), 3);
  EXPECT_EQ(ring_.oldest(), kNoIncarnation);
  EXPECT_FALSE(ring_.HasRoom(0));
}

TEST_F(SegmentRingTest, ARollTakesTheLowestFreeSegmentAndTheNextIncarnation) {
  for (uint64_t i = 0; i < 3; ++i) {
    const auto begun = ring_.Roll();
    ASSERT_TRUE(begun.has_value());
    EXPECT_EQ(begun->segment, i);
    EXPECT_EQ(begun->incarnation, i + 1);
    EXPECT_EQ(begun->oldest, 1);
    EXPECT_FALSE(ring_.is_free(i));
  }
  EXPECT_FALSE(ring_.Roll().has_value()) << "no segment is free";
  ring_.Add(1);
  const auto added = ring_.Roll();
  ASSERT_TRUE(added.has_value());
  EXPECT_EQ(added->segment, 3);
  EXPECT_EQ(added->incarnation, 4);
}

TEST_F(SegmentRingTest, ARecordNeverTakesTheRoomOfTwoCutBatches) {
  EXPECT_EQ(SegmentRing::RecordBytesMax(kRingSegmentBytes), kFirstRecordMax);
  ASSERT_TRUE(ring_.Roll().has_value());
  EXPECT_TRUE(ring_.HasRoom(kFirstRecordMax));
  EXPECT_FALSE(ring_.HasRoom(kFirstRecordMax + 1));
  ring_.Take(kFirstRecordMax, 0);
  EXPECT_FALSE(ring_.HasRoom(1));
  EXPECT_EQ(ring_.room(), 2 * kLogBlock) << "the second cut batch";
}

TEST_F(SegmentRingTest, ACutSegmentIsFreeOnceADurableBatchHasTold) {
  Fill(5);
  Fill(6);
  ring_.Synced(0, 2);
  ring_.Cut(5);
  EXPECT_EQ(ring_.oldest(), 2);
  EXPECT_EQ(ring_.free_count(), 1) << "a crash now would read the old segment again";
  ring_.Synced(1, 0);
  EXPECT_EQ(ring_.free_count(), 1) << "a batch that names the cut segment as the oldest";
  TellCut();
  EXPECT_TRUE(ring_.is_free(0));
  EXPECT_FALSE(ring_.is_free(1));
  EXPECT_EQ(ring_.Roll()->segment, 0);
}

TEST_F(SegmentRingTest, AStepThatIsStillNeededKeepsItsSegment) {
  Fill(5);
  Fill(6);
  ring_.Synced(0, 2);
  ring_.Cut(4);
  EXPECT_EQ(ring_.oldest(), 1);
  EXPECT_FALSE(ring_.cut_wants_batch());
  ring_.Cut(5);
  EXPECT_EQ(ring_.oldest(), 2);
  ring_.Cut(3);
  EXPECT_EQ(ring_.oldest(), 2);
}

TEST_F(SegmentRingTest, TheNewestOfASegmentsRecordsDecides) {
  Fill(9);
  ring_.Take(2 * kLogBlock, 3);
  Fill(9);
  ring_.Synced(0, 2);
  ring_.Cut(8);
  EXPECT_EQ(ring_.oldest(), 1);
}

TEST_F(SegmentRingTest, AnOldSegmentThatIsNeededKeepsTheNewerOnes) {
  Fill(9);
  Fill(1);
  Fill(20);
  ring_.Synced(0, 3);
  ring_.Cut(1);
  EXPECT_EQ(ring_.oldest(), 1) << "a log is read from its oldest segment on, without gaps";
  ring_.Cut(9);
  EXPECT_EQ(ring_.oldest(), 3);
  TellCut();
  EXPECT_EQ(ring_.free_count(), 2);
}

TEST_F(SegmentRingTest, TheNewestSegmentStaysHoweverOld) {
  Fill(1);
  ring_.Synced(0, 1);
  ring_.Cut(100);
  EXPECT_EQ(ring_.oldest(), 1);
  EXPECT_FALSE(ring_.cut_wants_batch());
}

TEST_F(SegmentRingTest, ACutWaitsForTheNewerSegmentsFirstRecord) {
  Fill(1);
  ring_.Synced(0, 1);
  Fill(2);
  ring_.Cut(1);
  EXPECT_EQ(ring_.oldest(), 1) << "the snapshot of segment 2 may still be lost";
  EXPECT_TRUE(ring_.cut_wants_batch()) << "its sync makes the snapshot durable";
  ring_.BeginCutBatch();
  ring_.Synced(1, 2);
  EXPECT_EQ(ring_.oldest(), 2);
  EXPECT_FALSE(ring_.is_free(0));
  TellCut();
  EXPECT_TRUE(ring_.is_free(0));
}

TEST_F(SegmentRingTest, ReleaseLowersWhatIsKeptAndRaisesNothing) {
  Fill(9);
  Fill(2);
  Fill(9);
  ring_.Synced(0, 3);
  ring_.Release(4);
  ring_.Cut(3);
  EXPECT_EQ(ring_.oldest(), 1);
  ring_.Cut(4);
  EXPECT_EQ(ring_.oldest(), 3) << "segment 2 is kept for step 2, as before";
}

TEST_F(SegmentRingTest, ASecondCutWithoutRoomWaitsForTheNextSegment) {
  Fill(1);
  Fill(2);
  Fill(3, kFirstRecordMax);
  ring_.Synced(0, 3);
  ring_.Cut(1);  // takes the room that each segment has for a cut
  EXPECT_TRUE(ring_.cut_wants_batch());
  TellCut();
  ring_.Take(ring_.room(), 3);
  ring_.Cut(2);
  EXPECT_EQ(ring_.oldest(), 3);
  EXPECT_TRUE(ring_.cut_lacks_room());
  EXPECT_FALSE(ring_.cut_wants_batch()) << "it would be written over the next segment";
  ASSERT_TRUE(ring_.Roll().has_value());
  EXPECT_FALSE(ring_.cut_lacks_room());
  TellCut();
  EXPECT_TRUE(ring_.is_free(1));
}

// Segments 0 and 2 of four are live.
ScannedLog TwoLiveSegments() {
  ScannedLog scanned;
  scanned.segment_bytes = kRingSegmentBytes;
  scanned.segment_count = 4;
  scanned.last_incarnation = 8;  // of a segment whose head was written, but no batch
  scanned.live = {{.index = 2, .incarnation = 6}, {.index = 0, .incarnation = 7}};
  return scanned;
}

TEST(RecoveredRing, KeepsEverySegmentUntilItIsToldOtherwise) {
  SegmentRing ring(TwoLiveSegments());
  EXPECT_EQ(ring.count(), 4);
  EXPECT_EQ(ring.free_count(), 2);
  EXPECT_EQ(ring.oldest(), 6);
  const auto begun = ring.Roll();
  ASSERT_TRUE(begun.has_value());
  EXPECT_EQ(begun->segment, 1);
  EXPECT_EQ(begun->incarnation, 9) << "an incarnation that was given out is never given out again";
  ring.Synced(0, 9);
  ring.Cut(1000);
  EXPECT_EQ(ring.oldest(), 6);
  ring.Keep(6, 10);
  ring.Cut(1000);
  EXPECT_EQ(ring.oldest(), 7);
  ring.Keep(5, 10);  // is not live
  ring.Keep(8, 10);
  ring.Cut(1000);
  EXPECT_EQ(ring.oldest(), 7);
  ring.Keep(7, 10);
  ring.Cut(1000);
  EXPECT_EQ(ring.oldest(), 9);
}

TEST(RecoveredRing, CutsNothingBeforeItsFirstRoll) {
  SegmentRing ring(TwoLiveSegments());
  ring.Keep(6, 1);
  ring.Keep(7, 1);
  ring.Cut(5);
  EXPECT_EQ(ring.oldest(), 6) << "no segment takes the batch that tells of the cut";
  EXPECT_FALSE(ring.cut_wants_batch());
  ASSERT_TRUE(ring.Roll().has_value());
  ring.Cut(5);
  EXPECT_EQ(ring.oldest(), 7) << "the newest that has a durable record stays until the next one has";
}

}  // namespace
}  // namespace ballast::storage
