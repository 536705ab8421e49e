// How many steps of gradients the log of a durable job holds.
//
// With a log of f steps each step flushes about 1 / (f - 2) of the state in memory (flush_pace.h). So a short log costs
// writes of state, and a long log costs disk: 2 bytes a parameter and step with bf16 gradients. A new log is short, and
// gets longer while the job's steps wait for flushes: until the disk flushes all chunks in as many steps as the log
// holds, without being waited for. A log never gets shorter.
#pragma once

#include <cstdint>

#include "absl/time/time.h"
#include "ballast/services/counters/step_clock.h"
#include "ballast/services/job_state/job_mutex.h"
#include "ballast/services/journal/log_steps.h"
#include "ballast/storage/store/chunk_store.h"

namespace ballast::services {

class JobCore;
class JobJournal;

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
