// How large a job's log is, and when it is too small.
#include "ballast/services/job_state/journal_size.h"

#include <vector>

#include "ballast/proto/base/status.h"
#include "ballast/services/journal/log_steps.h"
#include "ballast/storage/log/log_format.h"
#include "gtest/gtest.h"

namespace ballast::services {
namespace {

TEST(JournalSizeTest, ASegmentTakesSevenEighthsOfItselfInSlices) {
  EXPECT_EQ(UsedBytes(800), 700);
  EXPECT_EQ(SegmentsFor(0, 800), 0);
  EXPECT_EQ(SegmentsFor(1, 800), 1);
  EXPECT_EQ(SegmentsFor(700, 800), 1);
  EXPECT_EQ(SegmentsFor(701, 800), 2);
}

TEST(JournalSizeTest, ALogHoldsItsStepsATransactionOfValuesAndItsReserve) {
  const std::vector<uint64_t> elements(10, 65536), frozen(3, 65536);
  const JournalNeeds needs{.chunk_elements = 65536,
                           .elements = elements,
                           .frozen = frozen,
                           .gradient_bytes = 2,
                           .steps = 6,
                           .segments_reserved = kLogSegmentsReserved};
  const JournalSize size = SizeJournal(needs);
  EXPECT_EQ(size.segment_bytes, uint64_t{4} << 20);
  const uint64_t gradient = storage::RecordCostMax(kSliceBodyBytesMax, 65536 * 2);
  const uint64_t value = storage::RecordCostMax(kSliceBodyBytesMax, 65536 * 4);
  const uint64_t slices = 6 * 10 * gradient + 13 * value;
  EXPECT_EQ(size.segment_count, SegmentsFor(slices, size.segment_bytes) + kLogSegmentsReserved + 1);
  EXPECT_GE(size.segment_count * UsedBytes(size.segment_bytes), slices);
  EXPECT_EQ(size.bytes(), storage::kLogFirstSegment + size.segment_count * size.segment_bytes);
}

TEST(JournalSizeTest, ASegmentTakesTwoSnapshotsAndAWholeChunk) {
  JournalNeeds needs{.chunk_elements = uint64_t{1} << 20, .gradient_bytes = 2};
  EXPECT_EQ(SizeJournal(needs).segment_bytes, uint64_t{32} << 20) << "eight slices of values";
  needs.snapshot_bytes = uint64_t{16} << 20;
  EXPECT_GE(SizeJournal(needs).segment_bytes, uint64_t{8 * 16 + 4} << 20);
  EXPECT_EQ(SizeJournal(needs).segment_bytes % storage::kLogBlock, 0);
  needs.segment_bytes = uint64_t{8} << 20;
  EXPECT_EQ(SizeJournal(needs).segment_bytes, uint64_t{8} << 20) << "the segments of a log that is there stay";
}

TEST(JournalSizeTest, RecordsThatOutgrowTheSegmentsAreRefused) {
  JournalState journal{.durable = true, .path = "/data/log-job", .segment_bytes = 1 << 20, .record_bytes_max = 100000};
  const uint64_t most = 100000 - storage::RecordCostMax(1000, 0);
  EXPECT_EQ(CheckFits(journal, 1000, 50000), absl::OkStatus());
  const absl::Status refused = CheckFits(journal, 1000, most);
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(model::ReasonOf(refused), model::kBudget) << refused;
  journal.durable = false;
  EXPECT_EQ(CheckFits(journal, 1000, most), absl::OkStatus()) << "a spill has no snapshots";
}

TEST(LogStepsTest, ALongerLogFlushesLessPerStep) {
  EXPECT_EQ(FirstLogSteps(0), kLogStepsFirst);
  EXPECT_EQ(FirstLogSteps(20), 20);
  EXPECT_DOUBLE_EQ(FlushedShare(6), 0.25);
  EXPECT_DOUBLE_EQ(FlushedShare(3), 1);
  EXPECT_DOUBLE_EQ(FlushedShare(0), 1) << "no log is shorter";
}

}  // namespace
}  // namespace ballast::services
