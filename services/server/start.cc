// How a state server starts: its directory, its name, and the jobs that the catalog knows.
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <random>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "ballast/proto/base/threads.h"
#include "ballast/services/job/job.h"
#include "ballast/services/journal/data_files.h"
#include "ballast/services/server/nvme_devices.h"
#include "ballast/services/server/server_state.h"
#include "ballast/services/server/stored_jobs.h"
#include "ballast/storage/catalog/directory_format.h"
#include "ballast/storage/placement/profile_file.h"

namespace ballast::services {
namespace {

absl::Status CheckDirectory(const std::string& directory) {
  if (directory.empty()) {
    return model::Error(absl::StatusCode::kInvalidArgument, model::kBadConfig,
                        "data_directory is empty; expected a directory that this server alone uses");
  }
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  const bool writable = !error && ::access(directory.c_str(), W_OK | X_OK) == 0;
  if (writable) return absl::OkStatus();
  return model::Error(absl::StatusCode::kInternal, model::kIo,
                      absl::StrCat("data directory '", directory,
                                   "' is not writable: ", error ? error.message() : std::string(std::strerror(errno)),
                                   "; choose another, or give this user write permission"));
}

// None if no profile was named and the data directory has none.
absl::StatusOr<std::optional<storage::MachineProfile>> ReadMachineProfile(const StateServerOptions& options) {
  std::string path = options.machine_profile;
  const bool named = !path.empty();
  if (!named) {
    path = absl::StrCat(options.data_directory, "/", kMachineProfile);
    std::error_code error;
    if (!std::filesystem::exists(path, error)) {
      spdlog::info(
          "no machine profile: plans fill tiers in order and predict no times; `ballastctl iotune --directory {}` "
          "measures one",
          options.data_directory);
      return std::nullopt;
    }
  }
  absl::StatusOr<storage::MachineProfile> profile = storage::ReadProfile(path);
  if (!profile.ok() && !named) {
    // Plans alone depend on it, and nobody asked for it by name.
    spdlog::warn(
        "the server cannot use the machine profile, and plans predict no times: {}; `ballastctl iotune --directory {}` "
        "measures again",
        std::string(profile.status().message()), options.data_directory);
    return std::nullopt;
  }
  BALLAST_RETURN_IF_ERROR(profile.status());
  spdlog::info("plans are chosen by the machine profile {}", path);
  return *std::move(profile);
}

std::string MakeServerId() {
  std::random_device random;
  return absl::StrCat("server-", absl::Hex(random(), absl::kZeroPad8), absl::Hex(random(), absl::kZeroPad8));
}

// For a directory without a catalog: only the catalog tells what the disk holds, and a start would free it. DATA_LOSS
// (IO).
absl::Status CheckNothingLost(const std::string& directory) {
  std::error_code error;
  for (const auto& file : std::filesystem::directory_iterator(directory, error)) {
    if (!absl::StartsWith(file.path().filename().string(), kLogPrefix)) continue;
    return model::Error(
        absl::StatusCode::kDataLoss, model::kIo,
        absl::StrCat("data directory '", directory, "' holds ", file.path().filename().string(),
                     " of a durable job, but the catalog was lost. Run `ballastctl verify --rebuild`, or move "
                     "the logs away if you do not need the jobs"));
  }
  const uint64_t tier_bytes = std::filesystem::file_size(directory + "/nvme.tier", error);
  if (error || tier_bytes == 0) return absl::OkStatus();
  return model::Error(
      absl::StatusCode::kDataLoss, model::kIo,
      absl::StrCat("data directory '", directory, "' holds nvme.tier of ", tier_bytes,
                   " bytes, but the catalog, which says where jobs' state lies in it, was lost. "
                   "Put a copy of the catalog back, or move nvme.tier away if you do not need its contents"));
}

absl::StatusOr<std::string> SettleServerId(storage::Catalog* catalog, const std::string& wanted,
                                           const std::string& directory) {
  BALLAST_ASSIGN_OR_RETURN(const auto stored, catalog->Get(kCatalogServerId));
  if (stored.has_value()) {
    if (wanted.empty() || wanted == *stored) return *stored;
    return model::Error(absl::StatusCode::kInvalidArgument, model::kBadConfig,
                        absl::StrCat("data directory '", directory, "' belongs to server '", *stored,
                                     "', server_id says '", wanted, "'; use that name, or another directory"));
  }
  BALLAST_RETURN_IF_ERROR(CheckNothingLost(directory));
  const std::string id = wanted.empty() ? MakeServerId() : wanted;
  BALLAST_RETURN_IF_ERROR(catalog->Put(kCatalogServerId, id));
  return id;
}

// The data directory's own number: one that was wiped, or a new one under an old name, has another.
absl::StatusOr<uint64_t> SettleDisk(storage::Catalog* catalog, const std::string& directory) {
  BALLAST_ASSIGN_OR_RETURN(const auto stored, catalog->Get(kCatalogDisk));
  uint64_t disk = 0;
  if (stored.has_value()) {
    if (absl::SimpleHexAtoi(*stored, &disk) && disk != 0) return disk;
    return model::Error(absl::StatusCode::kDataLoss, model::kIo,
                        absl::StrCat("the catalog's '", kCatalogDisk, "' in ", directory,
                                     "/catalog cannot be read; expected 16 hexadecimal digits. Put a copy of the "
                                     "catalog back"));
  }
  std::random_device random;
  while (disk == 0) disk = static_cast<uint64_t>(random()) << 32 | random();
  BALLAST_RETURN_IF_ERROR(catalog->Put(kCatalogDisk, absl::StrCat(absl::Hex(disk, absl::kZeroPad16))));
  return disk;
}

// Removes spills of a server that died while making them; a finished spill has no name.
absl::Status RemoveSpills(const std::string& directory, storage::Disk* disk) {
  std::error_code error;
  for (const auto& file : std::filesystem::directory_iterator(directory, error)) {
    if (!absl::StartsWith(file.path().filename().string(), kSpillPrefix)) continue;
    BALLAST_RETURN_IF_ERROR(disk->Remove(file.path().string()));
  }
  return absl::OkStatus();
}

storage::TiersOptions TiersOf(const StateServerOptions& options, const std::vector<storage::NvmeDevice>& devices,
                              Foundation* foundation) {
  storage::TiersOptions tiers;
  tiers.budget = options.budget;
  tiers.directory = options.data_directory;
  tiers.devices = devices;
  tiers.staging_bytes = StagingBytes(options);
  tiers.hbm_device = options.hbm_device;
  tiers.disk = foundation->disk();
  tiers.open_hbm = foundation->hbm();
  return tiers;
}

// Nothing else may be written where jobs have state, known or not.
void KeepExtents(const StoredJobs& stored, storage::TiersOptions* tiers) {
  for (const auto& [name, entry] : stored.entries) {
    for (const storage::DurableChunk& chunk : entry.ChunksAndPinned()) {
      tiers->kept.push_back({chunk.offset, chunk.bytes, chunk.file});
    }
    const bool damaged = !entry.unreadable.empty() && (entry.durable() || entry.every_k());
    if (!damaged && !stored.orphans.contains(name)) continue;
    tiers->unnamed_stays = true;
    spdlog::warn(
        "the catalog's entries of job '{}' are missing or cannot be read; until they are back, the server treats "
        "all of nvme.tier as used, and puts new state behind its end",
        name);
  }
}

}  // namespace

uint64_t StagingBytes(const StateServerOptions& options) {
  return options.staging_bytes > 0 ? options.staging_bytes : storage::DefaultStagingBytes(options.budget.dram);
}

absl::StatusOr<std::unique_ptr<StateServer>> StateServer::Start(const StateServerOptions& options) {
  auto impl = std::make_unique<Impl>(options);
  BALLAST_RETURN_IF_ERROR(storage::CheckDirectoryFormat(options.data_directory));  // first of all
  BALLAST_RETURN_IF_ERROR(impl->deadlines.made());
  BALLAST_RETURN_IF_ERROR(impl->answers.Prepare());
  BALLAST_RETURN_IF_ERROR(CheckDirectory(options.data_directory));
  BALLAST_ASSIGN_OR_RETURN(impl->machine, ReadMachineProfile(options));
  BALLAST_ASSIGN_OR_RETURN(const std::vector<storage::NvmeDevice> devices, DevicesOf(options));
  if (impl->machine.has_value()) impl->machine = WithDevices(*impl->machine, devices);
  // Where CURRENT is missing, RocksDB would begin a new catalog and remove what is left of the old.
  if (std::error_code error; !std::filesystem::exists(options.data_directory + "/catalog/CURRENT", error)) {
    BALLAST_RETURN_IF_ERROR(CheckNothingLost(options.data_directory));
  }
  // RocksDB makes them without a look at what the system says.
  constexpr int kCatalogThreads = 4;
  BALLAST_RETURN_IF_ERROR(model::CheckThreads(kCatalogThreads));
  // The catalog's lock guards the whole directory, so it comes first.
  BALLAST_ASSIGN_OR_RETURN(impl->catalog, impl->foundation->OpenCatalog(options.data_directory));
  StoredJobs stored;
  BALLAST_ASSIGN_OR_RETURN(stored.entries, ReadEntries(*impl->catalog));
  BALLAST_RETURN_IF_ERROR(RemoveSpills(options.data_directory, impl->foundation->disk()));
  BALLAST_ASSIGN_OR_RETURN(impl->server_id,
                           SettleServerId(impl->catalog.get(), options.server_id, options.data_directory));
  BALLAST_ASSIGN_OR_RETURN(impl->disk, SettleDisk(impl->catalog.get(), options.data_directory));
  if (options.named) BALLAST_RETURN_IF_ERROR(options.named(impl->server_id, impl->disk));
  storage::TiersOptions tiers = TiersOf(options, devices, impl->foundation);
  BALLAST_ASSIGN_OR_RETURN(tiers.known, ReadKnownFiles(impl->catalog.get(), impl->server_id));
  FindOrphans(options.data_directory, impl->foundation->disk(), &stored);
  KeepExtents(stored, &tiers);
  if (options.progress != nullptr) {
    options.progress->total_bytes += BytesToRecover(options.data_directory, stored.entries);
    tiers.restored_bytes = &options.progress->done_bytes;
  }
  BALLAST_ASSIGN_OR_RETURN(impl->tiers, storage::Tiers::Open(tiers));
  impl->ExpectJobs(stored.entries);
  const auto load = [impl = impl.get(), stored = std::move(stored)] {
    const absl::Status status = impl->LoadJobs(stored);
    // Of jobs that are lost or refused, nothing more will be read.
    if (impl->options.progress != nullptr && status.ok()) {
      impl->options.progress->done_bytes = impl->options.progress->total_bytes.load();
    }
    absl::MutexLock lock(&impl->mu);
    impl->coming_back.going = false;
    impl->coming_back.outcome = status;
    return status;
  };
  std::unique_ptr<StateServer> server(new StateServer(std::move(impl)));
  if (options.serve_while_recovering) {
    BALLAST_ASSIGN_OR_RETURN(server->impl_->coming_back.thread, model::MakeThread(load));
    return server;
  }
  BALLAST_RETURN_IF_ERROR(load());
  return server;
}

}  // namespace ballast::services
