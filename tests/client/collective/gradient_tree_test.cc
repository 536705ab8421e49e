// The sum's bits do not depend on how many ranks share the work, nor on who owns what.
#include "ballast/client/collective/gradient_tree.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <random>

#include "ballast/proto/base/status.h"
#include "ballast/tests/client/collective/group.h"

namespace ballast::client {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using ElementRange = GradientTree::ElementRange;

// Values of very different sizes, so that the order of additions shows in nearly every sum.
float LeafValue(uint32_t leaf, uint64_t element) {
  uint64_t x = (leaf * uint64_t{1000003} + element) * 0x9e3779b97f4a7c15u;  // SplitMix64
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  x ^= x >> 31;
  return std::ldexp(static_cast<float>(static_cast<int32_t>(x)), static_cast<int>((x >> 32) % 24) - 40);
}

// The definition: a node is its left half plus its right half.
float Reference(uint32_t begin, uint32_t end, uint64_t element) {
  if (end - begin == 1) return LeafValue(begin, element);
  const uint32_t middle = begin + (end - begin) / 2;
  return Reference(begin, middle, element) + Reference(middle, end, element);
}

// Deals elements out in pieces of random length; some ranks may get nothing, pieces of a rank may touch, some elements
// have no owner.
std::vector<std::vector<ElementRange>> RandomRanges(uint64_t elements, int world_size, std::mt19937_64& random) {
  std::vector<std::vector<ElementRange>> owned(world_size);
  for (uint64_t at = 0; at < elements;) {
    const uint64_t end = std::min(elements, at + 1 + random() % 400);
    const uint64_t owner = random() % (static_cast<uint64_t>(world_size) + 1);
    if (owner < static_cast<uint64_t>(world_size)) owned[owner].push_back({at, end});
    at = end;
  }
  return owned;
}

std::vector<std::vector<ElementRange>> EvenRanges(uint64_t elements, int world_size) {
  std::vector<std::vector<ElementRange>> owned;
  for (uint64_t r = 0; r < static_cast<uint64_t>(world_size); ++r) {
    owned.push_back({{elements * r / world_size, elements * (r + 1) / world_size}});
  }
  return owned;
}

TEST(LeavesOf, AreContiguousAndEven) {
  for (const uint32_t leaves : {1u, 2u, 8u, 64u}) {
    for (int world_size = 1; world_size <= static_cast<int>(leaves); ++world_size) {
      uint32_t at = 0;
      for (int r = 0; r < world_size; ++r) {
        const LeafRun run = LeavesOf(leaves, r, world_size);
        EXPECT_EQ(run.begin, at);
        EXPECT_GE(run.end - run.begin, leaves / world_size);
        EXPECT_LE(run.end - run.begin, leaves / world_size + 1);
        at = run.end;
      }
      EXPECT_EQ(at, leaves);
    }
  }
}

TEST(ForestOf, HoldsTheMaximalSubtrees) {
  EXPECT_THAT(ForestOf({0, 8}), ElementsAre(TreeNode{3, 0}));
  EXPECT_THAT(ForestOf({4, 8}), ElementsAre(TreeNode{2, 1}));
  EXPECT_THAT(ForestOf({0, 3}), ElementsAre(TreeNode{1, 0}, TreeNode{0, 2}));
  EXPECT_THAT(ForestOf({1, 8}), ElementsAre(TreeNode{0, 1}, TreeNode{1, 1}, TreeNode{2, 1}));
  EXPECT_THAT(ForestOf({3, 6}), ElementsAre(TreeNode{0, 3}, TreeNode{1, 2}));
  EXPECT_THAT(ForestOf({5, 5}), ElementsAre());
}

struct Case {
  Backend backend;
  int world_size;
  uint32_t leaves;
};

class GradientTreeTest : public testing::TestWithParam<Case> {};

TEST_P(GradientTreeTest, HasTheBitsOfTheReference) {
  const auto [backend, world_size, leaf_count] = GetParam();
  const uint32_t leaves = leaf_count;  // clang 14 captures no structured binding
  const int world = world_size;
  const auto group = MakeGroup(backend, world, absl::Seconds(60));
  std::mt19937_64 random(world * 100 + leaves);
  // Growing and shrinking units, used one after the other by the same tree.
  const std::vector<uint64_t> sizes = {1000, 1, 4099, 37};
  std::vector<std::vector<std::vector<ElementRange>>> owned;
  for (const uint64_t size : sizes) {
    owned.push_back(RandomRanges(size, world, random));
    owned.push_back(EvenRanges(size, world));
  }
  OnEveryRank(world, [&](int r) {
    GradientTree tree(leaves, r, world);
    for (size_t use = 0; use < owned.size(); ++use) {
      const uint64_t elements = sizes[use / 2];
      tree.Reset(elements);
      const LeafRun run = LeavesOf(leaves, r, world);
      for (uint32_t leaf = run.begin; leaf < run.end; ++leaf) {
        const absl::Span<float> buffer = tree.NextLeaf();
        ASSERT_EQ(buffer.size(), elements);
        for (uint64_t i = 0; i < elements; ++i) buffer[i] = LeafValue(leaf, i);
        tree.Add();
      }
      std::vector<uint64_t> mine;
      for (const ElementRange& range : owned[use][r]) {
        for (uint64_t i = range.begin; i < range.end; ++i) mine.push_back(i);
      }
      std::vector<float> out(mine.size());
      const absl::Status status = tree.ReduceScatter(group[r].get(), owned[use], absl::MakeSpan(out));
      ASSERT_TRUE(status.ok()) << status;
      uint64_t wrong = 0;
      for (size_t i = 0; i < mine.size(); ++i) {
        wrong += std::bit_cast<uint32_t>(out[i]) != std::bit_cast<uint32_t>(Reference(0, leaves, mine[i]));
      }
      ASSERT_EQ(wrong, 0u) << "use " << use;
    }
  });
}

std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (const int world_size : {1, 2, 3, 4, 5, 7, 8}) {
    for (const uint32_t leaves : {8u, 16u}) cases.push_back({Backend::kLoopback, world_size, leaves});
  }
  cases.push_back({Backend::kLoopback, 1, 1});
  cases.push_back({Backend::kLoopback, 2, 2});
  for (const int world_size : {2, 3, 4}) cases.push_back({Backend::kGloo, world_size, 8});
  return cases;
}

INSTANTIATE_TEST_SUITE_P(All, GradientTreeTest, testing::ValuesIn(Cases()), [](const auto& info) {
  return absl::StrCat(info.param.backend == Backend::kLoopback ? "Loopback" : "Gloo", info.param.world_size, "Of",
                      info.param.leaves);
});

// The reference is sensitive to order: a sum from left to right has other bits.
TEST(GradientTreeReference, DependsOnTheTree) {
  int differ = 0;
  for (uint64_t i = 0; i < 1000; ++i) {
    float sum = LeafValue(0, i);
    for (uint32_t leaf = 1; leaf < 8; ++leaf) sum += LeafValue(leaf, i);
    differ += sum != Reference(0, 8, i);
  }
  EXPECT_GT(differ, 100);
}

TEST(GradientTree, MisuseIsRefused) {
  const auto group = MakeLoopbackGroup(1);
  GradientTree tree(2, 0, 1);
  tree.Reset(10);
  std::vector<float> out(10);
  std::fill(tree.NextLeaf().begin(), tree.NextLeaf().end(), 1.0f);
  tree.Add();
  const std::vector<std::vector<ElementRange>> all = {{{0, 10}}};
  absl::Status status = tree.ReduceScatter(group[0].get(), all, absl::MakeSpan(out));
  EXPECT_EQ(model::ReasonOf(status), model::kBadRequest);
  EXPECT_THAT(std::string(status.message()), HasSubstr("added leaves up to 1; expected [0, 2)"));
  std::fill(tree.NextLeaf().begin(), tree.NextLeaf().end(), 2.0f);
  tree.Add();
  status = tree.ReduceScatter(group[0].get(), {std::vector<ElementRange>{{5, 11}}}, absl::MakeSpan(out));
  EXPECT_EQ(model::ReasonOf(status), model::kBadRange);
  EXPECT_THAT(std::string(status.message()), HasSubstr("rank 0 owns [5, 11) of 10 elements"));
  status = tree.ReduceScatter(group[0].get(), all, absl::MakeSpan(out).first(9));
  EXPECT_EQ(model::ReasonOf(status), model::kBadLength);
  ASSERT_TRUE(tree.ReduceScatter(group[0].get(), all, absl::MakeSpan(out)).ok());
  EXPECT_EQ(out, std::vector<float>(10, 3.0f));
}

TEST(GradientTree, LeavesThatAreNoPowerOfTwoAreRefused) {
  const auto group = MakeLoopbackGroup(1);
  GradientTree tree(3, 0, 1);
  tree.Reset(1);
  for (int i = 0; i < 3; ++i) {
    tree.NextLeaf()[0] = 1;
    tree.Add();
  }
  std::vector<float> out(1);
  const std::vector<std::vector<ElementRange>> all = {{{0, 1}}};
  const absl::Status status = tree.ReduceScatter(group[0].get(), all, absl::MakeSpan(out));
  EXPECT_THAT(std::string(status.message()), HasSubstr("3 micro-batches; expected a power of two"));
}

}  // namespace
}  // namespace ballast::client
