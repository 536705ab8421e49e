#include "ballast/proto/model/epoch_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>

#include "ballast/proto/base/status.h"
#include "ballast/proto/model/next_table.h"
#include "ballast/proto/model/protocol.h"
#include "ballast/proto/model/tiling.h"

namespace ballast::model {
namespace {

using ::testing::HasSubstr;

v1::OpenRequest MakeOpen(int servers, uint32_t world_size, int units = 40) {
  v1::OpenRequest open;
  v1::JobSpec* spec = open.mutable_spec();
  spec->set_name("job");
  spec->set_chunk_elements(1 << 16);
  spec->set_group_count(1);
  v1::Registration* registration = spec->add_registrations();
  for (int i = 0; i < units; ++i) {
    v1::TensorSpec* tensor = registration->add_tensors();
    tensor->set_name(absl::StrCat("w", i));
    tensor->set_unit(absl::StrCat("unit", i));
    tensor->add_shape(100);
    tensor->add_shape(1000);
  }
  for (int i = 0; i < servers; ++i) {
    v1::Member* member = open.add_members();
    member->set_server_id(absl::StrCat("server", i));
    member->set_weight(1);
  }
  *open.mutable_tiling() = EvenTiling(world_size);
  return open;
}

TEST(EpochPlanTest, RanksPartitionEveryUnitInWholeSlices) {
  for (const uint32_t world_size : {1u, 2u, 3u, 7u}) {
    const auto plan = EpochPlan::Make(MakeOpen(2, world_size));
    ASSERT_TRUE(plan.ok()) << plan.status();
    std::vector<uint64_t> next(40, 0);
    for (const Slice& slice : plan->slices()) {
      EXPECT_EQ(slice.range.begin, next[slice.unit]);
      next[slice.unit] = slice.range.end;
      EXPECT_EQ(plan->FindSlice(slice.rank, slice.unit, slice.range).has_value(), true);
      EXPECT_FALSE(plan->FindSlice(slice.rank, slice.unit, {slice.range.begin, slice.range.end - 1}).has_value());
      EXPECT_FALSE(plan->FindSlice(slice.rank + 1, slice.unit, slice.range).has_value());
    }
    for (const uint64_t end : next) EXPECT_EQ(end, 100096u);
  }
}

TEST(EpochPlanTest, LoadIsBalancedWithinOneChunk) {
  for (const int servers : {1, 2, 3, 5}) {
    const auto plan = EpochPlan::Make(MakeOpen(servers, 2));
    std::vector<uint64_t> load(servers, 0);
    uint64_t total = 0;
    for (const Chunk& chunk : plan->layout().chunks()) {
      load[plan->holders_of(chunk.index)[0]] += chunk.range.size();
      total += chunk.range.size();
    }
    for (const uint64_t l : load) EXPECT_LE(l, total / servers + (1 << 16));
  }
}

TEST(EpochPlanTest, WeightsShiftTheShares) {
  v1::OpenRequest open = MakeOpen(2, 1, 200);
  open.mutable_members(0)->set_weight(3);
  const auto plan = EpochPlan::Make(open);
  uint64_t first = 0;
  uint64_t total = 0;
  for (const Chunk& chunk : plan->layout().chunks()) {
    total += chunk.range.size();
    if (plan->holders_of(chunk.index)[0] == 0) first += chunk.range.size();
  }
  EXPECT_NEAR(static_cast<double>(first) / total, 0.75, 0.02);
}

TEST(EpochPlanTest, LaterChunksNeverMoveEarlierOnes) {
  const auto before = EpochPlan::Make(MakeOpen(3, 2, 20));
  const auto after = EpochPlan::Make(MakeOpen(3, 2, 40));
  for (const Chunk& chunk : before->layout().chunks())
    EXPECT_EQ(before->holders_of(chunk.index)[0], after->holders_of(chunk.index)[0]);
}

// Some 300 KB that once took minutes, on a thread that all new jobs shared.
TEST(EpochPlanTest, TooManyChunksForSoManyMembersAreRefusedBeforeTheyAreRouted) {
  v1::OpenRequest open = MakeOpen(kMembersMax, 1, 1);
  v1::TensorSpec* const tensor = open.mutable_spec()->mutable_registrations(0)->mutable_tensors(0);
  tensor->clear_shape();
  tensor->add_shape((uint64_t{1} << 20) - 1);
  tensor->add_shape(1 << 16);
  int asked = 0;
  const absl::Status status = EpochPlan::Make(open, [&] {
                                ++asked;
                                return absl::OkStatus();
                              }).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_EQ(ReasonOf(status), kBadSpec);
  EXPECT_THAT(std::string(status.message()), HasSubstr("expected at most 268435456 chunks times members"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("got 1048575 chunks x 4096 members; use larger chunks"));
  EXPECT_EQ(asked, 0) << "nothing long had begun";
}

TEST(EpochPlanTest, RoutingCanBeInterrupted) {
  v1::OpenRequest open = MakeOpen(kMembersMax, 1, 1);
  v1::TensorSpec* const tensor = open.mutable_spec()->mutable_registrations(0)->mutable_tensors(0);
  tensor->clear_shape();
  tensor->add_shape(1 << 12);
  tensor->add_shape(1 << 16);
  int asked = 0;
  const auto count = [&] {
    ++asked;
    return absl::OkStatus();
  };
  ASSERT_TRUE(EpochPlan::Make(open, count).ok());
  EXPECT_GE(asked, 16) << "2^24 pairs, at most 2^20 at a time";
  const int all = asked;
  asked = 0;
  const absl::Status stopped =
      EpochPlan::Make(open, [&] { return ++asked < 4 ? absl::OkStatus() : absl::CancelledError("stopping"); }).status();
  EXPECT_TRUE(absl::IsCancelled(stopped)) << stopped;
  EXPECT_EQ(asked, 4);
  EXPECT_GT(all, 4);
}

// Found with the hash of job and server computed anew for each chunk: chunks never move.
TEST(EpochPlanTest, RoutesAreWhatTheyWere) {
  const auto plan = EpochPlan::Make(MakeOpen(5, 2));
  ASSERT_TRUE(plan.ok());
  std::string routes;
  for (const Chunk& chunk : plan->layout().chunks()) absl::StrAppend(&routes, plan->holders_of(chunk.index)[0]);
  EXPECT_EQ(routes, "34241323001121300240412043124201410130334023210133434203121223024432403211023110");
}

// Every tensor cut along its first dimension, and rank 0 has those without one.
v1::Tiling RowTiling(const Layout& layout, uint32_t world_size) {
  v1::Tiling tiling;
  tiling.set_world_size(world_size);
  tiling.set_division(v1::DIVISION_PLACED);
  v1::MeshCuts* const rows = tiling.add_placements()->add_meshes();
  rows->mutable_mesh()->add_size(world_size);
  rows->mutable_mesh()->add_stride(1);
  rows->add_cuts();                                       // axis 0 of dimension 0
  tiling.add_placements()->add_meshes()->mutable_mesh();  // rank 0
  for (const Tensor& tensor : layout.tensors()) tiling.add_placement_of(tensor.shape.empty() ? 1 : 0);
  return tiling;
}

TEST(EpochPlanTest, RowsAreCutAsTorchChunkCutsThem) {
  v1::OpenRequest open = MakeOpen(1, 1, 1);
  v1::Registration* registration = open.mutable_spec()->mutable_registrations(0);
  registration->clear_tensors();
  const auto add = [&](const char* name, const std::vector<uint64_t>& shape) {
    v1::TensorSpec* tensor = registration->add_tensors();
    tensor->set_name(name);
    tensor->set_unit("u");
    for (const uint64_t extent : shape) tensor->add_shape(extent);
  };
  add("matrix", {5, 30});
  add("vector", {2});
  add("scalar", {});
  const auto layout = Layout::Make(open.spec());
  ASSERT_TRUE(layout.ok()) << layout.status();
  // torch.chunk of 5 rows in 4 gives 2, 2, 1 and nothing.
  *open.mutable_tiling() = RowTiling(*layout, 4);
  const auto expanded = Expand(*layout, open.tiling());
  ASSERT_TRUE(expanded.ok()) << expanded.status();
  std::vector<std::array<uint64_t, 3>> ranges;
  for (const OwnedRange& r : *expanded) ranges.push_back({r.rank, r.range.begin, r.range.end});
  EXPECT_THAT(ranges,
              ::testing::ElementsAre(std::array<uint64_t, 3>{0, 0, 60}, std::array<uint64_t, 3>{1, 60, 120},
                                     std::array<uint64_t, 3>{2, 120, 150}, std::array<uint64_t, 3>{0, 256, 257},
                                     std::array<uint64_t, 3>{1, 257, 258}, std::array<uint64_t, 3>{0, 512, 513}));
  EXPECT_TRUE(EpochPlan::Make(open).ok()) << EpochPlan::Make(open).status();
}

// The same tiling as a list.
v1::Tiling Listed(const v1::OpenRequest& open) {
  v1::Tiling tiling;
  tiling.set_world_size(open.tiling().world_size());
  const auto expanded = Expand(*Layout::Make(open.spec()), open.tiling());
  for (const OwnedRange& r : *expanded) {
    v1::RankRange* range = tiling.add_ranges();
    range->set_rank(r.rank);
    range->set_unit(r.unit);
    range->set_begin(r.range.begin);
    range->set_end(r.range.end);
  }
  return tiling;
}

TEST(EpochPlanTest, AListedTilingIsTheSamePlan) {
  v1::OpenRequest open = MakeOpen(2, 3);
  const auto ruled = EpochPlan::Make(open);
  *open.mutable_tiling() = Listed(open);
  const auto listed = EpochPlan::Make(open);
  ASSERT_TRUE(ruled.ok() && listed.ok()) << listed.status();
  ASSERT_EQ(ruled->slices().size(), listed->slices().size());
  for (size_t i = 0; i < ruled->slices().size(); ++i) {
    EXPECT_EQ(ruled->slices()[i].rank, listed->slices()[i].rank);
    EXPECT_EQ(ruled->slices()[i].range, listed->slices()[i].range);
  }
}

TEST(EpochPlanTest, RefusesBadTilingsByName) {
  const auto refused = [](const v1::OpenRequest& open, const char* reason, const std::string& words) {
    const auto plan = EpochPlan::Make(open);
    EXPECT_EQ(ReasonOf(plan.status()), reason);
    EXPECT_THAT(plan.status().message(), HasSubstr(words));
  };
  v1::OpenRequest listed = MakeOpen(2, 2);
  *listed.mutable_tiling() = Listed(listed);
  v1::OpenRequest open = listed;
  open.mutable_tiling()->mutable_ranges(0)->set_end(60000);
  refused(open, kOverlap, "in unit 'unit0' range [0, 60000) of rank 0 overlaps range");
  open = listed;
  open.mutable_tiling()->mutable_ranges(0)->set_end(256);
  refused(open, kBadRange, "element 256 of unit 'unit0' (tensor 'w0') belongs to no rank");
  open = listed;
  open.mutable_tiling()->mutable_ranges(1)->set_end(1 << 30);
  refused(open, kBadRange, "lie in unit 'unit0', which has 100096 elements");
  open = listed;
  open.mutable_tiling()->mutable_ranges(1)->set_rank(2);
  refused(open, kBadRange, "rank beyond world size 2");
  open = MakeOpen(2, 2);
  open.mutable_members(1)->set_server_id("server0");
  refused(open, kBadRequest, "'server0' is a member twice");
  open = MakeOpen(2, 2);
  open.clear_members();
  refused(open, kBadRequest, "at least one member");
}

TEST(EpochPlanTest, TouchesLooksAtTensorsNotPadding) {
  const auto plan = EpochPlan::Make(MakeOpen(1, 1, 2));
  const std::string second = MakeBitmap(2, {1});
  for (const Slice& slice : plan->slices()) EXPECT_EQ(plan->Touches(slice, second), slice.unit == 1);
}

v1::OpenRequest MakeTableOpen(int servers, uint32_t replicas) {
  v1::OpenRequest open = MakeOpen(servers, 2);
  const std::vector<v1::Member> members(open.members().begin(), open.members().end());
  open.clear_members();
  const auto elements = ShardElements(*Layout::Make(open.spec()), 16);
  *open.mutable_table() =
      FirstTable({.servers = members, .replicas = replicas, .shard_elements = elements}, v1::Epoch());
  return open;
}

TEST(EpochPlanTest, ATableSaysWhereChunksAre) {
  v1::OpenRequest open = MakeTableOpen(3, 2);
  open.mutable_table()->mutable_shards(5)->mutable_holders()->Truncate(1);
  const uint32_t holder = open.table().shards(5).holders(0), filler = (holder + 1) % 3;
  open.mutable_table()->mutable_shards(5)->add_fillers(filler);
  const auto plan = EpochPlan::Make(open);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->members().size(), 3);
  EXPECT_EQ(*plan->FindMember("server2"), 2u);
  std::vector<int> pulled(3, 0);
  for (const Chunk& chunk : plan->layout().chunks()) {
    const v1::Shard& shard = open.table().shards(static_cast<int>(chunk.index % 16));
    EXPECT_THAT(plan->holders_of(chunk.index), ::testing::ElementsAreArray(shard.holders()));
    EXPECT_THAT(plan->fillers_of(chunk.index), ::testing::ElementsAreArray(shard.fillers()));
    for (uint32_t member = 0; member < 3; ++member) {
      EXPECT_EQ(plan->Has(member, chunk.index),
                std::count(shard.holders().begin(), shard.holders().end(), member) +
                        std::count(shard.fillers().begin(), shard.fillers().end(), member) >
                    0);
    }
    for (uint32_t rank = 0; rank < 8; ++rank) {
      const uint32_t source = plan->SourceFor(chunk.index, rank);
      EXPECT_THAT(plan->holders_of(chunk.index), ::testing::Contains(source)) << "never a filler";
      ++pulled[source];
    }
  }
  EXPECT_LT(*std::max_element(pulled.begin(), pulled.end()), 2 * *std::min_element(pulled.begin(), pulled.end()));
  // A chunk with too few copies is counted once, by its holder.
  const auto& chunks = plan->layout().chunks();
  const auto lacking =
      std::count_if(chunks.begin(), chunks.end(), [](const Chunk& one) { return one.index % 16 == 5; });
  ASSERT_GT(lacking, 0);
  for (uint32_t member = 0; member < 3; ++member) {
    EXPECT_EQ(plan->short_chunks(absl::StrCat("server", member)), member == holder ? lacking : 0);
  }
  EXPECT_EQ(plan->ShowServersOf(5), absl::StrCat("'server", holder, "', 'server", filler, "'"));
}

TEST(EpochPlanTest, APlanLikeAnEarlierOneIsWhatAPlanOfItsOwnWouldBe) {
  v1::OpenRequest open = MakeOpen(0, 2);
  open.set_spec_digest(SpecDigest(open.spec()));
  const auto spread = [&open](uint32_t servers) {
    v1::OpenRequest next = open;
    next.mutable_epoch()->set_counter(servers);
    next.mutable_table()->set_replicas(1);
    for (uint32_t i = 0; i < servers; ++i) {
      v1::Member* member = next.mutable_table()->add_members();
      member->set_server_id(absl::StrCat("server", i));
      member->set_weight(1);
      next.mutable_table()->add_shards()->add_holders(i);
    }
    return next;
  };
  const auto earlier = EpochPlan::Make(spread(3));
  ASSERT_TRUE(earlier.ok()) << earlier.status();
  const auto like = EpochPlan::Make(spread(2), &*earlier), own = EpochPlan::Make(spread(2));
  ASSERT_TRUE(like.ok()) << like.status();
  EXPECT_EQ(&like->layout(), &earlier->layout()) << "shared";
  EXPECT_EQ(like->open().epoch().counter(), 2u);
  EXPECT_EQ(FieldHash(like->tiling_hash()).Finish(), FieldHash(own->tiling_hash()).Finish());
  EXPECT_EQ(like->slices_of_rank(1).size(), own->slices_of_rank(1).size());
  for (const Chunk& chunk : own->layout().chunks()) {
    EXPECT_EQ(like->holders_of(chunk.index)[0], own->holders_of(chunk.index)[0]);
  }
  // Another tiling or spec shares nothing, and a digest that is not the spec's is refused.
  v1::OpenRequest other = spread(3);
  *other.mutable_tiling() = EvenTiling(5);
  const auto tiled = EpochPlan::Make(other, &*earlier);
  ASSERT_TRUE(tiled.ok()) << tiled.status();
  EXPECT_EQ(tiled->world_size(), 5u);
  EXPECT_EQ(tiled->slices().size(), EpochPlan::Make(other)->slices().size());
  other = spread(3);
  other.mutable_spec()->mutable_registrations(0)->mutable_tensors(7)->set_shape(0, 200);
  EXPECT_THAT(EpochPlan::Make(other, &*earlier).status().message(), HasSubstr("spec_digest"));
  other.set_spec_digest(SpecDigest(other.spec()));
  EXPECT_EQ(EpochPlan::Make(other, &*earlier)->layout().units()[7].elements, 200192u);
  // What is not shared is looked at.
  other = spread(2);
  other.mutable_table()->mutable_shards(0)->clear_holders();
  EXPECT_FALSE(EpochPlan::Make(other, &*earlier).ok());
  other = spread(2);
  other.mutable_table()->GetReflection()->MutableUnknownFields(other.mutable_table())->AddVarint(77, 1);
  EXPECT_THAT(EpochPlan::Make(other, &*earlier).status().message(), HasSubstr("77"));
  other = spread(2);
  other.mutable_spec()->GetReflection()->MutableUnknownFields(other.mutable_spec())->AddVarint(77, 1);
  EXPECT_THAT(EpochPlan::Make(other, &*earlier).status().message(), HasSubstr("77"));
}

TEST(EpochPlanTest, ATableThatDoesNotFitIsRefused) {
  v1::OpenRequest open = MakeTableOpen(2, 2);
  *open.add_members() = open.table().members(0);
  EXPECT_THAT(std::string(EpochPlan::Make(open).status().message()), HasSubstr("names its members there alone"));
  open = MakeTableOpen(2, 2);
  open.mutable_table()->mutable_members(1)->set_server_id("server0");
  EXPECT_THAT(std::string(EpochPlan::Make(open).status().message()), HasSubstr("'server0' is a member twice"));
  open = MakeTableOpen(2, 2);
  open.mutable_spec()->set_durability(v1::DURABILITY_EVERY_K);
  open.mutable_spec()->set_pin_interval(2);
  EXPECT_EQ(ReasonOf(EpochPlan::Make(open).status()), kUnsupported);
  open = MakeTableOpen(2, 2);
  open.mutable_table()->mutable_shards(3)->add_fillers(9);
  EXPECT_THAT(std::string(EpochPlan::Make(open).status().message()), HasSubstr("shard 3 has 9"));
}

}  // namespace
}  // namespace ballast::model
