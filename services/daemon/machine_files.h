// Files of /proc and /sys, and limits of control groups.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace ballast::services {

// The file's first 64 KiB, without white space at the end; empty for a file that cannot be read.
std::string ReadMachineFile(const std::string& path);

// The number behind `key` in lines such as "MemTotal:  16 kB" or "Seccomp:	2"; absent without such a line.
std::optional<uint64_t> NumberAfter(const std::string& text, const std::string& key);

// Whether the kernel is that of WSL, Linux within Windows.
bool IsWsl(const std::string& root);

struct GroupLimit {
  double amount = 0;  // bytes, or processors
  std::string file;   // which says so
};
// The tightest limit that a control group (version 2, or 1) of this process, or one above it, sets. `root`: folder in
// front of /proc and /sys; empty, or a copy in a test.
std::optional<GroupLimit> MemoryLimit(const std::string& root);
std::optional<GroupLimit> ProcessorLimit(const std::string& root);

// The size of the file system in memory that is mounted at `folder`; absent if there is none, or it has no size of its
// own: then half of the machine's memory is its limit.
std::optional<uint64_t> MemoryFileSystemBytes(const std::string& root, const std::string& folder);

// Processors that the scheduler gives this process: at least 1.
int ScheduledProcessors();
// Threads that can run at a time: ScheduledProcessors, or fewer by ProcessorLimit; at least 1.
int UsableProcessors(const std::string& root);

}  // namespace ballast::services
