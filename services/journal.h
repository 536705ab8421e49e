// The gradient log of a job with durability `step`: what the step machine appends becomes records of
// storage/log, each segment begins with a snapshot of the machine, and slices wait while the log is full. A job of
// another durability whose slices do not fit into memory has a transient one, a *spill*, that outlives nobody and holds
// nothing but slices.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ballast/proto/model/epoch_plan.h"
#include "ballast/services/step/step_machine.h"
#include "ballast/storage/log/gradient_log.h"

namespace ballast::services {

// Numbers on disk: never given to another record.
enum class RecordType : uint32_t { kPromise = 1, kOpen = 2, kSlice = 3, kPrepared = 4, kDecision = 5, kSnapshot = 6 };

storage::LogRecord EncodeRecord(const StepRecord& record);
// DATA_LOSS (CHECKSUM): no record of this version.
absl::StatusOr<StepRecord> DecodeRecord(const storage::ReadRecord& record);

// How far a log's records go: the last step that they tell of as decided (-1: none), and whether one behind it is
// prepared.
struct LoggedSteps {
  int64_t committed = -1;
  bool prepared = false;

  void Add(const StepRecord& record);
  bool any() const { return committed >= 0 || prepared; }
};

// `changed`: the last transaction that changed each chunk, registration order; -1: none did. Into `snapshot`, whose
// `committed` is set.
void EncodeChanged(absl::Span<const int64_t> changed, v1::LogSnapshot* snapshot);
// Of a server that has `chunks`. DATA_LOSS (DIVERGED): the snapshot is of another number of them, or of times to come.
absl::StatusOr<std::vector<int64_t>> DecodeChanged(const v1::LogSnapshot& snapshot, uint64_t chunks);

// What the log of a job must hold on this server, or its spill.
struct JournalNeeds {
  uint64_t chunk_elements = 0;
  absl::Span<const uint64_t> elements;  // of each slice of the job here, or of each chunk if there are few more slices
  uint64_t gradient_bytes = 0;          // per element
  uint64_t snapshot_bytes = 0;          // SnapshotBytesMax; 0 of a spill
  uint64_t segment_bytes = 0;           // of the log that there is; 0: to be chosen
  uint64_t steps = 0;                   // of gradients, besides a transaction of values
  uint64_t segments_reserved = 0;       // for what is no slice
};
struct JournalSize {
  uint64_t segment_bytes = 0;
  uint64_t segment_count = 0;
  uint64_t bytes() const;
};
// A segment that is chosen takes twice the snapshot and the prepared record of a step, so that a job may grow.
JournalSize SizeJournal(const JournalNeeds& needs);
// Of a snapshot of the job that `plan` opens, on a server that has these chunks of it (ids).
uint64_t SnapshotBytesMax(const model::EpochPlan& plan, absl::Span<const uint64_t> chunks);
// Of the norms in a prepared record.
uint64_t NormBytesMax(const model::Chunk& chunk);

// Threads: the job's lock, except where said.
class Journal {
 public:
  // Of a slice's header as a record's body.
  static constexpr uint64_t kSliceBodyBytesMax = 512;
  // Segments that slices leave to the other records and to restarts, each of which takes one. A spill has neither.
  static constexpr uint64_t kSegmentsReserved = 4;
  static constexpr uint64_t kSpillSegmentsReserved = 1;
  // Steps of gradients that a log holds: chunk flushes spread over as many. And a spill: the step that is applied and
  // two attempts at the next.
  static constexpr uint64_t kStepsKept = 16;
  static constexpr uint64_t kStepsSpilt = 3;
  // Of a decision with all ranks' blobs.
  static constexpr uint64_t kDecisionBytesMax = uint64_t{128} << 10;
  // Of state in memory, the share that goes to the disk with each step once that is steady: the log is in use nearly
  // whole, but for the next step's room and for what waits to be recorded.
  static constexpr double kFlushedShare = 1.0 / (kStepsKept - 2);

  Journal(std::unique_ptr<storage::GradientLog> log, uint64_t segments_reserved)
      : segments_reserved_(segments_reserved), log_(std::move(log)) {}
  storage::GradientLog& log() { return *log_; }

  // May a slice of `payload_bytes` be taken now, and the records that may come with it? False: the log is full until
  // chunks are flushed and it is cut. True: MakeRoom for as much leaves the reserve.
  bool HasRoomForSlice(uint64_t records, uint64_t record_bytes, uint64_t payload_bytes) const;
  // RESOURCE_EXHAUSTED (BUDGET): segments are too small for snapshots of that size and the records beside them.
  absl::Status CheckFits(uint64_t snapshot_bytes, uint64_t slice_bytes) const;
  // Makes sure that the next records fit, `record_bytes` of bodies and `payload_bytes` of payloads in at most
  // `records` records: begins a new segment if need be, with what `snapshot` returns: the machine's, encoded, its lsn
  // taken.
  // RESOURCE_EXHAUSTED (BUDGET) if no segment is free.
  absl::Status MakeRoom(uint64_t records, uint64_t record_bytes, uint64_t payload_bytes,
                        absl::FunctionRef<storage::LogRecord()> snapshot);
  void Append(storage::LogRecord record) { log_->Append(std::move(record)); }

  // Something has taken of the reserve.
  bool IsShort() const { return log_->free_segments() + 1 < segments_reserved_; }
  // Steps that the free part of the log still takes, of those that need `step_bytes` each.
  uint64_t StepsFree(uint64_t step_bytes) const;

 private:
  // Of the segment in use.
  bool HasRoom(uint64_t records, uint64_t record_bytes, uint64_t payload_bytes) const;

  const uint64_t segments_reserved_;
  const std::unique_ptr<storage::GradientLog> log_;
};

}  // namespace ballast::services
