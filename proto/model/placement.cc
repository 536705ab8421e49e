#include "ballast/proto/model/placement.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"

namespace ballast::model {
namespace {

absl::Status BadMesh(absl::string_view message) {
  return Error(absl::StatusCode::kInvalidArgument, kBadRange, absl::StrCat("a placement's mesh ", message));
}

// A box's elements in one block of a tensor in parts. Dimensions from `whole` on lie together both in the block and in
// the box.
struct BlockBox {
  uint64_t begin = 0;  // of the block, in the tensor
  std::vector<uint64_t> shape;
  Box box;  // in the block
  size_t whole = 0;
  uint64_t runs = 0;
};

// Those that have elements of the box, in order.
std::vector<BlockBox> Blocks(absl::Span<const uint64_t> shape, const Box& box, const Parts& parts) {
  std::vector<BlockBox> blocks;
  if (ElementsOf(box) == 0) return blocks;
  BlockBox block{.shape = {shape.begin(), shape.end()}, .box = box};
  const size_t d = parts.dimension;
  if (parts.count > 1) block.shape[d] /= parts.count;
  uint64_t elements = 1;
  for (const uint64_t extent : block.shape) elements *= extent;
  // The blocks that the box touches: a tensor may have many more.
  const uint64_t first = parts.count > 1 ? box[d].begin / block.shape[d] : 0;
  const uint64_t last = parts.count > 1 ? (box[d].end - 1) / block.shape[d] : 0;
  for (uint64_t i = first; i <= last; ++i) {
    block.begin = i * elements;
    if (parts.count > 1) {
      const uint64_t extent = block.shape[d];
      const Range part = Intersect(box[d], {i * extent, (i + 1) * extent});
      block.box[d] = {part.begin - i * extent, part.end - i * extent};
    }
    // A run covers the last dimension that is cut, and all behind.
    size_t cut = box.size();
    while (cut > 0 && block.box[cut - 1].size() == block.shape[cut - 1]) --cut;
    if (parts.count > 1 && block.box[d].size() < box[d].size()) cut = std::max(cut, d + 1);
    block.whole = cut == 0 ? 0 : cut - 1;
    block.runs = 1;
    for (size_t k = 0; k < block.whole; ++k) block.runs *= block.box[k].size();
    blocks.push_back(block);
  }
  return blocks;
}

std::vector<uint64_t> Strides(absl::Span<const uint64_t> shape) {
  std::vector<uint64_t> strides(shape.size(), 1);
  for (size_t d = shape.size(); d-- > 1;) strides[d - 1] = strides[d] * shape[d];
  return strides;
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

uint64_t RunCount(absl::Span<const uint64_t> shape, const Box& box, const Parts& parts) {
  uint64_t runs = 0;
  for (const BlockBox& block : Blocks(shape, box, parts)) runs += block.runs;
  return runs;
}

std::vector<BoxRun> RunsOf(absl::Span<const uint64_t> shape, const Box& box, const Parts& parts) {
  std::vector<uint64_t> extents;
  for (const Range& range : box) extents.push_back(range.size());
  const std::vector<uint64_t> in_box = Strides(extents);
  std::vector<BoxRun> runs;
  uint64_t passed = 0;  // along the dimension of the parts, in the box
  for (const BlockBox& block : Blocks(shape, box, parts)) {
    const std::vector<uint64_t> in_block = Strides(block.shape);
    BoxRun run{block.begin, 0, ElementsOf(block.box) / block.runs};
    for (size_t d = 0; d < box.size(); ++d) run.in_tensor += block.box[d].begin * in_block[d];
    if (parts.count > 1) {
      run.in_box += passed * in_box[parts.dimension];
      passed += block.box[parts.dimension].size();
    }
    std::vector<uint64_t> index(block.whole);
    for (uint64_t i = 0; i < block.runs; ++i) {
      runs.push_back(run);
      for (size_t d = block.whole; d-- > 0;) {
        run.in_tensor += in_block[d];
        run.in_box += in_box[d];
        if (++index[d] < block.box[d].size()) break;
        run.in_tensor -= index[d] * in_block[d];
        run.in_box -= index[d] * in_box[d];
        index[d] = 0;
      }
    }
  }
  return runs;
}

uint64_t ElementsOf(absl::Span<const BoxRun> runs) {
  uint64_t elements = 0;
  for (const BoxRun& run : runs) elements += run.count;
  return elements;
}

bool VisitRuns(absl::Span<const BoxRun> runs, uint64_t first, uint64_t count,
               absl::FunctionRef<void(uint64_t in_box, uint64_t offset, uint64_t count)> visit) {
  auto run = std::partition_point(runs.begin(), runs.end(),
                                  [first](const BoxRun& each) { return each.in_tensor + each.count <= first; });
  for (uint64_t done = 0; done < count; ++run) {
    const uint64_t at = first + done;
    if (run == runs.end() || run->in_tensor > at) return false;
    const uint64_t part = std::min(run->in_tensor + run->count - at, count - done);
    visit(run->in_box + (at - run->in_tensor), done, part);
    done += part;
  }
  return true;
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

namespace {

// How many ranks the mesh has, and how it names them.
absl::Status CheckSizes(const v1::Mesh& mesh, uint32_t world_size) {
  const int axes = mesh.size_size();
  const bool listed = mesh.ranks_size() > 0;
  if (axes > kAxesMax) return BadMesh(absl::StrCat("has ", axes, " axes; at most ", kAxesMax, " are accepted"));
  uint64_t ranks = 1, last = mesh.first();
  for (int i = 0; i < axes; ++i) {
    const uint64_t size = mesh.size(i);
    if (size == 0 || size > kRanksMax || ranks * size > kRanksMax) {
      return BadMesh(absl::StrCat("has no rank, or more than ", kRanksMax));
    }
    ranks *= size;
    if (!listed && i < mesh.stride_size()) last += (size - 1) * mesh.stride(i);
  }
  if (listed) {
    if (static_cast<uint64_t>(mesh.ranks_size()) == ranks) return absl::OkStatus();
    return BadMesh(absl::StrCat("lists ", mesh.ranks_size(), " ranks and has sizes for ", ranks));
  }
  if (mesh.stride_size() != axes) {
    return BadMesh(absl::StrCat("has ", axes, " axes and ", mesh.stride_size(), " strides"));
  }
  if (last < world_size) return absl::OkStatus();
  return BadMesh(absl::StrCat("names rank ", last, "; the group has ", world_size));
}

absl::Status CheckRanks(const v1::Mesh& mesh, uint32_t world_size) {
  std::vector<uint32_t> named = RanksOf(mesh);
  std::sort(named.begin(), named.end());
  if (named.back() >= world_size) {
    return BadMesh(absl::StrCat("names rank ", named.back(), "; the group has ", world_size));
  }
  const auto twice = std::adjacent_find(named.begin(), named.end());
  return twice == named.end() ? absl::OkStatus() : BadMesh(absl::StrCat("names rank ", *twice, " twice"));
}

absl::Status CheckCuts(const v1::MeshCuts& part) {
  const int axes = part.mesh().size_size();
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

}  // namespace

absl::Status CheckMesh(const v1::MeshCuts& part, uint32_t world_size) {
  BALLAST_RETURN_IF_ERROR(CheckSizes(part.mesh(), world_size));
  BALLAST_RETURN_IF_ERROR(CheckRanks(part.mesh(), world_size));
  return CheckCuts(part);
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
