// Part of class Job: the state of a replay, which recovery and the reading of its slices share.
#pragma once

#include <cstdint>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "ballast/services/job.h"
#include "ballast/storage/log/log_reader.h"

namespace ballast::services {

// Where the replay of a log is.
struct Job::Replaying {
  struct Slice {
    v1::PushRequest header;
    storage::PayloadPlace payload;
  };
  const storage::BlockFile* file = nullptr;
  // Of the step that is not decided yet, in the epoch that is open.
  std::vector<Slice> slices;
  uint64_t steps = 0;
  uint64_t payload_bytes = 0;
  // The updates of the last decided step, if slices of the next one are read meanwhile.
  std::thread updates;
  bool updating = false;  // guarded by the job's lock
  absl::Status updated;

  ~Replaying() { (void)FinishUpdates(); }
  absl::Status FinishUpdates() {
    if (updates.joinable()) updates.join();
    return updated;
  }
  absl::Time said = absl::Now();
};

}  // namespace ballast::services
