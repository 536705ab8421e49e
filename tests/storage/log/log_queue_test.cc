// What callers of a gradient log share with its writer.
#include "ballast/storage/log/log_queue.h"

#include <thread>
#include <utility>
#include <vector>

#include "ballast/proto/base/status.h"
#include "gtest/gtest.h"

namespace ballast::storage {
namespace {

constexpr uint64_t kQueuedSegmentBytes = uint64_t{64} << 20;

class LogQueueTest : public ::testing::Test {
 protected:
  static SegmentRing Ring() {
    SegmentRing ring(kQueuedSegmentBytes);
    ring.Add(2);
    return ring;
  }
  void Append(uint64_t lsn, absl::Span<const std::byte> payload = {}) {
    LogRecord record;
    record.lsn = lsn;
    record.payload = payload;
    record.written = [this, lsn](const PayloadPlace* place) {
      EXPECT_EQ(place, nullptr);
      never_written_.push_back(lsn);
    };
    queue_.Append(std::move(record));
  }
  // The records' numbers in the next batch; a segment's beginning as {0}.
  std::vector<uint64_t> Take(bool cut = false) {
    const std::optional<LogItems> items = queue_.Take(cut);
    if (!items.has_value()) return {};
    if (items->beginning.has_value()) {
      EXPECT_TRUE(items->records.empty());
      return {0};
    }
    std::vector<uint64_t> taken;
    for (const LogRecord& record : items->records) taken.push_back(record.lsn);
    return taken;
  }

  std::vector<uint64_t> never_written_;
  LogQueue queue_{Ring(), /*durable_lsn=*/3};
};

TEST_F(LogQueueTest, ABatchEndsAtSixteenRecordsAndAtASegment) {
  EXPECT_TRUE(queue_.empty());
  ASSERT_TRUE(queue_.Roll());
  for (uint64_t lsn = 4; lsn < 22; ++lsn) Append(lsn);
  ASSERT_TRUE(queue_.Roll());
  EXPECT_FALSE(queue_.Roll()) << "there are two segments";
  Append(22);
  EXPECT_EQ(Take(), std::vector<uint64_t>{0});
  EXPECT_EQ(Take(), (std::vector<uint64_t>{4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19}));
  EXPECT_EQ(Take(), (std::vector<uint64_t>{20, 21}));
  EXPECT_EQ(Take(), std::vector<uint64_t>{0});
  EXPECT_EQ(Take(), std::vector<uint64_t>{22});
  EXPECT_FALSE(queue_.Take(/*cut=*/true).has_value()) << "nothing was cut";
  EXPECT_TRUE(queue_.empty());
}

TEST_F(LogQueueTest, ABatchEndsAtEightMebibytesOfPayload) {
  const std::vector<std::byte> payload(kBatchPayloadBytesMax / 2);
  ASSERT_TRUE(queue_.Roll());
  for (uint64_t lsn = 4; lsn < 7; ++lsn) Append(lsn, payload);
  EXPECT_EQ(Take(), std::vector<uint64_t>{0});
  EXPECT_EQ(Take(), (std::vector<uint64_t>{4, 5}));
  EXPECT_EQ(Take(), std::vector<uint64_t>{6});
}

TEST_F(LogQueueTest, AnEmptyBatchTellsOfACutOnce) {
  ASSERT_TRUE(queue_.Roll());
  Append(4);
  ASSERT_TRUE(queue_.Roll());
  Append(5);
  while (!queue_.empty()) Take();
  queue_.Durable(5, /*told=*/0, /*held=*/2);
  queue_.Cut(-1);
  EXPECT_FALSE(queue_.Take(/*cut=*/false).has_value());
  const std::optional<LogItems> cut = queue_.Take(/*cut=*/true);
  ASSERT_TRUE(cut.has_value());
  EXPECT_TRUE(cut->records.empty());
  EXPECT_FALSE(cut->beginning.has_value());
  EXPECT_EQ(cut->oldest_incarnation, 2);
  EXPECT_FALSE(queue_.Take(/*cut=*/true).has_value());
  EXPECT_EQ(queue_.free_segments(), 0);
  queue_.Durable(5, /*told=*/2, /*held=*/0);
  EXPECT_EQ(queue_.free_segments(), 1);
}

TEST_F(LogQueueTest, OnlyASyncThatAnswersSomebodyIsWanted) {
  EXPECT_FALSE(queue_.WantsSync(100)) << "nobody asked";
  queue_.Sync(3);
  EXPECT_FALSE(queue_.WantsSync(100)) << "durable since the run before";
  queue_.Sync(6);
  queue_.Sync(5);
  EXPECT_FALSE(queue_.WantsSync(5)) << "it would not answer the one who waits for 6";
  EXPECT_TRUE(queue_.WantsSync(6));
  queue_.Durable(6, 0, 0);
  EXPECT_EQ(queue_.durable_lsn(), 6);
  EXPECT_FALSE(queue_.WantsSync(7));
  queue_.Durable(0, 0, 0);  // a batch that tells of a cut has no record
  EXPECT_EQ(queue_.durable_lsn(), 6);
}

TEST_F(LogQueueTest, NoSyncCountsWhileTheFileGrows) {
  EXPECT_TRUE(queue_.SyncCounts());
  queue_.BeginExtension();
  EXPECT_FALSE(queue_.SyncCounts()) << "the disk may have told the extension alone of a lost write";
  queue_.EndExtension(/*grown=*/5, /*written=*/5, /*synced=*/false);
  EXPECT_TRUE(queue_.SyncCounts());
  EXPECT_EQ(queue_.segments(), 2);
  queue_.BeginExtension();
  queue_.EndExtension(/*grown=*/5, /*written=*/5, /*synced=*/true);
  EXPECT_EQ(queue_.segments(), 7);
  EXPECT_EQ(queue_.free_segments(), 7);
}

TEST_F(LogQueueTest, TheFirstErrorStaysAndEveryQueuedRecordIsTold) {
  int progressed = 0;
  queue_.set_progress([&] { ++progressed; });
  ASSERT_TRUE(queue_.Roll());
  Append(4);
  Append(5);
  queue_.TellFailure();
  EXPECT_EQ(progressed, 0) << "there is no error";
  queue_.Fail(absl::DataLossError("first"));
  queue_.Fail(absl::InternalError("second"));
  EXPECT_EQ(queue_.status(), absl::DataLossError("first"));
  EXPECT_FALSE(queue_.SyncCounts());
  queue_.TellFailure();
  EXPECT_EQ(never_written_, (std::vector<uint64_t>{4, 5}));
  EXPECT_TRUE(queue_.empty());
  Append(6);  // by a caller that has not seen the error
  queue_.TellFailure();
  EXPECT_EQ(never_written_, (std::vector<uint64_t>{4, 5, 6}));
  EXPECT_EQ(progressed, 1);
}

TEST_F(LogQueueTest, SegmentsAreWrittenAheadWhileTheyAreFree) {
  ASSERT_TRUE(queue_.Roll());
  ASSERT_TRUE(queue_.Roll());
  queue_.BeginExtension();
  queue_.EndExtension(/*grown=*/4, /*written=*/1, /*synced=*/true);
  ASSERT_TRUE(queue_.Roll());  // segment 2, written in full
  ASSERT_TRUE(queue_.Roll());  // segment 3, before its turn
  EXPECT_EQ(queue_.BeginWriteAhead(), 4);
  EXPECT_TRUE(queue_.WritesAhead(4));
  ASSERT_TRUE(queue_.Roll());
  EXPECT_FALSE(queue_.WritesAhead(4)) << "zeros would go over records";
  queue_.AwaitNotAhead(3);
  std::thread writer([&] { queue_.AwaitNotAhead(4); });
  queue_.EndWriteAhead();
  writer.join();
  EXPECT_EQ(queue_.BeginWriteAhead(), 5);
  queue_.EndWriteAhead();
  std::thread ahead([&] { EXPECT_EQ(queue_.BeginWriteAhead(), std::nullopt); });
  queue_.Stop();
  ahead.join();
  EXPECT_FALSE(queue_.WritesAhead(5));
}

TEST_F(LogQueueTest, NothingIsWrittenAheadAfterAnError) {
  queue_.BeginExtension();
  queue_.EndExtension(/*grown=*/1, /*written=*/0, /*synced=*/true);
  queue_.Fail(absl::InternalError("the disk failed"));
  EXPECT_EQ(queue_.BeginWriteAhead(), std::nullopt);
}

TEST_F(LogQueueTest, ThePumpWakesForRecordsForSyncsAndForTheEnd) {
  ASSERT_TRUE(queue_.Roll());
  EXPECT_TRUE(queue_.AwaitWork());
  EXPECT_EQ(Take(), std::vector<uint64_t>{0});
  queue_.Sync(9);
  EXPECT_TRUE(queue_.AwaitWork());
  queue_.Durable(9, 0, 0);
  std::thread pump([&] { EXPECT_FALSE(queue_.AwaitWork()); });
  EXPECT_FALSE(queue_.stopping());
  queue_.Stop();
  pump.join();
  EXPECT_TRUE(queue_.stopping());
}

}  // namespace
}  // namespace ballast::storage
