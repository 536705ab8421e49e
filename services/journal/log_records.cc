#include "ballast/services/journal/log_records.h"

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"

namespace ballast::services {
namespace {

template <typename Message>
absl::Status Parse(const storage::ReadRecord& record, Message* message) {
  if (message->ParseFromString(record.body)) return absl::OkStatus();
  return model::Error(absl::StatusCode::kDataLoss, model::kChecksum,
                      absl::StrCat("the log's record ", record.lsn, " of type ", record.type,
                                   " is unknown to this version; did a newer version use the data directory?"));
}

}  // namespace

storage::LogRecord EncodeRecord(const StepRecord& record) {
  storage::LogRecord out;
  const auto encode = [&](RecordType type, const auto& message) {
    out.type = static_cast<uint32_t>(type);
    out.body = message.SerializeAsString();
  };
  if (const auto* promise = std::get_if<PromiseRecord>(&record)) encode(RecordType::kPromise, promise->epoch);
  if (const auto* open = std::get_if<OpenRecord>(&record)) encode(RecordType::kOpen, *open->open);
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
      const auto open = std::make_shared<v1::OpenRequest>();
      BALLAST_RETURN_IF_ERROR(Parse(record, open.get()));
      return OpenRecord{open};
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

void LoggedSteps::Add(const StepRecord& record) {
  prepared = prepared || std::holds_alternative<PreparedStepRecord>(record);
  if (const auto* decision = std::get_if<DecisionRecord>(&record)) committed = decision->decision.step();
  if (const auto* snapshot = std::get_if<SnapshotRecord>(&record)) committed = snapshot->snapshot.committed();
}

void EncodeChanged(absl::Span<const int64_t> changed, v1::LogSnapshot* snapshot) {
  for (size_t i = 0; i < changed.size(); ++i) {
    if (i == 0 || changed[i] != changed[i - 1]) {
      snapshot->add_changed()->set_age(static_cast<uint64_t>(snapshot->committed() - changed[i]));
    }
    v1::ChangedRun& run = *snapshot->mutable_changed(snapshot->changed_size() - 1);
    run.set_chunks(run.chunks() + 1);
  }
}

absl::StatusOr<std::vector<int64_t>> DecodeChanged(const v1::LogSnapshot& snapshot, uint64_t chunks) {
  std::vector<int64_t> changed;
  const auto committed = static_cast<uint64_t>(snapshot.committed());
  bool fits = snapshot.committed() >= -1;
  for (const v1::ChangedRun& run : snapshot.changed()) {
    fits = fits && run.chunks() <= chunks - changed.size() && run.age() <= committed + 1;
    if (fits) changed.insert(changed.end(), run.chunks(), static_cast<int64_t>(committed - run.age()));
  }
  if (fits && changed.size() == chunks) return changed;
  return model::Error(
      absl::StatusCode::kDataLoss, model::kDiverged,
      absl::StrCat("the snapshot of step ", snapshot.committed(), " at the start of the log describes ", changed.size(),
                   " chunks, but its Open gives ", chunks, " to this server; the log may belong to another server"));
}

uint64_t NormBytesMax(const model::Chunk& chunk) {
  constexpr uint64_t kChunkBytesMax = 32, kSegmentBytesMax = 24;  // as protobuf encodes them
  return kChunkBytesMax + kSegmentBytesMax * chunk.segments.size();
}

uint64_t SnapshotBytesMax(const model::EpochPlan& plan, absl::Span<const uint64_t> chunks) {
  constexpr uint64_t kFixedBytes = 4096, kTensorBytesMax = 26, kRunBytesMax = 24, kGroupBytesMax = 96,
                     kUnfilledBytesMax = 24;
  const uint64_t tensors = plan.layout().tensors().size(), groups = plan.open().spec().group_count();
  // The last decision, and the prepared step: its header, blobs and norms. The spec's digest is within the fixed bytes:
  // a log made for an Open without a digest fits the same Open with one.
  uint64_t bytes = kFixedBytes + plan.open().ByteSizeLong() - plan.open().spec_digest().size() + 2 * kDecisionBytesMax +
                   kTensorBytesMax * tensors + kGroupBytesMax * groups;
  for (const uint64_t id : chunks) bytes += kRunBytesMax + NormBytesMax(plan.layout().chunks()[id]);
  if (plan.open().has_table()) bytes += kUnfilledBytesMax * chunks.size();
  return bytes;
}

}  // namespace ballast::services
