#include "ballast/proto/model/tiling.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <random>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/epoch_plan.h"

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

// Index of the n-th element of a box, row-major.
std::vector<uint64_t> IndexIn(const Box& box, uint64_t n) {
  std::vector<uint64_t> index(box.size());
  for (size_t d = box.size(); d-- > 0; n /= box[d].size()) index[d] = box[d].begin + n % box[d].size();
  return index;
}

// The place of an element of a tensor in parts, by the definition.
uint64_t Stored(std::vector<uint64_t> shape, const Parts& parts, std::vector<uint64_t> index) {
  uint64_t block = 0, at = 0, elements = 1;
  if (parts.count > 1) {
    shape[parts.dimension] /= parts.count;
    block = index[parts.dimension] / shape[parts.dimension];
    index[parts.dimension] %= shape[parts.dimension];
  }
  for (size_t d = 0; d < shape.size(); ++d) at = at * shape[d] + index[d], elements *= shape[d];
  return block * elements + at;
}

TEST(TilingTest, PartsMakeACutOfColumnsOneRange) {
  const auto ranges = [&](const v1::MeshCuts& part, uint32_t parts) {
    v1::JobSpec spec = SpecOf({{64, 448}});
    spec.mutable_registrations(0)->mutable_tensors(0)->set_part_dimension(1);
    spec.mutable_registrations(0)->mutable_tensors(0)->set_parts(parts);
    const Layout layout = *Layout::Make(spec);
    const auto expanded = Expand(layout, TilingOf(layout, 32, {part}));
    EXPECT_TRUE(expanded.ok()) << expanded.status();
    return std::count_if(expanded->begin(), expanded->end(), [](const OwnedRange& each) { return each.rank == 1; });
  };
  const v1::MeshCuts tp8 = Part(0, {{8, 1}}, {{0, 1}}), tp4 = Part(0, {{4, 1}}, {{0, 1}});
  const v1::MeshCuts fsdp4 = Part(0, {{4, 8}, {8, 1}}, {{1, 1}, {0, 0}}), fsdp8 = Part(0, {{8, 1}}, {{0, 0}});
  EXPECT_EQ(ranges(tp8, 1), 64);
  EXPECT_EQ(ranges(tp8, 8), 1);
  EXPECT_EQ(ranges(fsdp4, 1), 16);
  EXPECT_EQ(ranges(fsdp4, 8), 1);
  EXPECT_EQ(ranges(tp4, 8), 1);
  EXPECT_EQ(ranges(fsdp8, 1), 1);
  EXPECT_EQ(ranges(fsdp8, 8), 8);
}

// Random shapes, meshes and cuts: the boxes of all coordinates cover each element once for each replica, the pushed
// ranges each element once, and each rank pushes only what it has.
TEST(TilingTest, EveryElementIsPushedOnceByARankThatHasIt) {
  std::mt19937_64 random(7);
  const auto below = [&](uint64_t n) { return random() % n; };
  for (int round = 0; round < 1000; ++round) {
    std::vector<uint64_t> shape(1 + below(3));
    for (uint64_t& extent : shape) extent = 1 + below(round % 50 == 0 ? 100 : 12);
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
    v1::JobSpec spec = SpecOf({shape, {3}});
    for (uint32_t d = 0; d < shape.size(); ++d) {
      if (shape[d] % 2 != 0 || below(2) == 0) continue;
      spec.mutable_registrations(0)->mutable_tensors(0)->set_part_dimension(d);
      spec.mutable_registrations(0)->mutable_tensors(0)->set_parts(shape[d] % 6 == 0 ? 6 : 2);
    }
    const Layout layout = *Layout::Make(spec);
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
      const std::vector<BoxRun> runs = RunsOf(shape, *boxes[0], tensor.parts);
      EXPECT_EQ(runs.size(), RunCount(shape, *boxes[0], tensor.parts));
      EXPECT_EQ(ElementsOf(runs), ElementsOf(*boxes[0]));
      bool right = true;
      for (const BoxRun& run : runs) {
        for (uint64_t i = 0; i < run.count; ++i) {
          has[rank][run.in_tensor + i] = true;
          ++copies[run.in_tensor + i];
          right = right && run.in_tensor + i == Stored(shape, tensor.parts, IndexIn(*boxes[0], run.in_box + i));
        }
      }
      EXPECT_TRUE(right) << "rank " << rank;
    }
    uint32_t replicas = ranks;
    for (const auto& [axis, dimension] : cuts) replicas /= axes[axis].first;
    const auto all = [](const std::vector<int>& counts, size_t begin, size_t end, uint32_t value) {
      return std::all_of(counts.begin() + static_cast<ptrdiff_t>(begin), counts.begin() + static_cast<ptrdiff_t>(end),
                         [value](int count) { return count == static_cast<int>(value); });
    };
    EXPECT_TRUE(all(copies, 0, copies.size(), replicas));
    std::vector<int> pushed(layout.units()[0].elements);
    bool own = true;
    for (const OwnedRange& owned : *expanded) {
      for (uint64_t i = owned.range.begin; i < owned.range.end; ++i) {
        ++pushed[i];
        own = own && (i >= tensor.range.end || has[owned.rank][i]);
      }
    }
    EXPECT_TRUE(own) << "a rank pushes elements of others";
    for (const Tensor& each : layout.tensors()) EXPECT_TRUE(all(pushed, each.range.begin, each.range.end, 1));
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
  refused(TilingOf(layout, 4, {Part(0, std::vector<std::pair<uint32_t, uint32_t>>(17, {1, 1}), {})}), kBadRange,
          "has 17 axes");
  refused(TilingOf(layout, 1 << 16, std::vector<v1::MeshCuts>(65, Part(0, {{1 << 16, 1}}, {}))), kBadRange,
          "at most 4194304");
  v1::Tiling missing = TilingOf(layout, 4, {Part(0, {{2, 1}}, {{0, 0}})});
  missing.clear_placement_of();
  refused(missing, kBadRange, "placements of 0 tensors; the job has 1");
  missing.add_placement_of(7);
  refused(missing, kBadRange, "placement 7; the tiling has 1");
  v1::Tiling unknown = EvenTiling(2);
  unknown.set_division(static_cast<v1::Division>(9));
  refused(unknown, kBadRequest, "division 9 is unknown");
}

struct Sizes {
  uint64_t open_bytes;
  size_t slices;
  double seconds;
};

Sizes PlanOf(const v1::JobSpec& spec, const v1::Tiling& tiling, int servers) {
  v1::OpenRequest open;
  *open.mutable_spec() = spec;
  *open.mutable_tiling() = tiling;
  for (int i = 0; i < servers; ++i) {
    open.add_members()->set_server_id(absl::StrCat("server", i));
    open.mutable_members(i)->set_weight(1);
  }
  const absl::Time start = absl::Now();
  const auto plan = EpochPlan::Make(open);
  EXPECT_TRUE(plan.ok()) << plan.status();
  return {open.ByteSizeLong(), plan.ok() ? plan->slices().size() : 0, absl::ToDoubleSeconds(absl::Now() - start)};
}

// A transformer with Llama 3's tensors. `tp`: storage in so many parts along the columns that tensor parallelism cuts.
v1::JobSpec Llama(uint64_t layers, uint64_t width, uint64_t hidden, uint64_t kv, uint32_t tp) {
  v1::JobSpec spec = SpecOf({});
  spec.set_chunk_elements(1 << 20);
  const auto add = [&](const std::string& name, const std::string& unit, std::vector<uint64_t> shape, bool columns) {
    v1::TensorSpec* tensor = spec.mutable_registrations(0)->add_tensors();
    tensor->set_name(absl::StrCat(unit, ".", name));
    tensor->set_unit(unit);
    for (const uint64_t extent : shape) tensor->add_shape(extent);
    if (!columns || tp == 1) return;
    tensor->set_part_dimension(1);
    tensor->set_parts(tp);
  };
  add("weight", "model.embed_tokens", {128256, width}, false);
  for (uint64_t i = 0; i < layers; ++i) {
    const std::string unit = absl::StrCat("model.layers.", i);
    for (const char* name : {"self_attn.q_proj.weight", "self_attn.o_proj.weight"}) {
      add(name, unit, {width, width}, absl::string_view(name).find("o_proj") != absl::string_view::npos);
    }
    add("self_attn.k_proj.weight", unit, {kv, width}, false);
    add("self_attn.v_proj.weight", unit, {kv, width}, false);
    add("mlp.gate_proj.weight", unit, {hidden, width}, false);
    add("mlp.up_proj.weight", unit, {hidden, width}, false);
    add("mlp.down_proj.weight", unit, {width, hidden}, true);
    add("input_layernorm.weight", unit, {width}, false);
    add("post_attention_layernorm.weight", unit, {width}, false);
  }
  add("weight", "model.norm", {width}, false);
  add("weight", "lm_head", {128256, width}, false);
  return spec;
}

TEST(TilingTest, LargeJobsFitAMessage) {
  const v1::JobSpec llama70 = Llama(80, 8192, 28672, 1024, 1);
  const Sizes rows = PlanOf(llama70, TilingOf(*Layout::Make(llama70), 4096, {Part(0, {{4096, 1}}, {{0, 0}})}), 16);

  // 405B over TP 8 x FSDP 128: matrices by rows or columns over TP, then rows over FSDP; norms over FSDP alone.
  const v1::JobSpec llama405 = Llama(126, 16384, 53248, 1024, 8);
  v1::Tiling tiling;
  tiling.set_world_size(1024);
  tiling.set_division(v1::DIVISION_PLACED);
  *tiling.add_placements()->add_meshes() = Part(0, {{128, 8}, {8, 1}}, {{1, 0}, {0, 0}});
  *tiling.add_placements()->add_meshes() = Part(0, {{128, 8}, {8, 1}}, {{1, 1}, {0, 0}});
  *tiling.add_placements()->add_meshes() = Part(0, {{128, 8}, {8, 1}}, {{0, 0}});
  for (const v1::TensorSpec& tensor : llama405.registrations(0).tensors()) {
    tiling.add_placement_of(tensor.shape_size() == 1 ? 2 : tensor.parts() > 1 ? 1 : 0);
  }
  const Sizes parallel = PlanOf(llama405, tiling, 64);

  // 45,000 experts' tensors of their own, 60 layers x 250 experts x 3, spread over EP 50 with each on one rank.
  v1::JobSpec experts = SpecOf({});
  experts.set_chunk_elements(1 << 20);
  v1::Tiling spread;
  spread.set_world_size(50);
  spread.set_division(v1::DIVISION_PLACED);
  for (uint32_t rank = 0; rank < 50; ++rank) *spread.add_placements()->add_meshes() = Part(rank, {}, {});
  for (int layer = 0; layer < 60; ++layer) {
    for (uint32_t expert = 0; expert < 250; ++expert) {
      for (const char* name : {"gate_proj", "up_proj", "down_proj"}) {
        v1::TensorSpec* tensor = experts.mutable_registrations(0)->add_tensors();
        tensor->set_unit(absl::StrCat("model.layers.", layer));
        tensor->set_name(absl::StrCat(tensor->unit(), ".mlp.experts.", expert, ".", name, ".weight"));
        tensor->add_shape(2048);
        tensor->add_shape(1408);
        spread.add_placement_of(expert / 5);
      }
    }
  }
  const Sizes moe = PlanOf(experts, spread, 64);

  for (const auto& [name, sizes] : {std::pair<const char*, Sizes>{"70B, rows of 4096 ranks", rows},
                                    {"405B, TP 8 x FSDP 128", parallel},
                                    {"MoE of 45,000 tensors, EP 50", moe}}) {
    std::printf("%-30s Open %7.1f KB, %8zu slices, plan made in %.2f s\n", name,
                static_cast<double>(sizes.open_bytes) / 1000, sizes.slices, sizes.seconds);
  }
  EXPECT_LT(rows.open_bytes, 100'000u);
  EXPECT_LT(parallel.open_bytes, 200'000u);
  EXPECT_LT(moe.open_bytes, 5'000'000u);
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
