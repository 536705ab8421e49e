// An offline scrub of a state server's data directory: is all there that a start of the server would need?
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

// Reads the whole of it, and changes nothing. Errors: DataDirectory::Open's.
absl::StatusOr<ScrubReport> Verify(const std::string& directory, const SayProgress& say);
// The same of one that is open already.
absl::StatusOr<ScrubReport> Verify(DataDirectory* directory, const SayProgress& say);

struct RebuildResult {
  bool written = false;
  std::vector<std::string> done;     // what was done
  std::vector<std::string> refused;  // why nothing was written
  ScrubReport before;
  ScrubReport after;  // of what was written; else as `before`
};
// Makes the catalog's entries of durable jobs anew, from the labels in nvme.tier and the logs, where Verify finds that
// they do not do as they are. Either all such jobs fit together or nothing is written. Deletes no log and no extent; a
// catalog that cannot be opened is moved aside. Errors: as Verify's, and those of writing a catalog. Entries are
// written at once: cut off, it has written all or none, and may be run again.
absl::StatusOr<RebuildResult> Rebuild(const std::string& directory, const SayProgress& say);

}  // namespace ballast::services
