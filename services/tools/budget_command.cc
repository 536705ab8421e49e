#include "ballast/services/tools/budget_command.h"

#include <cstdio>

#include "absl/strings/str_cat.h"
#include "ballast/services/monitoring/show.h"

namespace ballast::services {

int RunBudget(const BudgetCommand& command) {
  v1::SetBudgetRequest request;
  if (command.hbm_bytes.has_value()) request.set_hbm_bytes(*command.hbm_bytes);
  if (command.dram_bytes.has_value()) request.set_dram_bytes(*command.dram_bytes);
  if (command.nvme_bytes.has_value()) request.set_nvme_bytes(*command.nvme_bytes);
  int code = 0;
  for (const std::string& server : command.servers) {
    const auto answer = SetBudget(server, request, command.asking);
    if (!answer.ok()) {
      std::printf("%s: %s\n", server.c_str(), std::string(answer.status().message()).c_str());
      code = 1;
      continue;
    }
    std::printf("%s: budgets changed until the server restarts\n", server.c_str());
    for (const v1::JobMoves& job : answer->jobs()) {
      std::string dropped;
      if (job.working_copies_dropped() > 0) {
        dropped = absl::StrCat("; ", job.working_copies_dropped(), " working copies are dropped");
      }
      std::printf("  job '%s': %llu chunks move to nvme, %llu to dram, %llu to hbm%s. %s\n",
                  Printable(job.job()).c_str(), static_cast<unsigned long long>(job.chunks_to_nvme()),
                  static_cast<unsigned long long>(job.chunks_to_dram()),
                  static_cast<unsigned long long>(job.chunks_to_hbm()), dropped.c_str(), Printable(job.plan()).c_str());
    }
  }
  return code;
}

}  // namespace ballast::services
