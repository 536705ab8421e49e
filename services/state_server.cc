#include "ballast/services/state_server.h"

#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <map>
#include <random>
#include <set>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "ballast/proto/model/status.h"
#include "ballast/services/budgets.h"
#include "ballast/services/counters.h"
#include "ballast/services/foundation.h"
#include "ballast/services/job.h"
#include "ballast/storage/catalog/catalog.h"
#include "ballast/storage/io/failpoint.h"
#include "ballast/storage/machine/profile_file.h"
#include "ballast/storage/tier/nvme_tier.h"

namespace ballast::services {
namespace {

constexpr char kVersion[] = "0.1.0";
// Each job has a thread; a fence of an unknown name makes a job.
constexpr size_t kJobsMax = 256;
constexpr size_t kJobNameBytesMax = 128;

absl::Status CheckJobName(const std::string& name) {
  bool good = !name.empty() && name.size() <= kJobNameBytesMax;
  for (const char c : name) good = good && (absl::ascii_isalnum(c) || c == '.' || c == '_' || c == '-');
  if (good) return absl::OkStatus();
  return model::Error(
      absl::StatusCode::kInvalidArgument, model::kBadRequest,
      absl::StrCat("a job's name has 1 to ", kJobNameBytesMax, " letters, digits, '.', '_' or '-'; came ", name.size(),
                   " bytes: '", name.substr(0, kJobNameBytesMax), "'"));
}

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

// None if the data directory has none and no other was named.
absl::StatusOr<std::optional<storage::MachineProfile>> ReadMachineProfile(const StateServerOptions& options) {
  std::string path = options.machine_profile;
  if (path.empty()) {
    path = absl::StrCat(options.data_directory, "/", kMachineProfile);
    std::error_code error;
    if (!std::filesystem::exists(path, error)) {
      spdlog::info("no machine profile: plans predict no times; `ballastctl iotune --directory {}` measures one",
                   options.data_directory);
      return std::nullopt;
    }
  }
  BALLAST_ASSIGN_OR_RETURN(const storage::MachineProfile profile, storage::ReadProfile(path));
  spdlog::info("plans predict from the machine profile {}", path);
  return profile;
}

std::string MakeServerId() {
  std::random_device random;
  return absl::StrCat("server-", absl::Hex(random(), absl::kZeroPad8), absl::Hex(random(), absl::kZeroPad8));
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
  // Without the catalog nobody knows what the disk holds: to go on would free it.
  std::error_code error;
  for (const auto& file : std::filesystem::directory_iterator(directory, error)) {
    if (!absl::StartsWith(file.path().filename().string(), "log-")) continue;
    return model::Error(absl::StatusCode::kDataLoss, model::kIo,
                        absl::StrCat("data directory '", directory, "' holds ", file.path().filename().string(),
                                     " of a durable job, and its catalog is new: it was lost. Run `ballastctl verify "
                                     "--rebuild`, or move the logs away if the jobs are not wanted"));
  }
  const std::string id = wanted.empty() ? MakeServerId() : wanted;
  BALLAST_RETURN_IF_ERROR(catalog->Put(kCatalogServerId, id));
  return id;
}

}  // namespace

struct StateServer::Impl {
  explicit Impl(const StateServerOptions& options)
      : options(options),
        foundation(options.foundation != nullptr ? options.foundation : SystemFoundation()),
        compute(std::max(1, options.compute_threads)),
        executor(foundation->MakeExecutor(std::max(1, options.read_threads))),
        dropping(foundation->MakeExecutor(1)) {}

  // What a name stands for: a job, or the memory of one that a restart did not bring back: because its state is lost,
  // or for want of something that another start may find. Only the former is said of GetJob.
  struct Entry {
    std::shared_ptr<Job> job;
    std::optional<v1::GetJobResponse> lost;
    absl::Status cause;      // of the loss
    uint64_t log_bytes = 0;  // of the NVMe budget, that its log holds
  };

  absl::StatusOr<std::map<std::string, CatalogEntry>> ReadJobs() const;
  absl::Status LoadJobs(const std::map<std::string, CatalogEntry>& stored);
  void Lose(const std::string& name, const CatalogEntry& stored, const absl::Status& cause, uint64_t log_bytes = 0);
  // Gives back what a lost job has on the disk, once the catalog has forgotten it.
  void FreeLost(const Entry& entry, const std::vector<storage::DurableChunk>& chunks);
  std::shared_ptr<Job> MakeJob(const std::string& name);
  absl::Status LostToDurabilityNone(const std::string& name) const;
  absl::StatusOr<std::shared_ptr<Job>> Find(const std::string& name) const;
  absl::StatusOr<std::shared_ptr<Job>> FindOrMake(const std::string& name);
  // Checks the request and takes its job out of `jobs`.
  absl::StatusOr<Entry> TakeForDrop(const v1::DropJobRequest& request);
  void Drop(const v1::DropJobRequest& request, const Reply<v1::DropJobResponse>& reply);
  std::vector<v1::TierStatus> TierStatuses(const std::vector<v1::JobStatus>& jobs) const;

  // `reply`, its latency and its error counted.
  template <typename Response>
  Reply<Response> Counted(Call call, Reply<Response> reply) {
    return [this, call, began = absl::Now(), reply = std::move(reply)](absl::StatusOr<Response> response) {
      counters.calls[static_cast<size_t>(call)].Observe(absl::Now() - began);
      if (!response.ok()) {
        const std::string reason = model::ReasonOf(response.status());
        counters.errors.Add(call, reason.empty() ? absl::StatusCodeToString(response.status().code()) : reason);
      }
      reply(std::move(response));
    };
  }

  const StateServerOptions options;
  Foundation* const foundation;
  const absl::Time started = absl::Now();
  std::string server_id;
  ServerCounters counters;
  std::unique_ptr<storage::Catalog> catalog;
  std::unique_ptr<storage::Tiers> tiers;
  std::optional<storage::MachineProfile> machine;
  absl::Mutex planning;
  kernels::ThreadPool compute;
  const std::unique_ptr<Executor> executor;
  const std::unique_ptr<Executor> dropping;  // a drop waits for the update at work, new budgets for an Open
  Deadlines deadlines;

  mutable absl::Mutex mu;
  bool stopped ABSL_GUARDED_BY(mu) = false;
  absl::flat_hash_map<std::string, Entry> jobs ABSL_GUARDED_BY(mu);
  std::set<std::string> dropping_names ABSL_GUARDED_BY(mu);
};

absl::StatusOr<std::unique_ptr<StateServer>> StateServer::Start(const StateServerOptions& options) {
  auto impl = std::make_unique<Impl>(options);
  BALLAST_RETURN_IF_ERROR(CheckDirectory(options.data_directory));
  BALLAST_ASSIGN_OR_RETURN(impl->machine, ReadMachineProfile(options));
  // The catalog's lock guards the whole directory, so it comes first.
  BALLAST_ASSIGN_OR_RETURN(impl->catalog, impl->foundation->OpenCatalog(options.data_directory));
  BALLAST_ASSIGN_OR_RETURN(impl->server_id,
                           SettleServerId(impl->catalog.get(), options.server_id, options.data_directory));
  storage::TiersOptions tiers;
  tiers.budget = options.budget;
  tiers.directory = options.data_directory;
  tiers.staging_bytes = options.staging_bytes;
  tiers.hbm_device = options.hbm_device;
  tiers.disk = impl->foundation->disk();
  BALLAST_ASSIGN_OR_RETURN(const auto stored, impl->ReadJobs());
  for (const auto& [name, entry] : stored) {
    for (const storage::DurableChunk& chunk : entry.ChunksAndPinned()) {
      tiers.kept.push_back({chunk.offset, chunk.bytes});
    }
    if (entry.unreadable.empty() || !(entry.durable() || entry.every_k())) continue;
    tiers.unnamed_stays = true;
    spdlog::warn(
        "job '{}' has entries in the catalog that cannot be read: until they can, nothing in nvme.tier is "
        "taken for free, and what other jobs need comes behind its end",
        name);
  }
  BALLAST_ASSIGN_OR_RETURN(impl->tiers, storage::Tiers::Open(tiers));
  BALLAST_RETURN_IF_ERROR(impl->LoadJobs(stored));
  return std::unique_ptr<StateServer>(new StateServer(std::move(impl)));
}

StateServer::StateServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

StateServer::~StateServer() {
  Stop();
  impl_->dropping->Join();
  impl_->executor->Join();
}

void StateServer::Stop() {
  std::vector<std::shared_ptr<Job>> jobs;
  {
    absl::MutexLock lock(&impl_->mu);
    impl_->stopped = true;
    for (const auto& [name, entry] : impl_->jobs) {
      if (entry.job != nullptr) jobs.push_back(entry.job);
    }
  }
  for (const auto& job : jobs) {
    job->Stop(model::Error(
        absl::StatusCode::kUnavailable, model::kServerDown,
        absl::StrCat("server '", impl_->server_id, "' is stopping; send the request again once it is back")));
  }
}

absl::StatusOr<std::map<std::string, CatalogEntry>> StateServer::Impl::ReadJobs() const {
  BALLAST_ASSIGN_OR_RETURN(const auto stored, catalog->List(kCatalogJobs));
  std::map<std::string, CatalogEntry> jobs;
  for (const auto& [key, value] : stored) {
    const std::vector<std::string> parts = absl::StrSplit(key, '/');
    if (parts.size() != 3 || jobs.contains(parts[1])) continue;
    BALLAST_ASSIGN_OR_RETURN(jobs[parts[1]], ReadCatalogEntry(*catalog, parts[1]));
  }
  return jobs;
}

void StateServer::Impl::Lose(const std::string& name, const CatalogEntry& stored, const absl::Status& cause,
                             uint64_t log_bytes) {
  absl::MutexLock lock(&mu);
  Entry& entry = jobs[name];
  entry.cause = cause;
  entry.log_bytes = log_bytes;
  v1::GetJobResponse& lost = entry.lost.emplace();
  lost.set_server_id(server_id);
  lost.set_exists(true);
  lost.set_state_lost(absl::IsDataLoss(cause));
  lost.set_committed(stored.committed);
  if (stored.promised.has_value()) *lost.mutable_promised() = *stored.promised;
  if (stored.open.has_value()) *lost.mutable_open() = *stored.open;
}

absl::Status StateServer::Impl::LoadJobs(const std::map<std::string, CatalogEntry>& stored) {
  bool whole = true;
  std::map<std::string, std::shared_ptr<Job>> recovered;
  const auto refuse = [&](const std::string& name, Job& job, const absl::Status& status) {
    // The server's other jobs are well; this one is refused, with the reason, and what it has on the disk stays.
    spdlog::error("job '{}' cannot be recovered: {}", name, std::string(status.message()));
    job.Stop(status);
    Lose(name, stored.at(name), status, job.journal_bytes());
    whole = false;
  };
  for (const auto& [name, entry] : stored) {
    const bool nothing_left =
        !entry.every_k() && entry.pins.empty() &&
        std::find(entry.unreadable.begin(), entry.unreadable.end(), kCatalogOpen) == entry.unreadable.end();
    if (entry.had_state && nothing_left) {
      Lose(name, entry, LostToDurabilityNone(name));
      continue;
    }
    const std::shared_ptr<Job> job = MakeJob(name);
    absl::Status status;
    if (!entry.unreadable.empty()) {
      // Where pins are all that there is, nothing else tells what they were.
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
    if (status.ok()) {
      recovered[name] = job;
    } else {
      refuse(name, *job, status);
    }
  }
  // Now that all have what is theirs: more for one must not be what another comes back with.
  for (const auto& [name, job] : recovered) {
    if (const absl::Status status = job->EndRecovery(); !status.ok()) {
      refuse(name, *job, status);
      continue;
    }
    absl::MutexLock lock(&mu);
    jobs[name].job = job;
  }
  return whole && tiers->nvme() != nullptr ? tiers->nvme()->Trim() : absl::OkStatus();
}

std::shared_ptr<Job> StateServer::Impl::MakeJob(const std::string& name) {
  return Job::Make(name, {server_id, catalog.get(), tiers.get(), foundation, &compute, executor.get(), &deadlines,
                          &counters, &planning, machine.has_value() ? &*machine : nullptr, options.working_copies,
                          WaitingBounds{&counters.waiting_requests, options.waiting_requests_max,
                                        &counters.waiting_request_bytes, options.waiting_request_bytes_max}});
}

absl::Status StateServer::Impl::LostToDurabilityNone(const std::string& name) const {
  return model::Error(absl::StatusCode::kDataLoss, model::kStateLost,
                      absl::StrCat("server '", server_id, "' was restarted and lost the state of job '", name,
                                   "', whose durability is none; drop the job with `ballastctl drop` and start again"));
}

absl::StatusOr<std::shared_ptr<Job>> StateServer::Impl::Find(const std::string& name) const {
  absl::MutexLock lock(&mu);
  if (stopped) {
    return model::Error(absl::StatusCode::kUnavailable, model::kServerDown,
                        absl::StrCat("server '", server_id, "' is stopping"));
  }
  const auto entry = jobs.find(name);
  if (entry == jobs.end()) {
    return model::Error(absl::StatusCode::kNotFound, model::kUnknownJob,
                        absl::StrCat("server '", server_id, "' has no job '", name, "'; Fence makes one"));
  }
  if (entry->second.lost.has_value()) return entry->second.cause;
  return entry->second.job;
}

absl::StatusOr<std::shared_ptr<Job>> StateServer::Impl::FindOrMake(const std::string& name) {
  BALLAST_RETURN_IF_ERROR(CheckJobName(name));
  if (auto found = Find(name); found.ok() || model::ReasonOf(found.status()) != model::kUnknownJob) return found;
  absl::MutexLock lock(&mu);
  if (stopped) {
    return model::Error(absl::StatusCode::kUnavailable, model::kServerDown,
                        absl::StrCat("server '", server_id, "' is stopping"));
  }
  if (const auto raced = jobs.find(name); raced != jobs.end()) return raced->second.job;
  if (jobs.size() >= kJobsMax) {
    return model::Error(absl::StatusCode::kResourceExhausted, model::kBudget,
                        absl::StrCat("server '", server_id, "' holds ", jobs.size(),
                                     " jobs, which is all that it may; drop one with `ballastctl drop`"));
  }
  if (dropping_names.contains(name)) {
    return model::Error(absl::StatusCode::kUnavailable, model::kBusy,
                        absl::StrCat("job '", name, "' is being dropped; send the request again"));
  }
  const std::shared_ptr<Job> job = MakeJob(name);
  jobs[name].job = job;
  return job;
}

void StateServer::GetJob(const v1::GetJobRequest& request, Reply<v1::GetJobResponse> reply) {
  reply = impl_->Counted(Call::kGetJob, std::move(reply));
  std::optional<v1::GetJobResponse> answer;
  {
    absl::MutexLock lock(&impl_->mu);
    const auto entry = impl_->jobs.find(request.job());
    if (entry == impl_->jobs.end()) {
      answer.emplace().set_server_id(impl_->server_id);
    } else if (entry->second.lost.has_value() && entry->second.lost->state_lost()) {
      answer = *entry->second.lost;
    }
  }
  if (answer.has_value()) return reply(*answer);
  const auto job = impl_->Find(request.job());
  if (!job.ok()) return reply(job.status());
  (*job)->GetJob(std::move(reply));
}

void StateServer::Fence(const v1::FenceRequest& request, absl::Time deadline, Reply<v1::FenceResponse> reply) {
  reply = impl_->Counted(Call::kFence, std::move(reply));
  if (request.epoch().counter() == 0) {
    return reply(model::Error(absl::StatusCode::kInvalidArgument, model::kBadRequest,
                              "an epoch's counter counts from 1, came 0: choose one above any that GetJob reports"));
  }
  const auto job = impl_->FindOrMake(request.job());
  if (!job.ok()) return reply(job.status());
  (*job)->Fence(request, deadline, std::move(reply));
}

void StateServer::Open(const v1::OpenRequest& request, absl::Time deadline, Reply<v1::OpenResponse> reply) {
  reply = impl_->Counted(Call::kOpen, std::move(reply));
  const auto job = impl_->Find(request.spec().name());
  if (!job.ok()) return reply(job.status());
  (*job)->Open(request, deadline, std::move(reply));
}

void StateServer::Norm(const v1::NormRequest& request, Reply<v1::NormResponse> reply) {
  reply = impl_->Counted(Call::kNorm, std::move(reply));
  const auto job = impl_->Find(request.job());
  if (!job.ok()) return reply(job.status());
  (*job)->Norm(request, std::move(reply));
}

void StateServer::Seal(const v1::SealRequest& request, absl::Time deadline, Reply<v1::SealResponse> reply) {
  reply = impl_->Counted(Call::kSeal, std::move(reply));
  const auto job = impl_->Find(request.job());
  if (!job.ok()) return reply(job.status());
  (*job)->Seal(request, deadline, std::move(reply));
}

void StateServer::Commit(const v1::CommitRequest& request, Reply<v1::CommitResponse> reply) {
  reply = impl_->Counted(Call::kCommit, std::move(reply));
  const auto job = impl_->Find(request.job());
  if (!job.ok()) return reply(job.status());
  (*job)->Commit(request, std::move(reply));
}

void StateServer::Pin(const v1::PinRequest& request, absl::Time deadline, Reply<v1::PinResponse> reply) {
  reply = impl_->Counted(Call::kPin, std::move(reply));
  const auto job = impl_->Find(request.job());
  if (!job.ok()) return reply(job.status());
  (*job)->Pin(request, deadline, std::move(reply));
}

void StateServer::Unpin(const v1::UnpinRequest& request, Reply<v1::UnpinResponse> reply) {
  reply = impl_->Counted(Call::kUnpin, std::move(reply));
  const auto job = impl_->Find(request.job());
  if (!job.ok()) return reply(job.status());
  (*job)->Unpin(request, std::move(reply));
}

void StateServer::Push(const v1::PushRequest& header, absl::Span<const std::byte> payload, absl::Time deadline,
                       Reply<v1::PushResponse> reply) {
  reply = impl_->Counted(Call::kPush, std::move(reply));
  const auto job = impl_->Find(header.job());
  if (!job.ok()) return reply(job.status());
  (*job)->Push(header, payload, deadline, std::move(reply));
}

absl::StatusOr<std::unique_ptr<model::Loan>> StateServer::Lend(const model::LoanRequest& request) {
  BALLAST_ASSIGN_OR_RETURN(const std::shared_ptr<Job> job, impl_->Find(request.job));
  return job->Lend(request);
}

void StateServer::AwaitApplied(const std::string& job, int64_t version, absl::Time deadline,
                               Reply<v1::CommitResponse> reply) {
  const auto found = impl_->Find(job);
  if (!found.ok()) return reply(found.status());
  (*found)->AwaitApplied(version, deadline, std::move(reply));
}

bool StateServer::takes_loans() const { return !impl_->options.working_copies; }

void StateServer::Pull(const v1::PullRequest& request, absl::Time deadline, Allocate allocate, Reply<uint32_t> reply) {
  reply = impl_->Counted(Call::kPull, std::move(reply));
  const auto job = impl_->Find(request.job());
  if (!job.ok()) return reply(job.status());
  (*job)->Pull(request, deadline, std::move(allocate), std::move(reply));
}

void StateServer::DropJob(const v1::DropJobRequest& request, Reply<v1::DropJobResponse> reply) {
  reply = impl_->Counted(Call::kDropJob, std::move(reply));
  impl_->dropping->Post([impl = impl_.get(), request, reply = std::move(reply)] { impl->Drop(request, reply); });
}

void StateServer::SetBudget(const v1::SetBudgetRequest& request, Reply<v1::SetBudgetResponse> reply) {
  reply = impl_->Counted(Call::kSetBudget, std::move(reply));
  // Behind drops: no job goes away meanwhile.
  impl_->dropping->Post([impl = impl_.get(), request, reply = std::move(reply)] {
    std::map<std::string, std::shared_ptr<Job>> by_name;  // in an order that does not depend on hashes
    {
      absl::MutexLock lock(&impl->mu);
      for (const auto& [name, entry] : impl->jobs) {
        if (entry.job != nullptr) by_name[name] = entry.job;
      }
    }
    std::vector<std::shared_ptr<Job>> jobs;
    for (const auto& [name, job] : by_name) jobs.push_back(job);
    absl::StatusOr<v1::SetBudgetResponse> response = ChangeBudgets(request, jobs, impl->tiers.get(), &impl->planning);
    if (response.ok()) {
      for (auto& tier : impl->TierStatuses({})) *response->add_tiers() = std::move(tier);
    }
    reply(std::move(response));
  });
}

absl::StatusOr<StateServer::Impl::Entry> StateServer::Impl::TakeForDrop(const v1::DropJobRequest& request) {
  Entry entry;
  {
    absl::MutexLock lock(&mu);
    if (const auto found = jobs.find(request.job()); found != jobs.end()) {
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
                                     ": somebody fenced it meanwhile; look at `ballastctl status` again"));
  }
  absl::MutexLock lock(&mu);
  // Still there: drops come one after the other, and nothing else takes a job away.
  jobs.erase(request.job());
  dropping_names.insert(request.job());
  return entry;
}

void StateServer::Impl::FreeLost(const Entry& entry, const std::vector<storage::DurableChunk>& chunks) {
  tiers->Return(storage::TierKind::kNvme, entry.log_bytes);
  for (const storage::DurableChunk& chunk : chunks) {
    // Freed as it goes; disputed places stay until the next start.
    if (tiers->nvme() != nullptr) (void)tiers->nvme()->TakeKept(chunk.offset);
  }
}

void StateServer::Impl::Drop(const v1::DropJobRequest& request, const Reply<v1::DropJobResponse>& reply) {
  absl::StatusOr<Entry> entry = TakeForDrop(request);
  if (!entry.ok()) return reply(entry.status());
  if (entry->job != nullptr) {
    entry->job->Stop(model::Error(absl::StatusCode::kNotFound, model::kUnknownJob,
                                  absl::StrCat("job '", request.job(), "' was dropped from server '", server_id, "'")));
  }
  storage::Pass("drop/stopped");
  // The log first: what is interrupted then is a job without one, which is lost and can be dropped again. The extents
  // last, when nothing speaks of them any more.
  std::vector<storage::DurableChunk> left;
  if (entry->job == nullptr) {
    if (const auto stored = ReadCatalogEntry(*catalog, request.job()); stored.ok()) {
      left = stored->ChunksAndPinned();
    }
  }
  absl::Status erased = entry->job != nullptr ? entry->job->RemoveJournal() : RemoveLog(*tiers, request.job());
  storage::Pass("drop/log_forgotten");
  if (erased.ok()) erased = catalog->ErasePrefix(CatalogPrefix(request.job()));
  storage::Pass("drop/job_forgotten");
  if (erased.ok() && entry->job != nullptr) entry->job->Discard();
  if (erased.ok() && entry->job == nullptr) FreeLost(*entry, left);
  entry->job.reset();
  {
    absl::MutexLock lock(&mu);
    dropping_names.erase(request.job());
  }
  if (!erased.ok()) return reply(erased);
  reply(v1::DropJobResponse());
}

std::vector<v1::TierStatus> StateServer::Impl::TierStatuses(const std::vector<v1::JobStatus>& job_statuses) const {
  std::vector<v1::TierStatus> out;
  const storage::TierBytes budget = tiers->budget();
  const storage::TierBytes used = tiers->used();
  for (int i = 0; i < storage::kTierKinds; ++i) {
    const auto kind = static_cast<storage::TierKind>(i);
    v1::TierStatus& tier = out.emplace_back();
    tier.set_tier(storage::TierName(kind));
    tier.set_capacity_bytes(budget[kind]);
    tier.set_used_bytes(used[kind]);
    for (const v1::JobStatus& job : job_statuses) {
      if (job.tiers_size() <= i) continue;
      tier.set_state_bytes(tier.state_bytes() + job.tiers(i).state_bytes());
      tier.set_working_bytes(tier.working_bytes() + job.tiers(i).working_bytes());
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
    lost.set_failure(std::string(entry.cause.message()));
    lost.set_committed(entry.lost->committed());
    lost.set_oldest_chunk_version(-1);
    *lost.mutable_epoch() = entry.lost->promised();
    lost.set_world_size(entry.lost->open().tiling().world_size());
    for (const v1::Member& member : entry.lost->open().members()) lost.add_member_ids(member.server_id());
  }
  v1::GetServerStatusResponse status;
  status.set_server_id(impl_->server_id);
  status.set_version(kVersion);
  status.set_uptime_seconds(absl::ToDoubleSeconds(absl::Now() - impl_->started));
  status.set_io_backend(impl_->tiers->io_backend());
  for (auto& tier : impl_->TierStatuses(jobs)) *status.add_tiers() = std::move(tier);
  for (auto& job : jobs) *status.add_jobs() = std::move(job);
  return status;
}

void StateServer::GetServerStatus(Reply<v1::GetServerStatusResponse> reply) {
  impl_->Counted(Call::kGetServerStatus, std::move(reply))(Status());
}

const std::string& StateServer::server_id() const { return impl_->server_id; }
const ServerCounters& StateServer::counters() const { return impl_->counters; }
storage::TierTraffic StateServer::traffic() const { return impl_->tiers->traffic(); }

}  // namespace ballast::services
