#include "ballast/proto/model/tiling.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>
#include <random>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ballast/proto/model/status.h"

namespace ballast::model {
namespace {

using ::testing::HasSubstr;

v1::JobSpec SpecOf(const std::vector<std::vector<uint64_t>>& shapes) {
  v1::JobSpec spec;
  spec.set_name("job");
  spec.set_chunk_elements(1 << 16);
  spec.set_group_count(1);
  v1::Registration* registration = spec.add_registrations();
  for (size_t i = 0; i < shapes.size(); ++i) {
    v1::TensorSpec* tensor = registration->add_tensors();
    tensor->set_name(absl::StrCat("w", i));
    tensor->set_unit("unit");
    for (const uint64_t extent : shapes[i]) tensor->add_shape(extent);
  }
  return spec;
}

v1::MeshCuts Part(uint32_t first, std::vector<std::pair<uint32_t, uint32_t>> axes,
                  std::vector<std::pair<uint32_t, uint32_t>> cuts) {
  v1::MeshCuts part;
  part.mutable_mesh()->set_first(first);
  for (const auto& [size, stride] : axes) {
    part.mutable_mesh()->add_size(size);
    part.mutable_mesh()->add_stride(stride);
  }
  for (const auto& [axis, dimension] : cuts) {
    v1::Cut* cut = part.add_cuts();
    cut->set_axis(axis);
    cut->set_dimension(dimension);
  }
  return part;
}

// All tensors placed alike.
v1::Tiling TilingOf(const Layout& layout, uint32_t world_size, const std::vector<v1::MeshCuts>& parts) {
  v1::Tiling tiling;
  tiling.set_world_size(world_size);
  tiling.set_division(v1::DIVISION_PLACED);
  v1::Placement* placement = tiling.add_placements();
  for (const v1::MeshCuts& part : parts) *placement->add_meshes() = part;
  for (size_t i = 0; i < layout.tensors().size(); ++i) tiling.add_placement_of(0);
  return tiling;
}

TEST(PlacementTest, RunsWalkTheBoxInItsOwnOrder) {
  const std::vector<uint64_t> shape = {4, 3, 5};
  EXPECT_THAT(RunsOf(shape, WholeOf(shape)), ::testing::ElementsAre(BoxRun{0, 0, 60}));
  EXPECT_THAT(RunsOf(shape, {{1, 3}, {0, 3}, {0, 5}}), ::testing::ElementsAre(BoxRun{15, 0, 30}));
  EXPECT_THAT(RunsOf(shape, {{2, 4}, {1, 3}, {0, 5}}), ::testing::ElementsAre(BoxRun{35, 0, 10}, BoxRun{50, 10, 10}));
  EXPECT_THAT(RunsOf(shape, {{0, 1}, {1, 3}, {2, 4}}), ::testing::ElementsAre(BoxRun{7, 0, 2}, BoxRun{12, 2, 2}));
  EXPECT_TRUE(RunsOf(shape, {{0, 0}, {0, 3}, {0, 5}}).empty());
  EXPECT_THAT(RunsOf({}, {}), ::testing::ElementsAre(BoxRun{0, 0, 1}));
}

// Random shapes, meshes and cuts: the boxes of all coordinates cover each element once for each replica, the pushed
// ranges each element once, and each rank pushes only what it has.
TEST(TilingTest, EveryElementIsPushedOnceByARankThatHasIt) {
  std::mt19937_64 random(7);
  const auto below = [&](uint64_t n) { return random() % n; };
  for (int round = 0; round < 1000; ++round) {
    std::vector<uint64_t> shape(1 + below(3));
    for (uint64_t& extent : shape) extent = 1 + below(round % 10 == 0 ? 300 : 12);
    std::vector<std::pair<uint32_t, uint32_t>> axes(below(4));
    uint32_t ranks = 1;
    for (auto& [size, stride] : axes) {
      size = 1 + static_cast<uint32_t>(below(4));
      stride = ranks;
      ranks *= size;
    }
    std::shuffle(axes.begin(), axes.end(), random);
    std::vector<std::pair<uint32_t, uint32_t>> cuts;
    for (uint32_t axis = 0; axis < axes.size(); ++axis) {
      if (below(3) > 0) cuts.emplace_back(axis, static_cast<uint32_t>(below(shape.size())));
    }
    std::shuffle(cuts.begin(), cuts.end(), random);
    const uint32_t first = static_cast<uint32_t>(below(3));
    SCOPED_TRACE(absl::StrCat("round ", round, ": shape ", absl::StrJoin(shape, "x"), ", ", ranks, " ranks"));
    const Layout layout = *Layout::Make(SpecOf({shape, {3}}));
    v1::Tiling tiling = TilingOf(layout, first + ranks, {Part(first, axes, cuts)});
    *tiling.add_placements()->add_meshes() = Part(first, {{ranks, 1}}, {});  // w1: a replica on every rank
    tiling.set_placement_of(1, 1);
    const auto expanded = Expand(layout, tiling);
    ASSERT_TRUE(expanded.ok()) << expanded.status();

    const Tensor& tensor = layout.tensors()[0];
    std::vector<std::vector<bool>> has(first + ranks, std::vector<bool>(tensor.range.size()));
    std::vector<int> copies(tensor.range.size());
    for (uint32_t rank = 0; rank < first + ranks; ++rank) {
      const auto boxes = HeldBoxes(layout, tiling, rank);
      if (!boxes[0].has_value()) continue;
      uint64_t in_box = 0;
      for (const BoxRun& run : RunsOf(shape, *boxes[0])) {
        EXPECT_EQ(run.in_box, in_box);
        in_box += run.count;
        for (uint64_t i = 0; i < run.count; ++i) has[rank][run.in_tensor + i] = true, ++copies[run.in_tensor + i];
        EXPECT_EQ(PlaceInRuns(RunsOf(shape, *boxes[0]), run.in_tensor, run.count), run.in_box);
      }
      EXPECT_EQ(in_box, ElementsOf(*boxes[0]));
    }
    uint32_t replicas = ranks;
    for (const auto& [axis, dimension] : cuts) replicas /= axes[axis].first;
    EXPECT_THAT(copies, ::testing::Each(replicas));
    std::vector<int> pushed(layout.units()[0].elements);
    for (const OwnedRange& owned : *expanded) {
      for (uint64_t i = owned.range.begin; i < owned.range.end; ++i) {
        ++pushed[i];
        if (i < tensor.range.end) {
          EXPECT_TRUE(has[owned.rank][i]);
        }
      }
    }
    for (const Tensor& each : layout.tensors()) {
      for (uint64_t i = each.range.begin; i < each.range.end; ++i) EXPECT_EQ(pushed[i], 1);
    }
  }
}

TEST(TilingTest, ReplicasShareThePushing) {
  const Layout layout = *Layout::Make(SpecOf({{512, 1024}}));
  const auto ranges = Expand(layout, TilingOf(layout, 4, {Part(0, {{4, 1}}, {})}));
  ASSERT_TRUE(ranges.ok()) << ranges.status();
  std::vector<uint64_t> pushed(4);
  for (const OwnedRange& owned : *ranges) pushed[owned.rank] += owned.range.size();
  EXPECT_THAT(pushed, ::testing::Each(512 * 1024 / 4));
}

TEST(TilingTest, RefusesBadPlacementsByName) {
  const Layout layout = *Layout::Make(SpecOf({{8, 8}}));
  const auto refused = [&](const v1::Tiling& tiling, const char* reason, const std::string& words) {
    const auto expanded = Expand(layout, tiling);
    EXPECT_EQ(ReasonOf(expanded.status()), reason);
    EXPECT_THAT(expanded.status().message(), HasSubstr(words));
  };
  refused(TilingOf(layout, 2, {Part(0, {{4, 1}}, {{0, 0}})}), kBadRange, "names rank 3; the group has 2");
  refused(TilingOf(layout, 4, {Part(0, {{2, 0}}, {{0, 0}})}), kBadRange, "names rank 0 twice");
  refused(TilingOf(layout, 4, {Part(0, {{4, 1}}, {{1, 0}})}), kBadRange, "has 1 axes, and a cut names axis 1");
  refused(TilingOf(layout, 4, {Part(0, {{4, 1}}, {{0, 0}, {0, 1}})}), kBadRange, "cuts twice along axis 0");
  refused(TilingOf(layout, 4, {Part(0, {{4, 1}}, {{0, 2}})}), kBadRange, "cuts dimension 2 of a tensor that has 2");
  refused(TilingOf(layout, 4, {Part(0, {{1 << 16, 1}, {1 << 16, 1}}, {})}), kBadRange, "more than 65536");
  refused(TilingOf(layout, 4, {Part(0, {{2, 1}}, {{0, 0}}), Part(2, {{2, 1}}, {{0, 1}})}), kOverlap, "overlaps range");
  refused(TilingOf(layout, 4, {Part(0, {{2, 1}}, {{0, 0}}), Part(1, {{2, 1}}, {{0, 0}})}), kBadRange,
          "rank 1 has two parts of tensor 'w0'");
  v1::Tiling missing = TilingOf(layout, 4, {Part(0, {{2, 1}}, {{0, 0}})});
  missing.clear_placement_of();
  refused(missing, kBadRange, "placements of 0 tensors; the job has 1");
  missing.add_placement_of(7);
  refused(missing, kBadRange, "placement 7; the tiling has 1");
  v1::Tiling unknown = EvenTiling(2);
  unknown.set_division(static_cast<v1::Division>(9));
  refused(unknown, kBadRequest, "division 9 is unknown");
}

// A short message must not cost memory for every element that it names.
TEST(TilingTest, RefusesMoreRangesThanItsBound) {
  const Layout layout = *Layout::Make(SpecOf({{1 << 23, 2}}));
  const auto expanded = Expand(layout, TilingOf(layout, 2, {Part(0, {{2, 1}}, {{0, 1}})}));
  EXPECT_EQ(ReasonOf(expanded.status()), kBadRange);
  EXPECT_THAT(expanded.status().message(), HasSubstr("at most 4194304"));
}

}  // namespace
}  // namespace ballast::model
