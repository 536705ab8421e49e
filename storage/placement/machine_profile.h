// Measured speeds of a machine's memory, kernels, disk and bus, from `ballastctl iotune`: the input of predictions.
#pragma once

#include <cstdint>

namespace ballast::storage {

// The speed of one thread, and of all threads of the machine together.
struct ThreadSpeeds {
  uint64_t one_thread = 0;
  uint64_t all_threads = 0;

  bool operator==(const ThreadSpeeds&) const = default;
};

// 0 where nothing was measured. "1 thread" is a single thread, "all threads" is `threads` threads together. A copy
// counts the bytes copied, once; mixed counts bytes read plus bytes written.
struct MachineProfile {
  uint64_t threads = 0;
  ThreadSpeeds dram_read_bytes_per_s;
  ThreadSpeeds dram_copy_bytes_per_s;
  // AdamW in a chunk store over chunks in DRAM: bf16 gradients and working copies, moments in the named format.
  ThreadSpeeds update_f32_elements_per_s;
  ThreadSpeeds update_bf16_elements_per_s;
  ThreadSpeeds update_i8_elements_per_s;
  ThreadSpeeds update_f8_elements_per_s;
  // Digests of a chunk's state, computed before a write and after a read.
  ThreadSpeeds digest_bytes_per_s;
  // The highest speed of all depths tried, and its depth.
  uint64_t disk_read_bytes_per_s = 0;
  uint64_t disk_read_depth = 0;
  uint64_t disk_write_bytes_per_s = 0;
  uint64_t disk_write_depth = 0;
  uint64_t disk_mixed_bytes_per_s = 0;
  uint64_t disk_mixed_depth = 0;
  // Both at once: all threads with fp32 moments, during a mixture of reads and writes. If the disk needs processors,
  // each is slower than alone. 0: not measured; predictions then take each as fast as alone.
  uint64_t update_f32_beside_disk_elements_per_s = 0;
  uint64_t disk_mixed_beside_update_bytes_per_s = 0;
  uint64_t disk_direct = 0;  // 1: past the page cache
  uint64_t disk_append_p50_us = 0;
  uint64_t disk_append_p99_us = 0;
  uint64_t gpu_in_bytes_per_s = 0;   // from the host; 0: no GPU
  uint64_t gpu_out_bytes_per_s = 0;  // to the host

  bool operator==(const MachineProfile&) const = default;
};

}  // namespace ballast::storage
