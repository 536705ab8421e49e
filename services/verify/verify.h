// An offline scrub of a state server's data directory: is everything there that a server needs to start?
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "ballast/services/verify/data_directory.h"
#include "ballast/services/verify/extents.h"
#include "ballast/services/verify/finding.h"
#include "ballast/services/verify/log_history.h"

namespace ballast::services {

// Reads the whole directory and the NVMe devices beside it, and changes nothing. `nvme` and errors: as
// DataDirectory::Open.
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
// Makes the catalog's entries of durable jobs anew, from the labels in the NVMe tier's files and the logs, where Verify
// finds them unusable. Writes nothing unless all such jobs fit together. Deletes no log and no extent; a catalog that
// cannot be opened is moved aside. All entries are written in a single batch, so an interrupted rebuild has written all
// or none, and may be repeated. Errors: as Verify, and those of writing a catalog.
absl::StatusOr<RebuildResult> Rebuild(const std::string& directory, const SayProgress& say,
                                      const std::vector<std::string>& nvme = {});

}  // namespace ballast::services
