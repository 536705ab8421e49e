// What a gradient log's callers share with its writer: waiting records, the ring of segments, how far the log is
// durable, and the first error. Callers may use any thread; LogWriter takes the records from here and reports back.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <utility>
#include <variant>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "ballast/storage/log/batch_encoder.h"
#include "ballast/storage/log/segment_ring.h"

namespace ballast::storage {

// The writer takes so much at a time: a segment that begins, or the records of one batch.
struct LogItems {
  std::optional<SegmentRing::Beginning> beginning;
  std::vector<LogRecord> records;   // none, and no beginning: an empty batch, which tells of a cut
  uint64_t oldest_incarnation = 0;  // that is not cut
};

// Threads: any.
class LogQueue {
 public:
  // `durable_lsn`: what an earlier run left.
  LogQueue(SegmentRing ring, uint64_t durable_lsn)
      : ring_(std::move(ring)), requested_lsn_(durable_lsn), durable_lsn_(durable_lsn) {}

  // Before the first record: called with no lock held when something became durable or failed.
  void set_progress(std::function<void()> progress) { progress_ = std::move(progress); }

  // As GradientLog's.
  bool HasRoom(uint64_t body_bytes, uint64_t payload_bytes) const;
  bool Roll();
  void Append(LogRecord record);
  void Sync(uint64_t lsn);
  uint64_t durable_lsn() const;
  absl::Status status() const;
  void Cut(int64_t step);
  bool cut_lacks_room() const;
  void Release(int64_t step);
  void Keep(uint64_t incarnation, int64_t step);
  uint64_t free_segments() const;

  // Growing the file needs a sync of its own. If it fails, the disk may have dropped batches, too, and the system
  // reports a lost write only once. So while it is under way no other sync counts. `grown` segments join the ring if
  // `synced`; the first `written` of them have been written in full.
  uint64_t segments() const;
  void BeginExtension();
  void EndExtension(uint64_t grown, uint64_t written, bool synced);

  // Segments are written ahead of their first use, one at a time. BeginWriteAhead blocks until a free segment waits for
  // it; none: the log stops or has failed. WritesAhead: the segment is still free, and the log goes on; asked before
  // every piece. AwaitNotAhead blocks while a piece of `segment`, which is not free any more, may be under way.
  std::optional<uint64_t> BeginWriteAhead();
  bool WritesAhead(uint64_t segment) const;
  void EndWriteAhead();
  void AwaitNotAhead(uint64_t segment) const;

  // The writer's.

  // The next items; none if nothing is queued. `cut`: an empty batch may be asked for.
  std::optional<LogItems> Take(bool cut);
  // Does somebody wait for a sync that batches up to `lsn` would answer?
  bool WantsSync(uint64_t lsn) const;
  // False if an extension or an error voids a sync that succeeded.
  bool SyncCounts() const;
  // Records up to `lsn` are durable. `told`, `held`: as SegmentRing::Synced's.
  void Durable(uint64_t lsn, uint64_t told, uint64_t held);
  // Something that waits may go on.
  void Progressed() const;
  // The first error of the disk, which TellFailure tells. Any thread.
  void Fail(const absl::Status& status);
  // After an error: tells records that wait that they are never written; once, calls progress. No error: does nothing.
  void TellFailure();
  bool empty() const;

  // The pumping thread's: blocks until there is work, or Stop. False: Stop was called.
  bool AwaitWork();
  void Stop();
  bool stopping() const;

 private:
  bool HasWork() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool ended() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return stopping_ || !failed_.ok(); }

  std::function<void()> progress_;
  mutable absl::Mutex mutex_;
  SegmentRing ring_ ABSL_GUARDED_BY(mutex_);
  std::deque<std::variant<LogRecord, SegmentRing::Beginning>> queued_ ABSL_GUARDED_BY(mutex_);
  uint64_t requested_lsn_ ABSL_GUARDED_BY(mutex_);
  uint64_t durable_lsn_ ABSL_GUARDED_BY(mutex_);
  absl::Status failed_ ABSL_GUARDED_BY(mutex_);
  bool told_failure_ ABSL_GUARDED_BY(mutex_) = false;
  bool extending_ ABSL_GUARDED_BY(mutex_) = false;
  std::deque<uint64_t> unwritten_ ABSL_GUARDED_BY(mutex_);  // segments, to be written ahead
  std::optional<uint64_t> ahead_ ABSL_GUARDED_BY(mutex_);   // the segment that is being written ahead
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace ballast::storage
