#include "ballast/services/daemon/memory_room.h"

#include "absl/strings/str_cat.h"
#include "ballast/services/monitoring/show.h"

namespace ballast::services {

MemoryAllowance AllowedMemory(uint64_t dram, const std::string& root) {
  MemoryAllowance allowance;
  allowance.wanted = absl::StrCat(ShowBytes(dram), " (budget.dram) and ", ShowBytes(kBesideBudgetBytes));
  allowance.limit = MemoryLimit(root);
  if (!allowance.limit.has_value()) {
    allowance.found = "no control group limits it";
    return allowance;
  }
  const double bytes = allowance.limit->amount;
  allowance.found = absl::StrCat(ShowBytes(static_cast<uint64_t>(bytes)), " by ", allowance.limit->file);
  if (bytes >= static_cast<double>(dram + kBesideBudgetBytes)) return allowance;
  allowance.room = bytes < static_cast<double>(dram) ? MemoryRoom::kTooLittle : MemoryRoom::kTight;
  allowance.mend =
      absl::StrCat("raise the limit to ", ShowBytes(dram + kBesideBudgetBytes),
                   " (systemd: MemoryMax=, Kubernetes: resources.limits.memory, podman, docker: --memory), or lower "
                   "budget.dram");
  return allowance;
}

}  // namespace ballast::services
