// The one loop over a gradient log. A walk reads and decodes record by record, keeps the slices of the undecided step
// and nothing else, and tells a visitor: recovery replays the log onto chunks, a scrub replays the log without chunks.
// The walk knows everything on which both must agree: the slices of a step and how long each log segment must stay.
// Which slices an Open voids only the step machine knows, which the visitor has.
#pragma once

#include <cstdint>
#include <set>
#include <vector>

#include "absl/status/status.h"
#include "ballast/services/step/step_machine.h"
#include "ballast/storage/log/logged_records.h"

namespace ballast::services {

struct LoggedSlice {
  v1::PushRequest header;
  storage::PayloadPlace payload;
  size_t index = 0;    // among all slices of the log
  size_t segment = 0;  // among the scanned log's live segments
};

// Hears of each record in order; an error ends the walk. `record` is for StepMachine::Replay, which the visitor calls.
// A visitor overrides the kinds of records that matter; all other kinds come to VisitOther.
class LogVisitor {
 public:
  virtual ~LogVisitor() = default;
  virtual absl::Status VisitOther(const StepRecord& record) = 0;
  virtual absl::Status VisitPromise(const v1::Epoch&, const StepRecord& record) { return VisitOther(record); }
  virtual absl::Status VisitOpen(const v1::OpenRequest&, const StepRecord& record) { return VisitOther(record); }
  // After VisitOpen: as StepMachine::Holds. The walk forgets the other slices of older epochs.
  virtual bool Holds(const v1::PushRequest&) { return false; }
  // `begins`: the snapshot stands for an Open and steps that were cut from the log. Any other snapshot repeats the
  // records before it.
  virtual absl::Status VisitSnapshot(const v1::LogSnapshot&, bool /*begins*/, const StepRecord& record) {
    return VisitOther(record);
  }
  virtual absl::Status VisitSlice(const LoggedSlice&, const StepRecord& record) { return VisitOther(record); }
  virtual absl::Status VisitPrepared(const v1::PreparedRecord&, const StepRecord& record) { return VisitOther(record); }
  // The walk has the step's slices until the call returns.
  virtual absl::Status VisitDecision(const v1::Decision&, const StepRecord& record) { return VisitOther(record); }
};

// Threads: one.
class LogWalk {
 public:
  // Borrows `records`, those of a log with so many live segments.
  LogWalk(storage::RecordSource* records, size_t segments) : records_(records), keep_for_(segments, -1) {}

  // Call once. Errors: the visitor's; those of `records`; DATA_LOSS (CHECKSUM) if a record cannot be decoded.
  absl::Status Run(LogVisitor* visitor);

  // The last record that the visitor heard of, or that could not be decoded; 0: none.
  uint64_t lsn() const { return lsn_; }
  // Slices of an attempt at the undecided step, of the open epoch and those that its Open kept, as the log orders them.
  // A slice whose bytes were lost was pushed again, so only the newest record of a place counts. Valid until the walk
  // goes on.
  std::vector<const LoggedSlice*> Slices(uint64_t attempt, int64_t step) const;
  // Attempts with slices at the undecided step.
  std::set<uint64_t> Attempts() const;
  // After the last record, for each of the scanned log's live segments: the segment must stay until this step is in the
  // chunks' durable versions. -1: no step needs the segment.
  const std::vector<int64_t>& keep_for() const { return keep_for_; }

 private:
  // `segment`: index into keep_for_.
  absl::Status Visit(const StepRecord& record, const storage::PayloadPlace& payload, size_t segment,
                     LogVisitor* visitor);
  // Counts a record of the segment, which was visited, as needed.
  void Keep(const StepRecord& record, size_t segment);

  storage::RecordSource* const records_;
  uint64_t lsn_ = 0;
  bool opened_ = false;              // an Open has come, or a snapshot of one
  size_t slice_count_ = 0;           // in the log so far
  std::vector<LoggedSlice> slices_;  // of the undecided step, all attempts
  std::vector<int64_t> keep_for_;
};

}  // namespace ballast::services
