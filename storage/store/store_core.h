// Shared by the source files of class ChunkStore: chunk_store.cc moves chunks, store_addition.cc adds them,
// store_run.cc applies updates, store_reads.cc answers reads and pins, store_durable.cc keeps versions on the
// disk, store_scrub.cc reads what lies there.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "ballast/proto/base/status.h"
#include "ballast/storage/store/chunk_reader.h"
#include "ballast/storage/store/chunk_store.h"
#include "ballast/storage/store/pinned_copy.h"
#include "ballast/storage/store/read_pins.h"
#include "ballast/storage/store/state_restore.h"
#include "ballast/storage/store/store_buffers.h"
#include "ballast/storage/store/store_chunks.h"
#include "ballast/storage/store/store_scrub.h"
#include "ballast/storage/store/store_versions.h"
#include "ballast/storage/store/stored_chunk.h"
#include "ballast/storage/store/update_checks.h"

namespace ballast::storage {

// The parts of a store, and the verbs that need several of them. Threads: as ChunkStore's.
class StoreCore {
 public:
  StoreCore(Tiers* t, const StateLayout& l, kernels::ThreadPool* c, std::optional<DurableOptions> d,
            std::shared_ptr<Account> a)
      : tiers(t),
        account(std::move(a)),
        compute(c),
        layout(l),
        buffers(t, account),
        restore(t, c, &buffers.staging, d.has_value() ? d->job : "") {
    if (d.has_value()) versions.emplace(t->nvme(), *std::move(d), account);
  }
  ~StoreCore();

  // Null: the store is not durable, or has no such chunk.
  const DurableProgress* ProgressOf(uint64_t chunk) const;
  // Beside a GPU copies stay: page-locked memory cannot be given back in parts. A remainder means nothing without its
  // working copy.
  bool MayDropCopy(const StoredChunk& chunk) const {
    return tiers->hbm() == nullptr && chunk.layout.working_copies() && !chunk.layout.keeps_remainder() &&
           chunk.memory.placement().working.has_value();
  }
  // REQUIRES: MayDropCopy, and the memory for pulls is taken.
  void DropCopy(StoredChunk& chunk);
  // Can tier `state` hold the chunk's state?
  absl::Status CheckTier(uint64_t chunk, uint64_t elements, const StateLayout& of, TierKind state) const;
  absl::Status Move(StoredChunk& chunk, TierKind to);
  // An extent to move the chunk's state to; empty if the chunk's own extent holds the state already.
  absl::StatusOr<NvmeExtent> ExtentToMoveTo(const StoredChunk& chunk);
  // As ChunkStore::Harden.
  absl::Status Harden();
  // As ChunkStore::Void.
  void Void(StoredChunk& chunk);
  // UNAVAILABLE (BUSY) if a chunk is void.
  absl::Status CheckNoneVoid() const;
  // As ChunkStore::Remove, of a chunk of which nothing waits to be recorded. Returns the bytes of its NVMe place that
  // are still part of the room for versions.
  uint64_t Remove(StoredChunk& chunk);
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
  StoreBuffers buffers;
  const StateRestore restore;
  std::optional<StoreVersions> versions;  // durable store only
  StoreScrub scrub;
  StoreChunks chunks;
  ReadPins pins;

  // Store's thread: the error of a disk after which nothing is tried again.
  const absl::Status& failed() const { return failed_; }
  // `status` is OK or such an error. Returns it.
  absl::Status EndWith(absl::Status status) { return failed_ = std::move(status); }

 private:
  absl::Status failed_;
};

}  // namespace ballast::storage
