// How a server's jobs come back at its start: each from its entry in the catalog, its log and its extents. Calls to a
// job that cannot come back get the reason, and its files stay.
#include <spdlog/spdlog.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "absl/strings/str_cat.h"
#include "ballast/services/job/job.h"
#include "ballast/services/server/nvme_devices.h"
#include "ballast/services/server/server_state.h"
#include "ballast/services/server/stored_jobs.h"
#include "ballast/storage/tier/nvme_tier.h"

namespace ballast::services {
namespace {

// With durability none, a job that had state has lost it.
bool LostByRestart(const JobEntry& entry) {
  return entry.had_state && !entry.every_k() && entry.pins.empty() &&
         std::find(entry.unreadable.begin(), entry.unreadable.end(), kCatalogOpen) == entry.unreadable.end();
}

absl::Status Unreadable(const std::string& name, const JobEntry& entry, const std::string& directory) {
  // Where only pins are left, nothing else tells their content.
  const absl::string_view remedy =
      entry.every_k() ? "Put a copy of the catalog back, or drop the job" : "Run `ballastctl verify --rebuild`";
  return model::Error(absl::StatusCode::kDataLoss, model::kIo,
                      absl::StrCat("the catalog's '", entry.unreadable.front(), "' of job '", name, "' in ", directory,
                                   "/catalog cannot be read; expected what an earlier run wrote. ", remedy));
}

// Brings a new job to where its entry says that it was.
absl::Status BringBack(const std::string& name, const JobEntry& entry, const std::string& directory, Job* job) {
  BALLAST_RETURN_IF_ERROR(job->MakeThreads());  // refused by itself, as a job without room is
  if (!entry.unreadable.empty()) return Unreadable(name, entry, directory);
  if (entry.every_k() && entry.had_state) return job->ComeBack(entry);
  if (entry.durable()) return job->Recover(entry);
  if (entry.promised.has_value()) return job->Replay(PromiseRecord{*entry.promised});
  return absl::OkStatus();
}

}  // namespace

// Brings the jobs back one after another. On one thread: the start's, or coming_back.thread.
class StateServer::Impl::Loader {
 public:
  Loader(Impl* server, const StoredJobs& stored)
      : server_(server), stored_(stored), directory_(server->options.data_directory), tiers_(server->tiers.get()) {}
  absl::Status Run();

 private:
  // What is kept free for a job until its turn.
  struct Room {
    uint64_t dram = 0, nvme = 0;
  };

  Room KeepRoom(const std::string& name, const JobEntry& entry);
  // Is there nothing to load, or something missing that the job needs? Its entry then says which.
  bool IsNotTried(const std::string& name, const JobEntry& entry);
  // OK also for a job that is refused. An error: the server stops.
  absl::Status Load(const std::string& name, const JobEntry& entry);
  absl::Status Serve(const std::string& name, const std::shared_ptr<Job>& job);
  // Refuses this job, with the reason. Its files stay, and the server's other jobs go on.
  void Refuse(const std::string& name, Job* job, absl::Status status);
  // The same for a job that is not even tried.
  void RefuseUntried(const std::string& name, const JobEntry& entry, const absl::Status& cause);
  // OK until the server stops. Then the jobs that are back go as at a stop: each may have a log that is pumped.
  absl::Status Interrupted();

  Impl* const server_;
  const StoredJobs& stored_;
  const std::string& directory_;
  storage::Tiers* const tiers_;
  std::map<std::string, std::shared_ptr<Job>> recovered_;
  absl::Status device_;  // a job may lack the room that a device had which is not there
  bool whole_ = true;    // no job was refused
};

absl::Status StateServer::Impl::Loader::Run() {
  for (const auto& [name, entry] : stored_.entries) device_.Update(CheckDevices(name, entry, tiers_));
  std::map<std::string, Room> kept;
  for (const auto& [name, entry] : stored_.entries) kept[name] = KeepRoom(name, entry);
  for (const auto& [name, entry] : stored_.entries) {
    BALLAST_RETURN_IF_ERROR(Interrupted());
    tiers_->Return(storage::TierKind::kDram, kept[name].dram, storage::TierPart::kSpare);
    tiers_->Return(storage::TierKind::kNvme, kept[name].nvme, storage::TierPart::kSpare);
    if (!IsNotTried(name, entry)) BALLAST_RETURN_IF_ERROR(Load(name, entry));
  }
  // Only now may a job take more: first every job had to get back what it had.
  for (const auto& [name, job] : recovered_) {
    if (!server_->options.serve_while_recovering) BALLAST_RETURN_IF_ERROR(Serve(name, job));
  }
  BALLAST_RETURN_IF_ERROR(Interrupted());
  return whole_ && tiers_->nvme() != nullptr ? tiers_->nvme()->Trim() : absl::OkStatus();
}

StateServer::Impl::Loader::Room StateServer::Impl::Loader::KeepRoom(const std::string& name, const JobEntry& entry) {
  Room kept;
  // The least DRAM, so that a job loaded early cannot fill memory that a later job needs to load at all.
  const bool has_dram = tiers_
                            ->Take(storage::TierKind::kDram, entry.least_dram, absl::StrCat("job '", name, "'"),
                                   storage::TierPart::kSpare)
                            .ok();
  if (has_dram) kept.dram = entry.least_dram;
  // And the space of the log: a job that is served already may take more.
  const std::optional<uint64_t> log_bytes = LogBytes(directory_, name);
  if (!log_bytes.has_value() || !server_->options.serve_while_recovering) return kept;
  const bool has_nvme = tiers_
                            ->Take(storage::TierKind::kNvme, *log_bytes, absl::StrCat("the log of job '", name, "'"),
                                   storage::TierPart::kSpare)
                            .ok();
  if (has_nvme) kept.nvme = *log_bytes;
  return kept;
}

bool StateServer::Impl::Loader::IsNotTried(const std::string& name, const JobEntry& entry) {
  if (const auto orphan = stored_.orphans.find(name); orphan != stored_.orphans.end()) {
    RefuseUntried(name, entry, orphan->second);
    return true;
  }
  if (LostByRestart(entry)) {
    server_->Lose(name, entry, server_->LostToDurabilityNone(name));
    return true;
  }
  const absl::Status there = CheckDevices(name, entry, tiers_);
  if (!there.ok()) RefuseUntried(name, entry, there);
  return !there.ok();
}

absl::Status StateServer::Impl::Loader::Load(const std::string& name, const JobEntry& entry) {
  const std::shared_ptr<Job> job = server_->MakeJob(name);
  const absl::Status status = BringBack(name, entry, directory_, job.get());
  recovered_[name] = job;
  if (status.ok()) {
    if (!server_->options.serve_while_recovering) return absl::OkStatus();
    BALLAST_RETURN_IF_ERROR(Serve(name, job));
    recovered_.erase(name);  // the server's alone now: a drop gives its memory back while others come back
    return absl::OkStatus();
  }
  BALLAST_RETURN_IF_ERROR(Interrupted());
  recovered_.erase(name);
  Refuse(name, job.get(), status);
  return absl::OkStatus();
}

absl::Status StateServer::Impl::Loader::Serve(const std::string& name, const std::shared_ptr<Job>& job) {
  BALLAST_RETURN_IF_ERROR(Interrupted());
  if (const absl::Status status = job->EndRecovery(); !status.ok()) {
    BALLAST_RETURN_IF_ERROR(Interrupted());
    Refuse(name, job.get(), status);
    return absl::OkStatus();
  }
  absl::MutexLock lock(&server_->mu);
  Entry& entry = server_->jobs[name] = Entry();
  entry.job = job;
  entry.made = server_->next_made++;
  return absl::OkStatus();
}

void StateServer::Impl::Loader::Refuse(const std::string& name, Job* job, absl::Status status) {
  if (!device_.ok() && model::ReasonOf(status) == model::kBudget) {
    status = model::Error(
        status.code(), model::kBudget,
        absl::StrCat(status.message(), ". The nvme tier also has less room than before: ", device_.message()));
  }
  spdlog::error("job '{}' cannot be recovered: {}", name, std::string(status.message()));
  job->Stop(status);
  const storage::PartBytes held = tiers_->taken(job->account());
  server_->Lose(name, stored_.entries.at(name), status, held[static_cast<size_t>(storage::TierPart::kLog)].nvme);
  whole_ = false;
}

void StateServer::Impl::Loader::RefuseUntried(const std::string& name, const JobEntry& entry,
                                              const absl::Status& cause) {
  spdlog::error("job '{}' cannot be recovered: {}", name, std::string(cause.message()));
  const std::optional<uint64_t> bytes = LogBytes(directory_, name);
  const bool taken =
      bytes.has_value() &&
      tiers_->Take(storage::TierKind::kNvme, *bytes, "a log that is not read", storage::TierPart::kLog).ok();
  server_->Lose(name, entry, cause, taken ? *bytes : 0);
  whole_ = false;
}

absl::Status StateServer::Impl::Loader::Interrupted() {
  const absl::Status status = server_->coming_back.interrupt();
  if (status.ok()) return status;
  for (const auto& [name, job] : recovered_) job->Stop(status);
  return status;
}

absl::Status StateServer::Impl::LoadJobs(const StoredJobs& stored) { return Loader(this, stored).Run(); }

void StateServer::Impl::ExpectJobs(const std::map<std::string, JobEntry>& stored) {
  coming_back.interrupt = [this] {
    if (options.interrupt) BALLAST_RETURN_IF_ERROR(options.interrupt());
    if (!coming_back.ends) return absl::OkStatus();
    return model::Error(absl::StatusCode::kUnavailable, model::kServerDown,
                        "the server was stopped while it recovered its jobs; the next start recovers them again");
  };
  for (const auto& [name, entry] : stored) Lose(name, entry, absl::OkStatus());
  absl::MutexLock lock(&mu);
  coming_back.going = true;
  for (auto& [name, entry] : jobs) {
    entry.recovering = true;
    entry.taken[static_cast<size_t>(storage::TierPart::kLog)].nvme = LogBytes(options.data_directory, name).value_or(0);
    entry.taken[static_cast<size_t>(storage::TierPart::kState)].dram = stored.at(name).least_dram;
  }
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

}  // namespace ballast::services
