#include "ballast/services/job_state/promise_log.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "ballast/services/job_state/job_entry.h"

namespace ballast::services {

uint64_t PromiseLog::Append(const StepRecord& record) {
  const uint64_t lsn = next_lsn_++;
  const std::string prefix = CatalogPrefix(job_);
  if (const auto* promise = std::get_if<PromiseRecord>(&record)) {
    // A promise right behind one that nobody is writing yet takes its place: the machine answers only for the newest.
    const bool waits = unwritten_.size() > (writing_ ? 1 : 0);
    if (waits && unwritten_.back().key == prefix + kCatalogPromise) unwritten_.pop_back();
    unwritten_.push_back({lsn, prefix + kCatalogPromise, promise->epoch.SerializeAsString()});
  } else if (const auto* open = std::get_if<OpenRecord>(&record)) {
    unwritten_.push_back({lsn, prefix + kCatalogOpen, open->open->SerializeAsString()});
    Sync(lsn);  // no request waits for it, but operators read it after a restart
  } else if (std::holds_alternative<PreparedStepRecord>(record) && !marked_) {
    marked_ = true;
    unwritten_.push_back({lsn, prefix + kCatalogHadState, ""});
  }
  return lsn;
}

void PromiseLog::KeptHere() {
  marked_ = false;
  elsewhere_lsn_.reset();
}

void PromiseLog::KeptElsewhere(uint64_t next_lsn) {
  marked_ = true;
  elsewhere_lsn_ = 0;
  next_lsn_ = std::max(next_lsn_, next_lsn);
}

void PromiseLog::Sync(uint64_t lsn) { requested_lsn_ = std::max(requested_lsn_, lsn); }

std::optional<PromiseLog::Durable> PromiseLog::NextToWrite() {
  if (writing_ || unwritten_.empty() || unwritten_.front().lsn > requested_lsn_) return std::nullopt;
  writing_ = true;
  return unwritten_.front();
}

absl::Status PromiseLog::Write(storage::Catalog* catalog, const Durable& record) {
  return catalog->Put(record.key, record.value, storage::Catalog::Sync::kTwice);
}

void PromiseLog::Written(uint64_t lsn) {
  writing_ = false;
  if (!unwritten_.empty() && unwritten_.front().lsn == lsn) unwritten_.pop_front();
}

std::optional<uint64_t> PromiseLog::TakeSynced() {
  // A log is durable as a prefix: a later record never overtakes a record that is still being written.
  uint64_t durable = std::min(requested_lsn_, elsewhere_lsn_.value_or(requested_lsn_));
  if (!unwritten_.empty()) durable = std::min(durable, unwritten_.front().lsn - 1);
  if (durable <= reported_lsn_) return std::nullopt;
  reported_lsn_ = durable;
  return durable;
}

}  // namespace ballast::services
