// What a machine's memory, kernels, disk and bus give, as `ballastctl iotune` measured it: what a plan predicts from.
#pragma once

#include <cstdint>

namespace ballast::storage {

// 0 where nothing was measured. "1 thread" and "all threads": one, and `threads` of them together. A copy counts the
// bytes copied, once; mixed counts what was read and what was written.
struct MachineProfile {
  uint64_t threads = 0;
  uint64_t dram_read_1_thread_bytes_per_s = 0;
  uint64_t dram_read_all_threads_bytes_per_s = 0;
  uint64_t dram_copy_1_thread_bytes_per_s = 0;
  uint64_t dram_copy_all_threads_bytes_per_s = 0;
  // AdamW over chunks in DRAM, by a chunk store: bf16 gradients and working copies, moments as named.
  uint64_t update_f32_1_thread_elements_per_s = 0;
  uint64_t update_f32_all_threads_elements_per_s = 0;
  uint64_t update_bf16_1_thread_elements_per_s = 0;
  uint64_t update_bf16_all_threads_elements_per_s = 0;
  uint64_t update_i8_1_thread_elements_per_s = 0;
  uint64_t update_i8_all_threads_elements_per_s = 0;
  uint64_t update_f8_1_thread_elements_per_s = 0;
  uint64_t update_f8_all_threads_elements_per_s = 0;
  // Of a chunk's state, before it is written and when it was read.
  uint64_t digest_1_thread_bytes_per_s = 0;
  uint64_t digest_all_threads_bytes_per_s = 0;
  // At the depth, of those tried, that gave most.
  uint64_t disk_read_bytes_per_s = 0;
  uint64_t disk_read_depth = 0;
  uint64_t disk_write_bytes_per_s = 0;
  uint64_t disk_write_depth = 0;
  uint64_t disk_mixed_bytes_per_s = 0;
  uint64_t disk_mixed_depth = 0;
  uint64_t disk_direct = 0;  // 1: past the page cache
  uint64_t disk_append_p50_us = 0;
  uint64_t disk_append_p99_us = 0;
  uint64_t gpu_in_bytes_per_s = 0;   // from the host; 0: no GPU
  uint64_t gpu_out_bytes_per_s = 0;  // to the host

  bool operator==(const MachineProfile&) const = default;
};

}  // namespace ballast::storage
