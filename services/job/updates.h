// Decided steps become updates of chunks, on the worker and in the order of decisions.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "absl/status/statusor.h"
#include "ballast/services/job_state/job_mutex.h"
#include "ballast/services/journal/log_length.h"
#include "ballast/services/threads/waiting.h"
#include "ballast/v1/state_service.pb.h"

namespace ballast::services {

class ChunkMoves;
class DamagedChunks;
class Flushes;
class HeldChunk;
class JobCore;
class JobJournal;
class LentMemory;
class ReadPins;
class SliceRoom;
struct StepWork;

// Guarded by the job's lock, unless a method says otherwise.
class Updates {
 public:
  Updates(JobCore* core, JobJournal* journal, SliceRoom* room, Flushes* flushes, ReadPins* pins, ChunkMoves* moves,
          DamagedChunks* damaged)
      : core_(core),
        journal_(journal),
        room_(room),
        flushes_(flushes),
        pins_(pins),
        moves_(moves),
        damaged_(damaged),
        log_length_(core, journal) {}

  // The work of a decided step. The chunks' intakes are empty afterwards. As StepHost, to which Post belongs as well
  // unless the step is replayed.
  std::shared_ptr<StepWork> Prepare(const v1::PreparedRecord& prepared, const v1::Decision& decision)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void Post(std::shared_ptr<StepWork> work) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // Decided steps that wait for the worker. Beyond the bound no further step is taken.
  int queued() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) { return queued_; }
  bool full() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // Do all chunks, or only those of `unit`, show the version?
  bool Show(int64_t version, std::optional<uint32_t> unit) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // In a replay: DATA_LOSS (DIVERGED) if the step needs a slice of the chunk, or a pin to restore, that is missing.
  absl::Status CheckHeld(const HeldChunk& chunk, const v1::PreparedRecord& prepared) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);

  // In a replay: a chunk of which the log lacks slices of the step counts no more if another server holds it. It was
  // being filled or given up when the step was prepared, or the log is damaged.
  void GiveUpUnheld(const v1::PreparedRecord& prepared) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);

  // Before a step's work runs: as PassOverOthers of step_work.h.
  void PassOverOthers(StepWork* work, Replies* replies) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);

  // On the worker, or a thread of the recovery. PrepareReadBack comes first: memory for slices that are read from the
  // log. `log`: where they are; null if there are none.
  absl::Status PrepareReadBack(StepWork* work) ABSL_LOCKS_EXCLUDED(job_lock);
  absl::Status Run(storage::ChunkStore* store, StepWork* work, const storage::BlockFile* log)
      ABSL_LOCKS_EXCLUDED(job_lock);

 private:
  // The memory lent for this decided step; null if there is none.
  std::shared_ptr<LentMemory> TakeLent(const v1::PreparedRecord& prepared) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // In a replay: a chunk without a state on the disk whose slices the log does not hold any more is void. A later Open
  // of the log may have taken it away; ChunkChanges::EndReplay judges.
  void VoidGivenUp(const v1::PreparedRecord& prepared) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // Moments that a restart has left on the disk, ahead of the updates that need them: a chunk of which they are damaged
  // is given up where that may be, and its update is passed over.
  absl::Status LoadMoments(storage::ChunkStore* store, StepWork* work) ABSL_LOCKS_EXCLUDED(job_lock);
  // In a replay: CheckHeld for all chunks that the step changes.
  absl::Status CheckAllHeld(const StepWork& work, const v1::PreparedRecord& prepared) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  void RunStep(StepWork* work) ABSL_LOCKS_EXCLUDED(job_lock);
  // Blocks until the chunks of some updates from `first` on, which then come first, have no leases; returns how many.
  absl::StatusOr<size_t> AwaitLeases(StepWork* work, size_t first) ABSL_LOCKS_EXCLUDED(job_lock);
  // The chunk of the i-th update has its new version, and `returned` buffers have come back. `damage`: or the chunk's
  // old state was damaged, and nothing of it counts.
  void Done(StepWork* work, size_t i, size_t returned, const absl::Status& damage) ABSL_LOCKS_EXCLUDED(job_lock);
  void NoteCommitted(int64_t step);

  JobCore* const core_;
  JobJournal* const journal_;
  SliceRoom* const room_;
  Flushes* const flushes_;
  ReadPins* const pins_;
  ChunkMoves* const moves_;
  DamagedChunks* const damaged_;
  LogLength log_length_;
  int queued_ ABSL_GUARDED_BY(job_lock) = 0;
  int64_t updated_ ABSL_GUARDED_BY(job_lock) = -1;  // the last step that all chunks show
  bool said_unwritten_ = false;                     // worker only
};

}  // namespace ballast::services
