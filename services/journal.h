// The gradient log of a job with durability `step`: what the step machine appends becomes records of
// storage/log, each segment begins with a snapshot of the machine, and slices wait while the log is full.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

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

// How large a log a job needs on this server.
struct JournalSize {
  uint64_t segment_bytes = 0;
  uint64_t segment_count = 0;
  uint64_t bytes() const;
};
// `elements`: of each of the job's chunks here. Holds kStepsKept steps of gradients, so that chunk flushes spread over
// as many.
JournalSize SizeJournal(uint64_t chunk_elements, absl::Span<const uint64_t> elements, uint64_t gradient_bytes);

// Threads: the job's lock, except where said.
class Journal {
 public:
  // Of a slice's header as a record's body.
  static constexpr uint64_t kSliceBodyBytesMax = 512;
  // Segments that slices leave to the other records and to restarts, each of which takes one.
  static constexpr uint64_t kSegmentsReserved = 4;
  static constexpr uint64_t kStepsKept = 8;

  explicit Journal(std::unique_ptr<storage::GradientLog> log) : log_(std::move(log)) {}
  storage::GradientLog& log() { return *log_; }

  // May a slice of `payload_bytes` be taken now? False: the log is full until chunks are flushed and it is cut.
  bool HasRoomForSlice(uint64_t payload_bytes) const;
  // Makes sure that the next records fit, `record_bytes` of bodies and `payload_bytes` of payloads in at most
  // `records` records: begins a new segment if need be, with what `snapshot` returns: the machine's, encoded, its lsn
  // taken.
  // RESOURCE_EXHAUSTED (BUDGET) if no segment is free.
  absl::Status MakeRoom(uint64_t records, uint64_t record_bytes, uint64_t payload_bytes,
                        absl::FunctionRef<storage::LogRecord()> snapshot);
  void Append(storage::LogRecord record) { log_->Append(std::move(record)); }

  // Steps that the free part of the log still takes, of those that need `step_bytes` each.
  uint64_t StepsFree(uint64_t step_bytes) const;

 private:
  const std::unique_ptr<storage::GradientLog> log_;
};

}  // namespace ballast::services
