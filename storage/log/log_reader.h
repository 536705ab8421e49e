// Reads a gradient log after a restart, without changing it.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ballast/storage/io/block_file.h"
#include "ballast/storage/log/log_format.h"

namespace ballast::storage {

struct ScannedLog {
  std::string name;   // the job's
  uint64_t life = 0;  // the job's
  uint64_t segment_bytes = 0;
  uint64_t segment_count = 0;
  // Where the batches with the log's records lie (logged_records.h reads them). They are in order and without gaps,
  // from the oldest needed segment to the last durable record. Whole batches that were written but never synced may
  // follow. A batch takes at least 8 KiB of the file, and usually 8 MiB.
  struct Batch {
    uint64_t offset = 0;  // of the first copy of the meta
    uint64_t meta_bytes = 0;
  };
  std::vector<Batch> batches;
  struct Segment {
    uint64_t index = 0;
    uint64_t incarnation = 0;
    uint32_t salt = 0;
    size_t first_batch = 0;  // into `batches`
  };
  std::vector<Segment> live;      // by incarnation
  uint64_t record_count = 0;      // in all batches
  uint64_t last_lsn = 0;          // the last record's; 0: there is none
  uint64_t payload_bytes = 0;     // of all records
  uint64_t last_incarnation = 0;  // newest incarnation ever seen
  uint64_t last_batch = 0;        // the last one of `batches`
  uint64_t synced_batch = 0;      // newest batch known to have been durable
  uint64_t repaired_blocks = 0;   // read from their second copy
  uint64_t torn_batches = 0;      // void batches seen behind the end of the log
  uint64_t file_bytes = 0;
  uint64_t read_bytes = 0;  // read by the scan; a block read twice counts twice, up to file_bytes
};

// INTERNAL (IO); DATA_LOSS (CHECKSUM), with the offsets, if a durable batch cannot be read. NOT_FOUND if the file holds
// no log, not even a damaged log: its creation was not finished. `read_bytes` (may be null) grows in step with
// ScannedLog::read_bytes.
absl::StatusOr<ScannedLog> ScanLog(const BlockFile& file, std::atomic<uint64_t>* read_bytes = nullptr);

}  // namespace ballast::storage
