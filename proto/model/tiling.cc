#include "ballast/proto/model/tiling.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "ballast/proto/base/status.h"

namespace ballast::model {
namespace {

// Shortest piece of a box that replicas share: a shorter one costs a call of its own for little.
constexpr uint64_t kPieceElementsMin = 1 << 16;
// Of all boxes together. 70B in parts for TP 8, whole on one rank, has 10.5 million.
constexpr uint64_t kRunsMax = uint64_t{1} << 26;

absl::Status BadTiling(absl::string_view reason, absl::string_view message) {
  return Error(absl::StatusCode::kInvalidArgument, reason, message);
}

std::string ShowRange(const OwnedRange& r) {
  return absl::StrCat("[", r.range.begin, ", ", r.range.end, ") of rank ", r.rank);
}

absl::Status TooMany(uint64_t ranges) {
  return BadTiling(kBadRange, absl::StrCat("the ranks have ", ranges, " ranges or more; at most ", kRangesMax,
                                           " are accepted; cut tensors along their first dimension"));
}

// Ranges of one unit, by offset: inside the unit, disjoint, and together over every element of every live tensor.
absl::Status CheckUnit(const Layout& layout, uint32_t unit, absl::Span<const OwnedRange> ranges) {
  const Unit& u = layout.units()[unit];
  for (size_t i = 0; i < ranges.size(); ++i) {
    if (ranges[i].range.size() == 0 || ranges[i].range.end > u.elements) {
      return BadTiling(kBadRange, absl::StrCat("range ", ShowRange(ranges[i]), " must be non-empty and lie in unit '",
                                               u.name, "', which has ", u.elements, " elements"));
    }
    if (i > 0 && ranges[i].range.begin < ranges[i - 1].range.end) {
      return BadTiling(kOverlap,
                       absl::StrCat("in unit '", u.name, "' range ", ShowRange(ranges[i - 1]), " overlaps range ",
                                    ShowRange(ranges[i]), "; every element belongs to one rank"));
    }
  }
  for (const uint32_t index : u.tensors) {
    const Tensor& tensor = layout.tensors()[index];
    if (!layout.live(index)) continue;
    uint64_t covered = tensor.range.begin;
    auto next = std::upper_bound(ranges.begin(), ranges.end(), covered,
                                 [](uint64_t element, const OwnedRange& r) { return element < r.range.end; });
    for (; next != ranges.end() && next->range.begin <= covered && covered < tensor.range.end; ++next) {
      covered = next->range.end;
    }
    if (covered < tensor.range.end) {
      return BadTiling(kBadRange, absl::StrCat("element ", covered, " of unit '", u.name, "' (tensor '", tensor.name,
                                               "') belongs to no rank; the ranges must cover every tensor"));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<OwnedRange>> List(const Layout& layout, const v1::Tiling& tiling) {
  std::vector<OwnedRange> ranges;
  ranges.reserve(tiling.ranges_size());
  for (const v1::RankRange& r : tiling.ranges()) {
    const OwnedRange range{r.rank(), r.unit(), {r.begin(), r.end()}};
    if (r.unit() >= layout.units().size()) {
      return BadTiling(kBadRange, absl::StrCat("range ", ShowRange(range), " names unit ", r.unit(), "; the job has ",
                                               layout.units().size()));
    }
    if (r.rank() >= tiling.world_size()) {
      return BadTiling(kBadRange, absl::StrCat("range ", ShowRange(range), " of unit '", layout.units()[r.unit()].name,
                                               "' names a rank beyond world size ", tiling.world_size()));
    }
    ranges.push_back(range);
  }
  return ranges;
}

absl::StatusOr<std::vector<OwnedRange>> Even(const Layout& layout, uint32_t world_size) {
  std::vector<OwnedRange> ranges;
  for (uint32_t unit = 0; unit < layout.units().size(); ++unit) {
    const Unit& u = layout.units()[unit];
    for (size_t first = 0; first < u.chunks.size();) {
      // One registration batch: chunks without a gap between them.
      size_t last = first;
      while (last + 1 < u.chunks.size() &&
             layout.chunks()[u.chunks[last]].range.end == layout.chunks()[u.chunks[last + 1]].range.begin) {
        ++last;
      }
      const Range batch{layout.chunks()[u.chunks[first]].range.begin, layout.chunks()[u.chunks[last]].range.end};
      const uint64_t blocks = (batch.size() + kAlignElements - 1) / kAlignElements;
      if (ranges.size() + world_size > kRangesMax) return TooMany(ranges.size() + world_size);
      for (uint32_t rank = 0; rank < world_size; ++rank) {
        const Range range{batch.begin + blocks * rank / world_size * kAlignElements,
                          std::min(batch.end, batch.begin + blocks * (rank + 1) / world_size * kAlignElements)};
        if (range.size() > 0) ranges.push_back({rank, unit, range});
      }
      first = last + 1;
    }
  }
  return ranges;
}

// A rank's box of a tensor.
struct RankBox {
  Box box;
  uint32_t rank = 0;
};

bool Before(const RankBox& a, const RankBox& b) {
  for (size_t d = 0; d < a.box.size(); ++d) {
    if (a.box[d].begin != b.box[d].begin) return a.box[d].begin < b.box[d].begin;
    if (a.box[d].end != b.box[d].end) return a.box[d].end < b.box[d].end;
  }
  return a.rank < b.rank;
}

// Adds the ranges of the replicas `holders` (one box, ranks ascending).
void Share(const Tensor& tensor, absl::Span<const RankBox> holders, std::vector<OwnedRange>* ranges) {
  const Box& box = holders.front().box;
  const uint64_t elements = ElementsOf(box);
  const uint64_t pieces =
      std::clamp<uint64_t>((elements + kPieceElementsMin - 1) / kPieceElementsMin, 1, holders.size());
  const auto end_of = [&](uint64_t piece) {
    return piece + 1 == pieces ? elements : elements / pieces * (piece + 1) / kAlignElements * kAlignElements;
  };
  uint64_t piece = 0, passed = 0;  // elements of the box, by place in the tensor
  for (const BoxRun& run : RunsOf(tensor.shape, box, tensor.parts)) {
    for (uint64_t at = 0; at < run.count;) {
      while (end_of(piece) <= passed) ++piece;
      const uint64_t count = std::min(run.count - at, end_of(piece) - passed);
      const uint64_t begin = tensor.range.begin + run.in_tensor + at;
      const uint32_t rank = holders[(tensor.index + piece) % holders.size()].rank;
      // Runs that lie apart in the box may lie together in the tensor.
      if (!ranges->empty() && ranges->back().rank == rank && ranges->back().unit == tensor.unit &&
          ranges->back().range.end == begin) {
        ranges->back().range.end += count;
      } else {
        ranges->push_back({rank, tensor.unit, {begin, begin + count}});
      }
      at += count;
      passed += count;
    }
  }
}

absl::Status CheckPlacements(const Layout& layout, const v1::Tiling& tiling) {
  if (static_cast<size_t>(tiling.placement_of_size()) != layout.tensors().size()) {
    return BadTiling(kBadRange, absl::StrCat("the tiling has placements of ", tiling.placement_of_size(),
                                             " tensors; the job has ", layout.tensors().size()));
  }
  for (const uint32_t placement : tiling.placement_of()) {
    if (placement < static_cast<uint32_t>(tiling.placements_size())) continue;
    return BadTiling(kBadRange,
                     absl::StrCat("a tensor has placement ", placement, "; the tiling has ", tiling.placements_size()));
  }
  uint64_t ranks = 0;  // of all meshes: checked one mesh after another, so that a short message cannot name many
  for (const v1::Placement& placement : tiling.placements()) {
    for (const v1::MeshCuts& part : placement.meshes()) {
      BALLAST_RETURN_IF_ERROR(CheckMesh(part, tiling.world_size()));
      uint64_t of_mesh = 1;
      for (const uint32_t size : part.mesh().size()) of_mesh *= size;
      ranks += of_mesh;
      if (ranks > kRangesMax) return TooMany(ranks);
    }
  }
  return absl::OkStatus();
}

// All boxes of a tensor that are not empty, by box and rank, each rank once.
absl::StatusOr<std::vector<RankBox>> BoxesOf(const Tensor& tensor, const v1::Placement& placement) {
  std::vector<RankBox> boxes;
  for (const v1::MeshCuts& part : placement.meshes()) {
    const std::vector<uint32_t> ranks = RanksOf(part.mesh());
    for (size_t place = 0; place < ranks.size(); ++place) {
      BALLAST_ASSIGN_OR_RETURN(Box box, BoxAt(part, tensor.shape, place));
      if (ElementsOf(box) > 0) boxes.push_back({std::move(box), ranks[place]});
    }
  }
  std::sort(boxes.begin(), boxes.end(), Before);
  boxes.erase(std::unique(boxes.begin(), boxes.end(),
                          [](const RankBox& a, const RankBox& b) { return a.rank == b.rank && a.box == b.box; }),
              boxes.end());
  std::vector<uint32_t> ranks;
  for (const RankBox& each : boxes) ranks.push_back(each.rank);
  std::sort(ranks.begin(), ranks.end());
  if (const auto twice = std::adjacent_find(ranks.begin(), ranks.end()); twice != ranks.end()) {
    return BadTiling(kBadRange, absl::StrCat("rank ", *twice, " has two parts of tensor '", tensor.name,
                                             "'; expected one box of each tensor on a rank"));
  }
  return boxes;
}

absl::StatusOr<std::vector<OwnedRange>> Placed(const Layout& layout, const v1::Tiling& tiling) {
  BALLAST_RETURN_IF_ERROR(CheckPlacements(layout, tiling));
  std::vector<OwnedRange> ranges;
  uint64_t boxes_made = 0, runs = 0;
  for (const Tensor& tensor : layout.tensors()) {
    if (!layout.live(tensor.index)) continue;
    const v1::Placement& placement = tiling.placements(static_cast<int>(tiling.placement_of(tensor.index)));
    for (const v1::MeshCuts& part : placement.meshes()) {
      uint64_t ranks = 1;
      for (const uint32_t size : part.mesh().size()) ranks *= size;
      boxes_made += ranks;
    }
    if (boxes_made > kRangesMax) return TooMany(boxes_made);
    BALLAST_ASSIGN_OR_RETURN(const std::vector<RankBox> boxes, BoxesOf(tensor, placement));
    for (size_t first = 0; first < boxes.size();) {
      size_t last = first + 1;
      while (last < boxes.size() && boxes[last].box == boxes[first].box) ++last;
      // Runs of one rank may make one range, and cost time all the same.
      const uint64_t of_box = RunCount(tensor.shape, boxes[first].box, tensor.parts) + (last - first);
      runs += of_box;
      if (ranges.size() + of_box > kRangesMax || runs > kRunsMax) return TooMany(runs);
      Share(tensor, absl::MakeConstSpan(boxes).subspan(first, last - first), &ranges);
      first = last;
    }
  }
  return ranges;
}

}  // namespace

v1::Tiling EvenTiling(uint32_t world_size) {
  v1::Tiling tiling;
  tiling.set_world_size(world_size);
  tiling.set_division(v1::DIVISION_EVEN);
  return tiling;
}

absl::StatusOr<std::vector<OwnedRange>> Expand(const Layout& layout, const v1::Tiling& tiling) {
  if (tiling.world_size() == 0 || tiling.world_size() > kRanksMax) {
    return BadTiling(kBadRequest,
                     absl::StrCat("world_size must be from 1 to ", kRanksMax, ", got ", tiling.world_size()));
  }
  absl::StatusOr<std::vector<OwnedRange>> ranges;
  switch (tiling.division()) {
    case v1::DIVISION_UNSPECIFIED:
      ranges = List(layout, tiling);
      break;
    case v1::DIVISION_EVEN:
      ranges = Even(layout, tiling.world_size());
      break;
    case v1::DIVISION_PLACED:
      ranges = Placed(layout, tiling);
      break;
    default:
      return BadTiling(kBadRequest, absl::StrCat("division ", static_cast<int>(tiling.division()), " is unknown"));
  }
  BALLAST_RETURN_IF_ERROR(ranges.status());
  std::sort(ranges->begin(), ranges->end(), [](const OwnedRange& a, const OwnedRange& b) {
    return a.unit != b.unit ? a.unit < b.unit : a.range.begin < b.range.begin;
  });
  size_t next = 0;
  for (uint32_t unit = 0; unit < layout.units().size(); ++unit) {
    const size_t first = next;
    while (next < ranges->size() && (*ranges)[next].unit == unit) ++next;
    BALLAST_RETURN_IF_ERROR(CheckUnit(layout, unit, absl::MakeConstSpan(*ranges).subspan(first, next - first)));
  }
  return ranges;
}

std::vector<std::optional<Box>> HeldBoxes(const Layout& layout, const v1::Tiling& tiling, uint32_t rank) {
  std::vector<std::optional<Box>> boxes(layout.tensors().size());
  // By placement: the meshes that have the rank, and its place in each.
  std::vector<std::vector<std::pair<const v1::MeshCuts*, size_t>>> places(tiling.placements_size());
  for (int i = 0; i < tiling.placements_size(); ++i) {
    for (const v1::MeshCuts& part : tiling.placements(i).meshes()) {
      const std::vector<uint32_t> ranks = RanksOf(part.mesh());
      const auto at = std::find(ranks.begin(), ranks.end(), rank);
      if (at != ranks.end()) places[i].emplace_back(&part, at - ranks.begin());
    }
  }
  for (const Tensor& tensor : layout.tensors()) {
    if (!layout.live(tensor.index)) continue;
    if (tiling.division() != v1::DIVISION_PLACED) {
      boxes[tensor.index] = WholeOf(tensor.shape);
      continue;
    }
    for (const auto& [part, place] : places[tiling.placement_of(static_cast<int>(tensor.index))]) {
      absl::StatusOr<Box> box = BoxAt(*part, tensor.shape, place);
      if (box.ok() && ElementsOf(*box) > 0) boxes[tensor.index] = *std::move(box);
    }
  }
  return boxes;
}

}  // namespace ballast::model
