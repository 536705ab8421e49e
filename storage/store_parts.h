// What the files of class ChunkStore share: chunk_store.cc takes and moves places, store_run.cc applies updates,
// store_reads.cc answers reads and pins, store_durable.cc takes back and pins what is on the disk.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "ballast/proto/model/status.h"
#include "ballast/storage/chunk_reader.h"
#include "ballast/storage/chunk_store.h"
#include "ballast/storage/durable_pins.h"
#include "ballast/storage/pinned_copy.h"
#include "ballast/storage/state_update.h"
#include "ballast/storage/stored_chunk.h"
#include "ballast/storage/tier/hbm_tier.h"
#include "ballast/storage/update_pipeline.h"
#include "ballast/storage/versioned_extents.h"

namespace ballast::storage {

inline absl::Status Bad(const char* reason, absl::string_view message) {
  return model::Error(absl::StatusCode::kInvalidArgument, reason, message);
}

inline absl::Status CheckRange(uint64_t chunk, uint64_t elements, uint64_t begin, uint64_t count) {
  if (begin <= elements && count <= elements - begin) return absl::OkStatus();
  return Bad(model::kBadRange, absl::StrCat("elements [", begin, ", ", begin, " + ", count, ") leave chunk ", chunk,
                                            " of ", elements, " elements"));
}

struct ChunkStore::Impl {
  Impl(Tiers* t, const StateLayout& l, kernels::ThreadPool* c, std::optional<DurableOptions> d)
      : tiers(t), compute(c), layout(l), reader(t) {
    if (!d.has_value()) return;
    versions.emplace(t->nvme(), *std::move(d));
    durable_pins.emplace(t->nvme());
  }
  ~Impl();

  absl::StatusOr<StoredChunk*> Find(uint64_t chunk) const;
  absl::Status CheckPlan(absl::Span<const ChunkToAdd> added, const Plan& plan) const;
  // So that states of this size can be moved; 0: none need be.
  absl::Status TakeStaging(uint64_t state_bytes, DramTier::Limit limit);
  // Whether a chunk's state may be there.
  absl::Status CheckTier(uint64_t chunk, uint64_t elements, TierKind state) const;
  // Of a chunk to be added beside a GPU.
  absl::StatusOr<ChunkMemory> OwnMemory(uint64_t elements, const ChunkPlacement& placement);
  absl::Status Move(StoredChunk& chunk, TierKind to);
  // For a state that is not on NVMe; empty if the chunk has it there already.
  absl::StatusOr<NvmeExtent> ExtentToMoveTo(const StoredChunk& chunk);
  // What chunks that are added take on NVMe; goes back unless the store takes it over.
  struct NvmeSpace {
    std::vector<NvmeExtent> extents;  // an entry per chunk
    BudgetLease room;                 // of a durable store: for new versions, and aside for automatic pins
    uint64_t spare_bytes = 0;
    uint64_t aside_bytes = 0;
  };
  absl::StatusOr<NvmeSpace> TakeNvme(absl::Span<const ChunkToAdd> added, const Plan& plan);
  // States that an earlier run left, into the tiers where the chunks live now.
  absl::Status RestoreAll(absl::Span<const ChunkToAdd> added, const std::vector<StoredChunk*>& chunks);
  // The same, of any extent: into `state`, in host memory, or into the chunk's if that is on a device; and the working
  // copy from it.
  absl::Status ReadDurable(const StoredChunk& chunk, const DurableChunk& durable, std::byte* state,
                           const Compute& with) const;
  // As ReadDurable, of a chunk that was never updated.
  absl::Status Clear(const StoredChunk& chunk, std::byte* state, const Compute& with) const;
  // `state`, in host memory, to where the chunk's is; and the working copy from it.
  absl::Status TakeState(const StoredChunk& chunk, std::byte* state, const Compute& with) const;
  // The rest of ReadDurable, once `state` was read.
  absl::Status TakeRead(const StoredChunk& chunk, const DurableChunk& durable, std::byte* state,
                        const Compute& with) const;
  absl::Status CheckRestored(const StoredChunk& chunk, const DurableChunk& durable, const std::byte* state,
                             const Compute& with) const;
  absl::Status Harden();
  // Durable: room for one more version of the chunk.
  absl::StatusOr<NvmeExtent> MakeRoom(const StoredChunk& chunk, UpdatePipeline& pipeline);
  // `fresh`: empty if the chunk's extent is fresh already.
  absl::Status StartVersion(StoredChunk& chunk, std::byte* state, int64_t version, NvmeExtent fresh)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(chunk.mutex);
  absl::StatusOr<std::vector<StoredChunk*>> CheckUpdates(absl::Span<const ChunkUpdate> updates) const;
  // `update` with what it has in the log, read and compared: its gradient is where `reads` has it, its values are in
  // their memory.
  absl::StatusOr<ChunkUpdate> FetchLogged(size_t i, const ChunkUpdate& update, UpdatePipeline& pipeline,
                                          LogReads& reads) const;
  absl::Status Apply(size_t i, const ChunkUpdate& update, StoredChunk& chunk, UpdatePipeline& pipeline);
  absl::Status ApplyOnDevice(const ChunkUpdate& update, StoredChunk& chunk) ABSL_EXCLUSIVE_LOCKS_REQUIRED(chunk.mutex);
  // The same, of an update of the master and what follows from it.
  absl::Status QueueUpdate(const ChunkUpdate& update, const StoredChunk& chunk, HbmQueue& queue) const;
  void CountUpdate(const ChunkUpdate& update, const StoredChunk& chunk) const;
  bool IsPinned(const StoredChunk& chunk) const;
  // Bytes of an array as the pin sees it.
  absl::Status ReadPinned(int64_t pin, const StoredChunk& chunk, StateArray array, uint64_t begin, uint64_t count,
                          ChunkReader::Sink sink);

  Tiers* const tiers;
  kernels::ThreadPool* const compute;
  const StateLayout layout;
  ChunkReader reader;
  // Destroyed in reverse: chunks (which return extents) before the memory they point into.
  std::deque<DramBlock> dram;  // addresses stay
  PipelineStaging staging;
  std::optional<VersionedExtents> versions;  // of a durable store
  std::optional<DurablePins> durable_pins;   // of the same
  bool discarded = false;
  std::vector<StoredChunk*> unrecorded;  // those with versions that are not recorded yet
  // A device that is full is no shortage that somebody can make room for, as a budget's is.
  static absl::Status Lasting(const absl::Status& status);
  absl::Status failed;  // of the thread that runs: what a disk did wrong is never tried again

  mutable absl::Mutex mutex;
  std::deque<StoredChunk> chunks ABSL_GUARDED_BY(mutex);   // addresses stay
  std::vector<PlacedChunk> placed ABSL_GUARDED_BY(mutex);  // as the chunks are, without their locks
  uint64_t runs ABSL_GUARDED_BY(mutex) = 0;
  Residency residency ABSL_GUARDED_BY(mutex);
  struct PinPoint {
    uint64_t runs = 0;    // before the pin
    uint64_t chunks = 0;  // that there were
  };
  absl::flat_hash_map<int64_t, PinPoint> pins ABSL_GUARDED_BY(mutex);
};

}  // namespace ballast::storage
