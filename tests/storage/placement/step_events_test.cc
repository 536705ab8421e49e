#include "ballast/storage/placement/step_events.h"

#include <vector>

#include "gtest/gtest.h"

namespace ballast::storage {
namespace {

constexpr DiskSpeeds kDisk = {.read = 10, .write = 5, .mixed = 8};

StepTimes Play(const std::vector<ChunkWork>& work, uint64_t slots = 8, double log_bytes = 0,
               const SideBySide& side_by_side = {}) {
  return PlayStep(work, slots, 1, log_bytes, kDisk, side_by_side);
}

TEST(StepEventsTest, ChunksInMemoryTakeTheWorkersTime) {
  EXPECT_DOUBLE_EQ(Play({{.busy = 1}, {.busy = 2}}).total, 3);
  EXPECT_DOUBLE_EQ(Play({}).total, 0);
}

TEST(StepEventsTest, AChunkIsReadThenUpdatedThenWritten) {
  // 2 s of reads, 1 s of work, 4 s of writes.
  EXPECT_DOUBLE_EQ(Play({{.state_read = 20, .busy = 1, .stored = 20}}).total, 7);
}

TEST(StepEventsTest, TheNextChunkIsReadDuringTheUpdate) {
  // The reads share the disk, so both chunks are there after 4 s.
  const std::vector<ChunkWork> work(2, {.state_read = 20, .busy = 1});
  EXPECT_DOUBLE_EQ(Play(work).total, 6);
  // With one slot, the second chunk is read once the first is written: 7 s each.
  const std::vector<ChunkWork> stored(2, {.state_read = 20, .busy = 1, .stored = 20});
  EXPECT_DOUBLE_EQ(Play(stored, 1).total, 14);
}

TEST(StepEventsTest, ReadsAndWritesSideBySideHaveHalfOfTheMixture) {
  // 4 bytes per second each: the read takes 5 s, in which the log gets 20 of its 25 bytes, and then 1 s alone.
  EXPECT_DOUBLE_EQ(Play({{.state_read = 20}}, 8, 25).total, 6);
}

TEST(StepEventsTest, TheWorkerWaitsForASpill) {
  EXPECT_DOUBLE_EQ(Play({{.busy = 1, .spilled = 10}, {.busy = 1}}).total, 4);
}

TEST(StepEventsTest, WorkerAndDiskMaySlowEachOther) {
  const SideBySide half = {.worker = 0.5, .disk = 0.5};
  // For 2 s the worker does its second's work, and the log gets 5 of 10 bytes; the rest takes 1 s.
  EXPECT_DOUBLE_EQ(Play({{.busy = 1}}, 8, 10, half).total, 3);
}

TEST(StepEventsTest, AnIdleDiskIsOneThatWillHaveWork) {
  const StepTimes times = Play({{.busy = 3}, {.busy = 1, .flushed = 5}});
  EXPECT_DOUBLE_EQ(times.total, 5);
  EXPECT_DOUBLE_EQ(times.disk_idle, 4);
}

}  // namespace
}  // namespace ballast::storage
