// How class GradientLog writes: its thread makes batches of queued records, syncs when somebody waits for durability,
// and reports progress.
#include <algorithm>
#include <cstring>
#include <utility>

#include "ballast/storage/io/failpoint.h"
#include "ballast/storage/io/seeded_bugs.h"
#include "ballast/storage/log/gradient_log.h"

namespace ballast::storage {
namespace {

// A batch is closed when it reaches either limit. Each payload is at most two requests of the queue's 64.
constexpr size_t kBatchRecordsMax = 16;
constexpr uint64_t kBatchPayloadBytesMax = uint64_t{8} << 20;
constexpr uint64_t kBatchRequestsMax = 2 * kBatchRecordsMax + 1;

// Tags of requests that do not belong to a batch.
constexpr uint64_t kHeadTag = 0;
constexpr uint64_t kMarkTag = ~uint64_t{0};
constexpr uint64_t kSyncTag = ~uint64_t{0} - 1;

uint64_t MetaBytes(const std::vector<LogRecord>& records) {
  uint64_t bytes = sizeof(BatchHead);
  for (const LogRecord& record : records) bytes += sizeof(RecordHead) + Pad8(record.body.size());
  return AlignUp(bytes);
}

bool IsAligned(const std::byte* address) { return reinterpret_cast<uintptr_t>(address) % kLogBlock == 0; }

// Bytes of a payload that are written from the payload's own memory: the rest goes through the batch's memory.
uint64_t DirectBytes(const LogRecord& record) {
  return IsAligned(record.payload.data()) ? record.payload.size() / kLogBlock * kLogBlock : 0;
}

}  // namespace

bool GradientLog::HasWork() const {
  if (stopping_) return true;
  if (!failed_.ok()) return !queued_.empty();
  return !queued_.empty() || requested_lsn_ > durable_lsn_ || cut_wants_sync_;
}

void GradientLog::PumpUntilStopped() {
  for (;;) {
    {
      absl::MutexLock lock(&mutex_);
      if (stopping_) break;
      if (queue_ == nullptr || queue_->in_flight() == 0) mutex_.Await(absl::Condition(this, &GradientLog::HasWork));
      if (stopping_) break;
    }
    Pump(/*wait=*/true);
  }
  // An io_uring belongs to its thread. Requests in flight may complete: what they write is valid.
  std::vector<IoCompletion> dropped;
  while (queue_ != nullptr && queue_->in_flight() > 0) queue_->Reap(/*wait=*/true, &dropped);
  queue_.reset();
}

bool GradientLog::TakeItems(std::vector<Item>* items) {
  absl::MutexLock lock(&mutex_);
  uint64_t bytes = 0;
  while (!queued_.empty() && items->size() < kBatchRecordsMax && bytes < kBatchPayloadBytesMax) {
    if (queued_.front().roll_to != 0 && !items->empty()) break;
    items->push_back(std::move(queued_.front()));
    queued_.pop_front();
    if (items->back().roll_to != 0) break;
    bytes += items->back().record.payload.size();
    items->back().oldest_incarnation = OldestIncarnation();
  }
  if (!items->empty()) return true;
  if (!cut_wants_sync_ || write_incarnation_ == 0) return false;
  cut_wants_sync_ = false;
  cut_batch_ = next_batch_;
  items->push_back({{}, 0, current_, OldestIncarnation()});  // no lsn: an empty batch
  return true;
}

bool GradientLog::Pump(bool wait) {
  if (!status().ok()) DropQueued();
  if (queue_ == nullptr) {
    absl::StatusOr<std::unique_ptr<IoQueue>> queue = disk_->MakeQueue({});
    if (!queue.ok()) {
      Fail(queue.status());
      return false;
    }
    queue_ = *std::move(queue);
  }
  std::vector<Item> items;
  while (status().ok() && queue_->in_flight() + kBatchRequestsMax + 2 <= kIoRequestsMax && TakeItems(&items)) {
    if (items[0].roll_to != 0) {
      BeginSegment(items[0]);
    } else {
      WriteBatch(std::move(items));
    }
    items.clear();
  }
  MaybeSync();
  completions_.clear();
  if (queue_->in_flight() > 0) queue_->Reap(wait, &completions_);
  for (const IoCompletion& completion : completions_) Complete(completion);
  MaybeSync();
  absl::MutexLock lock(&mutex_);
  return !failed_.ok() ? queue_->in_flight() > 0 : !queued_.empty() || queue_->in_flight() > 0;
}

void GradientLog::BeginSegment(const Item& item) {
  // The previous head's blocks are in use until they are written. This wait is rare, since segments are long.
  while (heads_outstanding_ > 0) {
    CompleteRefused();
    completions_.clear();
    queue_->Reap(/*wait=*/true, &completions_);
    for (const IoCompletion& completion : completions_) Complete(completion);
  }
  write_incarnation_ = item.roll_to;
  const uint64_t begin = kLogFirstSegment + item.segment * segment_bytes_;
  write_at_ = begin + kSegmentHeadBytes;
  SegmentHead head;
  head.salt = salt_;
  head.incarnation = item.roll_to;
  head.first_batch = next_batch_;
  head.synced_batch = synced_batch_;
  head.oldest_incarnation = item.oldest_incarnation;
  head.previous_incarnation = previous_incarnation_;
  const absl::Span<std::byte> blocks(head_memory_.get(), kSegmentHeadBytes);
  EncodeHead(head, blocks.subspan(0, kLogBlock));
  EncodeHead(head, blocks.subspan(kLogBlock));
  ++heads_outstanding_;
  Submit(kHeadTag, IoRequest::Kind::kWrite, begin, blocks);
  Pass("log/head");
}

void GradientLog::WriteBatch(std::vector<Item> items) {
  Batch& batch = batches_.emplace_back();
  batch.number = next_batch_++;
  batch.incarnation = previous_incarnation_ = write_incarnation_;
  batch.oldest_incarnation = items.front().oldest_incarnation;
  for (Item& item : items) {
    if (item.record.lsn == 0) continue;
    batch.last_lsn = item.record.lsn;
    batch.records.push_back(std::move(item.record));
  }
  const uint64_t meta_bytes = MetaBytes(batch.records);
  uint64_t payload_bytes = 0, copied_bytes = 0;
  for (const LogRecord& record : batch.records) {
    payload_bytes += AlignUp(record.payload.size());
    copied_bytes += AlignUp(record.payload.size() - DirectBytes(record));
  }
  batch.memory = MakeLogMemory(2 * meta_bytes + copied_bytes);
  std::byte* const meta = batch.memory.get();
  BatchHead head;
  head.salt = salt_;
  head.incarnation = write_incarnation_;
  head.batch = batch.number;
  head.offset = write_at_;
  head.meta_bytes = meta_bytes;
  head.payload_bytes = payload_bytes;
  head.synced_batch = synced_batch_;
  head.oldest_incarnation = batch.oldest_incarnation;
  head.record_count = static_cast<uint32_t>(batch.records.size());
  std::memcpy(meta, &head, sizeof(head));
  uint64_t at = sizeof(head), payload_at = 0;
  for (const LogRecord& record : batch.records) {
    const RecordHead entry{record.lsn,    record.type,           static_cast<uint32_t>(record.body.size()),
                           payload_at,    record.payload.size(), record.payload_crc32c,
                           /*reserved=*/0};
    std::memcpy(meta + at, &entry, sizeof(entry));
    at += sizeof(entry);
    std::memcpy(meta + at, record.body.data(), record.body.size());
    at += Pad8(record.body.size());
    payload_at += AlignUp(record.payload.size());
  }
  SealMeta({meta, 2 * meta_bytes});

  // One request for both metas; batch.outstanding is complete before any completion is looked at.
  Submit(batch.number, IoRequest::Kind::kWrite, write_at_, {meta, 2 * meta_bytes});
  ++batch.outstanding;
  uint64_t to = write_at_ + 2 * meta_bytes;
  std::byte* copy = meta + 2 * meta_bytes;
  for (const LogRecord& record : batch.records) {
    batch.payload_offsets.push_back(to);
    const uint64_t direct = DirectBytes(record), rest = record.payload.size() - direct;
    if (direct > 0) {
      Submit(batch.number, IoRequest::Kind::kWrite, to, {const_cast<std::byte*>(record.payload.data()), direct});
      ++batch.outstanding;
    }
    if (rest > 0) {
      std::memcpy(copy, record.payload.data() + direct, rest);
      Submit(batch.number, IoRequest::Kind::kWrite, to + direct, {copy, AlignUp(rest)});
      ++batch.outstanding;
      copy += AlignUp(rest);
    }
    to += AlignUp(record.payload.size());
  }
  write_at_ = to;
  Pass("log/submitted");
}

void GradientLog::Submit(uint64_t tag, IoRequest::Kind kind, uint64_t offset, absl::Span<std::byte> buffer) {
  const absl::Status status =
      queue_->Submit({.kind = kind, .file = file_.get(), .offset = offset, .buffer = buffer, .tag = tag});
  // Handled as a completion, so that the counters of outstanding requests come out right.
  if (!status.ok()) refused_.push_back({tag, status});
}

void GradientLog::CompleteRefused() {
  for (std::vector<IoCompletion> refused; !refused_.empty();) {
    refused.swap(refused_);
    for (const IoCompletion& completion : refused) Complete(completion);
    refused.clear();
  }
}

void GradientLog::MaybeSync() {
  CompleteRefused();
  const bool head_written = heads_outstanding_ == 0 || Seeded(StorageBug::kSyncBeforeHead);
  if (syncing_ || !head_written || !status().ok()) return;
  uint64_t complete_batch = synced_batch_, complete_lsn = 0;
  for (const Batch& batch : batches_) {
    if (batch.outstanding > 0) break;
    complete_batch = batch.number;
    complete_lsn = std::max(complete_lsn, batch.last_lsn);
  }
  if (complete_batch == synced_batch_) return;
  bool wanted = cut_batch_ > synced_batch_ && complete_batch >= cut_batch_;
  {
    absl::MutexLock lock(&mutex_);
    wanted = wanted || (requested_lsn_ > durable_lsn_ && complete_lsn >= requested_lsn_);
  }
  if (!wanted) return;
  syncing_ = true;
  sync_covers_batch_ = complete_batch;
  Pass("log/sync");
  if (transient_ || Seeded(StorageBug::kSyncDropped)) return CompleteSync(absl::OkStatus());
  if (Seeded(StorageBug::kMarkBeforeSync)) synced_batch_ = complete_batch, WriteMark();
  Submit(kSyncTag, IoRequest::Kind::kSync, 0, {});
}

void GradientLog::Complete(const IoCompletion& completion) {
  if (completion.tag == kMarkTag) {
    mark_outstanding_ = false;  // a mark that failed only lags
    Pass("log/marked");
    if (marked_batch_ < synced_batch_) WriteMark();
    return;
  }
  if (completion.tag == kSyncTag) return CompleteSync(completion.status);
  const bool failed = !completion.status.ok() && !Seeded(StorageBug::kFailedWriteIgnored);
  if (failed) Fail(completion.status);
  if (completion.tag == kHeadTag) {
    --heads_outstanding_;
    Pass("log/head_written");
    return;
  }
  const auto batch =
      std::find_if(batches_.begin(), batches_.end(), [&](const Batch& b) { return b.number == completion.tag; });
  batch->failed = batch->failed || failed;
  if (--batch->outstanding > 0) return;
  for (size_t i = 0; i < batch->records.size(); ++i) {
    const LogRecord& record = batch->records[i];
    const PayloadPlace place{batch->payload_offsets[i], record.payload.size(), record.payload_crc32c};
    if (record.written) record.written(batch->failed ? nullptr : &place);
  }
  batch->records.clear();
  batch->memory.reset();
  Pass("log/written");
}

void GradientLog::CompleteSync(const absl::Status& status) {
  syncing_ = false;
  Pass("log/synced");
  if (!status.ok() && Seeded(StorageBug::kFailedSyncRetried)) return;
  if (!status.ok() && !Seeded(StorageBug::kFailedSyncIgnored)) return Fail(status);
  {
    absl::MutexLock lock(&mutex_);
    if (extending_ || !failed_.ok()) return;  // an extension's sync may have failed: then this sync is void
  }
  synced_batch_ = sync_covers_batch_;
  uint64_t durable = 0, held = 0, oldest = 0;
  while (!batches_.empty() && batches_.front().number <= synced_batch_) {
    durable = std::max(durable, batches_.front().last_lsn);
    if (batches_.front().last_lsn != 0) held = batches_.front().incarnation;
    oldest = std::max(oldest, batches_.front().oldest_incarnation);
    synced_incarnation_ = batches_.front().incarnation;
    batches_.pop_front();
  }
  if (Seeded(StorageBug::kSyncBeforeWritten) && !batches_.empty()) durable = batches_.back().last_lsn;
  {
    absl::MutexLock lock(&mutex_);
    durable_lsn_ = std::max(durable_lsn_, durable);
    for (Segment& segment : segments_) {
      if (!segment.cut || segment.incarnation >= oldest) continue;
      segment = {};
      Pass("log/freed");
    }
    held_incarnation_ = std::max(held_incarnation_, held);
    if (cut_waits_ && CutSegments()) {
      cut_waits_ = false;
      WantCutSync();
    }
  }
  WriteMark();
  if (progress_) progress_();
}

void GradientLog::WriteMark() {
  if (mark_outstanding_) return;
  LogMark mark;
  mark.synced_batch = marked_batch_ = synced_batch_;
  mark.incarnation = synced_incarnation_;
  const absl::Span<std::byte> block(head_memory_.get() + 2 * kLogBlock, kLogBlock);
  EncodeHead(mark, block);
  mark_outstanding_ = true;
  Submit(kMarkTag, IoRequest::Kind::kWrite, (2 + marks_++ % 2) * kLogBlock, block);
}

void GradientLog::Fail(const absl::Status& status) {
  {
    absl::MutexLock lock(&mutex_);
    if (!failed_.ok()) return;
    failed_ = status;
  }
  DropQueued();
  if (progress_) progress_();
}

void GradientLog::DropQueued() {
  std::deque<Item> dropped;
  {
    absl::MutexLock lock(&mutex_);
    dropped.swap(queued_);
  }
  for (Item& item : dropped) {
    if (item.record.written) item.record.written(nullptr);
  }
}

}  // namespace ballast::storage
