// Takes space for the chunks of an Open, before the epoch's promise is used. An Open that does not fit leaves the job
// as before.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>

#include "absl/status/statusor.h"
#include "ballast/services/job_state/job_mutex.h"
#include "ballast/services/journal/job_journal.h"
#include "ballast/services/space/space_need.h"

namespace ballast::services {

class ChunkMoves;
class EarlierExtents;
class Flushes;
class JobCore;
class Prediction;
class SliceRoom;

// Threads: the worker, or the thread that recovers, unless a method says otherwise.
class Space {
 public:
  Space(JobCore* core, JobJournal* journal, SliceRoom* room, Flushes* flushes, EarlierExtents* earlier,
        ChunkMoves* moves, Prediction* prediction)
      : core_(core),
        journal_(journal),
        room_(room),
        flushes_(flushes),
        earlier_(earlier),
        moves_(moves),
        prediction_(prediction) {}

  // Returns the server's chunks under `plan`, old and new. Errors: as Need's, and RESOURCE_EXHAUSTED (BUDGET).
  absl::StatusOr<HeldChunks> Take(const model::EpochPlan& plan) ABSL_LOCKS_EXCLUDED(job_lock);
  // The answer to a dry run, by the space that is free now; takes nothing, and waits for no disk, nor for another job's
  // Open. Errors as Take's.
  // Unless ReadsStore, on any thread, but not while the job's first Open takes its space. With ReadsStore on the
  // worker, behind what the job itself has begun: an Open of its own that needs space may wait for another job's.
  absl::StatusOr<v1::OpenResponse> Try(const model::EpochPlan& plan) const ABSL_LOCKS_EXCLUDED(job_lock);
  // Does a dry run of `plan` read what updates and moves change? Then it is the worker's.
  bool ReadsStore(const model::EpochPlan& plan) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // Under the job's lock, on any thread: the chunks, if an Open of `plan` needs no more space than the job has.
  std::optional<HeldChunks> AllHeld(const model::EpochPlan& plan) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // After a refused Open: keeps the chunks taken for this Open for the next.
  void KeepSpares(const HeldChunks& chunks) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // After a recovery: writes the least DRAM that the job's chunks need. Jobs that come back earlier leave so much.
  void NoteLeastDram(uint64_t more) ABSL_LOCKS_EXCLUDED(job_lock);

 private:
  // The store of the missing chunks, with the space taken for them.
  struct Grant {
    std::shared_ptr<storage::ChunkStore> store;
    std::shared_ptr<SliceMemory> memory;
    bool reads_back = false;                 // slices of the missing chunks leave memory
    uint64_t least_dram = 0;                 // without which the missing chunks cannot load
    JobJournal::Growth journal;              // for the missing chunks
    std::map<size_t, absl::Status> damaged;  // of the missing chunks: what the disk has is not what was written
  };

  SpaceState State() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  absl::StatusOr<SpaceState> Look() const ABSL_LOCKS_EXCLUDED(job_lock);
  // As Need, with the shape of the job's steps if there are chunks to place.
  absl::StatusOr<SpaceNeed> NeedOf(const SpaceState& state, const model::EpochPlan& plan) const
      ABSL_LOCKS_EXCLUDED(job_lock);
  absl::Status Annotate(const model::EpochPlan& plan, const absl::Status& status) const;
  std::shared_ptr<storage::ChunkStore> MakeStore(const NewChunks& wanted) const;
  // Takes what `need` says beside the chunks that the job held. `need` has the chunks that are there afterwards, also
  // after an error.
  absl::Status TakeAll(const model::EpochPlan& plan, SpaceNeed* need) ABSL_LOCKS_EXCLUDED(job_lock);
  // The job's store and memory, or new ones in their place.
  absl::StatusOr<Grant> Replace(SpaceNeed* need) ABSL_LOCKS_EXCLUDED(job_lock);
  // The chunks that the job lacks, and a log.
  absl::Status Add(SpaceNeed* need, Grant* grant) ABSL_LOCKS_EXCLUDED(job_lock);
  // Plans places for the missing chunks, takes them, and makes the journal large enough.
  absl::Status Place(SpaceNeed* need, Grant* grant) ABSL_LOCKS_EXCLUDED(job_lock);
  absl::Status PlanAndTake(const SpaceNeed& need, Grant* grant) ABSL_LOCKS_EXCLUDED(job_lock);
  absl::Status TakePlaces(const SpaceNeed& need, const storage::PlanRequest& request, const storage::Plan& plan,
                          Grant* grant) ABSL_LOCKS_EXCLUDED(job_lock);
  // Is there too little DRAM for any plan of the missing chunks?
  bool ShortOfDram(const SpaceNeed& need, const Grant& grant) const ABSL_LOCKS_EXCLUDED(job_lock);
  void Hold(const Grant& grant, SpaceNeed* need);
  absl::Status GrowJournal(const JournalSize& size, bool logged) ABSL_LOCKS_EXCLUDED(job_lock);
  // Takes the buffer for reading slices back out of `buffer_bytes`; pushes get the rest.
  absl::Status TakeReadBack(const NewChunks& wanted, const std::shared_ptr<SliceMemory>& memory, uint64_t buffer_bytes)
      ABSL_LOCKS_EXCLUDED(job_lock);
  // Memory for the slices of all chunks; moves state to NVMe, then drops working copies, if there is no room.
  absl::Status ReserveSlices(const model::EpochPlan& plan, const HeldChunks& chunks, const HeldChunks& spares)
      ABSL_LOCKS_EXCLUDED(job_lock);
  // As the store's; waits for leases first.
  absl::StatusOr<bool> DropWorkingCopies(storage::ChunkStore* store) ABSL_LOCKS_EXCLUDED(job_lock);
  // Moves the last chunk in DRAM, which the next forward needs latest. False if there is none.
  absl::StatusOr<bool> MoveOneDown(storage::ChunkStore* store);

  JobCore* const core_;
  JobJournal* const journal_;
  SliceRoom* const room_;
  Flushes* const flushes_;
  EarlierExtents* const earlier_;
  ChunkMoves* const moves_;
  Prediction* const prediction_;
  HeldChunks spares_ ABSL_GUARDED_BY(job_lock);  // taken for a refused Open
  uint64_t least_dram_ = 0;                      // as in the catalog's entry
};

}  // namespace ballast::services
