// `ballastctl drop`.
#pragma once

#include <string>
#include <vector>

#include "ballast/services/tools/cluster.h"

namespace ballast::services {

struct DropCommand {
  std::vector<std::string> servers;  // addresses, or the URL of a registry
  std::string job;
  std::vector<std::string> lost;  // members of the job's key that will never come back
  Asking asking;
};

// Drops the job from all servers and erases its key last. With a registry, nothing is dropped unless all members of the
// key are there or named as lost. Returns 0 if no server has the job any more, else 1.
int RunDrop(const DropCommand& command);

}  // namespace ballast::services
