// Reads a gradient log after a restart, without changing it.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ballast/storage/io/block_file.h"
#include "ballast/storage/log/log_format.h"

namespace ballast::storage {

struct ScannedLog {
  std::string name;   // the job's
  uint64_t life = 0;  // the job's
  uint64_t segment_bytes = 0;
  uint64_t segment_count = 0;
  // In order, from the oldest needed segment to the last durable record, and perhaps further records that were written
  // but never synced.
  std::vector<ReadRecord> records;
  struct Segment {
    uint64_t index = 0;
    uint64_t incarnation = 0;
    size_t first_record = 0;  // into `records`
  };
  std::vector<Segment> live;      // by incarnation
  uint64_t last_incarnation = 0;  // newest incarnation ever seen
  uint64_t last_batch = 0;        // batch of the last record in `records`
  uint64_t synced_batch = 0;      // newest batch known to have been durable
  uint64_t repaired_blocks = 0;   // read from their second copy
  uint64_t torn_batches = 0;      // void batches seen behind the end of the log
  uint64_t file_bytes = 0;
  uint64_t read_bytes = 0;  // by the scan, a block read again counted again; at most file_bytes
};

// INTERNAL (IO); DATA_LOSS (CHECKSUM), with the offsets, if a durable batch cannot be read. NOT_FOUND if the file holds
// no log, not even a damaged log: its creation was not finished. `read_bytes` grows with each read, by
// ScannedLog::read_bytes in all; null: nobody asks.
absl::StatusOr<ScannedLog> ScanLog(const BlockFile& file, std::atomic<uint64_t>* read_bytes = nullptr);

// Reads a payload into `to` (its exact bytes). A single block that is rotten or unreadable is rebuilt from the
// payload's parity: `rebuilt` gets the block's offset in the file; without `rebuilt` a warning names it.
// DATA_LOSS (CHECKSUM), INTERNAL (IO). Blocks; any thread.
absl::Status ReadPayload(const BlockFile& file, const PayloadPlace& place, absl::Span<std::byte> to,
                         std::optional<uint64_t>* rebuilt = nullptr);

}  // namespace ballast::storage
