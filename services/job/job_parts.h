// The parts of a job, in the order in which they are made: each borrows those before it, and two borrow one behind.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "ballast/services/job/copies.h"
#include "ballast/services/job/damaged_chunks.h"
#include "ballast/services/job/exports.h"
#include "ballast/services/job/filling.h"
#include "ballast/services/job/job.h"
#include "ballast/services/job/kept_copies.h"
#include "ballast/services/job/kept_versions.h"
#include "ballast/services/job/loans.h"
#include "ballast/services/job/peers.h"
#include "ballast/services/job/pulls.h"
#include "ballast/services/job/pushes.h"
#include "ballast/services/job/read_pins.h"
#include "ballast/services/job/recovery.h"
#include "ballast/services/job/scrub.h"
#include "ballast/services/job/seals.h"
#include "ballast/services/job/updates.h"
#include "ballast/services/job_state/job_core.h"
#include "ballast/services/job_state/job_entry.h"
#include "ballast/services/job_state/slice_room.h"
#include "ballast/services/journal/earlier_extents.h"
#include "ballast/services/journal/flushes.h"
#include "ballast/services/journal/job_journal.h"
#include "ballast/services/space/chunk_changes.h"
#include "ballast/services/space/chunk_moves.h"
#include "ballast/services/space/openings.h"
#include "ballast/services/space/prediction.h"
#include "ballast/services/space/space.h"
#include "ballast/services/step/step_machine.h"

namespace ballast::services {

struct Job::Parts {
  // As JobCore.
  Parts(const std::string& name, const JobSurroundings& surroundings, StepHost* host,
        std::function<void(uint64_t)> expire);

  JobJournal journal;  // first: the core and its step machine borrow it
  JobCore core;
  Peers peers ABSL_GUARDED_BY(job_lock);
  SliceRoom room;
  ReadPins read_pins;
  Flushes flushes;
  KeptCopies kept_copies;
  KeptVersions kept;
  EarlierExtents earlier;
  Prediction prediction;
  ChunkMoves moves;
  Space space;
  ChunkChanges changes;
  Openings openings;
  Filling filling;
  DamagedChunks damaged;
  Updates updates;
  Scrub scrub;
  Recovery recovery;
  Pushes pushes;
  Pulls pulls;
  Loans loans;
  Exports exports;
  Seals seals;
  Copies copies ABSL_GUARDED_BY(job_lock);
};

}  // namespace ballast::services
