#include "ballast/services/journal/log_walk.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <variant>

#include "ballast/proto/base/status.h"
#include "ballast/services/journal/log_records.h"

namespace ballast::services {

absl::Status LogWalk::Run(LogVisitor* visitor) {
  for (;;) {
    BALLAST_ASSIGN_OR_RETURN(const storage::ReadRecord* const read, records_->Next());
    if (read == nullptr) break;
    lsn_ = read->lsn;
    BALLAST_ASSIGN_OR_RETURN(const StepRecord record, DecodeRecord(*read));
    BALLAST_RETURN_IF_ERROR(Visit(record, read->payload, records_->segment(), visitor));
    Keep(record, records_->segment());
  }
  return absl::OkStatus();
}

void LogWalk::Keep(const StepRecord& record, size_t segment) {
  int64_t& keep_for = keep_for_[segment];
  if (const auto* slice = std::get_if<SliceRecord>(&record)) keep_for = std::max(keep_for, slice->header.step());
  // A restore has no slices: a replay needs its prepared record.
  if (const auto* prepared = std::get_if<PreparedStepRecord>(&record);
      prepared != nullptr && prepared->prepared.header().kind() == v1::STEP_KIND_RESTORE) {
    keep_for = std::max(keep_for, prepared->prepared.step());
  }
  // Slices of older epochs are void but for those that are left.
  if (const auto* open = std::get_if<OpenRecord>(&record)) {
    for (size_t i = 0; i <= segment; ++i) keep_for_[i] = std::min(keep_for_[i], open->open->base());
    for (const LoggedSlice& slice : slices_) {
      keep_for_[slice.segment] = std::max(keep_for_[slice.segment], slice.header.step());
    }
  }
}

absl::Status LogWalk::Visit(const StepRecord& record, const storage::PayloadPlace& payload, size_t segment,
                            LogVisitor* visitor) {
  if (const auto* promise = std::get_if<PromiseRecord>(&record)) return visitor->VisitPromise(promise->epoch, record);
  if (const auto* open = std::get_if<OpenRecord>(&record)) {
    opened_ = true;
    BALLAST_RETURN_IF_ERROR(visitor->VisitOpen(*open->open, record));
    std::erase_if(slices_, [&](const LoggedSlice& slice) { return !visitor->Holds(slice.header); });
    return absl::OkStatus();
  }
  if (const auto* snapshot = std::get_if<SnapshotRecord>(&record)) {
    const bool begins = !opened_ && snapshot->snapshot.has_open();
    opened_ = opened_ || begins;
    return visitor->VisitSnapshot(snapshot->snapshot, begins, record);
  }
  if (const auto* slice = std::get_if<SliceRecord>(&record)) {
    slices_.push_back({slice->header, payload, slice_count_++, segment});
    return visitor->VisitSlice(slices_.back(), record);
  }
  if (const auto* prepared = std::get_if<PreparedStepRecord>(&record)) {
    return visitor->VisitPrepared(prepared->prepared, record);
  }
  const absl::Status visited = visitor->VisitDecision(std::get<DecisionRecord>(record).decision, record);
  slices_.clear();
  return visited;
}

std::vector<const LoggedSlice*> LogWalk::Slices(uint64_t attempt, int64_t step) const {
  std::map<std::tuple<int, uint32_t, uint64_t>, const LoggedSlice*> newest;
  for (const LoggedSlice& slice : slices_) {
    const v1::PushRequest& header = slice.header;
    if (header.attempt() != attempt || header.step() != step) continue;
    newest[{header.kind(), header.unit(), header.begin()}] = &slice;
  }
  std::vector<const LoggedSlice*> found;
  for (const auto& [place, slice] : newest) found.push_back(slice);
  std::sort(found.begin(), found.end());  // the log's order
  return found;
}

std::set<uint64_t> LogWalk::Attempts() const {
  std::set<uint64_t> attempts;
  for (const LoggedSlice& slice : slices_) attempts.insert(slice.header.attempt());
  return attempts;
}

}  // namespace ballast::services
