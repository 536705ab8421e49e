// A chunk of a job on this server, and a slice that was pushed to such a chunk.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include "ballast/kernels/kernels.h"
#include "ballast/kernels/optimizer.h"
#include "ballast/proto/model/epoch_plan.h"
#include "ballast/services/foundation/waiting.h"
#include "ballast/services/slices/intake.h"
#include "ballast/services/slices/slice_memory.h"
#include "ballast/storage/parity/block_parity.h"
#include "ballast/storage/placement/tier_kind.h"

namespace ballast::services {

// Guarded by the job's lock.
struct HeldChunk {
  HeldChunk(std::shared_ptr<SliceMemory> memory, uint64_t store_index, uint64_t id, uint64_t elements,
            storage::Frozen frozen, const kernels::OptimizerSpec& optimizer, bool logged)
      : store_index(store_index),
        id(id),
        elements(elements),
        frozen(frozen),
        logged(logged),
        intake(std::move(memory), elements, optimizer.gradient, logged,
               frozen == storage::Frozen::kNo ? kernels::Dtype::kF32 : optimizer.working) {}

  bool is_frozen() const { return frozen != storage::Frozen::kNo; }

  const uint64_t store_index;
  const uint64_t id;  // index in the layout of the Open that took the chunk
  const uint64_t elements;
  const storage::Frozen frozen;
  const bool logged;  // updates read its slices back from the log wherever Intake::Logs
  model::Chunk layout;
  std::optional<int64_t> version;  // none before its first Open
  int64_t changed = -1;            // the last transaction that changed it; -1: none
  int64_t first_version = 0;       // version of its registration; the chunk has no earlier version
  bool next_started = false;       // the update to version + 1 is running: reads of `version` may see its writes
  int updates_pending = 0;         // decided but unfinished: the intake's gradient is theirs
  Intake intake;
  Waiting::Queue pulls;
  std::map<uint64_t, Waiting::Queue> pushes;  // by first element of the slice: a place has a single writer at a time
};

// A slice whose bytes have come. The step machine hands it through to the journal with the slice's record.
struct PushedSlice {
  std::shared_ptr<HeldChunk> chunk;
  Intake::Receipt receipt;
  uint64_t bytes = 0;
  bool wants_parity = false;    // the job has a log
  storage::BlockParity parity;  // of the bytes, if it is wanted
  bool appended = false;        // set by the journal: the log has the record, and owns the buffer until it is written
};

}  // namespace ballast::services
