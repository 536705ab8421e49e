// Which chunks of a job are written to the disk, so that the gradient log can be cut. A step flushes some chunks along
// with its updates (flush_pace.h); a full log, and a restart, flush all.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "ballast/services/job_state/job_mutex.h"
#include "ballast/storage/store/chunk_store.h"
#include "ballast/storage/store/chunk_update.h"

namespace ballast::services {

class JobCore;
class JobJournal;

// Threads: the worker, or the thread that recovers, unless a method says otherwise.
class Flushes {
 public:
  Flushes(JobCore* core, JobJournal* journal) : core_(core), journal_(journal) {}

  // Under the job's lock: has the worker flush all chunks; at most one such task is queued at a time.
  void Post() ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock);

  // Chooses the chunks to flush with step `step`: marks the step's own updates, and returns further chunks.
  std::vector<uint64_t> Mark(storage::ChunkStore* store, int64_t step, absl::Span<storage::ChunkUpdate> updates)
      ABSL_LOCKS_EXCLUDED(job_lock);
  // Writes these chunks. Errors as ChunkStore::Run's.
  absl::Status Run(storage::ChunkStore* store, absl::Span<const uint64_t> chunks,
                   storage::Interrupt interrupt = storage::Uninterrupted);
  // Syncs and records flushed versions once the log has room for no more than the next step.
  absl::Status Harden(storage::ChunkStore* store) ABSL_LOCKS_EXCLUDED(job_lock);
  // Cuts the log as far as the chunks on the disk allow.
  void Cut(const storage::ChunkStore& store) ABSL_LOCKS_EXCLUDED(job_lock);
  // At the end of a recovery, on its thread: begins a new log segment, and flushes all chunks if few segments are left,
  // so that restarts in a row cannot fill the log. Returns why the job has stopped, if it has.
  absl::Status EndRecovery() ABSL_LOCKS_EXCLUDED(job_lock);

  // The last step run: chunks that nothing changed since are at this version.
  int64_t applied() const { return applied_; }
  void SetApplied(int64_t step) { applied_ = step; }

 private:
  // State that is flushed in a moment.
  static constexpr uint64_t kQuickFlushBytesMax = uint64_t{256} << 20;
  static uint64_t DirtyBytes(const storage::ChunkStore& store);
  void FlushAll() ABSL_LOCKS_EXCLUDED(job_lock);

  JobCore* const core_;
  JobJournal* const journal_;
  bool posted_ ABSL_GUARDED_BY(job_lock) = false;
  int64_t applied_ = -1;
};

}  // namespace ballast::services
