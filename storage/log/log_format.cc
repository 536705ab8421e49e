#include "ballast/storage/log/log_format.h"

#include <cstddef>
#include <cstring>

#include "ballast/kernels/kernels.h"

namespace ballast::storage {
namespace {

// CRC32C of `bytes`, with the four bytes at `digest_at` taken as zero.
uint32_t DigestAround(absl::Span<const std::byte> bytes, size_t digest_at) {
  static constexpr std::byte kZeros[sizeof(uint32_t)] = {};
  uint32_t crc = kernels::Crc32c(bytes.subspan(0, digest_at));
  crc = kernels::Crc32c(kZeros, crc);
  return kernels::Crc32c(bytes.subspan(digest_at + sizeof(uint32_t)), crc);
}

}  // namespace

template <typename Head>
void EncodeHead(const Head& head, absl::Span<std::byte> block) {
  static_assert(sizeof(Head) <= kLogBlock);
  std::memset(block.data(), 0, block.size());
  std::memcpy(block.data(), &head, sizeof(head));
  const uint32_t digest = DigestAround(block, offsetof(Head, digest));
  std::memcpy(block.data() + offsetof(Head, digest), &digest, sizeof(digest));
}

template <typename Head>
bool DecodeHead(absl::Span<const std::byte> block, Head* head) {
  std::memcpy(head, block.data(), sizeof(*head));
  return head->magic == Head::kMagic && head->digest == DigestAround(block, offsetof(Head, digest));
}

template void EncodeHead(const FileHead&, absl::Span<std::byte>);
template void EncodeHead(const LogMark&, absl::Span<std::byte>);
template void EncodeHead(const SegmentHead&, absl::Span<std::byte>);
template bool DecodeHead(absl::Span<const std::byte>, FileHead*);
template bool DecodeHead(absl::Span<const std::byte>, LogMark*);
template bool DecodeHead(absl::Span<const std::byte>, SegmentHead*);

void SealMeta(absl::Span<std::byte> both) {
  const uint64_t bytes = both.size() / 2;
  std::memcpy(both.data() + bytes, both.data(), bytes);
  for (uint32_t copy = 0; copy < 2; ++copy) {
    const absl::Span<std::byte> meta = both.subspan(copy * bytes, bytes);
    std::memcpy(meta.data() + offsetof(BatchHead, copy), &copy, sizeof(copy));
    const uint32_t digest = DigestAround(meta, offsetof(BatchHead, digest));
    std::memcpy(meta.data() + offsetof(BatchHead, digest), &digest, sizeof(digest));
  }
}

bool DecodeBatchHead(absl::Span<const std::byte> block, uint64_t block_offset, uint64_t limit, BatchHead* head) {
  std::memcpy(head, block.data(), sizeof(*head));
  if (head->magic != BatchHead::kMagic || head->copy > 1) return false;
  if (head->meta_bytes < kLogBlock || head->meta_bytes % kLogBlock != 0 || head->payload_bytes % kLogBlock != 0)
    return false;
  if (head->offset > block_offset || head->meta_bytes > limit) return false;
  if (head->offset + head->copy * head->meta_bytes != block_offset) return false;
  const uint64_t room = limit - head->offset;
  return 2 * head->meta_bytes <= room && head->payload_bytes <= room - 2 * head->meta_bytes;
}

bool DecodeMeta(absl::Span<const std::byte> meta, ReadBatch* batch) {
  BatchHead& head = batch->head;
  std::memcpy(&head, meta.data(), sizeof(head));
  if (head.digest != DigestAround(meta, offsetof(BatchHead, digest))) return false;
  // The digest vouches for what a Ballast wrote; the checks below are for a digest that was made to fit.
  const uint64_t payloads = head.offset + 2 * head.meta_bytes;
  uint64_t at = sizeof(BatchHead);
  batch->records.clear();
  for (uint32_t i = 0; i < head.record_count; ++i) {
    RecordHead record;
    if (meta.size() - at < sizeof(record)) return false;
    std::memcpy(&record, meta.data() + at, sizeof(record));
    at += sizeof(record);
    if (Pad8(record.body_bytes) > meta.size() - at) return false;
    if (record.payload_bytes > head.payload_bytes || record.payload_at % kLogBlock != 0) return false;
    const uint64_t placed_bytes = AlignUp(record.payload_bytes) + (record.parity_sum != 0 ? kLogBlock : 0);
    if (placed_bytes > head.payload_bytes || record.payload_at > head.payload_bytes - placed_bytes) return false;
    batch->records.push_back(
        {record.lsn,
         record.type,
         std::string(reinterpret_cast<const char*>(meta.data() + at), record.body_bytes),
         {payloads + record.payload_at, record.payload_bytes, record.payload_crc32c, record.parity_sum}});
    at += Pad8(record.body_bytes);
  }
  batch->end = payloads + head.payload_bytes;
  return true;
}

}  // namespace ballast::storage
