// Reads a gradient log after a restart, without changing it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "ballast/storage/io/block_file.h"
#include "ballast/storage/log/log_format.h"

namespace ballast::storage {

struct ScannedLog {
  std::string name;   // of the job
  uint64_t life = 0;  // of it
  uint64_t segment_bytes = 0;
  uint64_t segment_count = 0;
  // In order, from the oldest segment that is needed to the last durable record, and perhaps some that were written but
  // never synced.
  std::vector<ReadRecord> records;
  struct Segment {
    uint64_t index = 0;
    uint64_t incarnation = 0;
    size_t first_record = 0;  // into `records`
  };
  std::vector<Segment> live;      // by incarnation
  uint64_t last_incarnation = 0;  // that was ever seen
  uint64_t last_batch = 0;        // of `records`
  uint64_t synced_batch = 0;      // is known to have been durable
  uint64_t repaired_blocks = 0;   // read from their second copy
  uint64_t torn_batches = 0;      // seen behind the end of the log, void
};

// INTERNAL (IO); DATA_LOSS (CHECKSUM) if something that was durable cannot be read: says which offsets. NOT_FOUND if
// the file holds no log, not even a damaged one: its creation was not finished.
absl::StatusOr<ScannedLog> ScanLog(const BlockFile& file);

// Is this what was written there? DATA_LOSS (CHECKSUM). `crc32c`: of what was read.
absl::Status ComparePayload(const BlockFile& file, const PayloadPlace& place, uint32_t crc32c);
// Reads a payload into `to` (its exact bytes). DATA_LOSS (CHECKSUM). Blocks; any thread.
absl::Status ReadPayload(const BlockFile& file, const PayloadPlace& place, absl::Span<std::byte> to);

}  // namespace ballast::storage
