// The gradient log of one job: an append-only record on disk of everything newer than the chunks' state on disk. The
// format is in log_format.h.
//
// The log uses segments of equal size in a ring. Create reserves all of them, so the log never waits for space.
// Segments are filled with zeros before records come, because a first write into a fresh extent of a file system costs
// two to three times a rewrite. Create fills the first segments. A separate thread (Start) fills the others while the
// log is in use. A segment that records reach first works as well, but more slowly. Append only queues. Pump encodes
// queued records into batches, submits the batches and the syncs that callers asked for, and handles completions. Pump
// runs on the log's own thread (Start), or on a test's thread.
//
// A *transient* log need not outlive the process. Its file has no name. Create reserves its segments without filling
// them. No thread syncs it: a complete write counts as durable.
//
// Bounds: the number of segments; 64 I/O requests in flight; 16 payloads in a batch. The caller bounds the queued
// records, each of which holds the lease of its payload.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "absl/status/statusor.h"
#include "ballast/storage/io/disk.h"
#include "ballast/storage/io/interrupt.h"
#include "ballast/storage/log/log_format.h"
#include "ballast/storage/log/log_queue.h"
#include "ballast/storage/log/log_reader.h"
#include "ballast/storage/log/log_writer.h"
#include "ballast/storage/log/segment_ring.h"

namespace ballast::storage {

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
  static constexpr uint64_t kWrittenSegments = 4;
  // Creates the file or replaces it, reserves every byte, and writes and syncs the first kWrittenSegments. On an error,
  // also of `interrupt`, the file is removed. RESOURCE_EXHAUSTED (DISK_FULL).
  static absl::StatusOr<std::unique_ptr<GradientLog>> Create(Disk* disk, const Options& options,
                                                             Interrupt interrupt = Uninterrupted);
  // Opens the log of an earlier run and fills `scanned` with its content. Errors and `read_bytes`: ScanLog's. Call Roll
  // before the first Append: a recovered log goes on in a new segment.
  static absl::StatusOr<std::unique_ptr<GradientLog>> Recover(Disk* disk, const std::string& path, ScannedLog* scanned,
                                                              std::atomic<uint64_t>* read_bytes = nullptr);
  // Stops pumping, drops queued records, waits for requests in flight.
  ~GradientLog();

  // For a caller that calls Pump itself instead of Start.
  void set_progress(std::function<void()> progress) { queue_.set_progress(std::move(progress)); }
  // From now on a thread pumps, and another writes segments ahead of their first use. The pumping thread calls
  // `progress` without a lock whenever something became durable or failed. RESOURCE_EXHAUSTED (LIMIT) if the system
  // makes no pumping thread; destroy the log then.
  absl::Status Start(std::function<void()> progress);

  const BlockFile& file() const { return *file_; }
  uint64_t segment_bytes() const { return segment_bytes_; }
  uint64_t segments() const { return queue_.segments(); }
  uint64_t file_bytes() const { return kLogFirstSegment + segments() * segment_bytes_; }

  // Threads: any, for all below.

  // Does a record fit into the current segment?
  bool HasRoom(uint64_t body_bytes, uint64_t payload_bytes) const { return queue_.HasRoom(body_bytes, payload_bytes); }
  // A segment's room for records, as RecordCostMax counts.
  uint64_t record_bytes_max() const { return SegmentRing::RecordBytesMax(segment_bytes_); }
  // Goes on with the next free segment; false if no segment is free. The caller's next record must repeat everything
  // from older records that is still needed, payloads excepted.
  bool Roll() { return queue_.Roll(); }
  // REQUIRES: HasRoom(record). Otherwise aborts, since the record would overwrite the next segment.
  void Append(LogRecord record) { queue_.Append(std::move(record)); }
  // Asks for records up to `lsn` to become durable.
  void Sync(uint64_t lsn) { queue_.Sync(lsn); }
  // All records up to this lsn are durable.
  uint64_t durable_lsn() const { return queue_.durable_lsn(); }
  // The first error. After an error no further record becomes durable.
  absl::Status status() const { return queue_.status(); }

  // Payloads kept for transactions up to `step` are not needed any more. A segment becomes free at the next sync if all
  // its payloads are of this kind and the first record of a newer segment is durable. Cut asks for the sync if a
  // segment waits for it.
  void Cut(int64_t step) { queue_.Cut(step); }
  // True if the segment in use has no room for the batch that announces a cut: then only Roll frees segments.
  bool cut_lacks_room() const { return queue_.cut_lacks_room(); }
  // No record so far is needed for a transaction after `step`: lowers a higher keep_for to `step`, so that a Cut up to
  // `step` frees the segments.
  void Release(int64_t step) { queue_.Release(step); }
  // After Recover: the last transaction whose replay needs payloads of the segment. Until Keep, the whole segment
  // stays.
  void Keep(uint64_t incarnation, int64_t step) { queue_.Keep(incarnation, step); }
  // Segments that Roll may still take, and their bytes for records.
  uint64_t free_segments() const { return queue_.free_segments(); }
  uint64_t free_bytes() const { return free_segments() * (segment_bytes_ - kSegmentHeadBytes); }
  // Adds segments. Blocks. RESOURCE_EXHAUSTED (DISK_FULL), or an error of `interrupt`: then nothing was
  // added. A failed sync here fails the whole log, since the disk may have dropped batches that were waiting for the
  // same sync.
  absl::Status Extend(uint64_t segment_count, Interrupt interrupt = Uninterrupted);

  // Pumps once. `wait`: blocks until something completes, unless nothing is in flight. True if anything is queued or in
  // flight. REQUIRES: one thread at a time, and not after Start.
  bool Pump(bool wait);

 private:
  GradientLog(Disk* disk, std::unique_ptr<BlockFile> file, uint64_t segment_bytes, bool transient, SegmentRing ring,
              const ScannedLog* scanned);
  absl::Status SyncFile() const;
  uint64_t SegmentBegin(uint64_t segment) const { return kLogFirstSegment + segment * segment_bytes_; }
  absl::Status WriteZeros(uint64_t begin, uint64_t end, Interrupt interrupt) const;
  // Writes waiting segments until the log stops or the disk fails; in the latter case the next records fail.
  void WriteAhead();
  void PumpUntilStopped();

  const std::unique_ptr<BlockFile> file_;
  const uint64_t segment_bytes_;
  const bool transient_;
  LogQueue queue_;
  LogWriter writer_;
  std::thread thread_;
  std::thread ahead_;
};

}  // namespace ballast::storage
