// `ballastctl accept-copy`.
#pragma once

#include <string>
#include <vector>

#include "ballast/services/tools/cluster.h"

namespace ballast::services {

struct AcceptCopyCommand {
  std::vector<std::string> servers;  // the URL of a registry
  std::vector<std::string> named;    // ids of servers that were restored from backups
  Asking asking;
};

// Lets the copy of each server's data directory that starts next serve, though another served last. Directories that
// serve now keep their marks. Returns 0 if all servers were accepted, 1 if one was not: then those before it were, 2
// for wrong arguments.
int RunAcceptCopy(const AcceptCopyCommand& command);

}  // namespace ballast::services
