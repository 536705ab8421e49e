// Predicts from measured bandwidths how long a step over a job's chunks takes on this server: a pure function.
// The transfers and kernels of a step are played through as events (step_events.h), in the order in which the store
// does them: so a disk that waits for its turn counts, and a kernel that waits for the disk.
// Not counted: the time of trainers and network, pinned copies, and pulls from working copies.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "ballast/storage/placement/machine_profile.h"
#include "ballast/storage/placement/state_layout.h"
#include "ballast/storage/placement/tier_kind.h"

namespace ballast::storage {

// How the server runs a step.
struct StepShape {
  const MachineProfile* machine = nullptr;  // borrowed; null: nothing is predicted
  int threads = 1;                          // number of computing threads
  uint64_t staging_bytes = 0;               // buffers for NVMe state on its way
  bool durable = false;                     // new versions go to free extents
  bool logged = true;                       // durable: gradients go to the log
  // Durable: the share of state in memory that each step writes to disk so that the log can be cut, or for pins.
  double flushed_share = 0;
  int passes = 2;  // in each of which all parameters are pulled: forward and backward
  // The share of gradients that does not stay in memory and is read back from the log or from a spill.
  double read_back_share = 0;
};

// Seconds of one step.
struct StepPrediction {
  double compute = 0;     // kernels, and digests of state on its way to or from disk
  double disk_read = 0;   // reads of state and slices, if the disk did nothing else
  double disk_write = 0;  // writes of state, if the disk did nothing else
  double log_write = 0;   // writes of the log or spill, if the disk did nothing else
  double disk = 0;        // reads and writes together
  double disk_least = 0;  // as `disk`, or one after the other, if that is shorter
  double disk_idle = 0;   // time in which the disk waits for work that the step has for it
  double sync = 0;        // durable: syncs that somebody waits for
  double gpu_link = 0;    // gradients in, working copies out
  double total = 0;
  // Not part of `total`: over all passes, the extra cost of pulls of parameters that are not in memory as such. These
  // are reads of masters and of frozen chunks on NVMe, and rounding of masters.
  double pulls = 0;
  std::vector<std::string> unmeasured;  // used by the plan, but without a figure in the profile: counted as 0 s

  // The resource that has most to do: "compute", "the disk" or "the GPU's link", for which the job's thread waits.
  const char* binds() const;
  // Seconds of that resource's work, plus the syncs. No order of the same work takes less.
  double bound() const { return std::max(compute + gpu_link, disk_least) + sync; }

  // A paragraph for people: the resource that bounds the step, and the time of the other resources.
  std::string Explain() const;
};

// `chunks`: all the job's chunks on this server, in the order of the update. REQUIRES: shape.machine is set.
StepPrediction PredictStep(const StepShape& shape, const StateLayout& layout, absl::Span<const PlacedChunk> chunks);

}  // namespace ballast::storage
