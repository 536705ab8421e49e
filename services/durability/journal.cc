#include "ballast/services/durability/journal.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "ballast/proto/model/status.h"

namespace ballast::services {
namespace {

constexpr uint64_t kSegmentBytesMin = uint64_t{4} << 20;

// A log segment ends when the next slice does not fit, so up to an eighth stays empty.
uint64_t UsedBytes(uint64_t segment_bytes) { return segment_bytes / 8 * 7; }

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
    gradients += storage::RecordCostMax(Journal::kSliceBodyBytesMax, n * gradient_bytes);
    values += storage::RecordCostMax(Journal::kSliceBodyBytesMax, n * sizeof(float));
  }
  for (const uint64_t n : needs.frozen) {
    values += storage::RecordCostMax(Journal::kSliceBodyBytesMax, n * sizeof(float));
  }
  size.segment_count = SegmentsFor(values + needs.steps * gradients, size.segment_bytes) + needs.segments_reserved + 1;
  return size;
}

uint64_t SegmentsFor(uint64_t bytes, uint64_t segment_bytes) {
  const uint64_t used_bytes = UsedBytes(segment_bytes);
  return (bytes + used_bytes - 1) / used_bytes;
}

// The size as a single body: each record may become a batch of its own, with metas and padding on top.
static uint64_t BodyBytesMax(uint64_t records, uint64_t record_bytes) {
  return record_bytes + (records - 1) * 2 * storage::kLogBlock;
}

bool Journal::HasRoom(uint64_t records, uint64_t record_bytes, uint64_t payload_bytes) const {
  return log_->HasRoom(BodyBytesMax(records, record_bytes), payload_bytes);
}

bool Journal::HasRoomForSlice(uint64_t records, uint64_t record_bytes, uint64_t payload_bytes) const {
  return HasRoom(records, record_bytes, payload_bytes) || log_->free_segments() >= segments_reserved_;
}

absl::Status Journal::CheckFits(uint64_t snapshot_bytes, uint64_t slice_bytes) const {
  const uint64_t needed =
      storage::RecordCostMax(snapshot_bytes, 0) + storage::RecordCostMax(snapshot_bytes, slice_bytes);
  if (needed <= log_->record_bytes_max()) return absl::OkStatus();
  return model::Error(absl::StatusCode::kResourceExhausted, model::kBudget,
                      absl::StrCat("the gradient log ", log_->file().path(), " was made with segments of ",
                                   log_->segment_bytes(), " bytes, and the job's records have grown to ", needed,
                                   ": drop the job and make it with larger chunks, or fewer tensors and ranks"));
}

absl::Status Journal::MakeRoom(uint64_t records, uint64_t record_bytes, uint64_t payload_bytes,
                               absl::FunctionRef<storage::LogRecord()> snapshot) {
  if (HasRoom(records, record_bytes, payload_bytes)) return absl::OkStatus();
  const uint64_t bytes = BodyBytesMax(records, record_bytes);
  const auto short_of = [&](absl::string_view what) {
    return model::Error(absl::StatusCode::kResourceExhausted, model::kBudget,
                        absl::StrCat("the gradient log ", log_->file().path(), " of ", log_->file_bytes(),
                                     " bytes in segments of ", log_->segment_bytes(), " has no room for ", what));
  };
  storage::LogRecord record = snapshot();
  if (storage::RecordCostMax(record.body.size(), 0) + storage::RecordCostMax(bytes, payload_bytes) >
      log_->record_bytes_max()) {
    return short_of(absl::StrCat("records of ", bytes + payload_bytes, " bytes beside a snapshot of ",
                                 record.body.size(), ": drop the job and make it with larger chunks"));
  }
  if (!log_->Roll()) return short_of("another segment although chunks were flushed");
  log_->Append(std::move(record));
  return absl::OkStatus();
}

uint64_t Journal::StepsFree(uint64_t step_bytes) const {
  const uint64_t free = log_->free_segments();
  if (free <= segments_reserved_) return 0;
  return (free - segments_reserved_) * log_->segment_bytes() / std::max<uint64_t>(1, step_bytes);
}

uint64_t Journal::StepsHeld(uint64_t step_bytes, uint64_t values_bytes) const {
  const uint64_t others = segments_reserved_ + 1, segments = log_->segments();
  const uint64_t bytes = (segments - std::min(segments, others)) * UsedBytes(log_->segment_bytes());
  return (bytes - std::min(bytes, values_bytes)) / std::max<uint64_t>(1, step_bytes);
}

}  // namespace ballast::services
