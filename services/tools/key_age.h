// Whether a job's key in etcd is as new as the job.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "ballast/proto/registry/registry.h"
#include "ballast/services/tools/cluster.h"
#include "ballast/v1/registry.pb.h"

namespace ballast::services {

// FAILED_PRECONDITION (KEY_LOST) if a member knows a later epoch than `key`: etcd came back from a backup, and what
// the key says is not what the job has. Servers that do not answer count as if they knew nothing.
absl::Status CheckKeyIsNewest(const std::string& job, const v1::JobKey& key,
                              const std::vector<v1::ServerEntry>& entries, const Asking& asking,
                              registry::Registry* registry);

}  // namespace ballast::services
