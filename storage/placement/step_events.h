// A step as events on three resources: the worker that updates chunks one after the other, the disk's reads, and its
// writes. Bytes flow at the measured speeds; nothing is done earlier than storage/store does it:
// - Reads of state go ahead in the order of the update, 24 MiB of them together, while there is a free slot; a slot is
//   free again once its new state is written. Reads of gradients go ahead at the same time, with slots of their own.
// - The worker waits for the reads of its chunk. Kernels, digests and the GPU's link keep it busy, one after the other.
// - New state goes to the disk as soon as it is computed. Flushes of state in memory and writes of the log go on at the
//   same time; the log has the whole step. State in HBM is flushed by the worker, which waits for the disk.
// - Where the worker and the disk disturb each other, both are slower while both have work.
// - Reads share the disk's read speed, writes its write speed, in equal parts. Where both are under way, each has half
//   of the speed measured for a mixture.
#pragma once

#include <algorithm>
#include <cstdint>

#include "absl/types/span.h"

namespace ballast::storage {

// The work of one chunk. Bytes, and seconds of the worker.
struct ChunkWork {
  double gradient_read = 0;  // of slices read back
  double state_read = 0;     // state on NVMe
  double busy = 0;           // kernels, digests, the GPU's link
  double stored = 0;         // state that goes back to NVMe from its slot
  double flushed = 0;        // state in DRAM
  double spilled = 0;        // state in HBM, for which the worker waits
};

// Bytes per second, greater than 0.
struct DiskSpeeds {
  double read = 0;
  double write = 0;
  double mixed = 0;  // read and written together, in equal parts
  double BesideWrites() const { return std::min(read, mixed / 2); }
  double BesideReads() const { return std::min(write, mixed / 2); }
};

// Speed of either while both are busy, as a part of its speed alone: greater than 0, at most 1.
struct SideBySide {
  double worker = 1;
  double disk = 1;
};

struct StepTimes {
  double total = 0;      // until all is computed and on the disk
  double disk_idle = 0;  // the disk had nothing to do, although there was work for it still to come
};

// `work`: by chunk, in the order of the update. `slots`, `gradient_slots`: states and gradients that memory holds on
// their way, at least 1. Time in proportion to the chunks and to the transfers in flight.
StepTimes PlayStep(absl::Span<const ChunkWork> work, uint64_t slots, uint64_t gradient_slots, double log_bytes,
                   const DiskSpeeds& disk, const SideBySide& side_by_side = {});

}  // namespace ballast::storage
