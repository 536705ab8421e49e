// The chunks of a store, and where each lives.
#pragma once

#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "ballast/storage/placement/tier_kind.h"
#include "ballast/storage/store/chunk_store.h"
#include "ballast/storage/store/stored_chunk.h"
#include "ballast/storage/tier/dram_tier.h"

namespace ballast::storage {

// A chunk before it is in the store.
struct NewChunk {
  StateLayout layout;
  uint64_t elements = 0;
  uint64_t id = 0;
  ChunkMemory memory;
  NvmeExtent extent;
};

// Threads: any may ask; the store's thread adds and moves. A chunk's address stays. Placements are readable without the
// chunks' locks.
class StoreChunks {
 public:
  // INVALID_ARGUMENT (BAD_RANGE): there is no such chunk, or it was removed.
  absl::StatusOr<StoredChunk*> Find(uint64_t chunk) const ABSL_LOCKS_EXCLUDED(mutex_);
  uint64_t count() const ABSL_LOCKS_EXCLUDED(mutex_);    // with gaps
  uint64_t present() const ABSL_LOCKS_EXCLUDED(mutex_);  // without
  // State of the largest that is present.
  uint64_t largest_bytes() const ABSL_LOCKS_EXCLUDED(mutex_);
  // Without gaps, by index.
  std::vector<StoredChunk*> All() const ABSL_LOCKS_EXCLUDED(mutex_);
  std::vector<PlacedChunk> placed() const ABSL_LOCKS_EXCLUDED(mutex_);
  ChunkStore::Residency residency() const ABSL_LOCKS_EXCLUDED(mutex_);

  // Keeps memory that chunks share, at an address that stays, as long as the chunks.
  DramBlock* Keep(DramBlock shared) { return &shared_.emplace_back(std::move(shared)); }
  // All at once for readers.
  std::vector<StoredChunk*> Append(std::vector<NewChunk> added) ABSL_LOCKS_EXCLUDED(mutex_);
  // The chunk's placement has changed.
  void Replace(const StoredChunk& chunk) ABSL_LOCKS_EXCLUDED(mutex_);
  // The chunk becomes a gap, which nobody finds. Its object stays, for whoever has found it before.
  void Remove(const StoredChunk& chunk) ABSL_LOCKS_EXCLUDED(mutex_);
  // Frees memory that chunks shared, where no chunk is left that has a part of it.
  void FreeUnshared() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  void CountOut(const StoredChunk& chunk) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CountIn(const StoredChunk& chunk) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Destroyed in reverse: chunks (which return extents) before the memory they point into.
  std::deque<DramBlock> shared_;
  mutable absl::Mutex mutex_;
  std::deque<StoredChunk> chunks_ ABSL_GUARDED_BY(mutex_);
  std::vector<PlacedChunk> placed_ ABSL_GUARDED_BY(mutex_);
  uint64_t present_ ABSL_GUARDED_BY(mutex_) = 0;
  ChunkStore::Residency residency_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ballast::storage
