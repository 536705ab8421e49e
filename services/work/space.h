// Takes space for the chunks of an Open, before the epoch's promise is used. An Open that does not fit leaves the job
// as it was.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ballast/services/durability/earlier_extents.h"
#include "ballast/services/durability/job_journal.h"
#include "ballast/services/job/job_core.h"
#include "ballast/services/job/slice_room.h"
#include "ballast/services/work/chunk_moves.h"
#include "ballast/services/work/new_chunks.h"
#include "ballast/services/work/prediction.h"
#include "ballast/services/work/slice_space.h"

namespace ballast::services {

// Threads: the worker, or the thread that recovers, unless a method says otherwise.
class Space {
 public:
  Space(JobCore* core, JobJournal* journal, SliceRoom* room, Flushes* flushes, EarlierExtents* earlier,
        ChunkMoves* moves, Prediction* prediction)
      : core_(core),
        journal_(journal),
        room_(room),
        earlier_(earlier),
        moves_(moves),
        plans_(core, journal, room, prediction),
        slices_(core, room, flushes) {}

  using Chunks = std::vector<std::shared_ptr<HeldChunk>>;
  // UNIMPLEMENTED (UNSUPPORTED), INVALID_ARGUMENT (BAD_SPEC): no server can hold such a job, or no server that keeps
  // no working copies. On any thread.
  static absl::Status CheckSupported(const v1::OpenRequest& request, bool working_copies);
  // Returns the server's chunks under `plan`, old and new. Errors: UNIMPLEMENTED (UNSUPPORTED), INVALID_ARGUMENT
  // (BAD_SPEC), RESOURCE_EXHAUSTED (BUDGET).
  absl::StatusOr<Chunks> Take(const model::EpochPlan& plan) ABSL_LOCKS_EXCLUDED(job_lock) {
    return Take(plan, nullptr);
  }
  // The answer to a dry run, by the space that is free now; takes nothing, and waits for no disk, nor for another job's
  // Open. Errors as Take's.
  // Unless ReadsStore, on any thread, but not while the job's first Open takes its space. With ReadsStore on the
  // worker, behind what the job itself has begun: an Open of its own that needs space may wait for another job's.
  absl::StatusOr<v1::OpenResponse> Try(const model::EpochPlan& plan) ABSL_LOCKS_EXCLUDED(job_lock);
  // Does a dry run of `plan` read what updates and moves change? Then it is the worker's.
  bool ReadsStore(const model::EpochPlan& plan) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // Under the job's lock, on any thread: the chunks, if an Open of `plan` needs no more space than the job has.
  std::optional<Chunks> AllHeld(const model::EpochPlan& plan) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // After a refused Open: keeps the chunks taken for this Open for the next.
  void KeepSpares(const Chunks& chunks) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  // After a recovery: writes the least DRAM that the job's chunks need. Jobs that come back earlier leave so much.
  void NoteLeastDram(uint64_t more) ABSL_LOCKS_EXCLUDED(job_lock);

 private:
  // Where an Open's chunks go: the job's store and memory, or new ones.
  struct Ground {
    std::shared_ptr<storage::ChunkStore> store;
    std::shared_ptr<SliceMemory> memory;
    Chunks spares;
    storage::TierBytes freed;  // dry run: freed by a real Open that replaces the store
    // Left by an Open that was then refused; destroyed without the lock.
    std::shared_ptr<storage::ChunkStore> old_store;
    Chunks old_spares;
    bool unlogged = false;  // there is a log, and none is wanted
  };
  // Chunks of an Open that the job does not have: spares, or, where null, the next of `missing`.
  struct Addition {
    Chunks taken;
    std::vector<storage::ChunkToAdd> missing;
    bool logged = false;      // slices of the missing chunks leave memory
    uint64_t least_dram = 0;  // without which the missing chunks cannot load
  };

  absl::StatusOr<Chunks> Take(const model::EpochPlan& plan, v1::OpenResponse* answer) ABSL_LOCKS_EXCLUDED(job_lock);
  // As `continues`: does the plan begin with the chunks that the job has?
  absl::Status CheckContinues(const model::EpochPlan& plan, const std::vector<uint64_t>& mine,
                              const Chunks& chunks) const;
  NewChunks NewOf(const model::EpochPlan& plan, const std::vector<uint64_t>& mine, const Chunks& held,
                  bool dry_run) const;
  // A log that has become longer stays as long beside further chunks.
  uint64_t LogSteps() const ABSL_LOCKS_EXCLUDED(job_lock);
  absl::Status Add(const NewChunks& wanted, Chunks* chunks, v1::OpenResponse* answer);
  absl::StatusOr<Ground> Prepare(const NewChunks& wanted) ABSL_LOCKS_EXCLUDED(job_lock);
  absl::Status DropOld(Ground* ground);
  Addition Match(const NewChunks& wanted, Ground* ground);
  struct PlannedPlaces {
    storage::PlanRequest request;
    storage::Plan plan;
  };
  // Is there too little DRAM for any plan of the missing chunks?
  bool ShortOfDram(const NewChunks& wanted, const Ground& ground, const Addition& add) ABSL_LOCKS_EXCLUDED(job_lock);
  // Plans places for the missing chunks; for a dry run fills in `answer`.
  absl::StatusOr<PlannedPlaces> PlanPlaces(const NewChunks& wanted, const Ground& ground, const Addition& add,
                                           v1::OpenResponse* answer) ABSL_LOCKS_EXCLUDED(job_lock);
  // Plans places for the missing chunks, takes them, and makes the journal large enough. A dry run only plans.
  absl::Status Place(const NewChunks& wanted, const Ground& ground, Addition* add, v1::OpenResponse* answer);
  absl::StatusOr<JobJournal::Growth> PlanAndTake(const NewChunks& wanted, const Ground& ground, Addition* add)
      ABSL_LOCKS_EXCLUDED(job_lock);
  absl::Status TakePlaces(const NewChunks& wanted, const Ground& ground, Addition* add, const storage::Plan& plan,
                          const storage::PlanRequest& request);
  absl::Status GrowJournal(const JournalSize& size, bool logged);
  std::optional<JournalSize> SpillFor(const model::EpochPlan& plan, const Chunks& chunks, NewChunks wanted) const
      ABSL_LOCKS_EXCLUDED(job_lock);
  // For a dry run: the bytes that a real Open takes for the job's present chunks, cut by `plan`; at most these, where
  // the DRAM budget is short and state or working copies make room.
  NewChunks::Retiled RetiledBy(const model::EpochPlan& plan, const Chunks& held, const NewChunks& wanted) const
      ABSL_LOCKS_EXCLUDED(job_lock);
  void Hold(const NewChunks& wanted, const Ground& ground, Addition* add);
  std::shared_ptr<storage::ChunkStore> MakeStore(const NewChunks& wanted) const;

  JobCore* const core_;
  JobJournal* const journal_;
  SliceRoom* const room_;
  EarlierExtents* const earlier_;
  ChunkMoves* const moves_;
  ChunkPlans plans_;
  SliceSpace slices_;
  Chunks spares_ ABSL_GUARDED_BY(job_lock);  // taken for an Open that was then refused
  uint64_t least_dram_ = 0;                  // as in the catalog's entry
};

}  // namespace ballast::services
