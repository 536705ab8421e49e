// What becomes of a chunk whose state on this server is damaged while the job runs (rule 33 of
// services/step/README.md). Where another server holds the chunk, this one gives up what it has, for good, and copies
// the chunk anew beside training (filling.h). A restart does the same (space/chunk_changes.h). Where nobody else holds
// it, the damage stays.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "ballast/services/job_state/job_mutex.h"
#include "ballast/storage/store/chunk_store.h"

namespace ballast::services {

class Filling;
class HeldChunk;
class JobCore;
class KeptCopies;

class DamagedChunks {
 public:
  DamagedChunks(JobCore* core, Filling* filling, KeptCopies* kept) : core_(core), filling_(filling), kept_(kept) {}

  // May this server give up the chunk with this index in the store?
  bool MayGiveUp(uint64_t store_index) const ABSL_LOCKS_EXCLUDED(job_lock);
  // On the worker, between runs of the store: gives the chunk up. `found`: the damage. Waits for leases of the chunk.
  // `found` if nobody else holds the chunk, when nothing has changed; other errors: the job ends.
  // In a recovery, on its thread: the chunk counts no more, and the end of the replay gives it up.
  absl::Status GiveUp(storage::ChunkStore* store, uint64_t store_index, const absl::Status& found)
      ABSL_LOCKS_EXCLUDED(job_lock);
  // The same of a chunk that counts no more already (HeldChunk::Damage), and that the store has made void.
  absl::Status End(storage::ChunkStore* store, const std::shared_ptr<HeldChunk>& chunk) ABSL_LOCKS_EXCLUDED(job_lock);
  // On any thread: a read of the chunk's present state ended with `read`. If that is damage that this server may give
  // up, it does so soon, and the answer is NOT_FILLED; else the answer is `read`.
  absl::Status Found(const std::shared_ptr<HeldChunk>& chunk, const absl::Status& read) ABSL_LOCKS_EXCLUDED(job_lock);
  // On the worker: these bytes, which a kept version needs, are damaged. True: they are copied from another server, and
  // the chunk stays as it is (kept_copies.h).
  bool FoundKept(const storage::ChunkStore& store, const storage::ScrubbedExtent& extent, const absl::Status& found)
      ABSL_LOCKS_EXCLUDED(job_lock);

 private:
  // The filled chunk with this index that another server holds; null: there is none.
  std::shared_ptr<HeldChunk> Find(uint64_t store_index) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // The catalog names the chunk's state no more, and the store knows that it does not count.
  absl::Status Forget(storage::ChunkStore* store, const HeldChunk& chunk) ABSL_LOCKS_EXCLUDED(job_lock);

  JobCore* const core_;
  Filling* const filling_;
  KeptCopies* const kept_;
};

}  // namespace ballast::services
