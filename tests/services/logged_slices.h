// Finds a step's slices in a job's log.
#pragma once

#include <string>
#include <vector>

#include "ballast/services/journal/log_records.h"
#include "ballast/storage/io/disk.h"
#include "ballast/storage/log/log_reader.h"
#include "ballast/tests/storage/log/all_records.h"

namespace ballast::services {

// The server may be running. Returns no places if the scan fails, as it may during a write.
inline std::vector<storage::PayloadPlace> LoggedSlices(int64_t step, const std::string& path) {
  std::vector<storage::PayloadPlace> places;
  auto file = storage::SystemDisk()->Open(path, storage::Disk::Mode::kShared);
  if (!file.ok()) return places;
  const auto scanned = storage::ScanLog(**file);
  if (!scanned.ok()) return places;
  const auto all = storage::RecordsOf(**file, *scanned);
  if (!all.ok()) return places;
  for (const storage::ReadRecord& read : all->records) {
    const auto record = DecodeRecord(read);
    const auto* slice = record.ok() ? std::get_if<SliceRecord>(&*record) : nullptr;
    if (slice != nullptr && slice->header.step() == step) places.push_back(read.payload);
  }
  return places;
}

}  // namespace ballast::services
