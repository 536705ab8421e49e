// A state server's data directory while no server runs on it: locked, its catalog as far as it can be read, its files.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "ballast/services/catalog_entry.h"
#include "ballast/services/verify/finding.h"
#include "ballast/storage/io/block_file.h"
#include "ballast/storage/io/file_lock.h"

namespace ballast::services {

// What the catalog says of one job, entry by entry, as far as that can be read.
struct CatalogJob {
  CatalogEntry entry;
  bool durable() const { return entry.open.has_value() && entry.open->spec().durability() == v1::DURABILITY_STEP; }
};

// Threads: one. Holds the directory's lock as long as it lives.
class DataDirectory {
 public:
  // FAILED_PRECONDITION (BUSY): a server has it; INVALID_ARGUMENT (BAD_REQUEST): it is no data directory. A catalog
  // that is missing or cannot be opened is no error: catalog() is null then.
  static absl::StatusOr<std::unique_ptr<DataDirectory>> Open(
      const std::string& path, storage::Catalog::Access access = storage::Catalog::Access::kReadOnly);

  const std::string& path() const { return path_; }
  storage::Catalog* catalog() { return catalog_.get(); }
  // NOT_FOUND: there is none; else why it cannot be opened.
  const absl::Status& catalog_error() const { return catalog_error_; }
  // RocksDB would not see that the catalog is missing, and begin an empty one.
  bool begins_anew() const { return begins_anew_; }
  // Moves a catalog that cannot be opened aside and begins a new one. Returns where the old one is, if there was one.
  absl::StatusOr<std::string> BeginCatalog();

  // Jobs of the catalog; what cannot be read is a finding. Also the server's id, if it is there.
  absl::StatusOr<std::map<std::string, CatalogJob>> ReadJobs(std::vector<Finding>* findings) const;
  absl::StatusOr<std::string> server_id() const;

  // Of jobs, by the names of the log files.
  std::vector<std::string> LogNames() const;
  std::string LogPath(const std::string& job) const;
  std::string TierPath() const;
  // Nothing if there is no such file.
  absl::StatusOr<std::unique_ptr<storage::BlockFile>> OpenFile(const std::string& path) const;

 private:
  explicit DataDirectory(std::string path) : path_(std::move(path)) {}
  absl::Status OpenCatalog(storage::Catalog::Access access);
  std::string CatalogPath() const;

  const std::string path_;
  std::unique_ptr<storage::Catalog> catalog_;  // has the lock
  std::optional<storage::FileLock> lock_;      // while there is no catalog
  absl::Status catalog_error_;
  bool begins_anew_ = false;
};

}  // namespace ballast::services
