// Work that a tier in GPU memory gave to its GPU, since the tier was opened.
#pragma once

#include <atomic>
#include <cstdint>

namespace ballast::storage {

// Threads: any. Counted when the work is queued, except for the waits. A GPU is asked for no times of its own: events
// around each copy and kernel would cost more than a small kernel. So kernels and copies of an update share a wait.
struct GpuCounters {
  struct Copies {
    std::atomic<uint64_t> count{0};
    std::atomic<uint64_t> bytes{0};
  };
  Copies in, out;                    // from the host to the GPU, and back
  std::atomic<uint64_t> kernels{0};  // launches
  // Threads that wait for queued work, and for what others queued before on the same stream: of updates, with their
  // copies of gradients and working parameters; and of copies for pulls, pins and moves.
  std::atomic<int64_t> update_wait_nanoseconds{0};
  std::atomic<int64_t> copy_wait_nanoseconds{0};
};

}  // namespace ballast::storage
