#include "ballast/storage/store/durable_progress.h"

#include <optional>

#include "gtest/gtest.h"

namespace ballast::storage {
namespace {

DurableChunk Entry(int64_t version) { return {.version = version}; }

TEST(DurableProgressTest, AChunkThatWasNeverUpdatedHasNoState) {
  const DurableProgress progress(std::nullopt);
  EXPECT_FALSE(progress.has_state());
  EXPECT_FALSE(progress.written());
  EXPECT_EQ(progress.recoverable_from(), std::nullopt);
}

TEST(DurableProgressTest, AStateOfAnEarlierRunIsWrittenAndRecorded) {
  const DurableProgress progress(Entry(7));
  EXPECT_TRUE(progress.has_state());
  EXPECT_EQ(progress.newest().version, 7);
  EXPECT_FALSE(progress.dirty());
  EXPECT_EQ(progress.recoverable_from(), std::nullopt);
}

TEST(DurableProgressTest, TheFirstUpdateInMemorySaysFromWhereTheLogIsNeeded) {
  DurableProgress progress(Entry(7));
  progress.Update(12);  // nothing changed the chunk from 8 to 11
  progress.Update(13);
  EXPECT_TRUE(progress.dirty());
  EXPECT_EQ(progress.needed_from(), 11);
  EXPECT_EQ(progress.recoverable_from(), 11);
}

TEST(DurableProgressTest, TheLogIsNeededUntilTheVersionIsRecorded) {
  DurableProgress progress(Entry(7));
  progress.Update(9);
  EXPECT_TRUE(progress.Store(10));
  progress.Write(Entry(10));
  EXPECT_FALSE(progress.dirty());
  EXPECT_EQ(progress.recoverable_from(), 8) << "a crash would fall back to version 7";
  progress.Record();
  EXPECT_EQ(progress.recoverable_from(), std::nullopt);
}

TEST(DurableProgressTest, TheOldestUnrecordedVersionCounts) {
  DurableProgress progress(Entry(7));
  EXPECT_TRUE(progress.Store(8));
  EXPECT_FALSE(progress.Store(9)) << "8 waits for its record already";
  progress.Update(10);
  EXPECT_EQ(progress.needed_from(), 9);
  EXPECT_EQ(progress.recoverable_from(), 7);
  progress.Record();
  EXPECT_EQ(progress.recoverable_from(), 9);
  EXPECT_TRUE(progress.Store(11));
  EXPECT_EQ(progress.recoverable_from(), 9);
}

TEST(DurableProgressTest, AVoidStateNeedsNoLog) {
  DurableProgress progress(Entry(7));
  EXPECT_TRUE(progress.Store(8));
  progress.Write(Entry(8));
  progress.Update(9);
  progress.Void();
  EXPECT_FALSE(progress.dirty());
  EXPECT_EQ(progress.recoverable_from(), std::nullopt);
  EXPECT_EQ(progress.newest().version, 8) << "the extent stays";
  EXPECT_TRUE(progress.Store(20));
  EXPECT_EQ(progress.recoverable_from(), 19);
}

}  // namespace
}  // namespace ballast::storage
