#include "ballast/storage/log/log_queue.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <cstdlib>

namespace ballast::storage {

bool LogQueue::HasRoom(uint64_t body_bytes, uint64_t payload_bytes) const {
  absl::MutexLock lock(&mutex_);
  return ring_.HasRoom(RecordCostMax(body_bytes, payload_bytes));
}

bool LogQueue::Roll() {
  absl::MutexLock lock(&mutex_);
  const std::optional<SegmentRing::Beginning> beginning = ring_.Roll();
  if (!beginning.has_value()) return false;
  queued_.emplace_back(*beginning);
  return true;
}

void LogQueue::Append(LogRecord record) {
  const uint64_t cost = RecordCostMax(record.body.size(), record.payload.size());
  absl::MutexLock lock(&mutex_);
  if (cost > ring_.room()) {
    spdlog::critical("a record of {} bytes for {} bytes of room: it would be written over another segment", cost,
                     ring_.room());
    std::abort();
  }
  ring_.Take(cost, record.keep_for);
  queued_.emplace_back(std::move(record));
}

void LogQueue::Sync(uint64_t lsn) {
  absl::MutexLock lock(&mutex_);
  requested_lsn_ = std::max(requested_lsn_, lsn);
}

uint64_t LogQueue::durable_lsn() const {
  absl::MutexLock lock(&mutex_);
  return durable_lsn_;
}

absl::Status LogQueue::status() const {
  absl::MutexLock lock(&mutex_);
  return failed_;
}

void LogQueue::Cut(int64_t step) {
  absl::MutexLock lock(&mutex_);
  ring_.Cut(step);
}

bool LogQueue::cut_lacks_room() const {
  absl::MutexLock lock(&mutex_);
  return ring_.cut_lacks_room();
}

void LogQueue::Release(int64_t step) {
  absl::MutexLock lock(&mutex_);
  ring_.Release(step);
}

void LogQueue::Keep(uint64_t incarnation, int64_t step) {
  absl::MutexLock lock(&mutex_);
  ring_.Keep(incarnation, step);
}

uint64_t LogQueue::free_segments() const {
  absl::MutexLock lock(&mutex_);
  return ring_.free_count();
}

uint64_t LogQueue::segments() const {
  absl::MutexLock lock(&mutex_);
  return ring_.count();
}

void LogQueue::BeginExtension() {
  absl::MutexLock lock(&mutex_);
  extending_ = true;
}

void LogQueue::EndExtension(uint64_t grown, uint64_t written, bool synced) {
  absl::MutexLock lock(&mutex_);
  extending_ = false;
  if (!synced) return;
  for (uint64_t i = written; i < grown; ++i) unwritten_.push_back(ring_.count() + i);
  ring_.Add(grown);
}

std::optional<uint64_t> LogQueue::BeginWriteAhead() {
  absl::MutexLock lock(&mutex_);
  for (;;) {
    const auto ready = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return ended() || !unwritten_.empty(); };
    mutex_.Await(absl::Condition(&ready));
    if (ended()) return std::nullopt;
    const uint64_t segment = unwritten_.front();
    unwritten_.pop_front();
    if (ring_.is_free(segment)) return ahead_ = segment;
  }
}

bool LogQueue::WritesAhead(uint64_t segment) const {
  absl::MutexLock lock(&mutex_);
  return !ended() && ring_.is_free(segment);
}

void LogQueue::EndWriteAhead() {
  absl::MutexLock lock(&mutex_);
  ahead_.reset();
}

void LogQueue::AwaitNotAhead(uint64_t segment) const {
  absl::MutexLock lock(&mutex_);
  const auto over = [this, segment]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return ahead_ != segment; };
  mutex_.Await(absl::Condition(&over));
}

std::optional<LogItems> LogQueue::Take(bool cut) {
  LogItems items;
  absl::MutexLock lock(&mutex_);
  items.oldest_incarnation = ring_.oldest();
  uint64_t bytes = 0;
  while (!queued_.empty() && items.records.size() < kBatchRecordsMax && bytes < kBatchPayloadBytesMax) {
    if (const auto* beginning = std::get_if<SegmentRing::Beginning>(&queued_.front())) {
      if (!items.records.empty()) break;
      items.beginning = *beginning;
      queued_.pop_front();
      return items;
    }
    items.records.push_back(std::move(std::get<LogRecord>(queued_.front())));
    queued_.pop_front();
    bytes += items.records.back().payload.size();
  }
  if (!items.records.empty()) return items;
  if (!cut || !ring_.cut_wants_batch()) return std::nullopt;
  ring_.BeginCutBatch();
  return items;
}

bool LogQueue::WantsSync(uint64_t lsn) const {
  absl::MutexLock lock(&mutex_);
  return requested_lsn_ > durable_lsn_ && lsn >= requested_lsn_;
}

bool LogQueue::SyncCounts() const {
  absl::MutexLock lock(&mutex_);
  return !extending_ && failed_.ok();
}

void LogQueue::Durable(uint64_t lsn, uint64_t told, uint64_t held) {
  absl::MutexLock lock(&mutex_);
  durable_lsn_ = std::max(durable_lsn_, lsn);
  ring_.Synced(told, held);
}

void LogQueue::Progressed() const {
  if (progress_) progress_();
}

void LogQueue::Fail(const absl::Status& status) {
  absl::MutexLock lock(&mutex_);
  failed_.Update(status);
}

void LogQueue::TellFailure() {
  std::deque<std::variant<LogRecord, SegmentRing::Beginning>> dropped;
  bool first = false;
  {
    absl::MutexLock lock(&mutex_);
    if (failed_.ok()) return;
    dropped.swap(queued_);
    first = !std::exchange(told_failure_, true);
  }
  for (const auto& item : dropped) {
    const auto* const record = std::get_if<LogRecord>(&item);
    if (record != nullptr && record->written) record->written(nullptr);
  }
  if (first) Progressed();
}

bool LogQueue::empty() const {
  absl::MutexLock lock(&mutex_);
  return queued_.empty();
}

bool LogQueue::HasWork() const {
  if (stopping_) return true;
  if (!failed_.ok()) return !queued_.empty() || !told_failure_;
  return !queued_.empty() || requested_lsn_ > durable_lsn_ || ring_.cut_wants_batch();
}

bool LogQueue::AwaitWork() {
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(this, &LogQueue::HasWork));
  return !stopping_;
}

void LogQueue::Stop() {
  absl::MutexLock lock(&mutex_);
  stopping_ = true;
}

bool LogQueue::stopping() const {
  absl::MutexLock lock(&mutex_);
  return stopping_;
}

}  // namespace ballast::storage
