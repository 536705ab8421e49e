// How large a job's log, or its spill, is on this server.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace ballast::services {

// Bound of a slice's header as the body of a record.
inline constexpr uint64_t kSliceBodyBytesMax = 512;
// Log segments that slices leave to further records and to restarts, each of which takes a segment. A spill has
// neither.
inline constexpr uint64_t kLogSegmentsReserved = 4;
inline constexpr uint64_t kSpillSegmentsReserved = 1;
// Steps of gradients in a spill: the step being applied, and two attempts at the next. For a log: log_length.h.
inline constexpr uint64_t kStepsSpilt = 3;

// Sizes that determine a job's log, or its spill.
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
// A log segment ends when the next slice does not fit, so up to an eighth stays empty. Bytes for slices in a segment;
// and segments that so many bytes of slices need.
uint64_t UsedBytes(uint64_t segment_bytes);
uint64_t SegmentsFor(uint64_t bytes, uint64_t segment_bytes);

// The journal that a job has, for whoever plans its space.
struct JournalState {
  bool durable = false;                // a gradient log; else a spill, or nothing
  std::string path;                    // of its file
  uint64_t segment_bytes = 0;          // 0 without a file
  uint64_t bytes = 0;                  // of the file
  uint64_t record_bytes_max = 0;       // that a segment takes
  std::optional<uint64_t> steps_held;  // as JobJournal::StepsHeld
};
// RESOURCE_EXHAUSTED (BUDGET) if a log's segments are too small for snapshots of this size and the records beside them.
absl::Status CheckFits(const JournalState& journal, uint64_t snapshot_bytes, uint64_t slice_bytes);

}  // namespace ballast::services
