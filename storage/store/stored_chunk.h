// One chunk as the store keeps it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "ballast/storage/placement/state_layout.h"
#include "ballast/storage/store/chunk_history.h"
#include "ballast/storage/store/chunk_memory.h"
#include "ballast/storage/store/state_on_disk.h"

namespace ballast::storage {

class StoredChunk {
 public:
  // `extent`: where the state lies, or the version that an earlier run left; else empty.
  StoredChunk(const StateLayout& l, uint64_t i, uint64_t n, uint64_t d, ChunkMemory m, NvmeExtent extent)
      : layout(l), index(i), elements(n), id(d), memory(std::move(m)), on_disk(std::move(extent)) {}

  const StateLayout layout;
  const uint64_t index;
  const uint64_t elements;
  const uint64_t id;  // in its job's layout

  uint64_t state_bytes() const { return layout.StateBytes(elements); }
  uint64_t working_bytes() const { return layout.WorkingBytes(elements); }
  StateView View(std::byte* base) const { return {&layout, base, elements}; }

  // Held by readers of the state until they have it, from the disk too, and by writers, before `mutex`, while they
  // change the state or its place: so nobody frees or overwrites what a read waits for. Readers of the working copy
  // need `mutex` alone and wait for no disk.
  mutable absl::Mutex reading ABSL_ACQUIRED_BEFORE(mutex);
  // Held by writers while they change the bytes in `memory`, and by readers while they copy. An update whose pieces
  // other threads compute is a change under way instead: readers lock `mutex` once `unchanging`.
  mutable absl::Mutex mutex;
  void BeginChange() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) { changing_ = true; }
  void EndChange() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) { changing_ = false; }
  absl::Condition unchanging() const {
    return absl::Condition(
        +[](const StoredChunk* chunk) ABSL_NO_THREAD_SAFETY_ANALYSIS { return !chunk->changing_; }, this);
  }

  ChunkMemory memory;
  StateOnDisk on_disk ABSL_GUARDED_BY(mutex);
  ChunkHistory history ABSL_GUARDED_BY(mutex);

 private:
  bool changing_ ABSL_GUARDED_BY(mutex) = false;
};

}  // namespace ballast::storage
