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
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "ballast/proto/model/threads.h"
#include "ballast/services/records/data_files.h"
#include "ballast/services/records/log_records.h"
#include "ballast/services/server/nvme_devices.h"
#include "ballast/services/server/server_state.h"
#include "ballast/storage/catalog/directory_format.h"
#include "ballast/storage/log/reading/logged_records.h"
#include "ballast/storage/machine/profile_file.h"
#include "ballast/storage/tier/nvme_tier.h"

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
                                   "; give another, or write permission to this user"));
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
        "the machine profile is not used, and plans predict no times: {}; `ballastctl iotune --directory {}` "
        "measures anew",
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
                     " of a durable job, and its catalog is missing or new: it was lost. Run `ballastctl "
                     "verify --rebuild`, or move the logs away if the jobs are not wanted"));
  }
  const uint64_t tier_bytes = std::filesystem::file_size(directory + "/nvme.tier", error);
  if (error || tier_bytes == 0) return absl::OkStatus();
  return model::Error(
      absl::StatusCode::kDataLoss, model::kIo,
      absl::StrCat("data directory '", directory, "' holds nvme.tier of ", tier_bytes,
                   " bytes, and its catalog, which says where jobs' state lies in it, is missing or new. "
                   "Put a copy of the catalog back, or move nvme.tier away if nothing of it is wanted"));
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

// Reads the steps in the log of job `name`.
absl::StatusOr<LoggedSteps> StepsOf(const std::string& log, absl::string_view name, storage::Disk* disk) {
  BALLAST_ASSIGN_OR_RETURN(const auto file, disk->Open(log, storage::Disk::Mode::kShared));
  BALLAST_ASSIGN_OR_RETURN(const storage::ScannedLog scanned, storage::ScanLog(*file));
  if (scanned.name != name) {
    return model::Error(absl::StatusCode::kDataLoss, model::kIo,
                        absl::StrCat("it is the log of job '", scanned.name, "', by another name"));
  }
  LoggedSteps steps;
  storage::LoggedRecords records(file.get(), &scanned);
  for (;;) {
    BALLAST_ASSIGN_OR_RETURN(const storage::ReadRecord* const read, records.Next());
    if (read == nullptr) return steps;
    BALLAST_ASSIGN_OR_RETURN(const StepRecord record, DecodeRecord(*read));
    steps.Add(record);
  }
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
  BALLAST_ASSIGN_OR_RETURN(auto stored, impl->ReadJobs());
  BALLAST_RETURN_IF_ERROR(RemoveSpills(options.data_directory, impl->foundation->disk()));
  BALLAST_ASSIGN_OR_RETURN(impl->server_id,
                           SettleServerId(impl->catalog.get(), options.server_id, options.data_directory));
  BALLAST_ASSIGN_OR_RETURN(const uint64_t disk, SettleDisk(impl->catalog.get(), options.data_directory));
  if (options.named) BALLAST_RETURN_IF_ERROR(options.named(impl->server_id, disk));
  storage::TiersOptions tiers;
  tiers.budget = options.budget;
  tiers.directory = options.data_directory;
  tiers.devices = devices;
  BALLAST_ASSIGN_OR_RETURN(tiers.known, ReadKnownFiles(impl->catalog.get(), impl->server_id));
  tiers.staging_bytes = StagingBytes(options);
  tiers.hbm_device = options.hbm_device;
  tiers.disk = impl->foundation->disk();
  tiers.open_hbm = impl->foundation->hbm();
  const std::map<std::string, absl::Status> orphans = impl->FindOrphans(stored);
  for (const auto& [name, cause] : orphans) stored.try_emplace(name);
  for (const auto& [name, entry] : stored) {
    for (const storage::DurableChunk& chunk : entry.ChunksAndPinned()) {
      tiers.kept.push_back({chunk.offset, chunk.bytes, chunk.file});
    }
    const bool damaged = !entry.unreadable.empty() && (entry.durable() || entry.every_k());
    if (!damaged && !orphans.contains(name)) continue;
    tiers.unnamed_stays = true;
    spdlog::warn(
        "job '{}' has entries in the catalog that cannot be read, or none: until it has them, nothing in nvme.tier is "
        "taken for free, and what other jobs need comes behind its end",
        name);
  }
  if (options.progress != nullptr) {
    impl->ExpectToRecover(stored);
    tiers.restored_bytes = &options.progress->done_bytes;
  }
  BALLAST_ASSIGN_OR_RETURN(impl->tiers, storage::Tiers::Open(tiers));
  impl->ExpectJobs(stored);
  const auto load = [impl = impl.get(), stored = std::move(stored), orphans = std::move(orphans)] {
    const absl::Status status = impl->LoadJobs(stored, orphans);
    // Of jobs that are lost or refused, nothing more will be read.
    if (impl->options.progress != nullptr && status.ok()) {
      impl->options.progress->done_bytes = impl->options.progress->total_bytes.load();
    }
    absl::MutexLock lock(&impl->mu);
    impl->coming_back.going = false;
    impl->coming_back.outcome = status;
    return status;
  };
  std::unique_ptr<StateServer> server(new StateServer(std::move(impl), disk));
  if (options.serve_while_recovering) {
    BALLAST_ASSIGN_OR_RETURN(server->impl_->coming_back.thread, model::MakeThread(load));
    return server;
  }
  BALLAST_RETURN_IF_ERROR(load());
  return server;
}

void StateServer::Impl::ExpectJobs(const std::map<std::string, JobEntry>& stored) {
  coming_back.interrupt = [this] {
    if (options.interrupt) BALLAST_RETURN_IF_ERROR(options.interrupt());
    if (!coming_back.ends) return absl::OkStatus();
    return model::Error(absl::StatusCode::kUnavailable, model::kServerDown,
                        "the server ends while it recovers; the next start recovers its jobs anew");
  };
  for (const auto& [name, entry] : stored) Lose(name, entry, absl::OkStatus());
  absl::MutexLock lock(&mu);
  coming_back.going = true;
  for (auto& [name, entry] : jobs) {
    entry.recovering = true;
    std::error_code error;
    const uint64_t log_bytes = std::filesystem::file_size(LogPath(options.data_directory, name), error);
    if (!error) entry.taken[static_cast<size_t>(storage::TierPart::kLog)].nvme = log_bytes;
    entry.taken[static_cast<size_t>(storage::TierPart::kState)].dram = stored.at(name).least_dram;
  }
}

void StateServer::Impl::ExpectToRecover(const std::map<std::string, JobEntry>& stored) const {
  for (const auto& [name, entry] : stored) {
    uint64_t bytes = 0;
    for (const storage::DurableChunk& chunk : entry.chunks) bytes += chunk.bytes;
    std::error_code error;
    const uint64_t log_bytes =
        entry.durable() ? std::filesystem::file_size(LogPath(options.data_directory, name), error) : 0;
    options.progress->total_bytes += bytes + (error ? 0 : log_bytes);
  }
}

absl::StatusOr<std::map<std::string, JobEntry>> StateServer::Impl::ReadJobs() const {
  BALLAST_ASSIGN_OR_RETURN(const auto stored, catalog->List(""));
  std::map<std::string, JobEntry> jobs;
  for (const auto& [key, value] : stored) {
    BALLAST_RETURN_IF_ERROR(CheckKnownKey(key));
    if (!absl::StartsWith(key, kCatalogJobs)) continue;
    const std::vector<std::string> parts = absl::StrSplit(key, '/');
    AddToEntry(parts[2], value, &jobs[parts[1]]);
  }
  return jobs;
}

std::map<std::string, absl::Status> StateServer::Impl::FindOrphans(
    const std::map<std::string, JobEntry>& stored) const {
  std::map<std::string, absl::Status> orphans;
  std::error_code error;
  for (const auto& file : std::filesystem::directory_iterator(options.data_directory, error)) {
    const std::string path = file.path().string(), file_name = file.path().filename().string();
    absl::string_view name = file_name;
    if (!absl::ConsumePrefix(&name, kLogPrefix)) continue;
    const auto entry = stored.find(std::string(name));
    if (entry != stored.end() && entry->second.durable()) continue;
    const absl::StatusOr<LoggedSteps> steps = StepsOf(path, name, foundation->disk());
    // The log is still being made, or was never used: an Open makes it anew.
    if (absl::IsNotFound(steps.status()) || (steps.ok() && !steps->any())) continue;
    if (!steps.ok() && entry == stored.end()) {
      spdlog::warn("{} is not looked after: {}", path, std::string(steps.status().message()));
      continue;
    }
    const std::string found =
        steps.ok() ? absl::StrCat("has steps up to ", steps->committed) : std::string(steps.status().message());
    orphans.emplace(name, model::Error(absl::StatusCode::kDataLoss, model::kIo,
                                       absl::StrCat("the catalog does not know the job of ", path, ", which ", found,
                                                    ": it is an older copy, or damaged. Run `ballastctl verify "
                                                    "--rebuild`, or drop the job if it is to be forgotten")));
  }
  return orphans;
}

void StateServer::Impl::Lose(const std::string& name, const JobEntry& stored, const absl::Status& cause,
                             uint64_t log_bytes) {
  absl::MutexLock lock(&mu);
  Entry& entry = jobs[name];
  entry.cause = cause;
  entry.recovering = false;
  entry.log_bytes = log_bytes;
  entry.taken = {};
  entry.taken[static_cast<size_t>(storage::TierPart::kLog)].nvme = log_bytes;
  uint64_t& extents = entry.taken[static_cast<size_t>(storage::TierPart::kState)].nvme;
  for (const storage::DurableChunk& chunk : stored.ChunksAndPinned()) extents += chunk.bytes;
  v1::GetJobResponse& lost = entry.lost.emplace();
  lost.set_server_id(server_id);
  lost.set_exists(true);
  lost.set_state_lost(absl::IsDataLoss(cause));
  lost.set_committed(stored.committed);
  if (stored.promised.has_value()) *lost.mutable_promised() = *stored.promised;
  if (stored.open.has_value()) *lost.mutable_open() = *stored.open;
}

absl::Status StateServer::Impl::LoadJobs(const std::map<std::string, JobEntry>& stored,
                                         const std::map<std::string, absl::Status>& orphans) {
  bool whole = true;
  std::map<std::string, std::shared_ptr<Job>> recovered;
  // A job may lack the room that a device had which is not there.
  absl::Status device;
  for (const auto& [name, entry] : stored) device.Update(CheckDevices(name, entry, tiers.get()));
  const auto refuse = [&](const std::string& name, Job& job, absl::Status status) {
    // Refuses this job, with the reason. Its files stay, and the server's other jobs go on.
    if (!device.ok() && model::ReasonOf(status) == model::kBudget) {
      status = model::Error(
          status.code(), model::kBudget,
          absl::StrCat(status.message(), ". Besides, the nvme tier has less room than before: ", device.message()));
    }
    spdlog::error("job '{}' cannot be recovered: {}", name, std::string(status.message()));
    job.Stop(status);
    const storage::PartBytes held = tiers->taken(job.account());
    Lose(name, stored.at(name), status, held[static_cast<size_t>(storage::TierPart::kLog)].nvme);
    whole = false;
  };
  // The same for a job that is not even tried.
  const auto lose = [&](const std::string& name, const JobEntry& entry, const absl::Status& cause) {
    spdlog::error("job '{}' cannot be recovered: {}", name, std::string(cause.message()));
    std::error_code error;
    const uint64_t bytes = std::filesystem::file_size(LogPath(options.data_directory, name), error);
    const bool taken =
        !error && tiers->Take(storage::TierKind::kNvme, bytes, "a log that is not read", storage::TierPart::kLog).ok();
    Lose(name, entry, cause, taken ? bytes : 0);
    whole = false;
  };
  // Reserve each job's minimum DRAM first, so that a job loaded early cannot fill memory that a later job needs to load
  // at all.
  std::map<std::string, uint64_t> kept;
  for (const auto& [name, entry] : stored) {
    if (tiers
            ->Take(storage::TierKind::kDram, entry.least_dram, absl::StrCat("job \'", name, "\'"),
                   storage::TierPart::kSpare)
            .ok()) {
      kept[name] = entry.least_dram;
    }
  }
  // And the space of its log: a job that is served already may take more.
  std::map<std::string, uint64_t> kept_logs;
  for (const auto& [name, entry] : stored) {
    std::error_code error;
    const uint64_t bytes = std::filesystem::file_size(LogPath(options.data_directory, name), error);
    if (error || !options.serve_while_recovering) continue;
    const bool taken = tiers
                           ->Take(storage::TierKind::kNvme, bytes, absl::StrCat("the log of job '", name, "'"),
                                  storage::TierPart::kSpare)
                           .ok();
    if (taken) kept_logs[name] = bytes;
  }
  // The jobs that are back go as at a stop: each may have a log that is pumped.
  const auto interrupted = [&] {
    const absl::Status status = coming_back.interrupt();
    for (const auto& [name, job] : recovered) {
      if (!status.ok()) job->Stop(status);
    }
    return status;
  };
  const auto serve = [&](const std::string& name, const std::shared_ptr<Job>& job) {
    BALLAST_RETURN_IF_ERROR(interrupted());
    if (const absl::Status status = job->EndRecovery(); !status.ok()) {
      BALLAST_RETURN_IF_ERROR(interrupted());
      refuse(name, *job, status);
      return absl::OkStatus();
    }
    absl::MutexLock lock(&mu);
    Entry& entry = jobs[name] = Entry();
    entry.job = job;
    entry.made = next_made++;
    return absl::OkStatus();
  };
  for (const auto& [name, entry] : stored) {
    BALLAST_RETURN_IF_ERROR(interrupted());
    tiers->Return(storage::TierKind::kDram, kept[name], storage::TierPart::kSpare);
    tiers->Return(storage::TierKind::kNvme, kept_logs[name], storage::TierPart::kSpare);
    if (const auto orphan = orphans.find(name); orphan != orphans.end()) {
      lose(name, entry, orphan->second);
      continue;
    }
    const bool nothing_left =
        !entry.every_k() && entry.pins.empty() &&
        std::find(entry.unreadable.begin(), entry.unreadable.end(), kCatalogOpen) == entry.unreadable.end();
    if (entry.had_state && nothing_left) {
      Lose(name, entry, LostToDurabilityNone(name));
      continue;
    }
    if (const absl::Status there = CheckDevices(name, entry, tiers.get()); !there.ok()) {
      lose(name, entry, there);
      continue;
    }
    const std::shared_ptr<Job> job = MakeJob(name);
    absl::Status status = job->MakeThreads();
    if (!status.ok()) {
      // Refused by itself, as a job without room is.
    } else if (!entry.unreadable.empty()) {
      // Where only pins are left, nothing else tells their content.
      const absl::string_view remedy =
          entry.every_k() ? "Put a copy of the catalog back, or drop the job" : "Run `ballastctl verify --rebuild`";
      status = model::Error(
          absl::StatusCode::kDataLoss, model::kIo,
          absl::StrCat("the catalog's '", entry.unreadable.front(), "' of job '", name, "' in ", options.data_directory,
                       "/catalog cannot be read; expected what an earlier run wrote. ", remedy));
    } else if (entry.every_k() && entry.had_state) {
      status = job->ComeBack(entry);
    } else if (entry.durable()) {
      status = job->Recover(entry);
    } else if (entry.promised.has_value()) {
      status = job->Replay(PromiseRecord{*entry.promised});
    }
    recovered[name] = job;
    if (status.ok() && options.serve_while_recovering) BALLAST_RETURN_IF_ERROR(serve(name, job));
    if (status.ok()) continue;
    BALLAST_RETURN_IF_ERROR(interrupted());
    recovered.erase(name);
    refuse(name, *job, status);
  }
  // Only now may a job take more: first every job had to get back what it had.
  for (const auto& [name, job] : recovered) {
    if (!options.serve_while_recovering) BALLAST_RETURN_IF_ERROR(serve(name, job));
  }
  BALLAST_RETURN_IF_ERROR(interrupted());
  return whole && tiers->nvme() != nullptr ? tiers->nvme()->Trim() : absl::OkStatus();
}

}  // namespace ballast::services
