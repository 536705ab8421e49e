// How a gradient log lies on disk. Little-endian; every part starts at a multiple of 4096 bytes, which is what O_DIRECT
// moves and what a disk tears.
//
//   file     = head (2 copies, 4096 each) | mark A | mark B | segment 0 | segment 1 | ...
//   segment  = head (2 copies) | batch | batch | ... | what an earlier life of the segment left
//   batch    = meta (2 copies) | payloads, each padded to 4096
//   meta     = BatchHead | RecordHead, body | RecordHead, body | ..., padded to 4096
//
// Segments are written one after the other and recycled: a segment's incarnation counts its lives over the whole log,
// so what an earlier life left is never taken for news. A crash may take a segment's head and leave its batches; the
// next opening of the log then counts the same incarnation again, and is told from the first by a random salt. Batches
// are numbered without gaps. A batch is written when it is full or the disk is idle, in any order with its neighbours;
// a sync makes all that is complete durable.
//
// Torn or rotten: every batch names the newest batch that was durable when it was written, and a mark does so after
// each sync. A batch that cannot be read is *torn* if it lies beyond all of these: the log ends before it. Else it was
// durable once, so it is *rotten*, which is DATA_LOSS. Small records are kept twice (meta), so one rotten block of them
// is repaired from its copy; a rotten payload harms only who needs it.
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

// Digests are CRC32C of the whole part with the digest itself as zero.
struct FileHead {
  static constexpr uint64_t kMagic = 0x474f4c47'4c4c4142;  // "BALLGLOG"
  uint64_t magic = kMagic;
  uint32_t digest = 0;
  uint32_t format = kLogFormat;
  uint64_t segment_bytes = 0;
  uint64_t life = 0;    // of the job: tells it from others that had its name
  char name[128] = {};  // of the job; zero-terminated unless full
};

// Written to A and B in turn after a sync; not synced itself, so it may lag. A new log has two of no batch.
struct LogMark {
  static constexpr uint64_t kMagic = 0x4b52414d'4c4c4142;
  uint64_t magic = kMagic;
  uint32_t digest = 0;
  uint32_t reserved = 0;
  uint64_t synced_batch = 0;
  uint64_t incarnation = 0;  // of that batch's segment
};

struct SegmentHead {
  static constexpr uint64_t kMagic = 0x4d474553'4c4c4142;
  uint64_t magic = kMagic;
  uint32_t digest = 0;
  uint32_t salt = 0;
  uint64_t incarnation = 0;  // from 1
  uint64_t first_batch = 0;  // the batches of the segment before end here, whatever follows them there
  uint64_t synced_batch = 0;
  uint64_t oldest_incarnation = 0;    // the oldest segment that is still needed
  uint64_t previous_incarnation = 0;  // of the batch before the first
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
  uint32_t reserved = 0;
};

// Where the bytes of a record's payload are in the file.
struct PayloadPlace {
  uint64_t offset = 0;
  uint64_t bytes = 0;
  uint32_t crc32c = 0;
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

// What a record takes at most: a batch of its own.
inline constexpr uint64_t RecordCostMax(uint64_t body_bytes, uint64_t payload_bytes) {
  return 2 * AlignUp(sizeof(BatchHead) + sizeof(RecordHead) + Pad8(body_bytes)) + AlignUp(payload_bytes);
}

// Writes `head` with its digest to the front of `block`, the rest zero; and reads it back: nothing if it is not there,
// or damaged. Of FileHead, LogMark, SegmentHead.
template <typename Head>
void EncodeHead(const Head& head, absl::Span<std::byte> block);
template <typename Head>
bool DecodeHead(absl::Span<const std::byte> block, Head* head);

// Completes both copies of a meta of `meta_bytes` each, whose first holds all but the digests.
void SealMeta(absl::Span<std::byte> both);
// A plausible head, its meta not yet looked at: magic, sizes within [offset of the block, `limit`), a copy's number.
bool DecodeBatchHead(absl::Span<const std::byte> block, uint64_t block_offset, uint64_t limit, BatchHead* head);
// False if the digest or any size is wrong.
bool DecodeMeta(absl::Span<const std::byte> meta, ReadBatch* batch);

}  // namespace ballast::storage
