// The gradient log of a job with durability `step`. The step machine's records become records of storage/log, each log
// segment begins with a snapshot of the machine, and slices wait while the log is full. A job of another durability
// whose slices do not fit into memory has a *spill* instead: a transient log that holds only slices and does not
// outlive the job.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "ballast/services/records/log_records.h"
#include "ballast/storage/log/gradient_log.h"

namespace ballast::services {

// Sizes that determine a job's log, or its spill, on this server.
struct JournalNeeds {
  uint64_t chunk_elements = 0;
  absl::Span<const uint64_t> elements;  // of each chunk for a log, of each slice for a spill
  absl::Span<const uint64_t> frozen;    // likewise, of chunks that have no gradients
  uint64_t gradient_bytes = 0;          // per element
  uint64_t snapshot_bytes = 0;          // SnapshotBytesMax; 0 for a spill
  uint64_t segment_bytes = 0;           // of the existing log; 0 lets SizeJournal choose
  uint64_t steps = 0;                   // of gradients, besides a transaction of values
  uint64_t segments_reserved = 0;       // for records other than slices
};
struct JournalSize {
  uint64_t segment_bytes = 0;
  uint64_t segment_count = 0;
  uint64_t bytes() const;
};
// A chosen log segment takes twice the snapshot and the prepared record of a step, so that the job may grow.
JournalSize SizeJournal(const JournalNeeds& needs);
// Segments that so many bytes of slices need.
uint64_t SegmentsFor(uint64_t bytes, uint64_t segment_bytes);
// Threads: under the job's lock, unless a method says otherwise.
class Journal {
 public:
  // Bound of a slice's header as the body of a record.
  static constexpr uint64_t kSliceBodyBytesMax = 512;
  // Log segments that slices leave to further records and to restarts, each of which takes a segment. A spill has
  // neither.
  static constexpr uint64_t kSegmentsReserved = 4;
  static constexpr uint64_t kSpillSegmentsReserved = 1;
  // Steps of gradients in a spill: the step being applied, and two attempts at the next. For a log: log_length.h.
  static constexpr uint64_t kStepsSpilt = 3;

  Journal(std::unique_ptr<storage::GradientLog> log, uint64_t segments_reserved)
      : segments_reserved_(segments_reserved), log_(std::move(log)) {}
  storage::GradientLog& log() { return *log_; }

  // Can the log take a slice of `payload_bytes` now, with the records that may come along? If false, the log is full
  // until chunks are flushed and it is cut. If true, MakeRoom for as much leaves the reserve untouched.
  bool HasRoomForSlice(uint64_t records, uint64_t record_bytes, uint64_t payload_bytes) const;
  // RESOURCE_EXHAUSTED (BUDGET) if log segments are too small for snapshots of this size and the records beside them.
  absl::Status CheckFits(uint64_t snapshot_bytes, uint64_t slice_bytes) const;
  // Makes sure that the next records fit: at most `records` records, with `record_bytes` of bodies and `payload_bytes`
  // of payloads. If need be begins a new log segment with the record that `snapshot` returns: the machine's snapshot,
  // encoded, its lsn taken. RESOURCE_EXHAUSTED (BUDGET) if no segment is free, or segments are too small.
  absl::Status MakeRoom(uint64_t records, uint64_t record_bytes, uint64_t payload_bytes,
                        absl::FunctionRef<storage::LogRecord()> snapshot);

  // Is part of the reserve in use?
  bool IsShort() const { return log_->free_segments() + 1 < segments_reserved_; }
  // How many more steps of `step_bytes` the free part of the log takes.
  uint64_t StepsFree(uint64_t step_bytes) const;
  // How many steps the whole log takes, beside a transaction of `values_bytes`: as many as SizeJournal made it for.
  uint64_t StepsHeld(uint64_t step_bytes, uint64_t values_bytes) const;

 private:
  // In the log segment in use.
  bool HasRoom(uint64_t records, uint64_t record_bytes, uint64_t payload_bytes) const;

  const uint64_t segments_reserved_;
  const std::unique_ptr<storage::GradientLog> log_;
};

}  // namespace ballast::services
