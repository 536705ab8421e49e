// One chunk as the store keeps it.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "ballast/storage/chunk_store.h"
#include "ballast/storage/extent_label.h"
#include "ballast/storage/placement/placement.h"
#include "ballast/storage/tier/dram_tier.h"
#include "ballast/storage/tier/hbm_tier.h"
#include "ballast/storage/tier/nvme_tier.h"

namespace ballast::storage {

// A chunk's state as some pins see it: those made after run `from` (inclusive) and before run `to`.
struct PinnedCopy {
  uint64_t from = 0;
  uint64_t to = 0;
  bool zero = false;  // before the first update; takes no space
  NvmeExtent extent;  // empty: `dram`
  DramBlock dram;
  ArrayDigests digests = {};  // of the extent
};

// Of one chunk alone, in HBM or DRAM: of a state that moved up, and of all states beside a GPU, where nothing is
// shared, since pinned and device memory cannot be given back in parts; of a working copy in HBM, and of one that came
// from there.
struct ChunkMemory {
  HbmBlock hbm;
  DramBlock dram;
  HbmBlock hbm_working;
  DramBlock dram_working;
};

struct StoredChunk {
  StoredChunk(const StateLayout* l, uint64_t i, uint64_t n, ChunkPlacement p, uint64_t d)
      : layout(*l), index(i), elements(n), placement(p), id(d) {}

  const StateLayout& layout;  // the store's
  const uint64_t index;
  const uint64_t elements;
  // Of the thread that runs the store, which changes it under the lock: others read it under that.
  ChunkPlacement placement;
  const uint64_t id;            // in its job's layout
  std::byte* state = nullptr;   // host or device memory; null on NVMe
  DramBlock* shared = nullptr;  // what `state` lies in while it is in DRAM and `own` is empty
  ChunkMemory own;
  std::byte* working = nullptr;  // host or device memory; null if the store keeps none

  uint64_t state_bytes() const { return layout.StateBytes(elements); }
  StateView View(std::byte* base) const { return {&layout, base, elements}; }

  // Writers hold it while they change what `state` and `working` point to, readers while they copy.
  mutable absl::Mutex mutex;
  uint64_t updated_in ABSL_GUARDED_BY(mutex) = 0;  // the run, from 1; 0: all zero, and an extent not written yet
  // Of NVMe state; in a durable store also what was last flushed of other state.
  NvmeExtent extent ABSL_GUARDED_BY(mutex);
  ArrayDigests digests ABSL_GUARDED_BY(mutex) = {};
  std::byte* staged ABSL_GUARDED_BY(mutex) = nullptr;  // the newest state, while the extent does not hold it yet
  std::vector<PinnedCopy> copies ABSL_GUARDED_BY(mutex);

  // Of a durable store; of the thread that runs it.
  bool dirty = false;        // updated since it was last written to its extent
  int64_t needed_from = -1;  // if dirty: the version before the first of these updates
  DurableChunk newest;       // what the extent holds; version -1: nothing yet
  // What `needed_from` was before versions that are not recorded yet: a crash would leave the one before them.
  std::optional<int64_t> unrecorded_from;
  // One that was never updated has none, and perhaps no place in the job.
  bool has_state() const { return dirty || newest.version >= 0; }
};

}  // namespace ballast::storage
