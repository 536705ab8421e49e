// The versions of a durable store's chunks on the disk: the next ones and where they go, the recorded ones, and those
// that pins keep.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "ballast/storage/store/chunk_reader.h"
#include "ballast/storage/store/chunk_update.h"
#include "ballast/storage/store/durable_progress.h"
#include "ballast/storage/store/kept_extents.h"
#include "ballast/storage/store/stored_chunk.h"
#include "ballast/storage/store/versioned_extents.h"

namespace ballast::storage {

// Turns RESOURCE_EXHAUSTED into INTERNAL, reason kept, for space that was taken beforehand: giving up a pin brings none
// of it back.
absl::Status Lasting(const absl::Status& status);

// Threads: the store's thread.
class StoreVersions {
 public:
  // `account`: whose all that pins take is.
  StoreVersions(NvmeTier* nvme, DurableOptions options, std::shared_ptr<Account> account)
      : extents(nvme, std::move(options)), pins(nvme, std::move(account)) {}
  // As ChunkStore::Discard.
  void Discard();
  bool discarded() const { return discarded_; }

  // The store's next chunk, with the version that an earlier run left.
  void Add(const std::optional<DurableChunk>& newest) { progress_.emplace_back(newest); }
  // As ChunkStore::Void.
  void Void(const StoredChunk& chunk) { progress_[chunk.index].Void(); }
  // The chunk is about to go, and nobody has its entry any more: nothing of it is recorded, or kept for a restart.
  void Forget(const StoredChunk& chunk);
  const DurableProgress& Of(const StoredChunk& chunk) const { return progress_[chunk.index]; }

  // An extent for the chunk's next version, after older versions were hardened if room was short. INTERNAL.
  absl::StatusOr<NvmeExtent> TakeFresh(const StoredChunk& chunk);
  // An update that goes to memory alone has made `version` of the chunk.
  void Update(const StoredChunk& chunk, int64_t version) { progress_[chunk.index].Update(version); }
  // Begins the chunk's next version in the extent `fresh`, which is empty if the chunk's extent is fresh already.
  // Labels `state`, in host memory, for its way to the extent.
  void Start(StoredChunk& chunk, std::byte* state, int64_t version, NvmeExtent fresh)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(chunk.mutex);
  // As Start, for state on a device, which `reader` writes to the extent; readers of the working copy do not wait.
  // INTERNAL (IO): the chunk keeps its last version.
  absl::Status Spill(ChunkReader* reader, StoredChunk& chunk, int64_t version, NvmeExtent fresh)
      ABSL_SHARED_LOCKS_REQUIRED(chunk.reading) ABSL_LOCKS_EXCLUDED(chunk.mutex);
  // As VersionedExtents::Harden.
  absl::Status Harden();
  // The entry of the chunk's `version` in `extent`, without digests.
  DurableChunk EntryOf(const StoredChunk& chunk, int64_t version, const NvmeExtent& extent) const;

  VersionedExtents extents;
  KeptExtents pins;

 private:
  void Expect(const StoredChunk& chunk, int64_t version);
  // The chunk moves on to the version `entry`.
  void Take(StoredChunk& chunk, const DurableChunk& entry, NvmeExtent fresh) ABSL_EXCLUSIVE_LOCKS_REQUIRED(chunk.mutex);

  std::vector<DurableProgress> progress_;  // of each chunk
  std::vector<uint64_t> unrecorded_;       // chunks with versions that are not recorded yet
  bool discarded_ = false;
};

}  // namespace ballast::storage
