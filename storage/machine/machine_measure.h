// Measures what MachineProfile names, with the queues, files and pages that the storage layer uses.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "ballast/storage/placement/machine_profile.h"

namespace ballast::storage {

struct MeasureOptions {
  std::string directory;                             // on the disk to be measured
  absl::Duration duration = absl::Seconds(20);       // of all measurements together, about
  uint64_t file_bytes = uint64_t{1} << 30;           // less if the disk has less than twice as much free
  uint64_t memory_bytes = uint64_t{512} << 20;       // in all
  int hbm_device = 0;                                // whose link is measured
  std::function<void(const std::string& line)> say;  // before each measurement
};

// One line of the table.
struct Measurement {
  std::string what;
  std::string how;  // "1 thread", "depth 4"
  uint64_t bytes_per_s = 0;
};

struct Measured {
  MachineProfile profile;
  std::vector<Measurement> rows;
  std::vector<std::string> notes;  // what could not be measured, or not as meant
};

// The file that is written has no name from the moment it is open: however this process ends, nothing is left of it.
// INTERNAL or RESOURCE_EXHAUSTED (IO) if the directory cannot take it.
absl::StatusOr<Measured> Measure(const MeasureOptions& options);

}  // namespace ballast::storage
