#include "ballast/proto/model/placement.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "ballast/proto/model/status.h"

namespace ballast::model {
namespace {

absl::Status BadMesh(absl::string_view message) {
  return Error(absl::StatusCode::kInvalidArgument, kBadRange, absl::StrCat("a placement's mesh ", message));
}

// Dimensions behind the last one that the box cuts lie together: one run covers them.
size_t CutDimensions(absl::Span<const uint64_t> shape, const Box& box) {
  size_t cut = box.size();
  while (cut > 0 && box[cut - 1].begin == 0 && box[cut - 1].end == shape[cut - 1]) --cut;
  return cut;
}

}  // namespace

uint64_t ElementsOf(const Box& box) {
  uint64_t elements = 1;
  for (const Range& range : box) elements *= range.size();
  return elements;
}

Box WholeOf(absl::Span<const uint64_t> shape) {
  Box box;
  for (const uint64_t extent : shape) box.push_back({0, extent});
  return box;
}

uint64_t RunCount(absl::Span<const uint64_t> shape, const Box& box) {
  if (ElementsOf(box) == 0) return 0;
  const size_t cut = CutDimensions(shape, box);
  uint64_t runs = 1;
  for (size_t d = 0; d + 1 < cut; ++d) runs *= box[d].size();
  return runs;
}

std::vector<BoxRun> RunsOf(absl::Span<const uint64_t> shape, const Box& box) {
  const uint64_t count = RunCount(shape, box);
  std::vector<BoxRun> runs;
  if (count == 0) return runs;
  runs.reserve(count);
  // A run covers the last cut dimension and all behind; the index walks the dimensions before.
  const size_t cut = CutDimensions(shape, box), walked = cut == 0 ? 0 : cut - 1;
  std::vector<uint64_t> stride(shape.size(), 1);
  for (size_t d = shape.size(); d-- > 1;) stride[d - 1] = stride[d] * shape[d];
  const uint64_t length = ElementsOf(box) / count;
  const uint64_t first = cut == 0 ? 0 : box[walked].begin * stride[walked];
  std::vector<uint64_t> index;
  for (size_t d = 0; d < walked; ++d) index.push_back(box[d].begin);
  for (uint64_t run = 0; run < count; ++run) {
    uint64_t at = first;
    for (size_t d = 0; d < walked; ++d) at += index[d] * stride[d];
    runs.push_back({at, run * length, length});
    for (size_t d = walked; d-- > 0;) {
      if (++index[d] < box[d].end) break;
      index[d] = box[d].begin;
    }
  }
  return runs;
}

std::optional<uint64_t> PlaceInRuns(absl::Span<const BoxRun> runs, uint64_t first, uint64_t count) {
  auto next = std::upper_bound(runs.begin(), runs.end(), first,
                               [](uint64_t element, const BoxRun& run) { return element < run.in_tensor; });
  if (next == runs.begin()) return std::nullopt;
  const BoxRun& run = *--next;
  if (first + count > run.in_tensor + run.count) return std::nullopt;
  return run.in_box + (first - run.in_tensor);
}

std::vector<RunGroup> GroupRuns(absl::Span<const BoxRun> runs, uint64_t gap_max) {
  std::vector<RunGroup> groups;
  for (size_t i = 0; i < runs.size(); ++i) {
    const Range range{runs[i].in_tensor, runs[i].in_tensor + runs[i].count};
    if (groups.empty() || groups.back().range.end + gap_max < range.begin) groups.push_back({range, i, i});
    groups.back().range.end = range.end;
    groups.back().last = i + 1;
  }
  return groups;
}

absl::Status CheckMesh(const v1::MeshCuts& part, uint32_t world_size) {
  const v1::Mesh& mesh = part.mesh();
  const int axes = mesh.size_size();
  uint64_t ranks = 1, last = mesh.first();
  for (int i = 0; i < axes; ++i) {
    const uint64_t size = mesh.size(i);
    if (size == 0 || size > kRanksMax || ranks * size > kRanksMax) {
      return BadMesh(absl::StrCat("has no rank, or more than ", kRanksMax));
    }
    ranks *= size;
    if (mesh.ranks_size() == 0 && i < mesh.stride_size()) last += (size - 1) * mesh.stride(i);
  }
  if (mesh.ranks_size() == 0 && mesh.stride_size() != axes) {
    return BadMesh(absl::StrCat("has ", axes, " axes and ", mesh.stride_size(), " strides"));
  }
  if (mesh.ranks_size() > 0 && static_cast<uint64_t>(mesh.ranks_size()) != ranks) {
    return BadMesh(absl::StrCat("lists ", mesh.ranks_size(), " ranks and has sizes for ", ranks));
  }
  if (mesh.ranks_size() == 0 && last >= world_size) {
    return BadMesh(absl::StrCat("names rank ", last, "; the group has ", world_size));
  }
  std::vector<uint32_t> named = RanksOf(mesh);
  std::sort(named.begin(), named.end());
  if (named.back() >= world_size) {
    return BadMesh(absl::StrCat("names rank ", named.back(), "; the group has ", world_size));
  }
  if (const auto twice = std::adjacent_find(named.begin(), named.end()); twice != named.end()) {
    return BadMesh(absl::StrCat("names rank ", *twice, " twice"));
  }
  std::vector<bool> is_cut(axes);
  for (const v1::Cut& cut : part.cuts()) {
    if (cut.axis() >= static_cast<uint32_t>(axes)) {
      return BadMesh(absl::StrCat("has ", axes, " axes, and a cut names axis ", cut.axis()));
    }
    if (is_cut[cut.axis()]) return BadMesh(absl::StrCat("cuts twice along axis ", cut.axis()));
    is_cut[cut.axis()] = true;
  }
  return absl::OkStatus();
}

std::vector<uint32_t> RanksOf(const v1::Mesh& mesh) {
  if (mesh.ranks_size() > 0) return {mesh.ranks().begin(), mesh.ranks().end()};
  std::vector<uint32_t> ranks = {mesh.first()};
  for (int axis = 0; axis < mesh.size_size(); ++axis) {
    std::vector<uint32_t> next;
    next.reserve(ranks.size() * mesh.size(axis));
    for (const uint32_t rank : ranks) {
      for (uint32_t i = 0; i < mesh.size(axis); ++i) next.push_back(rank + i * mesh.stride(axis));
    }
    ranks = std::move(next);
  }
  return ranks;
}

absl::StatusOr<Box> BoxAt(const v1::MeshCuts& part, absl::Span<const uint64_t> shape, uint64_t place) {
  const v1::Mesh& mesh = part.mesh();
  std::vector<uint64_t> coordinate(mesh.size_size());
  for (size_t axis = coordinate.size(); axis-- > 0;) {
    coordinate[axis] = place % mesh.size(static_cast<int>(axis));
    place /= mesh.size(static_cast<int>(axis));
  }
  Box box = WholeOf(shape);
  for (const v1::Cut& cut : part.cuts()) {
    if (cut.dimension() >= shape.size()) {
      return BadMesh(absl::StrCat("cuts dimension ", cut.dimension(), " of a tensor that has ", shape.size()));
    }
    Range& range = box[cut.dimension()];
    const uint64_t size = mesh.size(static_cast<int>(cut.axis()));
    const uint64_t share = (range.size() + size - 1) / size;
    const uint64_t begin = std::min(range.end, range.begin + coordinate[cut.axis()] * share);
    range = {begin, std::min(range.end, begin + share)};
  }
  return box;
}

}  // namespace ballast::model
