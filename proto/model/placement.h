// The part of a tensor that a rank has: a box, cut out by the axes of a mesh of ranks.
//
// Every shard of FSDP2, HSDP, tensor and expert parallelism and their products is a box, if the cuts are made in order:
// the axes of model parallelism first, the axis of FSDP last.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ballast/proto/model/layout.h"
#include "ballast/v1/types.pb.h"

namespace ballast::model {

// Indices [begin, end) of each dimension. A tensor without dimensions is a box without intervals: one element.
using Box = std::vector<Range>;

inline constexpr int kAxesMax = 16;
inline constexpr uint32_t kRanksMax = 1 << 16;

uint64_t ElementsOf(const Box& box);
Box WholeOf(absl::Span<const uint64_t> shape);

// Elements that are contiguous both in the servers' order of the tensor and in the box's row-major order.
struct BoxRun {
  uint64_t in_tensor = 0;
  uint64_t in_box = 0;
  uint64_t count = 0;
  bool operator==(const BoxRun&) const = default;
};

// The number of runs of `box`, and the runs, by place in the tensor. `box` lies in `shape`.
uint64_t RunCount(absl::Span<const uint64_t> shape, const Box& box, const Parts& parts = {});
std::vector<BoxRun> RunsOf(absl::Span<const uint64_t> shape, const Box& box, const Parts& parts = {});
uint64_t ElementsOf(absl::Span<const BoxRun> runs);

// Cuts elements [first, first + count) of the tensor into parts that each lie in one of `runs` (from RunsOf). Calls
// `visit` with each part's place in the box, its distance from `first`, and its length. False if some element is in no
// run.
bool VisitRuns(absl::Span<const BoxRun> runs, uint64_t first, uint64_t count,
               absl::FunctionRef<void(uint64_t in_box, uint64_t offset, uint64_t count)> visit);

// Runs [first, last) of a list that are read together, as the elements `range` of the tensor, gaps included.
struct RunGroup {
  Range range;
  size_t first = 0;
  size_t last = 0;
};
// Groups of neighbours with at most `gap_max` elements between them.
std::vector<RunGroup> GroupRuns(absl::Span<const BoxRun> runs, uint64_t gap_max);

// INVALID_ARGUMENT (BAD_RANGE): a mesh of no or of too many ranks, doubled ranks, ranks beyond `world_size`, sizes that
// overflow, an axis that does not exist or is cut twice.
absl::Status CheckMesh(const v1::MeshCuts& part, uint32_t world_size);

// Ranks of a checked mesh, in row-major order of their coordinates.
std::vector<uint32_t> RanksOf(const v1::Mesh& mesh);

// The box that the rank at row-major place `place` of the mesh has; may be empty. INVALID_ARGUMENT (BAD_RANGE) if a cut
// names a dimension that the shape does not have.
absl::StatusOr<Box> BoxAt(const v1::MeshCuts& part, absl::Span<const uint64_t> shape, uint64_t place);

}  // namespace ballast::model
