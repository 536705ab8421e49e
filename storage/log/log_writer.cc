#include "ballast/storage/log/log_writer.h"

#include <algorithm>
#include <utility>

namespace ballast::storage {
namespace {

// Each payload is at most two requests of the queue's 64.
constexpr uint64_t kBatchRequestsMax = 2 * kBatchRecordsMax + 1;

// Tags of requests that do not belong to a batch.
constexpr uint64_t kHeadTag = 0;
constexpr uint64_t kMarkTag = ~uint64_t{0};
constexpr uint64_t kSyncTag = ~uint64_t{0} - 1;

}  // namespace

void LogWriter::Pump(bool wait) {
  waiting_->TellFailure();  // of an extension, say
  if (queue_ == nullptr) {
    absl::StatusOr<std::unique_ptr<IoQueue>> queue = disk_->MakeQueue({});
    if (!queue.ok()) {
      waiting_->Fail(queue.status());
      return waiting_->TellFailure();
    }
    queue_ = *std::move(queue);
  }
  while (waiting_->status().ok() && queue_->in_flight() + kBatchRequestsMax + 2 <= kIoRequestsMax) {
    std::optional<LogItems> items = waiting_->Take(/*cut=*/encoder_.has_segment());
    if (!items.has_value()) break;
    if (items->beginning.has_value()) {
      BeginSegment(*items->beginning);
    } else {
      WriteBatch(*std::move(items));
    }
  }
  MaybeSync();
  if (in_flight()) Reap(wait);
  MaybeSync();
}

void LogWriter::Drain() {
  std::vector<IoCompletion> dropped;
  while (in_flight()) queue_->Reap(/*wait=*/true, &dropped);
  queue_.reset();
}

void LogWriter::Reap(bool wait) {
  completions_.clear();
  queue_->Reap(wait, &completions_);
  for (const IoCompletion& completion : completions_) Complete(completion);
}

void LogWriter::BeginSegment(const SegmentRing::Beginning& beginning) {
  waiting_->AwaitNotAhead(beginning.segment);  // a piece of zeros takes milliseconds
  // The previous head's blocks are in use until they are written. This wait is rare, since segments are long.
  while (heads_outstanding_ > 0) {
    CompleteRefused();
    Reap(/*wait=*/true);
  }
  const absl::Span<std::byte> blocks(head_memory_.get(), kSegmentHeadBytes);
  const uint64_t begin = encoder_.BeginSegment(beginning, synced_batch_, blocks);
  ++heads_outstanding_;
  Submit(kHeadTag, IoRequest::Kind::kWrite, begin, blocks);
}

void LogWriter::WriteBatch(LogItems items) {
  LogBatch& batch =
      batches_.emplace_back(encoder_.Encode(std::move(items.records), items.oldest_incarnation, synced_batch_));
  if (batch.last_lsn == 0) cut_batch_ = batch.number;
  for (const LogBatch::Write& write : batch.writes) {
    Submit(batch.number, IoRequest::Kind::kWrite, write.offset, write.bytes);
  }
}

void LogWriter::Submit(uint64_t tag, IoRequest::Kind kind, uint64_t offset, absl::Span<std::byte> buffer) {
  const absl::Status status =
      queue_->Submit({.kind = kind, .file = file_, .offset = offset, .buffer = buffer, .tag = tag});
  // Handled as a completion, so that the counters of outstanding requests come out right.
  if (!status.ok()) refused_.push_back({tag, status});
}

void LogWriter::CompleteRefused() {
  for (std::vector<IoCompletion> refused; !refused_.empty();) {
    refused.swap(refused_);
    for (const IoCompletion& completion : refused) Complete(completion);
    refused.clear();
  }
}

void LogWriter::MaybeSync() {
  CompleteRefused();
  if (syncing_ || heads_outstanding_ > 0 || !waiting_->status().ok()) return;
  while (!batches_.empty() && complete_batch_ < batches_.back().number) {
    const LogBatch& next = batches_[complete_batch_ + 1 - batches_.front().number];
    if (next.outstanding > 0) break;
    complete_batch_ = next.number;
    complete_lsn_ = std::max(complete_lsn_, next.last_lsn);
  }
  if (complete_batch_ == synced_batch_) return;
  const bool cut = cut_batch_ > synced_batch_ && complete_batch_ >= cut_batch_;
  if (!cut && !waiting_->WantsSync(complete_lsn_)) return;
  syncing_ = true;
  sync_covers_batch_ = complete_batch_;
  if (transient_) return CompleteSync(absl::OkStatus());
  Submit(kSyncTag, IoRequest::Kind::kSync, 0, {});
}

void LogWriter::Complete(const IoCompletion& completion) {
  if (completion.tag == kMarkTag) {
    mark_outstanding_ = false;  // a mark that failed only lags
    if (marked_batch_ < synced_batch_) WriteMark();
    return;
  }
  if (completion.tag == kSyncTag) return CompleteSync(completion.status);
  const bool failed = !completion.status.ok();
  if (failed) {
    waiting_->Fail(completion.status);
    waiting_->TellFailure();
  }
  if (completion.tag == kHeadTag) {
    --heads_outstanding_;
    return;
  }
  CompleteWrite(completion.tag, failed);
}

void LogWriter::CompleteWrite(uint64_t batch_number, bool failed) {
  LogBatch& batch = batches_[batch_number - batches_.front().number];
  batch.failed = batch.failed || failed;
  if (--batch.outstanding > 0) return;
  for (size_t i = 0; i < batch.records.size(); ++i) {
    const LogRecord& record = batch.records[i];
    const PayloadPlace place{batch.payload_offsets[i], record.payload.size(), record.payload_crc32c,
                             record.parity_sum()};
    if (record.written) record.written(batch.failed ? nullptr : &place);
  }
  batch.records.clear();
  batch.writes.clear();
  batch.memory.reset();
}

void LogWriter::CompleteSync(const absl::Status& status) {
  syncing_ = false;
  if (!status.ok()) {
    waiting_->Fail(status);
    return waiting_->TellFailure();
  }
  if (!waiting_->SyncCounts()) return;
  synced_batch_ = sync_covers_batch_;
  uint64_t durable = 0, held = 0, told = 0;
  while (!batches_.empty() && batches_.front().number <= synced_batch_) {
    const LogBatch& batch = batches_.front();
    durable = std::max(durable, batch.last_lsn);
    if (batch.last_lsn != 0) held = batch.incarnation;
    told = std::max(told, batch.oldest_incarnation);
    synced_incarnation_ = batch.incarnation;
    batches_.pop_front();
  }
  waiting_->Durable(durable, told, held);
  WriteMark();
  waiting_->Progressed();
}

void LogWriter::WriteMark() {
  if (mark_outstanding_) return;
  LogMark mark;
  mark.synced_batch = marked_batch_ = synced_batch_;
  mark.incarnation = synced_incarnation_;
  const absl::Span<std::byte> block(head_memory_.get() + kSegmentHeadBytes, kLogBlock);
  EncodeHead(mark, block);
  mark_outstanding_ = true;
  Submit(kMarkTag, IoRequest::Kind::kWrite, (2 + marks_++ % 2) * kLogBlock, block);
}

}  // namespace ballast::storage
