// Compares the memory that control groups allow a server with what its budget needs, for `ballastd` and the doctor.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "ballast/services/daemon/machine_files.h"

namespace ballast::services {

// A server's memory beyond budget.dram: gRPC's incoming messages (1 GiB) and three bounds of 128 MiB (services/README,
// "Bounds"), which only overload reaches.
constexpr uint64_t kBesideBudgetBytes = (uint64_t{1} << 30) + (uint64_t{384} << 20);

enum class MemoryRoom {
  kEnough,
  kTight,     // the budget fits, but not what overload adds; the kernel kills a process at its limit
  kTooLittle  // the kernel kills the server once a job fills the budget
};

struct MemoryAllowance {
  MemoryRoom room = MemoryRoom::kEnough;
  std::optional<GroupLimit> limit;  // the tightest; absent: no control group limits the memory
  std::string found;                // the limit and the file that says so
  std::string wanted;               // what the budget and the rest need
  std::string mend;                 // how to raise the limit or lower the budget; empty with kEnough
};

// `dram`: budget.dram in bytes. `root`: folder in front of /proc and /sys; empty, or a copy in a test.
MemoryAllowance AllowedMemory(uint64_t dram, const std::string& root);

}  // namespace ballast::services
