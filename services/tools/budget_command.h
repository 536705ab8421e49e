// `ballastctl budget`: new budgets for running servers.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ballast/services/tools/cluster.h"

namespace ballast::services {

struct BudgetCommand {
  std::vector<std::string> servers;
  std::optional<uint64_t> hbm_bytes, dram_bytes, nvme_bytes;  // unset: unchanged
  Asking asking;
};
// Exit code: 0 all servers have the new budgets; 1 some server refused or did not answer.
int RunBudget(const BudgetCommand& command);

}  // namespace ballast::services
