// `ballastctl members`.
#pragma once

#include <string>
#include <vector>

#include "ballast/services/tools/cluster.h"

namespace ballast::services {

struct MembersCommand {
  std::vector<std::string> servers;  // the URL of a registry
  std::string job;
  bool restore = false;
  Asking asking;
};

// Shows the servers in a job's key, and what each has of the job. With `restore`, writes the key of a job again whose
// table etcd has lost or has in an older state: from the newest Open that the registered servers know, if all members
// of it are registered, with their directories, and are in that Open. Returns 0 if all members are there (and, with
// `restore`, the key is written), 1 if not, 2 for wrong arguments.
int RunMembers(const MembersCommand& command);

}  // namespace ballast::services
