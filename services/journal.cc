#include "ballast/services/journal.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "ballast/proto/model/status.h"

namespace ballast::services {
namespace {

constexpr uint64_t kSegmentBytesMin = uint64_t{4} << 20;

template <typename Message>
absl::Status Parse(const storage::ReadRecord& record, Message* message) {
  if (message->ParseFromString(record.body)) return absl::OkStatus();
  return model::Error(absl::StatusCode::kDataLoss, model::kChecksum,
                      absl::StrCat("the log's record ", record.lsn, " of type ", record.type,
                                   " is none that this version writes; was the data directory used by a newer one?"));
}

}  // namespace

storage::LogRecord EncodeRecord(const StepRecord& record) {
  storage::LogRecord out;
  const auto encode = [&](RecordType type, const auto& message) {
    out.type = static_cast<uint32_t>(type);
    out.body = message.SerializeAsString();
  };
  if (const auto* promise = std::get_if<PromiseRecord>(&record)) encode(RecordType::kPromise, promise->epoch);
  if (const auto* open = std::get_if<OpenRecord>(&record)) encode(RecordType::kOpen, open->open);
  if (const auto* slice = std::get_if<SliceRecord>(&record)) encode(RecordType::kSlice, slice->header);
  if (const auto* prepared = std::get_if<PreparedStepRecord>(&record)) {
    encode(RecordType::kPrepared, prepared->prepared);
  }
  if (const auto* decision = std::get_if<DecisionRecord>(&record)) encode(RecordType::kDecision, decision->decision);
  if (const auto* snapshot = std::get_if<SnapshotRecord>(&record)) encode(RecordType::kSnapshot, snapshot->snapshot);
  return out;
}

absl::StatusOr<StepRecord> DecodeRecord(const storage::ReadRecord& record) {
  switch (static_cast<RecordType>(record.type)) {
    case RecordType::kPromise: {
      PromiseRecord promise;
      BALLAST_RETURN_IF_ERROR(Parse(record, &promise.epoch));
      return promise;
    }
    case RecordType::kOpen: {
      OpenRecord open;
      BALLAST_RETURN_IF_ERROR(Parse(record, &open.open));
      return open;
    }
    case RecordType::kSlice: {
      SliceRecord slice;
      BALLAST_RETURN_IF_ERROR(Parse(record, &slice.header));
      return slice;
    }
    case RecordType::kPrepared: {
      PreparedStepRecord prepared;
      BALLAST_RETURN_IF_ERROR(Parse(record, &prepared.prepared));
      return prepared;
    }
    case RecordType::kDecision: {
      DecisionRecord decision;
      BALLAST_RETURN_IF_ERROR(Parse(record, &decision.decision));
      return decision;
    }
    case RecordType::kSnapshot: {
      SnapshotRecord snapshot;
      BALLAST_RETURN_IF_ERROR(Parse(record, &snapshot.snapshot));
      return snapshot;
    }
  }
  v1::LogSnapshot none;
  return Parse({record.lsn, record.type, "\xff", {}}, &none);
}

uint64_t JournalSize::bytes() const { return storage::kLogFirstSegment + segment_count * segment_bytes; }

JournalSize SizeJournal(uint64_t chunk_elements, absl::Span<const uint64_t> elements, uint64_t gradient_bytes) {
  JournalSize size;
  const uint64_t slice_bytes = chunk_elements * sizeof(float);
  size.segment_bytes = std::max(kSegmentBytesMin, storage::AlignUp(8 * slice_bytes));
  uint64_t gradients = 0, values = 0;
  for (const uint64_t n : elements) {
    gradients += storage::RecordCostMax(Journal::kSliceBodyBytesMax, n * gradient_bytes);
    values += storage::RecordCostMax(Journal::kSliceBodyBytesMax, n * sizeof(float));
  }
  // A segment ends when the next slice does not fit, so up to an eighth of it stays empty.
  const uint64_t used_bytes = size.segment_bytes / 8 * 7;
  const uint64_t bytes = values + Journal::kStepsKept * gradients;
  size.segment_count = (bytes + used_bytes - 1) / used_bytes + Journal::kSegmentsReserved + 1;
  return size;
}

bool Journal::HasRoomForSlice(uint64_t payload_bytes) const {
  if (log_->HasRoom(kSliceBodyBytesMax, payload_bytes)) return true;
  return log_->free_segments() >= kSegmentsReserved;
}

absl::Status Journal::MakeRoom(uint64_t records, uint64_t record_bytes, uint64_t payload_bytes,
                               absl::FunctionRef<storage::LogRecord()> snapshot) {
  // Each record may become a batch of its own: its metas and padding come on top.
  const uint64_t bytes = record_bytes + (records - 1) * 2 * storage::kLogBlock;
  if (log_->HasRoom(bytes, payload_bytes)) return absl::OkStatus();
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
  if (free <= kSegmentsReserved) return 0;
  return (free - kSegmentsReserved) * log_->segment_bytes() / std::max<uint64_t>(1, step_bytes);
}

}  // namespace ballast::services
