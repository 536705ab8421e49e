// The gradient log of one job: an append-only record on disk of everything newer than the chunks' state on disk. The
// format is in log_format.h.
//
// Log segments of equal size are written in full once, when the file is made, and used in a ring: a first write into a
// fresh extent of a file system costs two to three times a rewrite. Append only queues. Pump encodes queued records
// into batches, submits the batches, and a sync where somebody wants a sync, and handles completions. Pump runs on the
// log's own thread (Start), or wherever a test calls it.
//
// A *transient* log need not outlive the process: the file has no name, is reserved but not written when it is made,
// and is never synced: a complete write counts as durable.
//
// Bounds: segments; 64 requests in flight of at most 16 payloads a batch; the caller bounds queued records (each holds
// the lease of its payload).
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "ballast/storage/io/disk.h"
#include "ballast/storage/log/log_format.h"
#include "ballast/storage/log/log_reader.h"

namespace ballast::storage {

struct LogRecord {
  uint64_t lsn = 0;  // increasing
  uint32_t type = 0;
  std::string body;
  // Borrowed, and must not change, until `written` was called.
  absl::Span<const std::byte> payload;
  uint32_t payload_crc32c = 0;
  // Called when the payload is written at `place`, or with null when it never will be. On the pumping thread, no lock
  // held. The payload is not durable yet, and readable at `place` until Cut frees it.
  std::function<void(const PayloadPlace* place)> written;
  int64_t keep_for = -1;  // last transaction whose replay needs the payload; Cut(keep_for) frees the payload
};

// Zeroed, aligned to kLogBlock.
using LogMemory = std::unique_ptr<std::byte, void (*)(void*)>;
LogMemory MakeLogMemory(uint64_t bytes);

class GradientLog {
 public:
  struct Options {
    std::string path;
    std::string job;
    uint64_t life = 0;                            // the job's; changes when a job is dropped and made again
    uint64_t segment_bytes = uint64_t{32} << 20;  // multiple of 4096; the largest record must fit
    uint64_t segment_count = 4;                   // at least 3
    bool transient = false;
  };
  // Makes the file anew, and writes and syncs every byte. Blocks for as long as it takes to write the whole file. On an
  // error the file is removed. RESOURCE_EXHAUSTED (IO) if the disk is full.
  static absl::StatusOr<std::unique_ptr<GradientLog>> Create(Disk* disk, const Options& options);
  // Opens the log of an earlier run and fills `scanned` with its content. Errors: ScanLog's. The first Append goes to a
  // new segment: Roll first.
  static absl::StatusOr<std::unique_ptr<GradientLog>> Recover(Disk* disk, const std::string& path, ScannedLog* scanned);
  // Stops pumping, drops queued records, waits for requests in flight.
  ~GradientLog();

  // For a caller that calls Pump itself instead of Start.
  void set_progress(std::function<void()> progress) { progress_ = std::move(progress); }
  // From now on a thread pumps. It calls `progress`, no lock held, when something became durable or failed.
  void Start(std::function<void()> progress);

  const BlockFile& file() const { return *file_; }
  uint64_t segment_bytes() const { return segment_bytes_; }
  uint64_t file_bytes() const;

  // Threads: any, for all below.

  // Does a record fit into the current segment?
  bool HasRoom(uint64_t body_bytes, uint64_t payload_bytes) const;
  // A segment's room for records, as RecordCostMax counts.
  uint64_t record_bytes_max() const { return segment_bytes_ - kSegmentHeadBytes - 2 * kCutBatchBytes; }
  // Goes on with the next free segment; false if no segment is free. The caller's next record must repeat everything
  // from older records that is still needed, payloads excepted.
  bool Roll();
  // REQUIRES: HasRoom(record). Otherwise aborts, since the record would overwrite the next segment.
  void Append(LogRecord record);
  // Asks for records up to `lsn` to become durable.
  void Sync(uint64_t lsn);
  // All records up to this lsn are durable.
  uint64_t durable_lsn() const;
  // The first error; after an error nothing becomes durable any more.
  absl::Status status() const;

  // Payloads kept for transactions up to `step` are not needed any more. A segment becomes free at the next sync if all
  // its payloads are of this kind and the first record of a newer segment is durable. Cut asks for the sync if a
  // segment waits for it.
  void Cut(int64_t step);
  // The segment in use has no room for the batch that makes a cut known: only Roll frees segments now.
  bool cut_lacks_room() const;
  // Everything appended so far is void for transactions beyond `step`: lowers a higher keep_for to `step`.
  void Release(int64_t step);
  // After Recover: the last transaction whose replay needs payloads of the segment. Until Keep, the whole segment
  // stays.
  void Keep(uint64_t incarnation, int64_t step);
  // Segments that Roll may still take, and their bytes for records.
  uint64_t free_segments() const;
  uint64_t free_bytes() const;
  // Adds segments. Blocks. RESOURCE_EXHAUSTED (IO) if the disk is full: then nothing was added. A failed sync here
  // fails the whole log, since the disk may have dropped batches that were waiting for the same sync.
  absl::Status Extend(uint64_t segment_count);

  // Pumps once. `wait`: blocks until something completes, unless nothing is in flight. True if anything is queued or in
  // flight. REQUIRES: one thread at a time, and not after Start.
  bool Pump(bool wait);

 private:
  // Size of the empty batch that makes a cut known. Every segment has room for its own, and HasRoom leaves room for a
  // second, since the pumping thread may want to write it at any time.
  static constexpr uint64_t kCutBatchBytes = 2 * kLogBlock;

  struct Segment {
    uint64_t incarnation = 0;  // 0: free
    int64_t keep_for = -1;     // highest keep_for of its records
    bool cut = false;          // becomes free once a sync has made the cut durable
  };
  struct Item {
    LogRecord record;
    uint64_t roll_to = 0;  // an incarnation: begin its segment; no record
    uint64_t segment = 0;  // index
    uint64_t oldest_incarnation = 0;
  };
  struct Batch {
    uint64_t number = 0;
    uint64_t last_lsn = 0;
    uint64_t incarnation = 0;
    uint64_t oldest_incarnation = 0;
    std::vector<LogRecord> records;
    std::vector<uint64_t> payload_offsets;  // of `records`, in the file
    LogMemory memory{nullptr, nullptr};     // metas and copied payloads
    uint64_t outstanding = 0;
    bool failed = false;  // some write of the batch failed
  };

  GradientLog(Disk* disk, std::unique_ptr<BlockFile> file, uint64_t segment_bytes, std::vector<Segment> segments,
              bool transient);
  absl::Status SyncFile() const;
  void WantCutSync() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status SyncExtension();
  absl::Status WriteZeros(uint64_t first_segment, uint64_t count);
  uint64_t OldestIncarnation() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // True if a segment was cut.
  bool CutSegments() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool HasWork() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void PumpUntilStopped();

  // On the pumping thread.
  bool TakeItems(std::vector<Item>* items);
  void BeginSegment(const Item& item);
  void WriteBatch(std::vector<Item> items);
  void Submit(uint64_t tag, IoRequest::Kind kind, uint64_t offset, absl::Span<std::byte> buffer);
  void MaybeSync();
  void CompleteRefused();
  void DropQueued();
  void Complete(const IoCompletion& completion);
  void CompleteSync(const absl::Status& status);
  void Fail(const absl::Status& status);
  void WriteMark();

  Disk* const disk_;
  const std::unique_ptr<BlockFile> file_;
  const uint64_t segment_bytes_;
  const bool transient_;
  const uint32_t salt_;  // of this opening

  mutable absl::Mutex mutex_;
  std::vector<Segment> segments_ ABSL_GUARDED_BY(mutex_);
  uint64_t current_ ABSL_GUARDED_BY(mutex_) = 0;  // index; segments_.size(): none yet
  uint64_t room_ ABSL_GUARDED_BY(mutex_) = 0;     // of the current segment, counted as if each record were a batch
  uint64_t last_incarnation_ ABSL_GUARDED_BY(mutex_) = 0;
  // The newest segment with a durable first record: older segments are needed for their payloads only.
  uint64_t held_incarnation_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t cut_step_ ABSL_GUARDED_BY(mutex_) = -1;
  bool cut_waits_ ABSL_GUARDED_BY(mutex_) = false;  // a cut waits for the newest segment's first record
  std::deque<Item> queued_ ABSL_GUARDED_BY(mutex_);
  uint64_t requested_lsn_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t durable_lsn_ ABSL_GUARDED_BY(mutex_) = 0;
  // A cut is written as an empty batch, for which each segment has room once. Cut segments are free when this batch is
  // durable.
  bool cut_wants_sync_ ABSL_GUARDED_BY(mutex_) = false;  // the batch is still to be written
  bool cut_lacks_room_ ABSL_GUARDED_BY(mutex_) = false;  // the batch has to wait for the next segment
  bool has_cut_room_ ABSL_GUARDED_BY(mutex_) = false;    // the current segment's room for the batch is not taken
  absl::Status failed_ ABSL_GUARDED_BY(mutex_);
  bool extending_ ABSL_GUARDED_BY(mutex_) = false;  // the sync of Extend is under way
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;

  // The pumping thread's own.
  std::unique_ptr<IoQueue> queue_;
  uint64_t write_incarnation_ = 0;
  uint64_t write_at_ = 0;  // in the file
  uint64_t next_batch_ = 1;
  uint64_t synced_batch_ = 0;
  uint64_t marks_ = 0;
  uint64_t marked_batch_ = 0;
  uint64_t previous_incarnation_ = 0;  // segment of the last batch
  uint64_t synced_incarnation_ = 0;    // segment of synced_batch_
  std::list<Batch> batches_;           // written, not yet durable, by number
  uint64_t heads_outstanding_ = 0;     // writes of segment heads
  bool mark_outstanding_ = false;
  uint64_t cut_batch_ = 0;             // the last batch written for a cut: wants a sync
  std::vector<IoCompletion> refused_;  // requests refused by the queue
  bool syncing_ = false;
  uint64_t sync_covers_batch_ = 0;
  std::vector<IoCompletion> completions_;
  LogMemory head_memory_;
  std::function<void()> progress_;
  std::thread thread_;
};

}  // namespace ballast::storage
