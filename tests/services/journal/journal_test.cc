// The three journals, chunk states in a log's snapshots, and the size of a log with such snapshots.
#include "ballast/services/journal/journal.h"

#include <gtest/gtest.h>

#include <limits>

#include "ballast/proto/base/status.h"
#include "ballast/services/job_state/held_chunk.h"
#include "ballast/services/journal/log_records.h"
#include "ballast/storage/io/disk.h"
#include "ballast/storage/log/gradient_log.h"
#include "ballast/tests/scratch_directory.h"
#include "ballast/tests/services/trainer_group.h"

namespace ballast::services {
namespace {

v1::LogSnapshot SnapshotOf(int64_t committed, const std::vector<int64_t>& changed) {
  v1::LogSnapshot snapshot;
  snapshot.set_committed(committed);
  EncodeChanged(changed, &snapshot);
  return snapshot;
}

TEST(Changed, ComesBackWhateverItIs) {
  const std::vector<std::vector<int64_t>> lists = {
      {}, {7}, {-1, -1}, {7, 7, 7, 7}, {0, 7, 7, -1, 3}, {-1, 0, 1, 2, 3, 4, 5, 6, 7}};
  for (const std::vector<int64_t>& changed : lists) {
    const auto decoded = DecodeChanged(SnapshotOf(7, changed), changed.size());
    ASSERT_TRUE(decoded.ok()) << decoded.status();
    EXPECT_EQ(*decoded, changed);
  }
  const auto before_any_step = DecodeChanged(SnapshotOf(-1, {-1, -1}), 2);
  ASSERT_TRUE(before_any_step.ok()) << before_any_step.status();
  EXPECT_EQ(*before_any_step, (std::vector<int64_t>{-1, -1}));
}

TEST(Changed, OfADenseJobTakesAFewBytesForAnyNumberOfChunks) {
  EXPECT_LT(SnapshotOf(1'000'000, std::vector<int64_t>(1'000'000, 1'000'000)).ByteSizeLong(), 32u);
}

TEST(Changed, IsRefusedForAnotherNumberOfChunksAndForTimesThatAreNone) {
  const auto refused = [](const v1::LogSnapshot& snapshot, uint64_t chunks) {
    const auto decoded = DecodeChanged(snapshot, chunks);
    return absl::IsDataLoss(decoded.status()) && model::ReasonOf(decoded.status()) == model::kDiverged;
  };
  EXPECT_TRUE(refused(SnapshotOf(5, {5, 5}), 1));
  EXPECT_TRUE(refused(SnapshotOf(5, {5, 5}), 3));
  EXPECT_TRUE(refused(SnapshotOf(5, {}), 1));
  v1::LogSnapshot forged = SnapshotOf(5, {5});
  forged.mutable_changed(0)->set_chunks(std::numeric_limits<uint64_t>::max());
  EXPECT_TRUE(refused(forged, 1));
  forged = SnapshotOf(5, {5});
  forged.mutable_changed(0)->set_age(7);  // before the job
  EXPECT_TRUE(refused(forged, 1));
  forged.mutable_changed(0)->set_age(std::numeric_limits<uint64_t>::max());
  EXPECT_TRUE(refused(forged, 1));
  forged = SnapshotOf(5, {5});
  forged.set_committed(-2);
  EXPECT_TRUE(refused(forged, 1));
}

// The largest snapshot has a plan with as many runs as chunks, a prepared step and a decision, all of maximal size.
TEST(SnapshotBytesMax, HoldsTheLargestSnapshot) {
  v1::OpenRequest open;
  *open.mutable_spec() = MakeSpec("job", SmallModel());
  open.mutable_epoch()->set_counter(1);
  open.mutable_spec()->mutable_registrations(0)->set_version(-1);
  open.add_members()->set_server_id("s");
  open.mutable_members(0)->set_weight(1);
  open.set_base(-1);
  open.mutable_tiling()->set_world_size(1);
  const auto layout = model::Layout::Make(open.spec());
  ASSERT_TRUE(layout.ok()) << layout.status();
  for (uint32_t unit = 0; unit < layout->units().size(); ++unit) {
    v1::RankRange* range = open.mutable_tiling()->add_ranges();
    range->set_unit(unit);
    range->set_end(layout->units()[unit].elements);
  }
  const auto plan = model::EpochPlan::Make(open);
  ASSERT_TRUE(plan.ok()) << plan.status();
  constexpr int64_t kStep = std::numeric_limits<int64_t>::max() - 1;
  v1::LogSnapshot snapshot;
  *snapshot.mutable_open() = open;
  snapshot.set_committed(kStep);
  snapshot.mutable_promised()->set_counter(~uint64_t{0});
  snapshot.mutable_promised()->set_nonce(~uint64_t{0});
  std::vector<uint64_t> ids;
  std::vector<int64_t> changed;
  v1::PreparedRecord& prepared = *snapshot.mutable_prepared();
  for (const model::Chunk& chunk : plan->layout().chunks()) {
    ids.push_back(chunk.index);
    changed.push_back(chunk.index % 2 == 0 ? -1 : 0);
    v1::ChunkNorm& norm = *prepared.add_norms();
    norm.set_chunk(~uint64_t{0});
    norm.set_overflow(true);
    for (const model::Segment& segment : chunk.segments) {
      v1::SegmentNorm& one = *norm.add_segments();
      one.set_tensor(~uint32_t{0} - segment.tensor);
      one.set_squared_norm(1.5);
    }
  }
  EncodeChanged(changed, &snapshot);
  *prepared.mutable_header() = UpdateHeader(static_cast<uint32_t>(SmallModel().size()));
  prepared.set_plan_hash(std::string(32, 'h'));
  prepared.add_blobs(std::string(64 << 10, 'b'));
  v1::Decision& decision = *snapshot.mutable_decision();
  decision.add_blobs(std::string(64 << 10, 'b'));
  decision.set_plan_hash(std::string(32, 'h'));
  for (size_t i = 0; i < SmallModel().size(); ++i) snapshot.add_tensor_steps(~uint64_t{0});
  EXPECT_LE(snapshot.ByteSizeLong(), SnapshotBytesMax(*plan, ids));
}

TEST(SizeJournal, CountsTheSnapshot) {
  const std::vector<uint64_t> elements(3, uint64_t{1} << 16);
  JournalNeeds needs{.chunk_elements = uint64_t{1} << 16, .elements = elements, .gradient_bytes = 2};
  const JournalSize small = SizeJournal(needs);
  needs.snapshot_bytes = uint64_t{10} << 20;
  const JournalSize large = SizeJournal(needs);
  EXPECT_LT(small.segment_bytes, needs.snapshot_bytes);
  // The snapshot and a prepared record that has grown like it, each written twice, and a slice.
  EXPECT_GT(large.segment_bytes, 2 * storage::RecordCostMax(2 * needs.snapshot_bytes, 0) - (uint64_t{1} << 16));
  needs.segment_bytes = small.segment_bytes;
  EXPECT_EQ(SizeJournal(needs).segment_bytes, small.segment_bytes) << "a log that is there keeps its segments";
}

class Journals : public testing::Test {
 protected:
  static constexpr uint64_t kSegmentBytes = uint64_t{256} << 10;
  static constexpr uint64_t kSegments = 7;

  std::unique_ptr<storage::GradientLog> MakeLog(bool transient) {
    auto log = storage::GradientLog::Create(storage::SystemDisk(), {.path = directory_ / "log",
                                                                    .job = "job",
                                                                    .segment_bytes = kSegmentBytes,
                                                                    .segment_count = kSegments,
                                                                    .transient = transient});
    EXPECT_TRUE(log.ok()) << log.status();
    return *std::move(log);
  }
  // The record that begins a segment.
  storage::LogRecord Begin(bool whole) {
    (whole ? snapshots_ : empty_)++;
    storage::LogRecord record = EncodeRecord(SnapshotRecord{});
    record.lsn = ++lsn_;
    return record;
  }
  absl::Status MakeRoom(Journal* journal, uint64_t bytes) {
    return journal->MakeRoom(1, bytes, [this](bool whole) { return Begin(whole); });
  }
  absl::Status MakeRoomFor(Journal* journal, const SliceNeeds& slice) {
    return journal->MakeRoomFor(slice, [this](bool whole) { return Begin(whole); });
  }
  storage::LogRecord RecordOf(uint64_t bytes) {
    storage::LogRecord record = EncodeRecord(DecisionRecord{});
    record.body = std::string(bytes, 'b');
    record.lsn = ++lsn_;
    return record;
  }

  ScratchDirectory directory_;
  uint64_t lsn_ = 0;
  int snapshots_ = 0, empty_ = 0;
};

constexpr SliceNeeds kSlice = {.payload_bytes = 20 << 10, .leaves_memory = true};
constexpr uint64_t kBodyBytes = 4 << 10;  // a record of it takes less than the slice

TEST_F(Journals, NoneKeepsNothingAndIsNeverFull) {
  const std::shared_ptr<Journal> none = NoJournal();
  EXPECT_FALSE(none->Keeps(DecisionRecord{}));
  EXPECT_FALSE(none->durable());
  EXPECT_TRUE(none->HasRoomFor({.payload_bytes = ~uint64_t{0} / 2, .leaves_memory = true}));
  EXPECT_TRUE(MakeRoom(none.get(), ~uint64_t{0} / 2).ok());
  EXPECT_EQ(none->durable_lsn(), std::nullopt);
  EXPECT_EQ(none->StepsFree(1), std::nullopt);
  EXPECT_EQ(none->StepsHeld(1, 1), std::nullopt);
  EXPECT_EQ(none->state().bytes, 0u);
  EXPECT_EQ(none->log(), nullptr);
  EXPECT_EQ(snapshots_ + empty_, 0);
}

TEST_F(Journals, ASpillKeepsSlicesThatLeaveMemoryAndNothingElse) {
  const std::shared_ptr<Journal> spill = SpillJournal(MakeLog(/*transient=*/true));
  PushedSlice stays, leaves;
  leaves.receipt.logged = true;
  EXPECT_FALSE(spill->Keeps(DecisionRecord{}));
  EXPECT_FALSE(spill->Keeps(SliceRecord{{}, nullptr}));
  EXPECT_FALSE(spill->Keeps(SliceRecord{{}, &stays}));
  EXPECT_TRUE(spill->Keeps(SliceRecord{{}, &leaves}));
  EXPECT_FALSE(spill->durable());
  EXPECT_EQ(spill->durable_lsn(), std::nullopt);
  EXPECT_EQ(spill->StepsFree(1), std::nullopt);
  EXPECT_TRUE(MakeRoom(spill.get(), 2 * kSegmentBytes).ok()) << "such records are not appended here";
  for (int i = 0; spill->HasRoomFor(kSlice); ++i) {
    ASSERT_LT(i, 1000);
    ASSERT_TRUE(MakeRoomFor(spill.get(), kSlice).ok());
    spill->log()->Append(RecordOf(kBodyBytes));
  }
  EXPECT_GT(empty_, 0) << "a spill's segments begin with empty snapshots";
  EXPECT_EQ(snapshots_, 0);
  EXPECT_EQ(spill->free_segments(), 0u);
  EXPECT_TRUE(spill->HasRoomFor({.payload_bytes = kSlice.payload_bytes, .leaves_memory = false}));
  EXPECT_FALSE(spill->IsShort());
  EXPECT_FALSE(MakeRoomFor(spill.get(), kSlice).ok());
}

TEST_F(Journals, ALogKeepsEverythingAndSlicesLeaveARoomForOtherRecords) {
  const std::shared_ptr<Journal> log = LogJournal(MakeLog(/*transient=*/false), /*before_lsn=*/5);
  EXPECT_TRUE(log->Keeps(DecisionRecord{}));
  EXPECT_TRUE(log->Keeps(SliceRecord{{}, nullptr}));
  EXPECT_TRUE(log->durable());
  EXPECT_EQ(log->durable_lsn(), 5u) << "records before the log need not be in it";
  lsn_ = 5;
  EXPECT_GT(log->StepsHeld(1000, 0), log->StepsHeld(1000, kSegmentBytes));
  EXPECT_EQ(log->StepsHeld(0, 0), std::nullopt);
  const SliceNeeds slice = {.payload_bytes = kSlice.payload_bytes, .leaves_memory = false};
  for (int i = 0; log->HasRoomFor(slice); ++i) {
    ASSERT_LT(i, 1000);
    ASSERT_TRUE(MakeRoomFor(log.get(), slice).ok());
    log->log()->Append(RecordOf(kBodyBytes));
  }
  EXPECT_GT(snapshots_, 0) << "a log's segments begin with snapshots of the job";
  EXPECT_EQ(empty_, 0);
  EXPECT_EQ(log->StepsFree(1), 0u);
  EXPECT_FALSE(log->IsShort());
  EXPECT_EQ(log->free_segments(), kLogSegmentsReserved - 1);
  while (!log->IsShort()) {
    ASSERT_TRUE(MakeRoom(log.get(), kBodyBytes).ok());
    log->log()->Append(RecordOf(kBodyBytes));
  }
  EXPECT_GT(log->free_segments(), 0u);
  EXPECT_EQ(model::ReasonOf(MakeRoom(log.get(), kSegmentBytes)), model::kBudget) << "no segment takes such a record";
}

// As many slices as the journals admit at once, before any of them is recorded.
TEST_F(Journals, SlicesThatHaveReservedRoomFindItWithoutTheReserve) {
  for (const bool transient : {false, true}) {
    const uint64_t reserve = transient ? kSpillSegmentsReserved : kLogSegmentsReserved;
    const std::shared_ptr<Journal> journal =
        transient ? SpillJournal(MakeLog(transient)) : LogJournal(MakeLog(transient), /*before_lsn=*/0);
    ASSERT_TRUE(MakeRoomFor(journal.get(), kSlice).ok());  // begins a segment
    ReservedRoom reserved;
    std::vector<std::pair<ReservedRoom::Lease, SliceNeeds>> slices;
    SliceNeeds next = kSlice;
    while (journal->HasRoomFor(next)) {
      slices.emplace_back(reserved.Take(storage::RecordCostMax(kSliceBodyBytesMax, next.payload_bytes)), next);
      next.payload_bytes =
          slices.size() % 3 == 0 ? kSlice.payload_bytes : kSlice.payload_bytes / (1 + slices.size() % 7);
      next.reserved_bytes = reserved.bytes();
      ASSERT_LT(slices.size(), 1000u);
    }
    EXPECT_GT(reserved.bytes(), kSegmentBytes) << "more than one segment takes";
    for (auto& [room, slice] : slices) {
      ASSERT_TRUE(MakeRoomFor(journal.get(), slice).ok());
      ASSERT_GE(journal->free_segments() + 1, reserve);
      const std::vector<std::byte> payload(slice.payload_bytes);
      storage::LogRecord record = RecordOf(kSliceBodyBytesMax);
      record.payload = payload;
      journal->log()->Append(std::move(record));
      while (journal->log()->Pump(/*wait=*/true)) continue;  // the payload ends here
      room = {};
    }
    EXPECT_EQ(reserved.bytes(), 0u);
  }
}

TEST_F(Journals, ALogsRecordsAreDurableOnceTheyAreSynced) {
  const std::shared_ptr<Journal> log = LogJournal(MakeLog(/*transient=*/false), /*before_lsn=*/0);
  ASSERT_TRUE(MakeRoom(log.get(), 100).ok());
  log->log()->Append(RecordOf(100));
  log->Sync(lsn_);
  while (log->durable_lsn() < lsn_) log->log()->Pump(/*wait=*/true);
  EXPECT_TRUE(log->status().ok()) << log->status();
}

}  // namespace
}  // namespace ballast::services
