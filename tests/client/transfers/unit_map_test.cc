#include "ballast/client/transfers/unit_map.h"

#include <gtest/gtest.h>

#include "ballast/proto/model/tiling.h"

namespace ballast::client {
namespace {

v1::OpenRequest TwoBatches(uint32_t world_size) {
  v1::OpenRequest open;
  open.mutable_epoch()->set_counter(1);
  open.set_base(-1);
  v1::JobSpec* spec = open.mutable_spec();
  spec->set_name("j");
  spec->set_chunk_elements(1 << 16);
  spec->set_group_count(1);
  const auto add = [&](v1::Registration* registration, const char* name, uint64_t elements) {
    v1::TensorSpec* tensor = registration->add_tensors();
    tensor->set_name(name);
    tensor->set_unit("u");
    tensor->add_shape(elements);
  };
  v1::Registration* first = spec->add_registrations();
  add(first, "a", 70000);
  add(first, "b", 10);
  add(spec->add_registrations(), "c", 3000);
  v1::Member* member = open.add_members();
  member->set_server_id("s");
  member->set_weight(1);
  *open.mutable_tiling() = model::EvenTiling(world_size);
  return open;
}

class UnitMapOfWorld : public ::testing::TestWithParam<int> {};

// Over all ranks, segments cover every tensor once, slices every owned element, and rounds place every rank's part.
TEST_P(UnitMapOfWorld, PartsFitTogether) {
  const int world = GetParam();
  auto plan = model::EpochPlan::Make(TwoBatches(static_cast<uint32_t>(world)));
  ASSERT_TRUE(plan.ok()) << plan.status();
  const auto shared = std::make_shared<const model::EpochPlan>(*std::move(plan));
  std::vector<int> covered(70000 + 10 + 3000, 0);
  const uint64_t base[] = {0, 70000, 70010};
  uint64_t owned_total = 0, gathered = 0;
  for (int r = 0; r < world; ++r) {
    const UnitMap map(shared, r);
    const UnitView& view = map.unit(0);
    owned_total += view.owned_elements;
    for (const OwnedSegment& s : view.segments) {
      for (uint64_t i = 0; i < s.count; ++i) ++covered[base[s.tensor] + s.first + i];
    }
    uint64_t in_slices = 0;
    for (const OwnedSlice& s : view.slices) {
      EXPECT_EQ(s.offset, in_slices);  // slices lie end to end in the owned ranges
      in_slices += s.slice.range.size();
      EXPECT_EQ(map.Find(0, s.slice.range), &s);
    }
    EXPECT_EQ(in_slices, view.owned_elements);
    // The rank's part of each round is its range there.
    uint64_t in_rounds = 0;
    for (const GatherRound& round : view.rounds) {
      const uint64_t begin = round.begin + round.offsets[r], end = round.begin + round.offsets[r + 1];
      in_rounds += end - begin;
      for (const UnitRange& range : view.ranges[r]) {
        if (range.begin >= round.begin && range.end <= round.end) {
          EXPECT_EQ(range.begin, begin);
          EXPECT_EQ(range.end, end);
        }
      }
      EXPECT_EQ(round.begin + round.offsets.back(), round.end);
    }
    EXPECT_EQ(in_rounds, view.owned_elements);
    gathered = 0;
    for (const GatherRound& round : view.rounds) gathered += round.end - round.begin;
    for (const UnitRange& gap : view.gaps) gathered += gap.end - gap.begin;
    EXPECT_EQ(gathered, view.elements);
  }
  for (const int n : covered) ASSERT_EQ(n, 1);
  EXPECT_EQ(owned_total, 70144u + 256 + 3072);
}

INSTANTIATE_TEST_SUITE_P(Worlds, UnitMapOfWorld, ::testing::Values(1, 2, 3, 4, 16));

TEST(UnitMap, UnknownUnitIsNamed) {
  auto plan = model::EpochPlan::Make(TwoBatches(1));
  const UnitMap map(std::make_shared<const model::EpochPlan>(*std::move(plan)), 0);
  EXPECT_TRUE(map.CheckUnit(0).ok());
  const absl::Status status = map.CheckUnit(1);
  EXPECT_TRUE(absl::IsNotFound(status));
  EXPECT_NE(status.message().find("unit 1 does not exist; the job has 1 unit(s)"), absl::string_view::npos) << status;
}

}  // namespace
}  // namespace ballast::client
