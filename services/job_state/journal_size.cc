#include "ballast/services/job_state/journal_size.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/storage/log/gradient_log.h"

namespace ballast::services {
namespace {

constexpr uint64_t kSegmentBytesMin = uint64_t{4} << 20;

}  // namespace

uint64_t JournalSize::bytes() const { return storage::kLogFirstSegment + segment_count * segment_bytes; }

JournalSize SizeJournal(const JournalNeeds& needs) {
  JournalSize size;
  const uint64_t slice_bytes = needs.chunk_elements * sizeof(float), gradient_bytes = needs.gradient_bytes;
  const absl::Span<const uint64_t> elements = needs.elements;
  size.segment_bytes = needs.segment_bytes;
  if (size.segment_bytes == 0) {
    // Records are stored twice, and beside the snapshot lies a prepared record that may be as large.
    size.segment_bytes = std::max({kSegmentBytesMin, storage::AlignUp(8 * slice_bytes),
                                   storage::AlignUp(2 * 4 * needs.snapshot_bytes + slice_bytes)});
  }
  uint64_t gradients = 0, values = 0;
  for (const uint64_t n : elements) {
    gradients += storage::RecordCostMax(kSliceBodyBytesMax, n * gradient_bytes);
    values += storage::RecordCostMax(kSliceBodyBytesMax, n * sizeof(float));
  }
  for (const uint64_t n : needs.frozen) values += storage::RecordCostMax(kSliceBodyBytesMax, n * sizeof(float));
  size.segment_count = SegmentsFor(values + needs.steps * gradients, size.segment_bytes) + needs.segments_reserved + 1;
  return size;
}

uint64_t UsedBytes(uint64_t segment_bytes) { return segment_bytes / 8 * 7; }

uint64_t SegmentsFor(uint64_t bytes, uint64_t segment_bytes) {
  const uint64_t used_bytes = UsedBytes(segment_bytes);
  return (bytes + used_bytes - 1) / used_bytes;
}

absl::Status CheckFits(const JournalState& journal, uint64_t snapshot_bytes, uint64_t slice_bytes) {
  const uint64_t needed =
      storage::RecordCostMax(snapshot_bytes, 0) + storage::RecordCostMax(snapshot_bytes, slice_bytes);
  if (!journal.durable || needed <= journal.record_bytes_max) return absl::OkStatus();
  return model::Error(absl::StatusCode::kResourceExhausted, model::kBudget,
                      absl::StrCat("the gradient log ", journal.path, " was made with segments of ",
                                   journal.segment_bytes, " bytes, and the job's records have grown to ", needed,
                                   ": drop the job and make it with larger chunks, or fewer tensors and ranks"));
}

}  // namespace ballast::services
