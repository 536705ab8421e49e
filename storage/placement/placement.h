// Which chunk's state and working copy live in which tier, and how long a step will take: a pure function of budgets,
// sizes and measured bandwidths, testable without I/O.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ballast/storage/placement/state_layout.h"
#include "ballast/storage/placement/step_prediction.h"
#include "ballast/storage/placement/tier_kind.h"

namespace ballast::storage {

struct Plan {
  std::vector<ChunkPlacement> chunks;
  TierBytes state;  // as taken in each tier, alignment included
  TierBytes working;
  uint64_t durable_bytes = 0;                // on NVMe, of state that lives in memory
  uint64_t slice_bytes = 0;                  // of DRAM, for slices of the step in flight
  bool reads_back = false;                   // these do not hold all of a step: the rest comes back from the disk
  uint64_t read_back_bytes = 0;              // if so, in each step
  uint64_t spill_bytes = 0;                  // and of NVMe, where there is no log anyway
  std::optional<StepPrediction> prediction;  // of a step of all the job's chunks here; none without a profile
  // One paragraph for people: what went where, and why, and how long a step will take.
  std::string Explain() const;
};

struct PlanRequest {
  TierBytes free;                  // what may still be taken
  std::vector<uint64_t> elements;  // per chunk, in the next forward's order
  StateLayout layout;
  // DRAM that the job needs besides chunks: slices of the step in flight.
  uint64_t provisional_bytes_per_element = 4;
  // If these do not fit, slices are in memory only until they are in the job's log, or in a spill, and are read back
  // for the update. What that needs of DRAM:
  struct ReadBack {
    uint64_t shared_bytes = 0;  // gradients of chunks that several ranks have parts of, which stay until the update
    // Buffers for slices that come and slices that are read back.
    uint64_t buffer_bytes_min = 0;
    uint64_t buffer_bytes_max = 0;
    // And of NVMe, if there is no log anyway.
    uint64_t spill_bytes = 0;
  };
  std::optional<ReadBack> read_back;
  // DRAM for moving NVMe state, taken once if any chunk goes there.
  uint64_t staging_bytes = 0;
  // Of it, what durable state in HBM is flushed through, taken if any chunk goes there.
  uint64_t flush_buffer_bytes = 0;
  // Every chunk's state has its place on NVMe too, wherever it lives; and what the job needs there besides: room for
  // new versions, its log.
  bool durable = false;
  uint64_t nvme_fixed_bytes = 0;
  // For the prediction: chunks of the job that have their places already, and how the server runs a step.
  std::vector<PlacedChunk> placed;
  StepShape shape;
};

// State fills HBM, then DRAM, then NVMe; within a tier in the given order. Working copies go with HBM-resident state if
// they fit there, else to DRAM; provisional slices to DRAM, or as few of them as `read_back` allows. RESOURCE_EXHAUSTED
// (BUDGET) says how many bytes are missing in which tier, and which budget to raise.
absl::StatusOr<Plan> MakePlan(const PlanRequest& request);

// Bytes of DRAM without which no plan of these chunks can be, as far as NVMe takes the rest.
uint64_t LeastDram(const PlanRequest& request);

}  // namespace ballast::storage
