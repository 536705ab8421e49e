// How long one step over a job's chunks takes on this server, predicted from measured bandwidths: a pure function.
//
// Three resources work at the same time: the job's threads, the disk, the GPU's link as far as it is waited for.
// Reads and writes share the disk (measured together: equal parts at the mixed speed, the rest at its own), and a
// kernel waits for its chunk's state. So a step takes the longer of all compute and all transfers; the disk is idle
// only while chunks in memory that come before the first on NVMe are updated and the staging buffers are full.
// Not counted: what trainers and the network take, pulls, pinned copies.
#pragma once

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
  int threads = 1;                          // that compute
  uint64_t staging_bytes = 0;               // of buffers for NVMe state on its way
  bool durable = false;                     // new versions go to free extents
  bool logged = true;                       // durable: gradients go to the log
  // Durable: of state that lives in memory, the share that goes to the disk with each step so that the log can be cut,
  // or for pins.
  double flushed_share = 0;
  // Of gradients, the share that does not stay in memory and is read back from the log, or from a spill that it was
  // written to.
  double read_back_share = 0;
};

// Seconds of one step.
struct StepPrediction {
  double compute = 0;     // kernels, and the digests of state that moves
  double disk_read = 0;   // each if it had the disk for itself; of state and of slices that are read back
  double disk_write = 0;  // of state
  double log_write = 0;
  double disk = 0;       // all three
  double disk_idle = 0;  // before the disk has work that it may begin
  double sync = 0;       // durable: syncs that somebody waits for
  double gpu_link = 0;   // gradients in, working copies out
  double total = 0;
  std::vector<std::string> unmeasured;  // what the plan uses and the profile has no figure for: counted as nothing

  // One paragraph for people: which resource bounds the step, and what the others take.
  std::string Explain() const;
};

// `chunks`: all of the job's on this server, in the order of the update. REQUIRES: shape.machine.
StepPrediction PredictStep(const StepShape& shape, const StateLayout& layout, absl::Span<const PlacedChunk> chunks);

}  // namespace ballast::storage
