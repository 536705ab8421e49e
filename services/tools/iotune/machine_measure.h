// Measures a MachineProfile, with the queues, files and pages of the storage layer.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "ballast/storage/placement/machine_profile.h"

namespace ballast::services {

struct MeasureOptions {
  std::string directory;                             // on the disk to be measured
  absl::Duration duration = absl::Seconds(20);       // approximate total of all measurements
  uint64_t file_bytes = uint64_t{1} << 30;           // less if the disk has less than twice as much free
  uint64_t memory_bytes = uint64_t{512} << 20;       // in all
  int hbm_device = 0;                                // the GPU with the link to be measured
  std::function<void(const std::string& line)> say;  // called before each measurement
};

// A row of the table of results.
struct Measurement {
  std::string what;
  std::string how;  // "1 thread", "depth 4"
  uint64_t bytes_per_s = 0;
};

struct Measured {
  storage::MachineProfile profile;
  std::vector<Measurement> rows;
  std::vector<std::string> notes;  // quantities that could not be measured, or not as meant
};

// The measured file has no name from the moment it is open: however this process ends, the disk space comes back.
// INTERNAL (IO) or RESOURCE_EXHAUSTED (DISK_FULL) if the directory cannot take the file.
absl::StatusOr<Measured> Measure(const MeasureOptions& options);

}  // namespace ballast::services
