// How a job comes back after a restart: the chunks from their newest durable versions, the step machine and the later
// versions from the log; with durability every-K from the versions kept on the disk. Asks nothing of other servers.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "ballast/services/job/logged_slices.h"
#include "ballast/services/job/replay.h"
#include "ballast/services/job_state/held_chunk.h"
#include "ballast/services/job_state/job_entry.h"
#include "ballast/services/job_state/job_mutex.h"

namespace ballast::services {

class ChunkChanges;
class EarlierExtents;
class Flushes;
class JobCore;
class JobJournal;
class Openings;
class SliceRoom;
class Space;
struct StepWork;
class Updates;

// Threads: one, before any request comes.
class Recovery {
 public:
  Recovery(JobCore* core, JobJournal* journal, SliceRoom* room, Flushes* flushes, EarlierExtents* earlier, Space* space,
           Openings* openings, ChunkChanges* changes, Updates* updates)
      : core_(core),
        journal_(journal),
        flushes_(flushes),
        earlier_(earlier),
        space_(space),
        openings_(openings),
        changes_(changes),
        updates_(updates),
        slices_(core, room) {}

  // As the methods of Job.
  absl::Status Recover(const JobEntry& entry) ABSL_LOCKS_EXCLUDED(job_lock);
  absl::Status End() ABSL_LOCKS_EXCLUDED(job_lock);
  absl::Status ComeBack(const JobEntry& entry) ABSL_LOCKS_EXCLUDED(job_lock);

  // As StepHost: the work of a decision that is being replayed.
  void Apply(std::shared_ptr<StepWork> work) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) { work_ = std::move(work); }

 private:
  class Replayer;

  // The chunks of an Open of the earlier run, with the states that kept versions have of them.
  absl::StatusOr<HeldChunks> TakeChunks(const v1::OpenRequest& open) ABSL_LOCKS_EXCLUDED(job_lock);
  // After the first snapshot: DATA_LOSS if a chunk's durable version misses a change from before the snapshot.
  absl::Status CheckChanged(const v1::LogSnapshot& snapshot) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // After a replay: DATA_LOSS (DIVERGED) if the server had applied a later step than the log ends with. Without the
  // check steps would pass over chunks that seem to have had them.
  absl::Status CheckLogReaches(const JobEntry& entry) const ABSL_LOCKS_EXCLUDED(job_lock);
  absl::Status CheckAllTaken() const;
  // Versions that an Open of the log gave up, with the job (rule 25), before the server could take them off the disk.
  absl::Status DropPins(const JobEntry& entry) ABSL_LOCKS_EXCLUDED(job_lock);

  JobCore* const core_;
  JobJournal* const journal_;
  Flushes* const flushes_;
  EarlierExtents* const earlier_;
  Space* const space_;
  Openings* const openings_;
  ChunkChanges* const changes_;
  Updates* const updates_;
  LoggedSlices slices_;
  std::shared_ptr<StepWork> work_ ABSL_GUARDED_BY(job_lock);
};

}  // namespace ballast::services
