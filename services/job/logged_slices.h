// Finds slices of a step in a job's log at recovery. Slices of a decided step are taken by their places, and the update
// reads them. Several gradient slices of a chunk, values of chunks that are not logged, and all slices of an undecided
// step are read into the chunks' intakes.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "ballast/services/job/replay.h"
#include "ballast/services/job_state/held_chunk.h"
#include "ballast/services/job_state/job_mutex.h"
#include "ballast/services/journal/log_walk.h"

namespace ballast::services {

class JobCore;
class SliceRoom;

// Threads: the one that recovers.
class LoggedSlices {
 public:
  LoggedSlices(JobCore* core, SliceRoom* room) : core_(core), room_(room) {}

  // kDecided: the update reads slices from the log where it can. kPrepared: a slice that cannot be read refuses the
  // job. kPushed: a slice that cannot be read is forgotten: the rank that pushed it still has the gradient and will be
  // asked again.
  enum class Use { kDecided, kPrepared, kPushed };
  absl::Status Load(absl::Span<const LoggedSlice* const> slices, Use use, Replay* replay) ABSL_LOCKS_EXCLUDED(job_lock);

 private:
  // A slice on its way from the log to its chunk.
  struct SliceLoad {
    const v1::PushRequest* header = nullptr;  // of the log's record
    storage::PayloadPlace payload;
    std::shared_ptr<HeldChunk> chunk;  // null if no chunk needs the slice
    uint32_t slice = 0;                // index into the plan's
    Intake::Receipt receipt;
    absl::Status status;
  };
  absl::Status Find(SliceLoad* load) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);
  absl::Status Begin(SliceLoad* load, Replay* replay);
  absl::Status Read(Use use, std::vector<SliceLoad>* loads, Replay* replay);

  JobCore* const core_;
  SliceRoom* const room_;
};

}  // namespace ballast::services
