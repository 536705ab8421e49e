// Counters of one job since the server made it.
#pragma once

#include <atomic>
#include <cstdint>

#include "ballast/services/counters/step_log.h"

namespace ballast::services {

// Threads: any.
struct JobCounters {
  StepLog steps;
  std::atomic<uint64_t> received_bytes{0};    // payloads of pushes
  std::atomic<uint64_t> sent_bytes{0};        // payloads of pulls
  std::atomic<uint64_t> duplicate_pushes{0};  // slices that were held already, acknowledged once more
  std::atomic<uint64_t> fences{0};
  std::atomic<uint64_t> flushed_chunks{0};
};

}  // namespace ballast::services
