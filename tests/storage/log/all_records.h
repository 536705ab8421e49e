// The records of a scanned log, all at once, for tests whose logs are small.
#pragma once

#include <cstddef>
#include <vector>

#include "absl/status/statusor.h"
#include "ballast/proto/base/status.h"
#include "ballast/storage/log/logged_records.h"

namespace ballast::storage {

struct AllRecords {
  std::vector<ReadRecord> records;
  std::vector<size_t> segments;  // of each record: index into ScannedLog::live
};

inline absl::StatusOr<AllRecords> RecordsOf(const BlockFile& file, const ScannedLog& scanned) {
  LoggedRecords source(&file, &scanned);
  AllRecords all;
  for (;;) {
    BALLAST_ASSIGN_OR_RETURN(const ReadRecord* const record, source.Next());
    if (record == nullptr) return all;
    all.records.push_back(*record);
    all.segments.push_back(source.segment());
  }
}

}  // namespace ballast::storage
