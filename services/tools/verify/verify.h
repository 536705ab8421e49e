// An offline check of a state server's data directory: does it have everything that a server needs to start?
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "ballast/services/tools/verify/data_directory.h"
#include "ballast/services/tools/verify/extents.h"
#include "ballast/services/tools/verify/finding.h"
#include "ballast/services/tools/verify/log_history.h"

namespace ballast::services {

// Reads the whole directory and its NVMe devices, and changes nothing. `nvme` and errors: as DataDirectory::Open.
absl::StatusOr<ScrubReport> Verify(const std::string& directory, const SayProgress& say,
                                   const std::vector<std::string>& nvme = {});
// Likewise for a directory that is open already.
absl::StatusOr<ScrubReport> Verify(DataDirectory* directory, const SayProgress& say);

struct RebuildResult {
  bool written = false;
  std::vector<std::string> done;     // lines for the operator
  std::vector<std::string> refused;  // why nothing was written
  ScrubReport before;
  ScrubReport after;  // after the rebuild; if nothing was written, as `before`
};
// If Verify finds catalog entries of durable jobs unusable, remakes them from the labels in the NVMe tier's files and
// from the logs. Writes nothing unless it can make the entries of all such jobs, and these do not contradict each
// other. It deletes no log and no extent. If the catalog cannot be opened, it moves the catalog aside. It writes all
// entries in one batch, so an interrupted rebuild has written all or none, and you may repeat it. Errors: as Verify,
// and those of writing a catalog.
absl::StatusOr<RebuildResult> Rebuild(const std::string& directory, const SayProgress& say,
                                      const std::vector<std::string>& nvme = {});

}  // namespace ballast::services
