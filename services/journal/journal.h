// A job's journal, to which records are appended, and its room. One interface over three cases.
//
// A log (durability `step`) keeps every record of the step machine, and its segments begin with snapshots of the
// machine. Flushes of chunks let the log be cut, and slices wait while the log is full.
//
// A spill keeps slices that do not fit into memory, and does not outlive the job.
//
// Without either nothing is kept here. The catalog keeps promise, Open and mark, as beside a spill
// (job_state/promise_log.h).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "ballast/services/job_state/journal_size.h"
#include "ballast/services/step/step_machine.h"
#include "ballast/storage/io/interrupt.h"
#include "ballast/storage/log/batch_encoder.h"

namespace ballast::storage {
class GradientLog;
}  // namespace ballast::storage

namespace ballast::services {

// A slice that asks for room.
struct SliceNeeds {
  uint64_t payload_bytes = 0;
  bool leaves_memory = false;  // once the journal has the bytes
  // Bound of the bodies of a prepared record: the slice may be the last for a sealed step.
  uint64_t prepared_bytes = 0;
  uint64_t reserved_bytes = 0;  // of a log or a spill, by RecordCostMax: for slices that are still on their way
};

// Threads: under the job's lock, except for Extend, and once the job has let go of the journal.
class Journal {
 public:
  virtual ~Journal() = default;
  // The record that begins a segment, its lsn taken: a snapshot of the job, or an empty one.
  using Begin = absl::FunctionRef<storage::LogRecord(bool whole)>;

  virtual bool Keeps(const StepRecord& record) const = 0;
  virtual void Sync(uint64_t lsn) = 0;
  // Do all records go to a log, which makes them durable?
  virtual bool durable() const = 0;
  // The log's records are durable up to here; none without a log.
  virtual std::optional<uint64_t> durable_lsn() const = 0;
  // The first error; after an error nothing becomes durable any more.
  virtual absl::Status status() const = 0;

  // Is there room for a slice behind those that have reserved theirs, with the records that may come along? If false,
  // the journal is full until chunks are flushed and it is cut. If true, MakeRoomFor finds room for each of these
  // slices, in whatever order they come, and leaves the reserve untouched.
  virtual bool HasRoomFor(const SliceNeeds& slice) const = 0;
  // Makes sure that what comes next fits, if need be in another segment. RESOURCE_EXHAUSTED (BUDGET) if no segment is
  // free, or segments are too small. MakeRoom is for records other than slices.
  virtual absl::Status MakeRoomFor(const SliceNeeds& slice, Begin begin) = 0;
  virtual absl::Status MakeRoom(uint64_t records, uint64_t record_bytes, Begin begin) = 0;
  // Is part of a log's reserve in use?
  virtual bool IsShort() const = 0;
  // How many more steps with `step_bytes` of gradients a log takes before it is full; how many steps the whole log
  // takes, beside a transaction of `values_bytes`. None without a log.
  virtual std::optional<uint64_t> StepsFree(uint64_t step_bytes) const = 0;
  virtual std::optional<uint64_t> StepsHeld(uint64_t step_bytes, uint64_t values_bytes) const = 0;

  // Everything appended so far is void for transactions beyond `step`.
  virtual void Release(int64_t step) = 0;
  // Slices up to `step` are not needed any more. As MakeRoom's: slices may wait for the room that the cut frees, and
  // nothing else may begin another segment.
  virtual absl::Status Cut(int64_t step, Begin begin) = 0;

  // Without steps_held.
  virtual JournalState state() const = 0;
  virtual uint64_t free_segments() const = 0;
  // Adds segments. Blocks.
  virtual absl::Status Extend(uint64_t segments, storage::Interrupt interrupt) = 0;
  // The file's log, to which records go that the journal keeps; null without a file.
  virtual storage::GradientLog* log() const = 0;
};

std::shared_ptr<Journal> NoJournal();
// Records up to `before_lsn` are not in the log, and need not be.
std::shared_ptr<Journal> LogJournal(std::unique_ptr<storage::GradientLog> log, uint64_t before_lsn);
std::shared_ptr<Journal> SpillJournal(std::unique_ptr<storage::GradientLog> log);

}  // namespace ballast::services
