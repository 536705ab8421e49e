// What a data directory holds of a server's jobs: their entries in the catalog, and logs that the catalog does not
// know.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ballast/services/job_state/job_entry.h"
#include "ballast/storage/catalog/catalog.h"
#include "ballast/storage/io/disk.h"

namespace ballast::services {

struct StoredJobs {
  std::map<std::string, JobEntry> entries;      // by name; an orphan may have an empty one
  std::map<std::string, absl::Status> orphans;  // by name: why the job is refused
};

// The catalog's entries, by job. FAILED_PRECONDITION (LATER_VERSION) if the catalog has a key that this version does
// not know.
absl::StatusOr<std::map<std::string, JobEntry>> ReadEntries(const storage::Catalog& catalog);

// Adds the orphans: jobs with steps in a log that the catalog does not know.
void FindOrphans(const std::string& directory, storage::Disk* disk, StoredJobs* jobs);

// The size of the job's log. None: it has no log.
std::optional<uint64_t> LogBytes(const std::string& directory, const std::string& job);

// The bytes that the start reads to recover the jobs, as RecoveryProgress counts them.
uint64_t BytesToRecover(const std::string& directory, const std::map<std::string, JobEntry>& entries);

}  // namespace ballast::services
