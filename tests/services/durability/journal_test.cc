// Chunk states in a log's snapshots, and the size of a log with such snapshots.
#include "ballast/services/durability/journal.h"

#include <gtest/gtest.h>

#include <limits>

#include "ballast/proto/model/status.h"
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

}  // namespace
}  // namespace ballast::services
