// A step simulated request by request, apart from the planner's own model: all requests in flight share the disk.
#pragma once

#include "absl/types/span.h"
#include "ballast/storage/placement/step_prediction.h"

namespace ballast::storage {

// Seconds of a step without its syncs, with the bounds of storage/store: 24 MiB of state reads in flight, 8 gradients,
// 4 MiB of flushes, 4 MiB of the log.
double SimulateStep(const StepShape& shape, const StateLayout& layout, absl::Span<const PlacedChunk> chunks);

}  // namespace ballast::storage
