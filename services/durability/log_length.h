// How many steps of gradients the log of a durable job holds.
//
// With a log of f steps each step flushes about 1 / (f - 2) of the state in memory (flush_pace.h). So a short log costs
// writes of state, and a long log costs disk: 2 bytes a parameter and step with bf16 gradients. A new log is short, and
// gets longer while the job's steps wait for flushes: until the disk flushes all chunks in as many steps as the log
// holds, without being waited for. A log never gets shorter.
#pragma once

#include <algorithm>
#include <cstdint>

#include "absl/time/time.h"
#include "ballast/services/counters/step_clock.h"
#include "ballast/services/durability/job_journal.h"
#include "ballast/services/job/job_core.h"
#include "ballast/storage/extents/versioned_extents.h"
#include "ballast/storage/store/chunk_store.h"

namespace ballast::services {

// The step that is applied, the step in flight, and one that a cut has still to free.
inline constexpr uint64_t kLogStepsMin = 3;
// Flushed versions share a sync and a record over so many steps, and two more are applied and in flight.
inline constexpr uint64_t kLogStepsFirst = storage::VersionedExtents::kRunsMax + 2;
// By then flushes write less than half of what the log itself writes, and a replay takes as many steps.
inline constexpr uint64_t kLogStepsMax = 16;
inline constexpr uint64_t kLogStepsConfiguredMax = 1024;
// Longer logs are worth their disk where steps wait for flushes for more than this share of their time.
inline constexpr double kFlushWaitShareMax = 0.1;

// How many steps a new log holds. `configured`: 0 for none.
constexpr uint64_t FirstLogSteps(uint64_t configured) { return configured > 0 ? configured : kLogStepsFirst; }
// Share of the state in memory that each step flushes with a log of so many steps. Nearly the whole log is then in use,
// except for the room of the next step and of flushed versions that are not recorded yet.
constexpr double FlushedShare(uint64_t steps) { return 1.0 / static_cast<double>(std::max(steps, kLogStepsMin) - 2); }

// Some steps of a job, as its clock and its store saw them.
struct FlushWaits {
  uint64_t log_steps = 0;  // that the log holds
  absl::Duration time;     // of the steps
  absl::Duration waited;   // the part in which the worker waited for writes of state, flushes among them
  // A step writes all of the latter, and FlushedShare of the former.
  uint64_t memory_state_bytes = 0, disk_state_bytes = 0;
};
// How many steps the log should hold: as many as it does, unless flushes are waited for; at most twice as many, since
// waits need not fall in proportion; at most kLogStepsMax.
uint64_t LogStepsFor(const FlushWaits& waits);

// Threads: the worker.
class LogLength {
 public:
  // Steps that the clock is read over: a log of kLogStepsFirst steps has gone round.
  static constexpr int kStepsSeen = 8;

  LogLength(JobCore* core, JobJournal* journal) : core_(core), journal_(journal) {}

  // A step was applied and flushed. From time to time makes the log longer: to the configured length, or by how long
  // the last steps waited for flushes. Where that fails, for want of space or otherwise, the job goes on with the log
  // that it has, says so, and does not try again.
  void AfterStep(const storage::ChunkStore& store) ABSL_LOCKS_EXCLUDED(job_lock);

 private:
  uint64_t Wanted(const storage::ChunkStore& store, uint64_t held) const;
  void Lengthen(uint64_t held, uint64_t wanted) ABSL_LOCKS_EXCLUDED(job_lock);
  void BeginWindow();

  JobCore* const core_;
  JobJournal* const journal_;
  int steps_ = -1;  // of the window; -1: none has begun
  StageTimes before_ = {};
  bool stays_short_ = false;
};

}  // namespace ballast::services
