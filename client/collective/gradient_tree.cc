#include "ballast/client/collective/gradient_tree.h"

#include <algorithm>
#include <bit>

#include "ballast/kernels/kernels.h"
#include "ballast/proto/base/status.h"

namespace ballast::client {
namespace {

using ElementRange = GradientTree::ElementRange;

uint64_t Size(const std::vector<ElementRange>& ranges) {
  uint64_t size = 0;
  for (const ElementRange& range : ranges) size += range.end - range.begin;
  return size;
}

bool AreSiblings(TreeNode left, TreeNode right) {
  return left.level == right.level && left.index % 2 == 0 && right.index == left.index + 1;
}

TreeNode Parent(TreeNode node) { return {node.level + 1, node.index / 2}; }

absl::Span<const std::byte> Bytes(absl::Span<const float> values) {
  return absl::MakeConstSpan(reinterpret_cast<const std::byte*>(values.data()), values.size() * sizeof(float));
}

absl::Status CheckRanges(absl::Span<const std::vector<ElementRange>> owned, uint64_t elements) {
  for (size_t r = 0; r < owned.size(); ++r) {
    for (const ElementRange& range : owned[r]) {
      if (range.begin <= range.end && range.end <= elements) continue;
      return model::Error(
          absl::StatusCode::kInvalidArgument, model::kBadRange,
          absl::StrCat("rank ", r, " owns [", range.begin, ", ", range.end, ") of ", elements, " elements"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

LeafRun LeavesOf(uint32_t leaf_count, int rank, int world_size) {
  const auto cut = [&](uint64_t r) {
    return static_cast<uint32_t>(leaf_count * r / static_cast<uint64_t>(world_size));
  };
  return {cut(static_cast<uint64_t>(rank)), cut(static_cast<uint64_t>(rank) + 1)};
}

std::vector<TreeNode> ForestOf(LeafRun run) {
  std::vector<TreeNode> forest;
  for (uint32_t at = run.begin; at < run.end;) {
    // The largest aligned block that starts here and fits.
    const uint32_t aligned = at == 0 ? 31 : static_cast<uint32_t>(std::countr_zero(at));
    const uint32_t fits = static_cast<uint32_t>(std::bit_width(run.end - at)) - 1;
    const uint32_t level = std::min(aligned, fits);
    forest.push_back({level, at >> level});
    at += 1u << level;
  }
  return forest;
}

GradientTree::GradientTree(uint32_t leaf_count, int rank, int world_size)
    : leaf_count_(leaf_count), rank_(rank), world_size_(world_size) {}

void GradientTree::Reset(uint64_t elements) {
  elements_ = elements;
  next_leaf_ = LeavesOf(leaf_count_, rank_, world_size_).begin;
  for (auto& [node, sum] : nodes_) free_.push_back(std::move(sum));
  nodes_.clear();
}

absl::Span<float> GradientTree::NextLeaf() {
  if (free_.empty()) free_.emplace_back();
  // Grown, never shrunk: units of different sizes take turns.
  if (free_.back().size() < elements_) free_.back().resize(elements_);
  return absl::MakeSpan(free_.back()).first(elements_);
}

void GradientTree::Add() {
  NextLeaf();
  nodes_.emplace_back(TreeNode{0, next_leaf_++}, std::move(free_.back()));
  free_.pop_back();
  while (nodes_.size() > 1 && AreSiblings(nodes_[nodes_.size() - 2].first, nodes_.back().first)) {
    auto& [left, sum] = nodes_[nodes_.size() - 2];
    kernels::AddInto(absl::MakeConstSpan(nodes_.back().second).first(elements_), absl::MakeSpan(sum).first(elements_));
    left = Parent(left);
    free_.push_back(std::move(nodes_.back().second));
    nodes_.pop_back();
  }
}

// The own nodes' elements of `ranges`, one node after the other: in place if they lie in one piece, else copied to
// `to`.
absl::Span<const float> GradientTree::Pack(const std::vector<ElementRange>& ranges, float* to) const {
  if (nodes_.size() == 1 && ranges.size() == 1) {
    return absl::MakeConstSpan(nodes_[0].second).subspan(ranges[0].begin, ranges[0].end - ranges[0].begin);
  }
  float* end = to;
  for (const auto& [node, sum] : nodes_) {
    for (const ElementRange& range : ranges) end = std::copy(sum.data() + range.begin, sum.data() + range.end, end);
  }
  return absl::MakeConstSpan(to, static_cast<size_t>(end - to));
}

absl::Status GradientTree::ReduceScatter(Collective* collective, absl::Span<const std::vector<ElementRange>> owned,
                                         absl::Span<float> out) {
  const LeafRun run = LeavesOf(leaf_count_, rank_, world_size_);
  if (next_leaf_ != run.end) {
    return model::Error(absl::StatusCode::kInvalidArgument, model::kBadRequest,
                        absl::StrCat("rank ", rank_, " added leaves up to ", next_leaf_, "; expected [", run.begin,
                                     ", ", run.end, ")"));
  }
  if (owned.size() != static_cast<size_t>(world_size_)) {
    return model::Error(absl::StatusCode::kInvalidArgument, model::kBadRequest,
                        absl::StrCat("ranges of ", owned.size(), " ranks; expected ", world_size_));
  }
  BALLAST_RETURN_IF_ERROR(CheckRanges(owned, elements_));
  const uint64_t own_size = Size(owned[rank_]);
  if (out.size() != own_size) {
    return model::Error(absl::StatusCode::kInvalidArgument, model::kBadLength,
                        absl::StrCat("room for ", out.size(), " sums; rank ", rank_, " owns ", own_size));
  }

  uint64_t packed_size = 0;
  for (const auto& ranges : owned) packed_size += Size(ranges) * nodes_.size();
  if (packed_.size() < packed_size) packed_.resize(packed_size);
  std::vector<TreeNode> nodes;  // of all ranks, left to right
  for (int r = 0; r < world_size_; ++r) {
    const std::vector<TreeNode> forest = ForestOf(LeavesOf(leaf_count_, r, world_size_));
    nodes.insert(nodes.end(), forest.begin(), forest.end());
  }
  if (received_.size() < own_size * nodes.size()) received_.resize(own_size * nodes.size());

  std::vector<absl::Span<const std::byte>> to(world_size_);
  std::vector<absl::Span<std::byte>> from(world_size_);
  float* pack_at = packed_.data();
  float* receive_at = received_.data();
  for (int r = 0; r < world_size_; ++r) {
    const absl::Span<const float> packed = Pack(owned[r], pack_at);
    to[r] = Bytes(packed);
    if (packed.data() == pack_at) pack_at += packed.size();
    const size_t size = ForestOf(LeavesOf(leaf_count_, r, world_size_)).size() * own_size;
    from[r] = absl::MakeSpan(reinterpret_cast<std::byte*>(receive_at), size * sizeof(float));
    receive_at += size;
  }
  BALLAST_RETURN_IF_ERROR(collective->AllToAll(to, from));

  // The same stack as Add's, over everybody's nodes: sums move down into the left sibling's place.
  std::vector<std::pair<TreeNode, absl::Span<float>>> stack;
  for (size_t i = 0; i < nodes.size(); ++i) {
    stack.emplace_back(nodes[i], absl::MakeSpan(received_.data() + i * own_size, own_size));
    while (stack.size() > 1 && AreSiblings(stack[stack.size() - 2].first, stack.back().first)) {
      kernels::AddInto(stack.back().second, stack[stack.size() - 2].second);
      stack.pop_back();
      stack.back().first = Parent(stack.back().first);
    }
  }
  if (stack.size() != 1) {
    return model::Error(absl::StatusCode::kInvalidArgument, model::kBadRequest,
                        absl::StrCat(leaf_count_, " micro-batches; expected a power of two"));
  }
  std::copy(stack[0].second.begin(), stack[0].second.end(), out.begin());
  return absl::OkStatus();
}

}  // namespace ballast::client
