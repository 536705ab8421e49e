// What new budgets mean for the jobs of a server: a pure function, like the plan that each of them gets anew.
#pragma once

#include <cstdint>
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
  uint64_t staging_bytes_missing = 0;       // that it will take once a chunk of it goes to NVMe
  uint64_t flush_buffer_bytes_missing = 0;  // of these, once a chunk of it goes to HBM, if it is durable
  StepShape shape;
};

// State moves between the tiers, and a working copy leaves HBM with it; all else that is `used` stays where it is. What
// HBM and DRAM are left for state is shared by the jobs in proportion to theirs, each in a plan of its own, of all its
// chunks. One plan per job, same order. RESOURCE_EXHAUSTED (BUDGET) with the bytes that are missing in which tier.
absl::StatusOr<std::vector<Plan>> PlanBudgets(const TierBytes& budget, const TierBytes& used,
                                              absl::Span<const JobHolding> jobs);

}  // namespace ballast::storage
