// What a machine's memory, disk and bus give, as `ballastctl iotune` measured it: a small file for a placement plan.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace ballast::services {

// 0 where nothing was measured. A copy counts the bytes copied, once; mixed counts what was read and what was written.
struct MachineProfile {
  uint64_t threads = 0;  // that "all threads" stands for
  uint64_t dram_read_1_thread_bytes_per_s = 0;
  uint64_t dram_read_all_threads_bytes_per_s = 0;
  uint64_t dram_copy_1_thread_bytes_per_s = 0;
  uint64_t dram_copy_all_threads_bytes_per_s = 0;
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

// Every field under its name.
struct ProfileKey {
  const char* name;
  uint64_t MachineProfile::*field;
};
const std::vector<ProfileKey>& ProfileKeys();

// YAML: a comment and a line `key: value` each.
std::string ShowProfile(const MachineProfile& profile);
// Lines `key: value`, blank ones and comments, in any order. INVALID_ARGUMENT (BAD_CONFIG) with path and line for
// unknown, doubled or missing keys and for values that are no whole numbers; says which keys there are.
absl::StatusOr<MachineProfile> ParseProfile(absl::string_view text, const std::string& path);
absl::StatusOr<MachineProfile> ReadProfile(const std::string& path);
// Replaces the file as a whole. INTERNAL (IO).
absl::Status WriteProfile(const MachineProfile& profile, const std::string& path);

}  // namespace ballast::services
