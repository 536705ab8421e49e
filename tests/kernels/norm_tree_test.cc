// The fixed shape of sums: the same bits for every number of leaves, however they were computed.
#include "ballast/kernels/norm_tree.h"

#include <cmath>
#include <vector>

#include "gtest/gtest.h"

namespace ballast::kernels {
namespace {

// A binary tree with complete left children, from the definition.
double TreeOf(const std::vector<double>& leaves, size_t begin, size_t end) {
  if (end - begin == 1) return leaves[begin];
  size_t left = 1;
  while (2 * left < end - begin) left *= 2;
  return TreeOf(leaves, begin, begin + left) + TreeOf(leaves, begin + left, end);
}

// Leaves whose sum depends on the order of the additions.
std::vector<double> Leaves(size_t count) {
  std::vector<double> leaves(count);
  for (size_t i = 0; i < count; ++i)
    leaves[i] = std::ldexp(1.0 + static_cast<double>(i) / 7, static_cast<int>(i * 11 % 60));
  return leaves;
}

TEST(NormTreeTest, AddsLikeATreeWithCompleteLeftChildren) {
  EXPECT_EQ(NormTree().Total(), 0);
  bool order_matters = false;
  for (size_t count = 1; count <= 70; ++count) {
    const std::vector<double> leaves = Leaves(count);
    NormTree tree;
    double in_a_row = 0;
    for (const double leaf : leaves) {
      tree.Add(leaf);
      in_a_row += leaf;
    }
    EXPECT_EQ(tree.Total(), TreeOf(leaves, 0, count)) << count << " leaves";
    EXPECT_EQ(tree.Total(), tree.Total());
    order_matters = order_matters || tree.Total() != in_a_row;
  }
  EXPECT_TRUE(order_matters) << "these leaves try nothing";
}

TEST(NormTreeTest, LanesAreAddedNeighboursFirst) {
  std::vector<double> lanes = Leaves(kNormLanes);
  const double expected = TreeOf(lanes, 0, kNormLanes);
  EXPECT_EQ(SumLanes(lanes.data()), expected);
}

}  // namespace
}  // namespace ballast::kernels
