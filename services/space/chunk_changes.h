// What Opens of other tables change of a job's chunks on this server (rules 25 and 28 of services/step/README.md).
// Chunks that the server has to copy first are void until they are filled. Chunks that it gives up leave at once, and
// their bytes go once the Open is durable: before that a crash brings the earlier table back.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "ballast/proto/model/epoch_plan.h"
#include "ballast/services/job_state/held_chunk.h"
#include "ballast/services/job_state/job_mutex.h"
#include "ballast/storage/store/chunk_store.h"
#include "ballast/v1/log.pb.h"

namespace ballast::services {

class ChunkMoves;
class EarlierExtents;
class JobCore;
class SliceRoom;

class ChunkChanges {
 public:
  ChunkChanges(JobCore* core, SliceRoom* room, EarlierExtents* earlier, ChunkMoves* moves)
      : core_(core), room_(room), earlier_(earlier), moves_(moves) {}

  // As StepHost, once the core has the plan and its chunks. In a recovery also after a snapshot that begins a log.
  void Opened() ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // As StepHost: has the worker free what the server gave up.
  void TableDurable() ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // In a recovery, after the last record: chunks that the log calls unfilled are filled if the disk has a state of them
  // that may count, and what the plan does not give to this server is freed. Chunks that the log calls filled and the
  // disk has no state of become unfilled if another server holds them, else DATA_LOSS (DIVERGED, CHECKSUM).
  absl::Status EndReplay() ABSL_LOCKS_EXCLUDED(job_lock);

 private:
  // On the worker.
  void Free() ABSL_LOCKS_EXCLUDED(job_lock);
  // What the store has of the chunks counts no more, for good: first the catalog forgets it. Those that are leaving are
  // freed, with what pins keep of them; the others keep their places, and pins what they keep of them. A restart takes
  // a state of the latter that the catalog names for a copy.
  absl::Status Forget(storage::ChunkStore* store, const HeldChunks& leaving, const HeldChunks& lacked)
      ABSL_LOCKS_EXCLUDED(job_lock);
  void Unreserve(const storage::ChunkStore& store, const HeldChunks& chunks) ABSL_LOCKS_EXCLUDED(job_lock);
  // Pins keep nothing of these chunks, by their store's indices, as far as a restart looks.
  absl::Status LeavePins(const storage::ChunkStore& store, absl::Span<const uint64_t> chunks)
      ABSL_LOCKS_EXCLUDED(job_lock);
  std::vector<v1::PinnedVersion> Pins() const ABSL_LOCKS_EXCLUDED(job_lock);
  // What the catalog names of chunks, and of pins, that no chunk took. `store` may be null.
  absl::Status FreeEarlier(const storage::ChunkStore* store) ABSL_LOCKS_EXCLUDED(job_lock);
  void FreeExtent(const storage::DurableChunk& extent) const;
  // In a recovery: what the log calls filled and the disk has no state of. DATA_LOSS unless another server holds it.
  absl::Status GiveUp(HeldChunk* chunk) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // The plan's chunks that the server lacks.
  HeldChunks Lacked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);

  JobCore* const core_;
  SliceRoom* const room_;
  EarlierExtents* const earlier_;
  ChunkMoves* const moves_;
};

}  // namespace ballast::services
