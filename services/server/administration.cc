// Calls of operators to a state server: status, budgets, drops.
#include <algorithm>
#include <filesystem>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "ballast/proto/model/protocol.h"
#include "ballast/proto/model/table.h"
#include "ballast/services/job/job.h"
#include "ballast/services/journal/job_journal.h"
#include "ballast/services/server/budgets.h"
#include "ballast/services/server/job_steps.h"
#include "ballast/services/server/server_state.h"
#include "ballast/storage/tier/hbm_tier.h"
#include "ballast/storage/tier/nvme_tier.h"

namespace ballast::services {

void StateServer::DropJob(const v1::DropJobRequest& request, Reply<v1::DropJobResponse> reply, const CallLimit& limit) {
  impl_->drops.Begin<v1::DropJobResponse>(
      request.ByteSizeLong(), limit, "the end of what the job's threads do; the drop goes on",
      [impl = impl_.get(), request] { return impl->Drop(request); }, impl_->Counted(Call::kDropJob, std::move(reply)));
}

void StateServer::SetBudget(const v1::SetBudgetRequest& request, Reply<v1::SetBudgetResponse> reply,
                            const CallLimit& limit) {
  impl_->budget_changes.Begin<v1::SetBudgetResponse>(
      request.ByteSizeLong(), limit, "the end of a chunk's move between tiers, or of an Open that takes space",
      [impl = impl_.get(), request] { return impl->SetBudget(request); },
      impl_->Counted(Call::kSetBudget, std::move(reply)));
}

std::map<std::string, std::shared_ptr<Job>> StateServer::Impl::JobsByName() const {
  std::map<std::string, std::shared_ptr<Job>> by_name;
  absl::MutexLock lock(&mu);
  for (const auto& [name, entry] : jobs) {
    if (entry.job != nullptr) by_name[name] = entry.job;
  }
  return by_name;
}

absl::StatusOr<v1::SetBudgetResponse> StateServer::Impl::SetBudget(const v1::SetBudgetRequest& request) {
  {
    absl::MutexLock lock(&mu);
    BALLAST_RETURN_IF_ERROR(CheckAllBack());
  }
  BALLAST_ASSIGN_OR_RETURN(v1::SetBudgetResponse response,
                           ChangeBudgets(
                               request, [this] { return JobsByName(); }, tiers.get(), &moving, &planning));
  for (auto& tier : TierStatuses({})) *response.add_tiers() = std::move(tier);
  return response;
}

absl::StatusOr<StateServer::Impl::Entry> StateServer::Impl::TakeForDrop(const v1::DropJobRequest& request) {
  Entry entry;
  {
    absl::MutexLock lock(&mu);
    if (const auto found = jobs.find(request.job()); found != jobs.end()) {
      if (found->second.recovering) return CauseOf(request.job(), found->second);
      entry = found->second;
    } else {
      const bool again = dropping_names.contains(request.job());
      return model::Error(again ? absl::StatusCode::kUnavailable : absl::StatusCode::kNotFound,
                          again ? model::kBusy : model::kUnknownJob,
                          absl::StrCat("server '", server_id, "' has no job '", request.job(), "'",
                                       again ? ": it is being dropped" : ""));
    }
  }
  const v1::Epoch newest = entry.job != nullptr ? entry.job->promised() : entry.lost->promised();
  if (newest.counter() != request.epoch().counter() || newest.nonce() != request.epoch().nonce()) {
    return model::Error(absl::StatusCode::kFailedPrecondition, model::kStaleEpoch,
                        absl::StrCat("job '", request.job(), "' is at epoch ", newest.counter(), ".", newest.nonce(),
                                     ", the request names ", request.epoch().counter(), ".", request.epoch().nonce(),
                                     ": another group fenced it in the meantime; look at `ballastctl status` again"));
  }
  absl::MutexLock lock(&mu);
  const auto found = jobs.find(request.job());
  if (found == jobs.end() || found->second.job != entry.job) {
    return model::Error(absl::StatusCode::kUnavailable, model::kBusy,
                        absl::StrCat("job '", request.job(), "' was never opened and is being forgotten"));
  }
  jobs.erase(found);
  dropping_names.insert(request.job());
  return entry;
}

void StateServer::Impl::FreeLost(const Entry& entry, const std::vector<storage::DurableChunk>& chunks) {
  tiers->Return(storage::TierKind::kNvme, entry.log_bytes, storage::TierPart::kLog);
  for (const storage::DurableChunk& chunk : chunks) {
    // The extent is freed at once; disputed places stay until the next start.
    if (tiers->nvme() != nullptr) (void)tiers->nvme()->TakeKept(chunk.offset, chunk.file);
  }
}

void StateServer::Impl::KeepForDrop(const std::string& name, const Entry& entry, const v1::Epoch& promised,
                                    const absl::Status& cause) {
  if (entry.job != nullptr) {
    const auto stored = ReadJobEntry(*catalog, name);
    Lose(name, stored.ok() ? *stored : JobEntry(), cause);
  }
  absl::MutexLock lock(&mu);
  Entry& kept = jobs[name];
  if (entry.job == nullptr) kept = entry;
  kept.cause = cause;
  *kept.lost->mutable_promised() = promised;
}

absl::StatusOr<v1::DropJobResponse> StateServer::Impl::Drop(const v1::DropJobRequest& request) {
  BALLAST_ASSIGN_OR_RETURN(Entry entry, TakeForDrop(request));
  if (entry.job != nullptr) {
    entry.job->Stop(model::Error(absl::StatusCode::kNotFound, model::kUnknownJob,
                                 absl::StrCat("job '", request.job(), "' was dropped from server '", server_id, "'")));
  }
  BALLAST_RETURN_IF_ERROR(Erase(request.job(), std::move(entry)));
  return v1::DropJobResponse();
}

absl::Status StateServer::Impl::Erase(const std::string& name, Entry entry) {
  // The log goes first: an interrupted drop then leaves a job without a log, which counts as lost and can be dropped
  // again. The extents go last, when no entry names them any more.
  const v1::Epoch promised = entry.job != nullptr ? entry.job->promised() : entry.lost->promised();
  std::vector<storage::DurableChunk> left;
  if (entry.job == nullptr) {
    if (const auto stored = ReadJobEntry(*catalog, name); stored.ok()) left = stored->ChunksAndPinned();
  }
  absl::Status erased = entry.job != nullptr ? entry.job->RemoveJournal() : RemoveLog(*tiers, name);
  if (erased.ok()) erased = catalog->ErasePrefix(CatalogPrefix(name));
  if (erased.ok() && entry.job != nullptr) entry.job->Discard();
  if (erased.ok() && entry.job == nullptr) FreeLost(entry, left);
  if (!erased.ok()) {
    erased = model::Annotate(erased, absl::StrCat("job '", name, "' was dropped in part; drop it again"));
    KeepForDrop(name, entry, promised, erased);
  }
  entry.job.reset();
  absl::MutexLock lock(&mu);
  dropping_names.erase(name);
  return erased;
}

bool StateServer::Impl::MayForget(const std::string& name, const v1::Epoch& promised) const {
  std::shared_ptr<Job> job;
  {
    absl::MutexLock lock(&mu);
    const auto found = jobs.find(name);
    if (stopped || found == jobs.end() || found->second.job == nullptr) return false;
    job = found->second.job;
  }
  const std::optional<v1::Epoch> newest = job->UnopenedPromise();
  return newest.has_value() && model::Compare(*newest, promised) == 0;
}

bool StateServer::Impl::Forget(const std::string& name, const v1::Epoch& promised) {
  Entry entry;
  {
    absl::MutexLock lock(&mu);
    const auto found = jobs.find(name);
    if (stopped || found == jobs.end() || found->second.job == nullptr) return false;
    entry = found->second;
  }
  // The catalog knows whether the job was opened before the server's start.
  const absl::StatusOr<JobEntry> stored = ReadJobEntry(*catalog, name);
  if (!stored.ok() || stored->opened()) return false;
  const absl::Status status = model::Error(absl::StatusCode::kUnavailable, model::kBusy,
                                           absl::StrCat("job '", name, "' was never opened on server '", server_id,
                                                        "' and is being forgotten; send the request again"));
  if (!entry.job->RefuseIfUnopened(promised, status)) return false;
  {
    absl::MutexLock lock(&mu);
    const auto found = jobs.find(name);
    if (found == jobs.end() || found->second.job != entry.job) return false;  // a drop has the job
    jobs.erase(found);
    dropping_names.insert(name);
  }
  entry.job->Stop(status);
  return Erase(name, std::move(entry)).ok();
}

bool StateServer::Impl::ForgetOldest() {
  std::map<uint64_t, std::pair<std::string, std::shared_ptr<Job>>> by_age;
  {
    absl::MutexLock lock(&mu);
    if (!full()) return false;
    for (const auto& [name, entry] : jobs) {
      if (entry.job != nullptr) by_age[entry.made] = {name, entry.job};
    }
  }
  bool may_later = false;
  for (const auto& [made, job] : by_age) {
    bool locked = false;
    const std::optional<v1::Epoch> promised = job.second->UnopenedPromise(&locked);
    if (promised.has_value() && Forget(job.first, *promised)) return false;
    if (!locked) continue;
    // A job at work keeps its lock, too.
    const absl::StatusOr<JobEntry> stored = ReadJobEntry(*catalog, job.first);
    may_later = may_later || (stored.ok() && !stored->opened());
  }
  return may_later;
}

std::vector<v1::TierStatus> StateServer::Impl::TierStatuses(const std::vector<v1::JobStatus>& job_statuses) const {
  std::vector<v1::TierStatus> out;
  const storage::TierUsage usage = tiers->usage();
  for (int i = 0; i < storage::kTierKinds; ++i) {
    const auto kind = static_cast<storage::TierKind>(i);
    v1::TierStatus& tier = out.emplace_back();
    tier.set_tier(storage::TierName(kind));
    tier.set_capacity_bytes(usage.budget[kind]);
    tier.set_used_bytes(usage.used[kind]);
    for (size_t part = 0; part < storage::kTierParts; ++part) {
      v1::TierPart& out_part = *tier.add_parts();
      out_part.set_part(storage::kTierPartNames[part]);
      out_part.set_bytes(usage.parts[part][kind]);
    }
    for (const storage::TierUsage::Device& device : usage.nvme) {
      if (kind != storage::TierKind::kNvme) break;
      v1::NvmeDeviceStatus& out_device = *tier.add_devices();
      out_device.set_directory(device.directory);
      out_device.set_capacity_bytes(device.budget);
      out_device.set_used_bytes(device.used);
    }
    for (const v1::JobStatus& job : job_statuses) {
      for (const v1::TierStatus& of : job.tiers()) {
        if (of.tier() != tier.tier()) continue;
        tier.set_state_bytes(tier.state_bytes() + of.state_bytes());
        tier.set_working_bytes(tier.working_bytes() + of.working_bytes());
      }
    }
  }
  return out;
}

v1::GetServerStatusResponse StateServer::Status() const {
  std::map<std::string, Impl::Entry> entries;
  {
    absl::MutexLock lock(&impl_->mu);
    entries.insert(impl_->jobs.begin(), impl_->jobs.end());
  }
  std::vector<v1::JobStatus> jobs;
  for (const auto& [name, entry] : entries) {
    if (entry.job != nullptr) {
      jobs.push_back(entry.job->Status());
      continue;
    }
    v1::JobStatus& lost = jobs.emplace_back();
    lost.set_name(name);
    lost.set_state_lost(entry.lost->state_lost());
    lost.set_failure(std::string(impl_->CauseOf(name, entry).message()));
    lost.set_committed(entry.lost->committed());
    lost.set_oldest_chunk_version(-1);
    *lost.mutable_epoch() = entry.lost->promised();
    lost.set_world_size(entry.lost->open().tiling().world_size());
    for (const v1::Member& member : model::MembersOf(entry.lost->open())) lost.add_member_ids(member.server_id());
    for (v1::TierStatus& tier : DescribeTaken(entry.taken)) *lost.add_tiers() = std::move(tier);
  }
  v1::GetServerStatusResponse status;
  status.set_server_id(impl_->server_id);
  status.set_version(model::Version());
  status.set_uptime_seconds(absl::ToDoubleSeconds(absl::Now() - impl_->started));
  status.set_io_backend(impl_->tiers->io_backend());
  for (auto& tier : impl_->TierStatuses(jobs)) *status.add_tiers() = std::move(tier);
  for (auto& job : jobs) *status.add_jobs() = std::move(job);
  return status;
}

absl::Status StateServer::TryCatalog(absl::Duration patience) const {
  BALLAST_RETURN_IF_ERROR(impl_->catalog->CheckWrites(patience));
  return impl_->catalog->Get(kCatalogServerId).status();
}

absl::Status StateServer::TryClock(absl::Duration patience) const {
  // The callback may run after this has given up.
  const auto passed = std::make_shared<absl::Notification>();
  impl_->deadlines.Add(absl::Now(), [passed] { passed->Notify(); });
  if (passed->WaitForNotificationWithTimeout(patience)) return absl::OkStatus();
  return absl::UnavailableError("no deadline passes");
}

ServerFigures StateServer::Figures() const {
  const auto bound = [](const SharedBound& shared) { return ServerFigures::Bound{shared.used(), shared.max()}; };
  ServerFigures figures;
  {
    absl::MutexLock lock(&impl_->mu);
    for (const auto& [name, entry] : impl_->jobs) {
      if (entry.job == nullptr) continue;
      figures.jobs.emplace(name, std::shared_ptr<const JobCounters>(entry.job, &entry.job->counters()));
    }
    figures.job_places = {impl_->jobs.size(), kJobsMax};
  }
  figures.waiting_requests = bound(impl_->bounds.requests);
  figures.waiting_request_bytes = bound(impl_->bounds.request_bytes);
  figures.waiting_push_bytes = bound(impl_->bounds.push_bytes);
  figures.unsent_bytes = bound(impl_->answer_room.bound());
  figures.moved = impl_->tiers->moved();
  const storage::TierUsage usage = impl_->tiers->usage();
  figures.nvme_devices = usage.nvme;
  if (usage.nvme.empty()) {
    figures.nvme_devices = {{impl_->options.data_directory, usage.budget.nvme, usage.used.nvme}};
  }
  if (storage::HbmTier* const hbm = impl_->tiers->hbm(); hbm != nullptr) figures.gpu = &hbm->counters();
  figures.memory_locked = impl_->tiers->memory_locked();
  figures.compute_threads = impl_->compute.threads();
  figures.compute_busy_seconds = impl_->compute.busy_seconds();
  std::error_code error;
  const std::filesystem::space_info space = std::filesystem::space(impl_->options.data_directory, error);
  if (!error) figures.file_system_bytes = {space.capacity - space.available, space.capacity};
  return figures;
}

v1::GetStepsResponse StateServer::Steps(const v1::GetStepsRequest& request) const {
  v1::GetStepsResponse response;
  response.set_server_id(impl_->server_id);
  for (const auto& [name, counters] : Figures().jobs) {
    if (!request.job().empty() && request.job() != name) continue;
    *response.add_jobs() = ShowSteps(name, counters->steps, request.last());
  }
  return response;
}

void StateServer::GetSteps(const v1::GetStepsRequest& request, Reply<v1::GetStepsResponse> reply) {
  impl_->Counted(Call::kGetSteps, std::move(reply))(Steps(request));
}

void StateServer::GetServerStatus(Reply<v1::GetServerStatusResponse> reply) {
  Look(impl_->Counted(Call::kGetServerStatus, std::move(reply)));
}

void StateServer::Look(Reply<v1::GetServerStatusResponse> reply) {
  if (const absl::Status ready = impl_->answers.looks->Prepare(); !ready.ok()) return reply(ready);
  impl_->answers.looks->Post([this, reply = std::move(reply)] { reply(Status()); });
}

}  // namespace ballast::services
