// The gradient log's format on disk. Little-endian. Every part starts at a multiple of 4096 bytes: O_DIRECT moves whole
// blocks of this size, and a torn write is torn between blocks.
//
//   file     = head (2 copies, 4096 each) | mark A | mark B | segment 0 | segment 1 | ...
//   segment  = head (2 copies) | batch | batch | ... | leftovers from an earlier life of the segment
//   batch    = meta (2 copies) | payloads, each padded to 4096, with or without a block of parity behind it
//   meta     = BatchHead | RecordHead, body | RecordHead, body | ..., padded to 4096
//
// Segments are written in order and recycled. Incarnations count the lives of segments over the whole log, so leftovers
// from an earlier life are never taken for new batches. A crash may lose a segment's head and leave its batches; the
// next opening of the log then gives out the same incarnation again, with a different random salt. Batches are numbered
// without gaps. A batch is written when it is full or the disk is idle, in any order with its neighbours; a sync makes
// all complete batches durable.
//
// Torn or rotten: every batch names the newest batch that was durable at the time of its writing, and a mark names the
// newest after each sync. An unreadable batch beyond all batches so named is *torn*: the log ends before it. Any
// earlier unreadable batch was durable once, so it is *rotten*, which is DATA_LOSS. Small records are kept twice
// (meta), so a rotten block is repaired from its copy. A payload with a single rotten block is rebuilt from its parity
// when somebody needs the payload; anything worse is DATA_LOSS then.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "ballast/storage/io/block_file.h"

namespace ballast::storage {

inline constexpr uint32_t kLogFormat = 2;
inline constexpr uint64_t kLogBlock = kIoAlignment;
inline constexpr uint64_t kLogFirstSegment = 4 * kLogBlock;
inline constexpr uint64_t kSegmentHeadBytes = 2 * kLogBlock;
inline constexpr uint64_t kLogSegmentBytesMin = 16 * kLogBlock;

// Digests are CRC32C of the whole part, computed with a digest field of zero.
struct FileHead {
  static constexpr uint64_t kMagic = 0x474f4c47'4c4c4142;  // "BALLGLOG"
  uint64_t magic = kMagic;
  uint32_t digest = 0;
  uint32_t format = kLogFormat;
  uint64_t segment_bytes = 0;
  uint64_t life = 0;    // the job's: differs between jobs that had the same name
  char name[128] = {};  // the job's; zero-terminated unless full
};

// Written to A and B in turn after a sync; not synced itself, so a mark may lag. The marks of a new log name batch 0.
struct LogMark {
  static constexpr uint64_t kMagic = 0x4b52414d'4c4c4142;
  uint64_t magic = kMagic;
  uint32_t digest = 0;
  uint32_t reserved = 0;
  uint64_t synced_batch = 0;
  uint64_t incarnation = 0;  // of the batch's segment
};

struct SegmentHead {
  static constexpr uint64_t kMagic = 0x4d474553'4c4c4142;
  uint64_t magic = kMagic;
  uint32_t digest = 0;
  uint32_t salt = 0;
  uint64_t incarnation = 0;  // from 1
  uint64_t first_batch = 0;  // the previous segment's batches end before this number; leftovers there do not count
  uint64_t synced_batch = 0;
  uint64_t oldest_incarnation = 0;    // the oldest segment still needed
  uint64_t previous_incarnation = 0;  // segment of the batch before first_batch
};

struct BatchHead {
  static constexpr uint64_t kMagic = 0x48435442'4c4c4142;
  uint64_t magic = kMagic;
  uint32_t digest = 0;  // of the meta
  uint32_t copy = 0;    // 0 or 1
  uint64_t incarnation = 0;
  uint64_t batch = 0;   // from 1
  uint64_t offset = 0;  // in the file, of copy 0
  uint64_t meta_bytes = 0;
  uint64_t payload_bytes = 0;  // padding included
  uint64_t synced_batch = 0;
  uint64_t oldest_incarnation = 0;
  uint32_t record_count = 0;
  uint32_t salt = 0;  // its segment's
};

struct RecordHead {
  uint64_t lsn = 0;
  uint32_t type = 0;
  uint32_t body_bytes = 0;
  uint64_t payload_at = 0;  // from the start of the batch's payloads
  uint64_t payload_bytes = 0;
  uint32_t payload_crc32c = 0;
  uint32_t parity_sum = 0;  // BlockParity::sum of the payload; 0: there is no block of parity, as in older logs
};

// Place of a record's payload in the file.
struct PayloadPlace {
  uint64_t offset = 0;
  uint64_t bytes = 0;
  uint32_t crc32c = 0;
  uint32_t parity_sum = 0;  // as RecordHead's
  uint64_t parity_offset() const { return offset + AlignUp(bytes); }
};

struct ReadRecord {
  uint64_t lsn = 0;
  uint32_t type = 0;
  std::string body;
  PayloadPlace payload;
};

struct ReadBatch {
  BatchHead head;
  std::vector<ReadRecord> records;
  uint64_t end = 0;  // in the file
};

inline constexpr uint64_t Pad8(uint64_t bytes) { return (bytes + 7) / 8 * 8; }

// The most space that a record can take: as the only record of a batch.
inline constexpr uint64_t RecordCostMax(uint64_t body_bytes, uint64_t payload_bytes) {
  const uint64_t parity_bytes = payload_bytes > 0 ? kLogBlock : 0;
  return 2 * AlignUp(sizeof(BatchHead) + sizeof(RecordHead) + Pad8(body_bytes)) + AlignUp(payload_bytes) + parity_bytes;
}

// For FileHead, LogMark and SegmentHead. EncodeHead writes `head` with its digest to the front of `block` and zeroes
// the rest. DecodeHead returns false if `block` holds no head of this type, or a damaged one.
template <typename Head>
void EncodeHead(const Head& head, absl::Span<std::byte> block);
template <typename Head>
bool DecodeHead(absl::Span<const std::byte> block, Head* head);

// Completes both copies of a meta. `both` holds two metas of equal size; the first is filled except for its digest.
void SealMeta(absl::Span<std::byte> both);
// False unless the head is plausible: magic, copy number, and sizes within [offset of the block, `limit`). The meta is
// not checked.
bool DecodeBatchHead(absl::Span<const std::byte> block, uint64_t block_offset, uint64_t limit, BatchHead* head);
// False if the digest or any size is wrong.
bool DecodeMeta(absl::Span<const std::byte> meta, ReadBatch* batch);

}  // namespace ballast::storage
