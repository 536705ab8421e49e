// A state server's data directory while no server runs on it: the lock, the readable part of the catalog, and the
// files.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "ballast/services/job_state/job_entry.h"
#include "ballast/services/tools/verify/finding.h"
#include "ballast/storage/io/block_file.h"
#include "ballast/storage/io/file_lock.h"

namespace ballast::services {

// A job's entries in the catalog, as far as they can be read.
struct CatalogJob {
  JobEntry entry;
  bool durable() const { return entry.open.has_value() && entry.open->spec().durability() == v1::DURABILITY_STEP; }
};

struct TierFile {
  std::unique_ptr<storage::BlockFile> file;
  uint64_t bytes = 0;
};
using TierFiles = std::map<storage::NvmeFileId, TierFile>;

// Threads: one. Holds the directory's lock during its life.
class DataDirectory {
 public:
  // FAILED_PRECONDITION (BUSY) if a server has the directory, (LATER_VERSION) if a later version used it;
  // INVALID_ARGUMENT (BAD_REQUEST) if this is no data directory, or one of `nvme` has no NVMe file. A catalog that is
  // missing or cannot be opened is not an error: catalog() is null then. `nvme`: more directories to search for NVMe
  // files, in case the catalog cannot be read or a path has changed.
  static absl::StatusOr<std::unique_ptr<DataDirectory>> Open(
      const std::string& path, storage::Catalog::Access access = storage::Catalog::Access::kReadOnly,
      const std::vector<std::string>& nvme = {});

  const std::string& path() const { return path_; }
  storage::Catalog* catalog() { return catalog_.get(); }
  // NOT_FOUND if there is no catalog; otherwise why the catalog cannot be opened.
  const absl::Status& catalog_error() const { return catalog_error_; }
  // Is CURRENT missing? RocksDB would then begin an empty catalog instead of failing.
  bool begins_anew() const { return begins_anew_; }
  // Moves an unreadable catalog aside and begins a new catalog. Returns the path of the old catalog, if there was any.
  absl::StatusOr<std::string> BeginCatalog();

  // Jobs of the catalog, which must be open; unreadable entries become findings.
  absl::StatusOr<std::map<std::string, CatalogJob>> ReadJobs(std::vector<Finding>* findings) const;
  // The server's id. NOT_FOUND if there is no catalog, or no id in it.
  absl::StatusOr<std::string> server_id() const;

  // Names of jobs, from the names of the log files.
  std::vector<std::string> LogNames() const;
  std::string LogPath(const std::string& job) const;
  // Path of a file of the NVMe tier, as the catalog last knew it.
  std::string TierPath(storage::NvmeFileId id = 0) const;
  // The files of the NVMe tier that are there, by the ids in their first blocks.
  absl::StatusOr<TierFiles> OpenTierFiles() const;
  // Null if there is no such file.
  absl::StatusOr<std::unique_ptr<storage::BlockFile>> OpenFile(const std::string& path) const;

 private:
  DataDirectory(std::string path, std::vector<std::string> nvme) : path_(std::move(path)), nvme_(std::move(nvme)) {}
  std::map<storage::NvmeFileId, std::string> KnownTierPaths() const;
  absl::Status OpenCatalog(storage::Catalog::Access access);
  absl::Status CheckKeys() const;
  std::string CatalogPath() const;

  const std::string path_;
  const std::vector<std::string> nvme_;
  std::unique_ptr<storage::Catalog> catalog_;  // holds the lock
  std::optional<storage::FileLock> lock_;      // while there is no catalog
  absl::Status catalog_error_;
  bool begins_anew_ = false;
};

}  // namespace ballast::services
