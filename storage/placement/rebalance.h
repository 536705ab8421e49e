// New plans for a server's jobs when its budgets change: a pure function.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ballast/storage/placement/placement.h"

namespace ballast::storage {

// A job as it lies on the server now.
struct JobHolding {
  std::string name;
  std::vector<PlacedChunk> chunks;  // in the order of the update
  StateLayout layout;
  bool durable = false;
  uint64_t staging_bytes_missing = 0;       // DRAM that the job takes once a chunk goes to NVMe
  uint64_t flush_buffer_bytes_missing = 0;  // the part of it that a durable job takes once a chunk goes to HBM
  // Working copies in DRAM may go, by way of this memory for pulls (PlanRequest::pull). nullopt: they stay.
  std::optional<PullMemory> pull;
  StepShape shape;
};

// Compares every choice of MakePlan that fits, the same for all jobs, by the seconds of 100 steps and of the moves
// before them. So a plan moves more than it must only if the faster steps repay the moves within 100 steps
// (kStepsToRepay). Without a machine's profile it takes the first choice. Slices stay in memory, or are read back, as
// before.
//
// State moves between the tiers, and a working copy leaves HBM with its state. If DRAM has no room for all working
// copies, each job that can do without drops some, in proportion to the size of its copies; dropped copies do not come
// back. Everything else in `used` stays. Jobs share the HBM and DRAM that are left for state, in proportion to the size
// of their state. Returns a plan for each job, in the same order, with all its chunks. RESOURCE_EXHAUSTED (BUDGET)
// names the tier and the missing bytes.
absl::StatusOr<std::vector<Plan>> PlanBudgets(const TierBytes& budget, const TierBytes& used,
                                              absl::Span<const JobHolding> jobs);

}  // namespace ballast::storage
