// The pumping thread of a gradient log. It writes queued records in batches, syncs when somebody waits for it, writes
// marks after syncs, and calls those who wait.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "ballast/storage/io/disk.h"
#include "ballast/storage/log/batch_encoder.h"
#include "ballast/storage/log/log_queue.h"

namespace ballast::storage {

// Threads: the pumping thread's.
class LogWriter {
 public:
  // Borrows `disk`, `file` and `waiting`. `synced_batch`: durable before this run.
  LogWriter(Disk* disk, const BlockFile* file, bool transient, BatchEncoder encoder, uint64_t synced_batch,
            LogQueue* waiting)
      : disk_(disk),
        file_(file),
        transient_(transient),
        waiting_(waiting),
        encoder_(encoder),
        complete_batch_(synced_batch),
        synced_batch_(synced_batch),
        head_memory_(MakeLogMemory(kSegmentHeadBytes + kLogBlock)) {}
  ~LogWriter() { Drain(); }

  // Pumps once. `wait`: blocks until something completes, unless nothing is in flight.
  void Pump(bool wait);
  bool in_flight() const { return queue_ != nullptr && queue_->in_flight() > 0; }
  // Waits for requests in flight and ignores their results; they may or may not have been written. An io_uring belongs
  // to its thread, so this is the thread's last call.
  void Drain();

 private:
  void Reap(bool wait);
  void BeginSegment(const SegmentRing::Beginning& beginning);
  void WriteBatch(LogItems items);
  void Submit(uint64_t tag, IoRequest::Kind kind, uint64_t offset, absl::Span<std::byte> buffer);
  void CompleteRefused();
  void Complete(const IoCompletion& completion);
  void CompleteWrite(uint64_t batch_number, bool failed);
  void MaybeSync();
  void CompleteSync(const absl::Status& status);
  void WriteMark();

  Disk* const disk_;
  const BlockFile* const file_;
  const bool transient_;
  LogQueue* const waiting_;
  BatchEncoder encoder_;
  std::unique_ptr<IoQueue> queue_;
  std::deque<LogBatch> batches_;       // written, not yet durable, by number, without gaps
  std::vector<IoCompletion> refused_;  // requests refused by the queue
  std::vector<IoCompletion> completions_;
  // All batches up to this one have been written. A step's batches wait together for one sync, so nothing here may
  // look through all that wait.
  uint64_t complete_batch_;
  uint64_t complete_lsn_ = 0;       // of the last record up to there
  uint64_t heads_outstanding_ = 0;  // writes of segment heads
  uint64_t cut_batch_ = 0;          // the last batch written for a cut: wants a sync
  bool syncing_ = false;
  uint64_t sync_covers_batch_ = 0;
  uint64_t synced_batch_;
  uint64_t synced_incarnation_ = 0;  // segment of synced_batch_
  uint64_t marks_ = 0;
  uint64_t marked_batch_ = 0;
  bool mark_outstanding_ = false;
  LogMemory head_memory_;  // a segment's head, then a mark
};

}  // namespace ballast::storage
