#include "ballast/storage/log/batch_encoder.h"

#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

namespace ballast::storage {
namespace {

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

uint64_t ParityBytes(const LogRecord& record) { return record.parity.empty() ? 0 : kLogBlock; }

// In the file, padding and parity included.
uint64_t PlacedBytes(const LogRecord& record) { return AlignUp(record.payload.size()) + ParityBytes(record); }

}  // namespace

LogMemory MakeLogMemory(uint64_t bytes) {
  auto* memory = static_cast<std::byte*>(std::aligned_alloc(kLogBlock, bytes));
  if (memory == nullptr) throw std::bad_alloc();
  std::memset(memory, 0, bytes);
  return {memory, std::free};
}

uint64_t BatchEncoder::BeginSegment(const SegmentRing::Beginning& beginning, uint64_t synced_batch,
                                    absl::Span<std::byte> blocks) {
  const uint64_t begin = kLogFirstSegment + beginning.segment * segment_bytes_;
  incarnation_ = beginning.incarnation;
  at_ = begin + kSegmentHeadBytes;
  SegmentHead head;
  head.salt = salt_;
  head.incarnation = beginning.incarnation;
  head.first_batch = next_batch_;
  head.synced_batch = synced_batch;
  head.oldest_incarnation = beginning.oldest;
  head.previous_incarnation = previous_incarnation_;
  EncodeHead(head, blocks.subspan(0, kLogBlock));
  EncodeHead(head, blocks.subspan(kLogBlock));
  return begin;
}

LogBatch BatchEncoder::Encode(std::vector<LogRecord> records, uint64_t oldest_incarnation, uint64_t synced_batch) {
  LogBatch batch;
  batch.number = next_batch_++;
  batch.incarnation = previous_incarnation_ = incarnation_;
  batch.oldest_incarnation = oldest_incarnation;
  batch.records = std::move(records);
  if (!batch.records.empty()) batch.last_lsn = batch.records.back().lsn;
  const uint64_t meta_bytes = MetaBytes(batch.records);
  uint64_t payload_bytes = 0, copied_bytes = 0;
  for (const LogRecord& record : batch.records) {
    payload_bytes += PlacedBytes(record);
    copied_bytes += AlignUp(record.payload.size() - DirectBytes(record)) + ParityBytes(record);
  }
  batch.memory = MakeLogMemory(2 * meta_bytes + copied_bytes);
  EncodeMetas(meta_bytes, payload_bytes, synced_batch, &batch);
  PlacePayloads(meta_bytes, &batch);
  batch.outstanding = batch.writes.size();
  return batch;
}

void BatchEncoder::EncodeMetas(uint64_t meta_bytes, uint64_t payload_bytes, uint64_t synced_batch,
                               LogBatch* batch) const {
  std::byte* const meta = batch->memory.get();
  BatchHead head;
  head.salt = salt_;
  head.incarnation = incarnation_;
  head.batch = batch->number;
  head.offset = at_;
  head.meta_bytes = meta_bytes;
  head.payload_bytes = payload_bytes;
  head.synced_batch = synced_batch;
  head.oldest_incarnation = batch->oldest_incarnation;
  head.record_count = static_cast<uint32_t>(batch->records.size());
  std::memcpy(meta, &head, sizeof(head));
  uint64_t at = sizeof(head), payload_at = 0;
  for (const LogRecord& record : batch->records) {
    const RecordHead entry{record.lsn,         record.type,           static_cast<uint32_t>(record.body.size()),
                           payload_at,         record.payload.size(), record.payload_crc32c,
                           record.parity_sum()};
    std::memcpy(meta + at, &entry, sizeof(entry));
    at += sizeof(entry);
    std::memcpy(meta + at, record.body.data(), record.body.size());
    at += Pad8(record.body.size());
    payload_at += PlacedBytes(record);
  }
  SealMeta({meta, 2 * meta_bytes});
}

void BatchEncoder::PlacePayloads(uint64_t meta_bytes, LogBatch* batch) {
  std::byte* const meta = batch->memory.get();
  batch->writes.push_back({at_, {meta, 2 * meta_bytes}});  // one write for both metas
  uint64_t to = at_ + 2 * meta_bytes;
  std::byte* copy = meta + 2 * meta_bytes;
  for (const LogRecord& record : batch->records) {
    batch->payload_offsets.push_back(to);
    const uint64_t direct = DirectBytes(record), rest = record.payload.size() - direct;
    if (direct > 0) batch->writes.push_back({to, {const_cast<std::byte*>(record.payload.data()), direct}});
    const uint64_t copied = AlignUp(rest) + ParityBytes(record);
    if (copied > 0) {
      if (rest > 0) std::memcpy(copy, record.payload.data() + direct, rest);
      if (!record.parity.empty()) std::memcpy(copy + AlignUp(rest), record.parity.block().data(), kLogBlock);
      batch->writes.push_back({to + direct, {copy, copied}});
      copy += copied;
    }
    to += PlacedBytes(record);
  }
  at_ = to;
}

}  // namespace ballast::storage
