// `ballastctl add`, `drain`, `remove`, `replace` and `replicas`: what an operator wants of a job's servers.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ballast/services/tools/cluster.h"

namespace ballast::services {

struct WishCommand {
  enum class Kind { kAdd, kDrain, kRemove, kReplace, kReplicas };
  Kind kind = Kind::kAdd;
  std::vector<std::string> servers;  // the URL of a registry
  std::string job;
  std::vector<std::string> named;  // to add, to drain, to remove, or the server to replace
  std::string by;                  // in its place
  bool lost = false;               // the job went on without some of those to drain or replace
  bool now = false;                // to remove: always
  uint32_t replicas = 0;
  Asking asking;
};

// Writes the wish into etcd, on top of the wish so far, and shows the table that follows if all servers stay as they
// are. The group that opens the job next goes by it. Checks names against the servers that are registered. Returns 0 if
// the wish is written, 1 if it was refused or etcd did not take it, 2 for wrong arguments.
int RunWish(const WishCommand& command);

}  // namespace ballast::services
