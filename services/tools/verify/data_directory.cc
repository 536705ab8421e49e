#include "ballast/services/tools/verify/data_directory.h"

#include <algorithm>
#include <filesystem>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "ballast/proto/base/status.h"
#include "ballast/services/journal/data_files.h"
#include "ballast/storage/catalog/directory_format.h"
#include "ballast/storage/io/disk.h"
#include "ballast/storage/tier/device_header.h"
#include "ballast/storage/tier/nvme_tier.h"

namespace ballast::services {
namespace {

namespace fs = std::filesystem;

bool Exists(const std::string& path) {
  std::error_code ignored;
  return fs::exists(path, ignored);
}

bool HasFiles(const std::string& directory) {
  std::error_code error;
  return fs::directory_iterator(directory, error) != fs::directory_iterator() && !error;
}

}  // namespace

Harm ScrubReport::worst() const {
  Harm worst = Harm::kNone;
  for (const Finding& finding : findings) worst = std::max(worst, finding.harm);
  return worst;
}

absl::StatusOr<std::unique_ptr<DataDirectory>> DataDirectory::Open(const std::string& path,
                                                                   storage::Catalog::Access access,
                                                                   const std::vector<std::string>& nvme) {
  for (const std::string& device : nvme) {
    if (Exists(storage::NvmeFilePath(device, 0))) continue;
    return model::Error(absl::StatusCode::kInvalidArgument, model::kBadRequest,
                        absl::StrCat("'", device, "' holds no nvme.tier; expected a directory of budget.nvme"));
  }
  std::unique_ptr<DataDirectory> directory(new DataDirectory(path, nvme));
  std::error_code ignored;
  const bool known = Exists(directory->CatalogPath()) || Exists(directory->TierPath()) ||
                     Exists(absl::StrCat(path, "/LOCK.ballast")) || !directory->LogNames().empty();
  if (!fs::is_directory(path, ignored) || !known) {
    return model::Error(absl::StatusCode::kInvalidArgument, model::kBadRequest,
                        absl::StrCat("'", path, "' is no state server's data directory: it holds neither catalog/ nor ",
                                     "nvme.tier nor ", kLogPrefix, "*; give what the server's data_directory says"));
  }
  BALLAST_RETURN_IF_ERROR(storage::CheckDirectoryFormat(path));
  BALLAST_RETURN_IF_ERROR(directory->OpenCatalog(access));
  BALLAST_RETURN_IF_ERROR(directory->CheckKeys());
  return directory;
}

absl::Status DataDirectory::OpenCatalog(storage::Catalog::Access access) {
  begins_anew_ = !Exists(CatalogPath() + "/CURRENT");
  // RocksDB would begin an empty catalog where its CURRENT is missing.
  if (!HasFiles(CatalogPath())) {
    catalog_error_ = absl::NotFoundError(absl::StrCat("there is no catalog in ", CatalogPath()));
  } else if (begins_anew_) {
    catalog_error_ = absl::DataLossError(
        absl::StrCat(CatalogPath(), "/CURRENT is missing: RocksDB would take the catalog for an empty one"));
  } else {
    auto catalog = storage::Catalog::Open(path_, access);
    if (catalog.ok()) {
      catalog_ = *std::move(catalog);
      return absl::OkStatus();
    }
    if (absl::IsFailedPrecondition(catalog.status())) return catalog.status();
    catalog_error_ = catalog.status();
  }
  BALLAST_ASSIGN_OR_RETURN(storage::FileLock lock,
                           storage::FileLock::Take(path_ + "/LOCK.ballast", absl::StrCat("data directory ", path_)));
  lock_.emplace(std::move(lock));
  return absl::OkStatus();
}

// A rebuild would erase the entries of a later version.
absl::Status DataDirectory::CheckKeys() const {
  if (catalog_ == nullptr) return absl::OkStatus();
  const auto pairs = catalog_->List("");
  if (!pairs.ok()) return absl::OkStatus();  // which reading the jobs will say
  for (const auto& [key, value] : *pairs) BALLAST_RETURN_IF_ERROR(CheckKnownKey(key));
  return absl::OkStatus();
}

absl::StatusOr<std::string> DataDirectory::BeginCatalog() {
  std::string aside;
  if (HasFiles(CatalogPath())) {
    for (int i = 1; aside.empty(); ++i) {
      const std::string path = absl::StrCat(path_, "/catalog.damaged-", i);
      if (!Exists(path)) aside = path;
    }
    std::error_code error;
    fs::rename(CatalogPath(), aside, error);
    if (error) return storage::IoError(error.value(), "rename", CatalogPath(), 0, 0);
  }
  lock_.reset();  // the catalog takes it
  auto catalog = storage::Catalog::Open(path_);
  if (catalog.ok()) {
    catalog_ = *std::move(catalog);
    catalog_error_ = absl::OkStatus();
    return aside;
  }
  std::error_code ignored;
  if (!aside.empty() && !absl::IsFailedPrecondition(catalog.status())) {
    fs::remove_all(CatalogPath(), ignored);
    fs::rename(aside, CatalogPath(), ignored);
  }
  return catalog.status();
}

absl::StatusOr<std::map<std::string, CatalogJob>> DataDirectory::ReadJobs(std::vector<Finding>* findings) const {
  BALLAST_ASSIGN_OR_RETURN(const auto stored, catalog_->List(kCatalogJobs));
  std::map<std::string, CatalogJob> jobs;
  for (const auto& [key, value] : stored) {
    const std::vector<std::string> parts = absl::StrSplit(key, '/');
    if (parts.size() != 3) continue;
    JobEntry& entry = jobs[parts[1]].entry;
    const size_t unreadable = entry.unreadable.size();
    AddToEntry(parts[2], value, &entry);
    if (entry.unreadable.size() == unreadable) continue;
    findings->push_back({.harm = Harm::kJobRefused,
                         .job = parts[1],
                         .what = absl::StrCat("the catalog's entry '", parts[2], "' cannot be read"),
                         .file = CatalogPath(),
                         .offset = 0,
                         .expected = "what an earlier run wrote",
                         .found = absl::StrCat(value.size(), " bytes that are not a valid entry"),
                         .advice = kRebuildAdvice});
  }
  return jobs;
}

absl::StatusOr<std::string> DataDirectory::server_id() const {
  if (catalog_ == nullptr) return absl::NotFoundError("no catalog");
  BALLAST_ASSIGN_OR_RETURN(const auto id, catalog_->Get(kCatalogServerId));
  if (!id.has_value()) return absl::NotFoundError("the catalog has no 'server_id'");
  return *id;
}

std::vector<std::string> DataDirectory::LogNames() const {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator at(path_, error), end; !error && at != end; at.increment(error)) {
    const std::string file = at->path().filename().string();
    absl::string_view name = file;
    if (absl::ConsumePrefix(&name, kLogPrefix)) names.emplace_back(name);
  }
  std::sort(names.begin(), names.end());
  return names;
}

std::string DataDirectory::CatalogPath() const { return path_ + "/catalog"; }
std::string DataDirectory::LogPath(const std::string& job) const { return absl::StrCat(path_, "/", kLogPrefix, job); }

std::map<storage::NvmeFileId, std::string> DataDirectory::KnownTierPaths() const {
  std::map<storage::NvmeFileId, std::string> paths;
  if (catalog_ == nullptr) return paths;
  const auto pairs = catalog_->List(kCatalogNvme);
  if (!pairs.ok()) return paths;
  for (const auto& [key, path] : *pairs) {
    if (const auto id = NvmeFileOfKey(key); id.has_value()) paths[*id] = path;
  }
  return paths;
}

std::string DataDirectory::TierPath(storage::NvmeFileId id) const {
  if (id == 0) return storage::NvmeFilePath(path_, 0);
  const auto known = KnownTierPaths();
  const auto found = known.find(id);
  return found != known.end() ? found->second : absl::StrCat("nvme file ", storage::ShowFileId(id));
}

absl::StatusOr<TierFiles> DataDirectory::OpenTierFiles() const {
  TierFiles files;
  const auto add = [&](storage::NvmeFileId id, std::unique_ptr<storage::BlockFile> file) -> absl::Status {
    BALLAST_ASSIGN_OR_RETURN(const uint64_t bytes, file->Size());
    files.emplace(id, TierFile{std::move(file), bytes});
    return absl::OkStatus();
  };
  BALLAST_ASSIGN_OR_RETURN(auto home, OpenFile(TierPath()));
  if (home != nullptr) BALLAST_RETURN_IF_ERROR(add(0, std::move(home)));
  std::set<std::string> directories(nvme_.begin(), nvme_.end()), paths;
  directories.insert(path_);
  for (const auto& [id, path] : KnownTierPaths()) {
    paths.insert(path);
    directories.insert(fs::path(path).parent_path());
  }
  for (const std::string& directory : directories) {
    for (uint64_t number = directory == path_ ? 1 : 0; Exists(storage::NvmeFilePath(directory, number)); ++number) {
      paths.insert(storage::NvmeFilePath(directory, number));
    }
  }
  for (const std::string& path : paths) {
    auto file = OpenFile(path);
    if (!file.ok() || *file == nullptr) continue;  // a device that is not there, or cannot be read
    const auto header = storage::ReadDeviceHeader(**file);
    if (header.ok() && header->has_value()) BALLAST_RETURN_IF_ERROR(add((*header)->id, *std::move(file)));
  }
  return files;
}

absl::StatusOr<std::unique_ptr<storage::BlockFile>> DataDirectory::OpenFile(const std::string& path) const {
  if (!Exists(path)) return std::unique_ptr<storage::BlockFile>();
  return storage::SystemDisk()->Open(path, storage::Disk::Mode::kShared);
}

}  // namespace ballast::services
