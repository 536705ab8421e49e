// Where a server keeps NVMe state: the directories of its configuration, and what the catalog knows of files in them.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "ballast/services/job_state/job_entry.h"
#include "ballast/services/server/state_server.h"
#include "ballast/storage/catalog/catalog.h"
#include "ballast/storage/placement/machine_profile.h"
#include "ballast/storage/tier/tiers.h"

namespace ballast::services {

// The devices of `options`, the data directory first, with the speeds that `ballastctl iotune` wrote into each. Empty
// if the data directory is the only one. INVALID_ARGUMENT (BAD_CONFIG) for two paths to one directory, and for the data
// directory of another server.
absl::StatusOr<std::vector<storage::NvmeDevice>> DevicesOf(const StateServerOptions& options);

// `profile` with the speeds of all devices together, if all were measured.
storage::MachineProfile WithDevices(storage::MachineProfile profile, const std::vector<storage::NvmeDevice>& devices);

// Reads what the catalog knows of files outside the data directory, and makes `remember` write there. Borrows the
// catalog.
absl::StatusOr<storage::KnownFiles> ReadKnownFiles(storage::Catalog* catalog, const std::string& server_id);

// OK, or why the job `name` cannot come back: states of it are on devices that are not there. Codes as
// NvmeTier::TakeKept.
absl::Status CheckDevices(const std::string& name, const JobEntry& entry, storage::Tiers* tiers);

}  // namespace ballast::services
