// A step simulated request by request, apart from the planner's own model: what is in flight shares the disk.
#pragma once

#include "absl/types/span.h"
#include "ballast/storage/placement/step_prediction.h"

namespace ballast::storage {

// Seconds of a step without its syncs. As storage/update runs it: at most 24 MiB of states are being read at a time, 8
// gradients, one part of 4 MiB of the flushes, and one of the log.
double SimulateStep(const StepShape& shape, const StateLayout& layout, absl::Span<const PlacedChunk> chunks);

}  // namespace ballast::storage
