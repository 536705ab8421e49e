#include "ballast/storage/log/logged_records.h"

#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"

namespace ballast::storage {

absl::StatusOr<const ReadRecord*> LoggedRecords::Next() {
  while (next_record_ == records_.size()) {
    if (next_batch_ == scanned_->batches.size()) return nullptr;
    const std::vector<ScannedLog::Segment>& live = scanned_->live;
    while (segment_ + 1 < live.size() && live[segment_ + 1].first_batch <= next_batch_) ++segment_;
    const ScannedLog::Batch& place = scanned_->batches[next_batch_];
    BatchHead which;
    which.offset = place.offset;
    which.meta_bytes = place.meta_bytes;
    which.batch = scanned_->last_batch - (scanned_->batches.size() - 1 - next_batch_);
    which.incarnation = live[segment_].incarnation;
    which.salt = live[segment_].salt;
    const uint64_t limit = kLogFirstSegment + (live[segment_].index + 1) * scanned_->segment_bytes;
    BALLAST_ASSIGN_OR_RETURN(std::optional<ReadBatch> batch, ReadBatchOf(&reader_, which, limit));
    if (!batch.has_value()) {
      return model::Error(
          absl::StatusCode::kDataLoss, model::kChecksum,
          absl::StrCat("gradient log ", file_->path(), ": batch ", which.batch, " at offset ", place.offset,
                       " was read a moment ago, and now the disk returns something else; check the "
                       "disk, then start again"));
    }
    records_ = std::move(batch->records);
    next_record_ = 0;
    ++next_batch_;
  }
  return &records_[next_record_++];
}

}  // namespace ballast::storage
