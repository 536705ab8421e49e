// Takes memory for the slices of a job whose chunks read them back from the log.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ballast/services/durability/flushes.h"
#include "ballast/services/job/job_core.h"
#include "ballast/services/job/slice_room.h"
#include "ballast/services/work/new_chunks.h"

namespace ballast::services {

// Threads: the worker, or the thread that recovers, unless a method says otherwise.
class SliceSpace {
 public:
  SliceSpace(JobCore* core, SliceRoom* room, Flushes* flushes) : core_(core), room_(room), flushes_(flushes) {}

  // Takes from `buffer_bytes`, the memory for such slices, the buffer that updates read into; the rest is for pushes.
  absl::Status TakeReadBack(const NewChunks& wanted, uint64_t buffer_bytes) ABSL_LOCKS_EXCLUDED(job_lock);
  // Memory that the chunks' slices need in this epoch's tiling, `spares` being chunks that no Open has adopted. 0 if
  // the reservation of the chunks suffices whatever the tiling. Under the job's lock.
  uint64_t NeededBytes(const model::EpochPlan& plan, absl::Span<const std::shared_ptr<HeldChunk>> chunks,
                       absl::Span<const std::shared_ptr<HeldChunk>> spares) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // Reserves so much memory; moves state to NVMe, then drops working copies, if there is no room. RESOURCE_EXHAUSTED
  // (BUDGET).
  absl::Status Reserve(uint64_t needed_bytes) ABSL_LOCKS_EXCLUDED(job_lock);

 private:
  // Moves the last chunk in DRAM, which the next forward needs latest. False if there is none.
  absl::StatusOr<bool> MoveOneDown(storage::ChunkStore* store);

  JobCore* const core_;
  SliceRoom* const room_;
  Flushes* const flushes_;
};

}  // namespace ballast::services
