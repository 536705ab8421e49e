// Operations of the disks of this process, and damage found on them, since the process began.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "ballast/storage/io/duration_histogram.h"

namespace ballast::storage {

// Threads: any. One for the process: its servers and its disks have nothing smaller in common.
struct DiskCounters {
  static constexpr size_t kOperations = 3;
  static constexpr std::array<const char*, kOperations> kOperationNames = {"read", "write", "sync"};
  struct Operation {
    DurationHistogram seconds;  // from the request to its end, with the wait in the queue
    std::atomic<uint64_t> bytes{0};
    std::atomic<uint64_t> errors{0};
  };
  std::array<Operation, kOperations> operations;  // by IoRequest::Kind
  std::atomic<int64_t> in_flight{0};

  std::atomic<uint64_t> wrong_extents{0};        // states unlike their digests or labels
  std::atomic<uint64_t> wrong_payloads{0};       // logged slices unlike their checksums, beyond repair
  std::atomic<uint64_t> repaired_payloads{0};    // blocks of slices rebuilt from parity
  std::atomic<uint64_t> repaired_log_blocks{0};  // blocks of a log read from their second copy
};

inline DiskCounters& ProcessDiskCounters() {
  static auto* const counters = new DiskCounters;
  return *counters;
}

}  // namespace ballast::storage
