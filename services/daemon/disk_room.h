// Compares the free space of the disks under a server's directories with budget.nvme, for `ballastd` and the doctor.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ballast/services/server/state_server.h"

namespace ballast::services {

// The catalog and its write-ahead log in the data directory, beside budget.nvme.
constexpr uint64_t kCatalogBytes = uint64_t{256} << 20;

enum class DiskRoom {
  kEnough,
  kTooLittle,  // Opens and moves of states are refused (DISK_FULL) before the budget is used up
  kUnknown     // the file system cannot be asked
};

struct DiskAllowance {
  DiskRoom room = DiskRoom::kEnough;
  std::string found;   // what is free, where, and what is the server's already
  std::string wanted;  // what the budget and the catalog need
  std::string mend;    // how much to free, or a budget that fits; empty with kEnough
};

// One for each file system on which `options` has directories, that of the data directory first. Asks the nearest
// folder that is there: a server makes its directories. Threads: any.
std::vector<DiskAllowance> AllowedDisks(const StateServerOptions& options);

// `folder` itself, or the nearest above that is there.
std::string NearestFolder(const std::string& folder);

}  // namespace ballast::services
