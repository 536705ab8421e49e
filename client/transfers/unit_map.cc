#include "ballast/client/transfers/unit_map.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/tiling.h"

namespace ballast::client {
namespace {

// Place of a unit's element in `ranges` laid end to end. REQUIRES: some range contains the element.
uint64_t OffsetOf(const std::vector<UnitRange>& ranges, uint64_t element) {
  uint64_t before = 0;
  for (const UnitRange& range : ranges) {
    if (element < range.end) return before + (element - range.begin);
    before += range.end - range.begin;
  }
  return before;
}

}  // namespace

UnitMap::UnitMap(std::shared_ptr<const model::EpochPlan> plan, int rank) : plan_(std::move(plan)), rank_(rank) {
  units_.resize(layout().units().size());
  for (uint32_t u = 0; u < units_.size(); ++u) {
    units_[u].elements = layout().units()[u].elements;
    units_[u].ranges.resize(plan_->world_size());
  }
  for (const model::Slice& slice : plan_->slices()) {  // by offset
    std::vector<UnitRange>& ranges = units_[slice.unit].ranges[slice.rank];
    if (ranges.empty() || ranges.back().end != slice.range.begin)
      ranges.push_back({slice.range.begin, slice.range.begin});
    ranges.back().end = slice.range.end;
  }
  for (UnitView& view : units_) {
    for (const UnitRange& range : view.ranges[rank_]) view.owned_elements += range.end - range.begin;
  }
  held_ = model::HeldBoxes(layout(), plan_->open().tiling(), static_cast<uint32_t>(rank));
  PlaceSlices();
  PlaceSegments();
  MakeRounds();
}

void UnitMap::PlaceSlices() {
  for (const uint32_t index : plan_->slices_of_rank(static_cast<uint32_t>(rank_))) {
    const model::Slice& slice = plan_->slices()[index];
    UnitView& view = units_[slice.unit];
    view.slices.push_back({slice, OffsetOf(view.ranges[rank_], slice.range.begin)});
  }
  for (UnitView& view : units_) {
    std::sort(view.slices.begin(), view.slices.end(),
              [](const OwnedSlice& a, const OwnedSlice& b) { return a.slice.range.begin < b.slice.range.begin; });
  }
}

void UnitMap::PlaceSegments() {
  for (uint32_t u = 0; u < units_.size(); ++u) {
    UnitView& view = units_[u];
    for (const uint32_t index : layout().units()[u].tensors) {
      if (!layout().live(index)) continue;
      const model::Range tensor = layout().tensors()[index].range;
      uint64_t before = 0;
      for (const UnitRange& range : view.ranges[rank_]) {
        const model::Range part = model::Intersect(tensor, {range.begin, range.end});
        if (part.size() > 0) {
          view.segments.push_back({index, part.begin - tensor.begin, part.size(), before + part.begin - range.begin});
        }
        before += range.end - range.begin;
      }
    }
    std::sort(view.segments.begin(), view.segments.end(),
              [](const OwnedSegment& a, const OwnedSegment& b) { return a.offset < b.offset; });
  }
}

void UnitMap::MakeRounds() {
  struct Part {
    UnitRange range;
    uint32_t rank;
  };
  for (UnitView& view : units_) {
    std::vector<Part> parts;
    for (uint32_t r = 0; r < view.ranges.size(); ++r) {
      for (const UnitRange& range : view.ranges[r]) parts.push_back({range, r});
    }
    std::sort(parts.begin(), parts.end(), [](const Part& a, const Part& b) { return a.range.begin < b.range.begin; });
    uint64_t covered = 0;
    for (size_t first = 0; first < parts.size();) {
      size_t last = first;
      while (last + 1 < parts.size() && parts[last + 1].range.begin == parts[last].range.end &&
             parts[last + 1].rank >= parts[last].rank) {
        ++last;
      }
      GatherRound round{parts[first].range.begin, parts[last].range.end, {}};
      round.offsets.assign(view.ranges.size() + 1, 0);
      for (size_t i = first; i <= last; ++i) {
        round.offsets[parts[i].rank + 1] += parts[i].range.end - parts[i].range.begin;
      }
      for (size_t r = 1; r < round.offsets.size(); ++r) round.offsets[r] += round.offsets[r - 1];
      if (round.begin > covered) view.gaps.push_back({covered, round.begin});
      covered = round.end;
      view.rounds.push_back(std::move(round));
      first = last + 1;
    }
    if (covered < view.elements) view.gaps.push_back({covered, view.elements});
  }
}

absl::Status UnitMap::CheckUnit(uint32_t unit) const {
  if (unit < units_.size()) return absl::OkStatus();
  return model::Error(absl::StatusCode::kNotFound, model::kUnknownUnit,
                      absl::StrCat("unit ", unit, " does not exist; the job has ", units_.size(),
                                   " unit(s), numbered from 0; FindUnit gives a unit's number by name"));
}

bool UnitMap::Covers(uint32_t tensor, absl::Span<const model::BoxRun> runs) const {
  const std::vector<OwnedSegment>& segments = units_[layout().tensors()[tensor].unit].segments;
  return std::all_of(segments.begin(), segments.end(), [&](const OwnedSegment& segment) {
    return segment.tensor != tensor ||
           model::VisitRuns(runs, segment.first, segment.count, [](uint64_t, uint64_t, uint64_t) {});
  });
}

const OwnedSlice* UnitMap::Find(uint32_t unit, model::Range range) const {
  if (unit >= units_.size()) return nullptr;
  for (const OwnedSlice& owned : units_[unit].slices) {
    if (owned.slice.range == range) return &owned;
  }
  return nullptr;
}

}  // namespace ballast::client
