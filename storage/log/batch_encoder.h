// Records of a gradient log, and batches of records as bytes: where the next batch goes in the file and what is written
// for it. No I/O.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "ballast/storage/log/block_parity.h"
#include "ballast/storage/log/log_format.h"
#include "ballast/storage/log/segment_ring.h"

namespace ballast::storage {

struct LogRecord {
  uint64_t lsn = 0;  // increasing
  uint32_t type = 0;
  std::string body;
  // Borrowed, and must not change, until `written` was called.
  absl::Span<const std::byte> payload;
  uint32_t payload_crc32c = 0;
  BlockParity parity;  // of the payload, if one rotten block of the payload is to be rebuilt
  // Called when the payload is written at `place`, or with null when the payload never will be. On the pumping thread,
  // no lock held. The payload is not durable yet, and readable at `place` until Cut frees the segment.
  std::function<void(const PayloadPlace* place)> written;
  uint32_t parity_sum() const { return parity.empty() ? 0 : parity.sum(); }
  int64_t keep_for = -1;  // last transaction whose replay needs the payload: a Cut at this step frees the payload
};

// Zeroed, aligned to kLogBlock.
using LogMemory = std::unique_ptr<std::byte, void (*)(void*)>;
LogMemory MakeLogMemory(uint64_t bytes);

// A batch is closed by whichever comes first.
inline constexpr size_t kBatchRecordsMax = 16;
inline constexpr uint64_t kBatchPayloadBytesMax = uint64_t{8} << 20;

// Records that are written together: one head, twice, then the payloads.
struct LogBatch {
  uint64_t number = 0;
  uint64_t last_lsn = 0;  // 0: an empty batch, which tells of a cut
  uint64_t incarnation = 0;
  uint64_t oldest_incarnation = 0;
  std::vector<LogRecord> records;
  std::vector<uint64_t> payload_offsets;  // of `records`, in the file
  LogMemory memory{nullptr, nullptr};     // metas and copied payloads
  struct Write {
    uint64_t offset = 0;
    absl::Span<std::byte> bytes;  // of `memory`, or of a record's payload
  };
  std::vector<Write> writes;
  uint64_t outstanding = 0;  // writes that have not completed
  bool failed = false;       // some write failed
};

// Threads: one.
class BatchEncoder {
 public:
  // `salt`: of this opening of the file. `next_batch`, `previous_incarnation`: as the last run left them; 1 and 0 of a
  // new log.
  BatchEncoder(uint64_t segment_bytes, uint32_t salt, uint64_t next_batch, uint64_t previous_incarnation)
      : segment_bytes_(segment_bytes),
        salt_(salt),
        next_batch_(next_batch),
        previous_incarnation_(previous_incarnation) {}

  uint64_t next_batch() const { return next_batch_; }
  // A segment was begun: batches have a place.
  bool has_segment() const { return incarnation_ != 0; }
  // Fills `blocks` (kSegmentHeadBytes) with the segment's head. Returns where they go; batches follow behind.
  uint64_t BeginSegment(const SegmentRing::Beginning& beginning, uint64_t synced_batch, absl::Span<std::byte> blocks);
  // REQUIRES: has_segment(), and the segment has room for the records.
  LogBatch Encode(std::vector<LogRecord> records, uint64_t oldest_incarnation, uint64_t synced_batch);

 private:
  // Metas into the front of batch->memory, then the writes of metas and payloads, from at_ on.
  void EncodeMetas(uint64_t meta_bytes, uint64_t payload_bytes, uint64_t synced_batch, LogBatch* batch) const;
  void PlacePayloads(uint64_t meta_bytes, LogBatch* batch);

  const uint64_t segment_bytes_;
  const uint32_t salt_;
  uint64_t next_batch_;
  uint64_t previous_incarnation_;  // segment of the last batch
  uint64_t incarnation_ = 0;       // segment of the next batch; 0: none was begun
  uint64_t at_ = 0;                // in the file
};

}  // namespace ballast::storage
