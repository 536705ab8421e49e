// The tiling of an Open: which rank pushes which elements, and which elements it has. Clients and servers compute it
// alike.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "ballast/proto/model/layout.h"
#include "ballast/proto/model/placement.h"
#include "ballast/v1/types.pb.h"

namespace ballast::model {

// Ranges of all ranks together. A tiling with more is refused, before memory is taken for them.
inline constexpr uint64_t kRangesMax = uint64_t{1} << 22;

// Elements of a unit that one rank pushes.
struct OwnedRange {
  uint32_t rank = 0;
  uint32_t unit = 0;
  Range range;
};

// Cuts every unit into `world_size` runs of about equal size.
v1::Tiling EvenTiling(uint32_t world_size);

// The ranges of all ranks, by (unit, begin). INVALID_ARGUMENT for a tiling with ranges outside a unit, overlaps
// (OVERLAPPING_RANGES names unit and both ranges), unowned elements of live tensors, or too many ranges.
// Replicas of a box share the pushing. Expand cuts the box, in the order of the tensor's elements, into as many pieces
// as it has replicas, but at most one for each 65,536 elements begun. The replicas take turns, and each tensor begins
// with another replica.
absl::StatusOr<std::vector<OwnedRange>> Expand(const Layout& layout, const v1::Tiling& tiling);

// By tensor: the box that `rank` has; none if it has no element, or a later registration replaced the tensor. Without
// DIVISION_PLACED every rank has each tensor. REQUIRES: Expand took the tiling.
std::vector<std::optional<Box>> HeldBoxes(const Layout& layout, const v1::Tiling& tiling, uint32_t rank);

}  // namespace ballast::model
