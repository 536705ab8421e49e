// The records of a log in order. A log may have far more records than fit into memory: a scan finds the batches, and a
// reader of records reads the batches again, each on its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "ballast/storage/log/log_reader.h"
#include "ballast/storage/log/meta_reader.h"

namespace ballast::storage {

class RecordSource {
 public:
  virtual ~RecordSource() = default;
  // The next record, valid until the next call; null behind the last one. After an error the source is of no use.
  virtual absl::StatusOr<const ReadRecord*> Next() = 0;
  // The segment of the last record that Next returned, as index into ScannedLog::live; the last segment at the end.
  virtual size_t segment() const = 0;
};

// Records from the file of a scanned log, with the memory of one batch and of a MetaReader. Threads: one.
class LoggedRecords : public RecordSource {
 public:
  // Borrows both. Nobody may write to the log meanwhile.
  LoggedRecords(const BlockFile* file, const ScannedLog* scanned) : file_(file), scanned_(scanned), reader_(file) {}

  // DATA_LOSS (CHECKSUM) if a batch is not what the scan found, INTERNAL (IO).
  absl::StatusOr<const ReadRecord*> Next() override;
  size_t segment() const override { return segment_; }

 private:
  const BlockFile* file_;
  const ScannedLog* scanned_;
  MetaReader reader_;
  size_t next_batch_ = 0;
  size_t segment_ = 0;
  std::vector<ReadRecord> records_;  // of the batch before next_batch_
  size_t next_record_ = 0;
};

}  // namespace ballast::storage
