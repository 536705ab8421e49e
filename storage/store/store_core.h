// Shared by the source files of class ChunkStore: chunk_store.cc takes and moves places, store_run.cc applies updates,
// store_reads.cc answers reads and pins, store_durable.cc takes back state on the disk and keeps versions there,
// store_scrub.cc reads what lies there.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "ballast/proto/model/status.h"
#include "ballast/storage/chunk/chunk_reader.h"
#include "ballast/storage/chunk/pulled_copies.h"
#include "ballast/storage/chunk/stored_chunk.h"
#include "ballast/storage/extents/kept_extents.h"
#include "ballast/storage/extents/versioned_extents.h"
#include "ballast/storage/store/chunk_store.h"
#include "ballast/storage/store/pinned_copy.h"
#include "ballast/storage/store/store_scrub.h"
#include "ballast/storage/tier/hbm_tier.h"
#include "ballast/storage/update/state_update.h"
#include "ballast/storage/update/update_checks.h"
#include "ballast/storage/update/update_pipeline.h"

namespace ballast::storage {

struct StoreCore {
  StoreCore(Tiers* t, const StateLayout& l, kernels::ThreadPool* c, std::optional<DurableOptions> d,
            std::shared_ptr<Account> a)
      : tiers(t), account(std::move(a)), compute(c), layout(l), reader(t, account) {
    if (!d.has_value()) return;
    versions.emplace(t->nvme(), *std::move(d));
    durable_pins.emplace(t->nvme(), account);
  }
  ~StoreCore();

  absl::StatusOr<StoredChunk*> Find(uint64_t chunk) const;
  absl::Status CheckPlan(absl::Span<const ChunkToAdd> added, const Plan& plan) const;
  // Takes the staging memory to move states of this size; 0: no state needs moving.
  absl::Status TakeStaging(uint64_t state_bytes, DramTier::Limit limit);
  // Takes memory for pulls of chunks without a working copy, once.
  absl::Status TakePullMemory(const PullMemory& wanted, DramTier::Limit limit = DramTier::Limit::kBudget);
  // Beside a GPU copies stay: page-locked memory cannot be given back in parts. A remainder means nothing without its
  // working copy.
  bool MayDropCopy(const StoredChunk& chunk) const ABSL_SHARED_LOCKS_REQUIRED(mutex) {
    return tiers->hbm() == nullptr && chunk.layout.working_copies() && !chunk.layout.keeps_remainder() &&
           placed[chunk.index].placement.working.has_value();
  }
  // REQUIRES: MayDropCopy, and the memory for pulls is taken.
  void DropCopy(StoredChunk& chunk);
  // Can tier `state` hold the chunk's state?
  absl::Status CheckTier(uint64_t chunk, uint64_t elements, const StateLayout& of, TierKind state) const;
  // Memory for a new chunk on a server with a GPU, where chunks share no memory.
  absl::StatusOr<ChunkMemory> OwnMemory(const ChunkToAdd& added, const ChunkPlacement& placement);
  absl::Status Move(StoredChunk& chunk, TierKind to);
  // An extent to move the chunk's state to; empty if the chunk's own extent holds the state already.
  absl::StatusOr<NvmeExtent> ExtentToMoveTo(const StoredChunk& chunk);
  // NVMe space for new chunks; returned to the tier unless the store takes it over.
  struct NvmeSpace {
    std::vector<NvmeExtent> extents;  // an entry per chunk
    NvmeRoom room;                    // durable store: for new versions, and aside for automatic pins
    uint64_t spare_bytes = 0;
    uint64_t aside_bytes = 0;
  };
  absl::StatusOr<NvmeSpace> TakeNvme(absl::Span<const ChunkToAdd> added, const Plan& plan);
  // The part of it that no earlier run left.
  absl::Status TakeFreshNvme(absl::Span<const ChunkToAdd> added, const Plan& plan, NvmeSpace* space);
  // Takes back the states left by an earlier run, in the tiers where the chunks live now. A restart is over once
  // trainers can pull, and pulls need the master alone: the master and the label are read and checked here, moments
  // where the first update needs them (LoadMoments, UpdatePipeline). State in HBM is read whole.
  absl::Status RestoreAll(absl::Span<const ChunkToAdd> added, const std::vector<StoredChunk*>& chunks,
                          Interrupt interrupt);
  // Reads and checks the moments that RestoreAll left on the disk, of those chunks whose state lives in DRAM.
  // Store's thread, nothing in flight on its queue. DATA_LOSS (CHECKSUM), INTERNAL (IO), `interrupt`'s error, which is
  // asked before each chunk: then the chunks that were not read are as before.
  absl::Status LoadMoments(absl::Span<StoredChunk* const> chunks, Interrupt interrupt);
  // As LoadMoments, of one chunk, which may have them already, with a read of its own: transfers may be in flight.
  absl::Status LoadMoments(StoredChunk& chunk);
  // The rest of LoadMoments, once the moments were read from `file`.
  absl::Status TakeMoments(StoredChunk& chunk, const BlockFile& file, uint64_t read_bytes, const Compute& with);
  // Reads the state `durable` from its extent into `state`, in host memory, or into the chunk's own memory on a device,
  // and makes the working copy.
  absl::Status ReadDurable(const StoredChunk& chunk, const DurableChunk& durable, std::byte* state,
                           const Compute& with) const;
  // As ReadDurable, with the zero state of a chunk that was never updated.
  absl::Status Clear(const StoredChunk& chunk, std::byte* state, const Compute& with) const;
  // Copies `state`, in host memory, to the device if the chunk lives there, and makes the working copy.
  absl::Status TakeState(const StoredChunk& chunk, std::byte* state, const Compute& with) const;
  // The rest of ReadDurable, once `state` was read: checks label and digests, then TakeState.
  absl::Status TakeRead(const StoredChunk& chunk, const DurableChunk& durable, std::byte* state,
                        const Compute& with) const;
  // `durable` has been taken back, `read_bytes` of it read.
  void TakeDurable(StoredChunk& chunk, const DurableChunk& durable, uint64_t read_bytes, bool moments_unread) const;
  absl::Status CheckRestored(const StoredChunk& chunk, const DurableChunk& durable, const std::byte* state,
                             const Compute& with) const;
  absl::Status CheckLabel(const StoredChunk& chunk, const DurableChunk& durable, const std::byte* label) const;
  // Compares one array, at `bytes`, with its digest.
  absl::Status CheckArray(const BlockFile& file, const StoredChunk& chunk, uint64_t state_at,
                          const ArrayDigests& expected, StateArray array, const std::byte* bytes,
                          const Compute& with) const;
  absl::Status Harden();
  // Pins for reading that need the chunk's present state, ascending.
  std::vector<int64_t> PinsOf(const StoredChunk& chunk) const;
  // Elements of a chunk without a working copy, rounded from its master.
  absl::Status ReadRounded(const StoredChunk& chunk, uint64_t begin, uint64_t count, std::byte* to);
  // Reads bytes of an array at the pin's version.
  absl::Status ReadPinned(int64_t pin, const StoredChunk& chunk, StateArray array, uint64_t begin, uint64_t count,
                          ChunkReader::Sink sink);

  Tiers* const tiers;
  const std::shared_ptr<Account> account;  // whose all that the store takes is
  kernels::ThreadPool* const compute;
  const StateLayout layout;  // of chunks that are not frozen
  ChunkReader reader;
  DramBlock pull_memory;  // of `pulled` and of further buffers of `reader`
  PulledCopies pulled;
  // Destroyed in reverse: chunks (which return extents) before the memory they point into.
  std::deque<DramBlock> dram;  // addresses stay
  PipelineStaging staging;
  std::optional<VersionedExtents> versions;  // durable store only
  std::optional<KeptExtents> durable_pins;   // durable store only
  StoreScrub scrub;
  bool discarded = false;
  std::vector<StoredChunk*> unrecorded;  // chunks with versions that are not recorded yet
  // Turns RESOURCE_EXHAUSTED into INTERNAL, reason kept, for space that was taken beforehand: giving up a pin brings
  // none of it back.
  static absl::Status Lasting(const absl::Status& status);
  absl::Status failed;  // store's thread only: after an error of a disk nothing is tried again

  mutable absl::Mutex mutex;
  std::deque<StoredChunk> chunks ABSL_GUARDED_BY(mutex);   // addresses stay
  std::vector<PlacedChunk> placed ABSL_GUARDED_BY(mutex);  // the chunks' placements, readable without chunk locks
  uint64_t runs ABSL_GUARDED_BY(mutex) = 0;
  ChunkStore::Residency residency ABSL_GUARDED_BY(mutex);
  struct PinPoint {
    uint64_t runs = 0;    // number of runs before the pin
    uint64_t chunks = 0;  // number of chunks before the pin
  };
  absl::flat_hash_map<int64_t, PinPoint> pins ABSL_GUARDED_BY(mutex);
};

}  // namespace ballast::storage
