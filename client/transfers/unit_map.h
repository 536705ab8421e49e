// One rank's view of an epoch's plan: the parts of each unit that the rank owns, their places in its buffers, and the
// rounds in which a unit is gathered. A pure function of the plan.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "ballast/client/session_types.h"
#include "ballast/proto/model/epoch_plan.h"
#include "ballast/proto/model/placement.h"

namespace ballast::client {

// A slice of this rank, and the place of its first element in the unit's owned ranges laid end to end.
struct OwnedSlice {
  model::Slice slice;
  uint64_t offset = 0;
};

// The part of a tensor in this rank's owned ranges: `offset` as above.
struct OwnedSegment {
  uint32_t tensor = 0;
  uint64_t first = 0;  // element of the tensor
  uint64_t count = 0;
  uint64_t offset = 0;
};

// Neighbouring ranges in rank order, gathered by a single all-gather in place. offsets[r], in elements from `begin`.
struct GatherRound {
  uint64_t begin = 0;
  uint64_t end = 0;
  std::vector<uint64_t> offsets;
};

struct UnitView {
  uint64_t elements = 0;
  uint64_t owned_elements = 0;
  std::vector<std::vector<UnitRange>> ranges;  // by rank, by offset
  std::vector<OwnedSlice> slices;              // by offset
  std::vector<OwnedSegment> segments;          // of live tensors, by offset
  std::vector<GatherRound> rounds;
  std::vector<UnitRange> gaps;  // in no rank's range: zeros
};

// All of a tensor, in the order in which servers have it.
inline std::vector<model::BoxRun> WholeRuns(const model::Tensor& tensor) {
  return model::RunsOf(tensor.shape, model::WholeOf(tensor.shape), tensor.parts);
}

class UnitMap {
 public:
  UnitMap(std::shared_ptr<const model::EpochPlan> plan, int rank);

  const model::EpochPlan& plan() const { return *plan_; }
  const model::Layout& layout() const { return plan_->layout(); }
  int rank() const { return rank_; }
  uint32_t unit_count() const { return static_cast<uint32_t>(units_.size()); }
  const UnitView& unit(uint32_t unit) const { return units_[unit]; }
  // INVALID_ARGUMENT / NOT_FOUND (UNKNOWN_UNIT).
  absl::Status CheckUnit(uint32_t unit) const;
  // The part of a tensor that this rank has, by index; nullptr: none. Every rank has the whole of each tensor unless
  // the tiling places tensors.
  const model::Box* Held(uint32_t tensor) const { return held_[tensor].has_value() ? &*held_[tensor] : nullptr; }
  // Whether all that this rank owns of the tensor lies in `runs`.
  bool Covers(uint32_t tensor, absl::Span<const model::BoxRun> runs) const;
  // The slice of this rank, or nullptr.
  const OwnedSlice* Find(uint32_t unit, model::Range range) const;

 private:
  void PlaceSlices();
  void PlaceSegments();
  void MakeRounds();

  std::shared_ptr<const model::EpochPlan> plan_;
  int rank_;
  std::vector<UnitView> units_;
  std::vector<std::optional<model::Box>> held_;  // by tensor
};

}  // namespace ballast::client
