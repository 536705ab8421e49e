// Chooses a tier for each chunk's state and working copy, and predicts how long a step will take: a pure function of
// budgets, sizes and measured bandwidths, testable without I/O.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ballast/storage/placement/choice.h"
#include "ballast/storage/placement/state_layout.h"
#include "ballast/storage/placement/step_prediction.h"
#include "ballast/storage/placement/tier_kind.h"

namespace ballast::storage {

// DRAM for pulls of chunks without a working copy: slots, each for one copy, and buffers to read masters into.
struct PullMemory {
  uint64_t slots = 0;
  uint64_t slot_bytes = 0;
  uint64_t buffer_bytes = 0;
  uint64_t bytes() const { return slots * slot_bytes + buffer_bytes; }
};

struct Plan {
  std::vector<ChunkPlacement> chunks;
  TierBytes state;  // bytes taken in each tier, alignment included
  TierBytes working;
  uint64_t durable_bytes = 0;    // on NVMe, for state that lives in memory
  uint64_t slice_bytes = 0;      // DRAM for slices of the step in flight
  PullMemory pull;               // taken if a chunk has no working copy
  bool reads_back = false;       // `slice_bytes` do not hold a whole step: slices come back from the disk
  uint64_t read_back_bytes = 0;  // if reads_back: bytes read back in each step
  uint64_t spill_bytes = 0;      // if reads_back without a log: NVMe for the spill
  Choice choice;
  std::optional<StepPrediction> prediction;  // for a step of all the job's chunks here; none without a profile
  // The best plan among those with other places or slices.
  struct RunnerUp {
    Choice choice;
    StepPrediction prediction;
  };
  std::optional<RunnerUp> runner_up;
  // True if places and slices are the same, even if the choice was another.
  bool SameAs(const Plan& other) const;
  // A paragraph for people: the tiers chosen, why, how long a step will take, and what it would take otherwise.
  std::string Explain() const;
};

struct PlanRequest {
  TierBytes free;                  // budget that may still be taken
  std::vector<uint64_t> elements;  // per chunk, in the next forward's order
  std::vector<StateForm> forms;    // likewise; empty: no chunk is frozen
  StateLayout layout;
  StateLayout LayoutOf(size_t chunk) const {
    return LayoutOf(chunk, present.empty() ? ChunkPlacement() : present[chunk]);
  }
  StateLayout LayoutOf(size_t chunk, const ChunkPlacement& placement) const {
    return layout.Of(forms.empty() ? StateForm::kFull : forms[chunk], placement);
  }
  bool IsFrozen(size_t chunk) const { return !forms.empty() && storage::IsFrozen(forms[chunk]); }
  // Elements that steps update.
  uint64_t TrainedElements() const;
  // If not all working copies of chunks on NVMe fit in DRAM, those that do not are left out. Pulls then round the
  // masters, by way of this memory (zero: taken already). nullopt: working copies must fit.
  std::optional<PullMemory> pull;
  // DRAM for slices of the step in flight, which the job needs besides its chunks. Frozen chunks take none.
  uint64_t provisional_bytes_per_element = 4;
  // DRAM for values of frozen chunks: buffers on the way to and from the log, part of the slices' / or where there is
  // no log, for all of their first values until they are applied, which must be free, and is not taken.
  uint64_t value_buffer_bytes = 0;
  uint64_t passing_bytes = 0;
  // If slices of a whole step do not fit, a slice stays in memory only until it is in the job's log, or in a spill, and
  // is read back for the update. Memory needed in this case:
  struct ReadBack {
    uint64_t shared_bytes = 0;  // gradients of chunks shared by several ranks: stay in DRAM until the update
    // DRAM for slices on their way in and slices read back.
    uint64_t buffer_bytes_min = 0;
    uint64_t buffer_bytes_max = 0;
    // NVMe for the spill, if the job has no log.
    uint64_t spill_bytes = 0;
  };
  std::optional<ReadBack> read_back;
  // DRAM for moving NVMe state, taken once if any chunk goes to NVMe.
  uint64_t staging_bytes = 0;
  // The part of `staging_bytes` for flushes of durable state in HBM, taken if any chunk goes to HBM.
  uint64_t flush_buffer_bytes = 0;
  // A durable job needs a place on NVMe for every chunk's state, wherever the state lives. nvme_fixed_bytes: NVMe for
  // the job's log and for new versions.
  bool durable = false;
  uint64_t nvme_fixed_bytes = 0;
  // For the prediction: chunks of the job that are placed already and stay there.
  std::vector<PlacedChunk> placed;
  // If budgets change: where the chunks lie now, one entry per chunk. Working copies in HBM stay with their state, or
  // leave with it. No copy comes to HBM, and a chunk without a copy does not get one. Empty: the chunks are new.
  std::vector<ChunkPlacement> present;
  StepShape shape;  // how the server runs a step, for the prediction
};

// Arranges the chunks by every choice (choice.h), predicts a step of each plan that fits, and takes the shortest; of
// equal ones the simplest. Without a machine's profile nothing can be predicted, and the simplest choice is taken:
// state fills HBM, then DRAM, then NVMe, within a tier in the given order.
//
// By any choice, frozen chunks get DRAM first, since they are pulled in every pass, and are not in HBM. Working copies
// of state in HBM may go to HBM, all others go to DRAM, before any state; those that do not fit there are left out,
// evenly over the update (PlanRequest::pull). Provisional slices go to DRAM: all of a step's, or as few as
// `read_back` allows. RESOURCE_EXHAUSTED (BUDGET) names each tier that is short, the missing bytes and the budget to
// raise, of the plan that lacks least.
absl::StatusOr<Plan> MakePlan(const PlanRequest& request);

// The least DRAM for a plan of these chunks, if NVMe has room for the rest.
uint64_t LeastDram(const PlanRequest& request);

}  // namespace ballast::storage
