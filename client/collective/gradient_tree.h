// Sums of gradients over micro-batches, with the same bits however the micro-batches are spread over ranks.
//
// The sum is fp32 over a fixed binary tree with the micro-batches 0..M-1 as leaves (M a power of two). A rank holds a
// contiguous run of leaves, so it can complete some subtrees alone: its forest, at most 2 log2(M) nodes. For each
// element range, ranks send their partial sums to the range's owner. The owner adds the remaining nodes level by level
// from the leaves up, left child + right child. Cost for W = 2^k ranks: each rank sends (W - 1) / W of its elements, as
// any reduce-scatter does.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ballast/client/collective/collective.h"

namespace ballast::client {

// Micro-batches [begin, end) of rank `rank` of `world_size`: contiguous, sizes differ by at most one.
struct LeafRun {
  uint32_t begin = 0;
  uint32_t end = 0;
};
LeafRun LeavesOf(uint32_t leaf_count, int rank, int world_size);

// The maximal complete subtrees within a run, left to right. level 0 is a leaf; the node covers [index << level,
// (index+1) << level).
struct TreeNode {
  uint32_t level = 0;
  uint32_t index = 0;
  bool operator==(const TreeNode&) const = default;
};
std::vector<TreeNode> ForestOf(LeafRun run);

// Adds leaves as they come, in order, and keeps only the partial sums still needed.
// Owns its buffers, kept between uses: (forest + log2 M + 1) x elements fp32 for the leaves. For the exchange: one copy
// of the sums to send, unless they lie in one piece, and the owned elements times the nodes of all forests. Threads:
// one.
class GradientTree {
 public:
  GradientTree(uint32_t leaf_count, int rank, int world_size);

  // Starts a new sum over `elements`.
  void Reset(uint64_t elements);
  // The buffer for the next leaf's gradient (contents undefined); valid until Add().
  absl::Span<float> NextLeaf();
  // Folds the leaf into the tree.
  void Add();

  // After all own leaves: reduce-scatters over `collective`. Rank r owns `owned[r]` (element ranges, by offset, the
  // same lists on every rank, disjoint). Writes the full sums of the own ranges, concatenated, into `out`. The partial
  // sums stay as they are until Reset. Errors: BAD_REQUEST (a leaf is missing, or too many), BAD_RANGE, BAD_LENGTH
  // (`out`), and the collective's.
  struct ElementRange {
    uint64_t begin = 0;
    uint64_t end = 0;
  };
  absl::Status ReduceScatter(Collective* collective, absl::Span<const std::vector<ElementRange>> owned,
                             absl::Span<float> out);

 private:
  absl::Span<const float> Pack(const std::vector<ElementRange>& ranges, float* to) const;

  uint32_t leaf_count_;
  int rank_;
  int world_size_;
  uint64_t elements_ = 0;
  uint32_t next_leaf_ = 0;
  std::vector<std::vector<float>> free_;
  std::vector<std::pair<TreeNode, std::vector<float>>> nodes_;  // a stack: partial sums, left to right
  std::vector<float> packed_;
  std::vector<float> received_;
};

}  // namespace ballast::client
