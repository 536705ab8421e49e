// One chunk as the store keeps it.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "ballast/storage/chunk/chunk_update.h"
#include "ballast/storage/chunk/extent_label.h"
#include "ballast/storage/placement/placement.h"
#include "ballast/storage/tier/dram_tier.h"
#include "ballast/storage/tier/hbm_tier.h"
#include "ballast/storage/tier/nvme_tier.h"

namespace ballast::storage {

// A chunk's state for the pins made after run `from` (inclusive) and before run `to`.
struct PinnedCopy {
  uint64_t from = 0;
  uint64_t to = 0;
  bool zero = false;  // a state before the first update; takes no space
  absl::Status lost;  // not OK: the state could not be read when a restore replaced it; what readers are told
  NvmeExtent extent;  // empty: the state is in `dram`
  DramBlock dram;
  ArrayDigests digests = {};  // the extent's
  StateLayout layout;         // the copy's, which is whole without a working copy

  // REQUIRES: the state is in `dram`.
  StateView View(uint64_t elements) const { return {&layout, dram.bytes().data(), elements}; }
};

// Memory of a single chunk, in HBM or DRAM. Holds a state that moved up, and on a server with a GPU every state in
// memory: page-locked and device memory cannot be given back in parts, so chunks do not share blocks there. Also holds
// a working copy in HBM, or a working copy that left HBM.
struct ChunkMemory {
  HbmBlock hbm;
  DramBlock dram;
  HbmBlock hbm_working;
  DramBlock dram_working;
  void Charge(const std::shared_ptr<Account>& account) {
    hbm.Charge(account);
    dram.Charge(account);
    hbm_working.Charge(account);
    dram_working.Charge(account);
  }
};

struct StoredChunk {
  StoredChunk(const StateLayout& l, uint64_t i, uint64_t n, ChunkPlacement p, uint64_t d)
      : layout(l), index(i), elements(n), placement(p), id(d) {}

  const StateLayout layout;
  const uint64_t index;
  const uint64_t elements;
  // Written by the store's thread only, holding `mutex`; every other thread reads it holding `mutex`.
  ChunkPlacement placement;
  const uint64_t id;            // in its job's layout
  std::byte* state = nullptr;   // host or device memory; null on NVMe
  DramBlock* shared = nullptr;  // the block with `state`, while `state` is in DRAM and `own` is empty
  ChunkMemory own;
  std::byte* working = nullptr;  // host or device memory; null if the chunk has none beside its state

  uint64_t state_bytes() const { return layout.StateBytes(elements); }
  StateView View(std::byte* base) const { return {&layout, base, elements}; }

  // Held by readers of the state until they have it, from the disk too, and by writers, before `mutex`, while they
  // change the state or its place: so nobody frees or overwrites what a read waits for. Readers of the working copy
  // need `mutex` alone and wait for no disk.
  mutable absl::Mutex reading ABSL_ACQUIRED_BEFORE(mutex);
  // Held by writers while they change the memory behind `state` and `working`, and by readers while they copy. An
  // update whose pieces other threads compute is `changing` instead: readers lock `mutex` once `unchanging`.
  mutable absl::Mutex mutex;
  bool changing ABSL_GUARDED_BY(mutex) = false;
  absl::Condition unchanging() const {
    return absl::Condition(
        +[](const StoredChunk* chunk) ABSL_NO_THREAD_SAFETY_ANALYSIS { return !chunk->changing; }, this);
  }
  uint64_t updated_in ABSL_GUARDED_BY(mutex) = 0;  // run of the last update, from 1; 0: all zero, extent not written
  // The place of NVMe state; in a durable store also the last flushed version of state in memory.
  NvmeExtent extent ABSL_GUARDED_BY(mutex);
  ArrayDigests digests ABSL_GUARDED_BY(mutex) = {};
  std::byte* staged ABSL_GUARDED_BY(mutex) = nullptr;  // the newest state, while the extent does not hold it yet
  // State in DRAM, since a restart took back its master alone: the extent holds the moments, and nobody reads or writes
  // them in memory until StoreCore::LoadMoments has read them. `digests` are the extent's. Cleared by the store's
  // thread.
  bool moments_unread ABSL_GUARDED_BY(mutex) = false;
  std::vector<PinnedCopy> copies ABSL_GUARDED_BY(mutex);

  // Durable store only; used by the store's thread only.
  bool dirty = false;        // updated since the state was last written to its extent
  int64_t needed_from = -1;  // if dirty: the version before the first of these updates
  DurableChunk newest;       // the extent's content; version -1: nothing yet
  // `needed_from` before the oldest version that is not recorded yet: a crash would fall back to the version before.
  std::optional<int64_t> unrecorded_from;
  // A chunk that was never updated has no state, and perhaps no place in the job.
  bool has_state() const { return dirty || newest.version >= 0; }
};

}  // namespace ballast::storage
