// Progress of the replay of a job's log.
#pragma once

#include <cstdint>
#include <thread>

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "ballast/services/counters/recovery_progress.h"
#include "ballast/storage/io/block_file.h"

namespace ballast::services {

struct Replay {
  const storage::BlockFile* file = nullptr;
  uint64_t steps = 0;
  // Slices read so far, and slices passed over, since their chunks have the step. Guarded by the job's lock while
  // `updates` runs.
  uint64_t replayed_bytes = 0;
  uint64_t passed_bytes = 0;
  RecoveryProgress* progress = nullptr;  // null: nobody asks
  // Applies the last decided step while slices of the next step are read.
  std::thread updates;
  bool updating = false;  // guarded by the job's lock
  absl::Status updated;
  absl::Time said = absl::Now();

  void Count(uint64_t bytes) {
    replayed_bytes += bytes;
    if (progress != nullptr) progress->done_bytes += bytes;
  }
  void Pass(uint64_t bytes) {
    passed_bytes += bytes;
    if (progress != nullptr) progress->done_bytes += bytes;
  }

  ~Replay() { (void)FinishUpdates(); }
  absl::Status FinishUpdates() {
    if (updates.joinable()) updates.join();
    return updated;
  }
};

}  // namespace ballast::services
