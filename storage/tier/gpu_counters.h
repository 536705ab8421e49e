// Work that a tier in GPU memory gave to its GPU, since the tier was opened.
#pragma once

#include <atomic>
#include <cstdint>

namespace ballast::storage {

// Threads: any. Counted when the work is queued, except for the waits. The tier does not time single copies and
// kernels, because events around each would cost more than a small kernel. So one figure has the waits for an update's
// kernels and copies.
struct GpuCounters {
  struct Copies {
    std::atomic<uint64_t> count{0};
    std::atomic<uint64_t> bytes{0};
  };
  Copies in, out;                    // from the host to the GPU, and back
  std::atomic<uint64_t> kernels{0};  // launches
  // Time that threads wait for the GPU, also for earlier work of others on the same stream. update_wait: for updates,
  // with their copies of gradients and working parameters. copy_wait: for copies of pulls, pins and moves.
  std::atomic<int64_t> update_wait_nanoseconds{0};
  std::atomic<int64_t> copy_wait_nanoseconds{0};
};

}  // namespace ballast::storage
