#include "ballast/services/server/state_server.h"

#include "absl/strings/str_cat.h"
#include "ballast/proto/model/names.h"
#include "ballast/proto/model/protocol.h"
#include "ballast/services/job/exports.h"
#include "ballast/services/job/job.h"
#include "ballast/services/job/loans.h"
#include "ballast/services/job/pulls.h"
#include "ballast/services/job/pushes.h"
#include "ballast/services/job/scrubber.h"
#include "ballast/services/job/seals.h"
#include "ballast/services/server/server_state.h"
#include "ballast/storage/tier/dram_tier.h"

namespace ballast::services {
StateServer::StateServer(std::unique_ptr<Impl> impl)
    : impl_(std::move(impl)),
      scrubber_(std::make_unique<Scrubber>(impl_->options.scrub_bytes_per_s, &impl_->deadlines, [impl = impl_.get()] {
        Scrubber::Jobs jobs;
        for (const auto& [name, job] : impl->JobsByName()) {
          jobs[name] = {job->last_scrubbed(), [job = job](absl::Span<std::byte> buffer, std::shared_ptr<void> lease) {
                          job->ScrubNext(buffer, std::move(lease));
                        }};
        }
        return jobs;
      })) {
  scrubber_->Start();
}

StateServer::~StateServer() {
  Stop();
  impl_->drops.Join();
  impl_->budget_changes.Join();
  impl_->answers.Join();
  impl_->forgetting->Join();
}

void StateServer::ScrubNext() { scrubber_->Next(); }

void StateServer::Stop() {
  scrubber_->Stop();
  {
    absl::MutexLock lock(&impl_->mu);
    impl_->stopped = true;
    if (impl_->coming_back.going) impl_->coming_back.ends = true;
  }
  // Before the jobs are listed: the last of them comes back meanwhile.
  if (impl_->coming_back.thread.joinable()) impl_->coming_back.thread.join();
  std::vector<std::shared_ptr<Job>> jobs;
  {
    absl::MutexLock lock(&impl_->mu);
    for (const auto& [name, entry] : impl_->jobs) {
      if (entry.job != nullptr) jobs.push_back(entry.job);
    }
    if (impl_->planner != nullptr) jobs.push_back(impl_->planner);
  }
  const absl::Status stopping =
      model::Error(absl::StatusCode::kUnavailable, model::kServerDown,
                   absl::StrCat("server '", impl_->server_id, "' is stopping; send the request again once it is back"));
  impl_->drops.Stop(stopping);
  impl_->budget_changes.Stop(stopping);
  for (const auto& job : jobs) job->Stop(stopping);
}

std::shared_ptr<Job> StateServer::Impl::MakeJob(const std::string& name) {
  const size_t queue = answers.next_queue++;
  return Job::Make(name, {.server_id = server_id,
                          .disk = disk,
                          .catalog = catalog.get(),
                          .tiers = tiers.get(),
                          .foundation = foundation,
                          .compute = &compute,
                          .answers = answers.pulls.queue(queue),
                          .step_answers = answers.steps.queue(queue),
                          .read_threads = std::max(1, options.read_threads),
                          .deadlines = &deadlines,
                          .counters = &counters,
                          .planning = &planning,
                          .moving = &moving,
                          .machine = machine.has_value() ? &*machine : nullptr,
                          .working_copies = options.working_copies,
                          .log_steps = options.log_steps,
                          .interrupt = coming_back.interrupt,
                          .progress = options.progress,
                          .waiting = {&bounds.requests, &bounds.request_bytes},
                          .push_bytes = &bounds.push_bytes,
                          .answer_room = &answer_room,
                          .chunk_source = options.chunk_source,
                          .import_pace = &import_pace,
                          .may_grow = GrowthCheck()});
}

MayGrow StateServer::Impl::GrowthCheck() {
  if (!options.may_grow) return nullptr;
  return [this](const std::string& job, const storage::TierBytes& more) {
    return options.may_grow(job, more, [this] { return Taken(); });
  };
}

std::vector<v1::JobStatus> StateServer::Impl::Taken() const {
  std::map<std::string, Entry> entries;
  {
    absl::MutexLock lock(&mu);
    entries.insert(jobs.begin(), jobs.end());
  }
  std::vector<v1::JobStatus> out;
  for (const auto& [name, entry] : entries) {
    v1::JobStatus& job = out.emplace_back();
    job.set_name(name);
    const storage::PartBytes taken = entry.job == nullptr ? entry.taken : tiers->taken(entry.job->account());
    for (v1::TierStatus& tier : DescribeTaken(taken)) *job.add_tiers() = std::move(tier);
  }
  return out;
}

absl::Status StateServer::Impl::LostToDurabilityNone(const std::string& name) const {
  return model::Error(
      absl::StatusCode::kDataLoss, model::kStateLost,
      absl::StrCat("server '", server_id, "' was restarted and lost the state of job '", name,
                   "', whose durability is none. If the job has copies (replicas), start its group again with ",
                   "resume=auto; else drop the job (", model::kHowToDrop, ") and start again"));
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
                        absl::StrCat("server '", server_id, "' has no job '", name,
                                     "': no trainer opened it here, or somebody dropped it"));
  }
  if (entry->second.lost.has_value()) return CauseOf(name, entry->second);
  return entry->second.job;
}

absl::Status StateServer::Impl::CauseOf(const std::string& name, const Entry& entry) const {
  if (!entry.recovering) return entry.cause;
  const RecoveryProgress* const progress = options.progress;
  return model::Error(
      absl::StatusCode::kUnavailable, model::kBusy,
      absl::StrCat("job '", name, "' is not back yet on server '", server_id, "', which recovers its jobs",
                   progress == nullptr ? ""
                                       : absl::StrCat(": ", progress->done_bytes.load(), " of ",
                                                      progress->total_bytes.load(), " bytes")));
}

absl::Status StateServer::Impl::CheckAllBack() const {
  if (!coming_back.going) return absl::OkStatus();
  return model::Error(absl::StatusCode::kUnavailable, model::kBusy,
                      absl::StrCat("server '", server_id,
                                   "' recovers its jobs: new jobs wait until these have their "
                                   "space back"));
}

absl::Status StateServer::AwaitRecovered() {
  if (impl_->coming_back.thread.joinable()) impl_->coming_back.thread.join();
  absl::MutexLock lock(&impl_->mu);
  return impl_->coming_back.outcome;
}

bool StateServer::Impl::full() const { return jobs.size() >= kJobsMax; }

absl::StatusOr<std::shared_ptr<Job>> StateServer::Impl::FindOrMake(const std::string& name) {
  BALLAST_RETURN_IF_ERROR(model::CheckJobName(name));
  if (auto found = Find(name); found.ok() || model::ReasonOf(found.status()) != model::kUnknownJob) return found;
  absl::MutexLock lock(&mu);
  if (stopped) {
    return model::Error(absl::StatusCode::kUnavailable, model::kServerDown,
                        absl::StrCat("server '", server_id, "' is stopping"));
  }
  if (const auto raced = jobs.find(name); raced != jobs.end()) {
    if (raced->second.lost.has_value()) return CauseOf(name, raced->second);  // a failed drop has put the entry back
    return raced->second.job;
  }
  BALLAST_RETURN_IF_ERROR(CheckAllBack());
  if (dropping_names.contains(name)) {
    return model::Error(absl::StatusCode::kUnavailable, model::kBusy,
                        absl::StrCat("job '", name, "' is being dropped; send the request again"));
  }
  if (full()) {
    return model::Error(absl::StatusCode::kResourceExhausted, model::kBudget,
                        absl::StrCat("server '", server_id, "' holds ", jobs.size(),
                                     " jobs, the most that it may hold; drop one: ", model::kHowToDrop));
  }
  const std::shared_ptr<Job> job = MakeJob(name);
  BALLAST_RETURN_IF_ERROR(job->MakeThreads());
  Entry& entry = jobs[name];
  entry.job = job;
  entry.made = next_made++;
  return job;
}

absl::StatusOr<std::shared_ptr<Job>> StateServer::Impl::Planner(const std::string& name) {
  BALLAST_RETURN_IF_ERROR(model::CheckJobName(name));
  absl::MutexLock lock(&mu);
  if (stopped) {
    return model::Error(absl::StatusCode::kUnavailable, model::kServerDown,
                        absl::StrCat("server '", server_id, "' is stopping"));
  }
  BALLAST_RETURN_IF_ERROR(CheckAllBack());
  if (planner == nullptr) {
    std::shared_ptr<Job> made = MakeJob("");
    BALLAST_RETURN_IF_ERROR(made->MakeThreads(/*dry_runs_alone=*/true));
    planner = std::move(made);
  }
  return planner;
}

void StateServer::Identify(const v1::IdentifyRequest&, Reply<v1::IdentifyResponse> reply) {
  reply = impl_->Counted(Call::kIdentify, std::move(reply));
  v1::IdentifyResponse answer;
  answer.set_server_id(impl_->server_id);
  answer.set_protocol_version(model::kProtocolVersion);
  answer.set_disk(impl_->disk);
  answer.set_page(impl_->options.page);
  const storage::TierBytes budget = this->budget();
  answer.set_budget_bytes(budget.hbm + budget.dram + budget.nvme);
  reply(std::move(answer));
}

void StateServer::GetJob(const v1::GetJobRequest& request, Reply<v1::GetJobResponse> reply) {
  reply = impl_->Counted(Call::kGetJob, std::move(reply));
  reply = [disk = impl_->disk, reply = std::move(reply)](absl::StatusOr<v1::GetJobResponse> answer) {
    if (answer.ok()) answer->set_disk(disk);
    reply(std::move(answer));
  };
  std::optional<v1::GetJobResponse> answer;
  {
    absl::MutexLock lock(&impl_->mu);
    const auto entry = impl_->jobs.find(request.job());
    if (entry == impl_->jobs.end()) {
      answer.emplace().set_server_id(impl_->server_id);
    } else if (entry->second.lost.has_value() && entry->second.lost->state_lost()) {
      answer = *entry->second.lost;
      if (request.without_open()) answer->clear_open();
    }
  }
  if (answer.has_value()) return reply(*answer);
  const auto job = impl_->Find(request.job());
  if (!job.ok()) return reply(job.status());
  (*job)->GetJob(!request.without_open(), std::move(reply));
}

void StateServer::Fence(const v1::FenceRequest& request, const CallLimit& limit, Reply<v1::FenceResponse> reply) {
  reply = impl_->Counted(Call::kFence, std::move(reply));
  reply = [disk = impl_->disk, reply = std::move(reply)](absl::StatusOr<v1::FenceResponse> answer) {
    if (answer.ok()) answer->mutable_job()->set_disk(disk);
    reply(std::move(answer));
  };
  if (request.epoch().counter() == 0) {
    return reply(model::Error(absl::StatusCode::kInvalidArgument, model::kBadRequest,
                              "an epoch's counter counts from 1, got 0: choose one above any that GetJob reports"));
  }
  const absl::Status known =
      model::CheckSentVersion(absl::StrCat("the fence of job '", request.job(), "'"), request.protocol_version());
  if (!known.ok()) return reply(known);
  const auto fence = [impl = impl_.get(), request, limit, reply](const absl::StatusOr<std::shared_ptr<Job>>& job) {
    if (!job.ok()) return reply(job.status());
    // A first Fence that is refused leaves a job that has promised nothing.
    (*job)->Fence(request, limit, impl->ForgetAfterError(request.job(), v1::Epoch(), reply));
  };
  const auto job = impl_->FindOrMake(request.job());
  if (model::ReasonOf(job.status()) != model::kBudget) return fence(job);
  if (const absl::Status ready = impl_->forgetting->Prepare(); !ready.ok()) return reply(ready);
  impl_->forgetting->Post([impl = impl_.get(), name = request.job(), fence] {
    const bool may_later = impl->ForgetOldest();
    const auto made = impl->FindOrMake(name);
    if (!may_later || model::ReasonOf(made.status()) != model::kBudget) return fence(made);
    fence(model::Error(absl::StatusCode::kUnavailable, model::kBusy,
                       absl::StrCat("server '", impl->server_id, "' holds ", kJobsMax,
                                    " jobs, and the one that may be forgotten is busy; send the request again")));
  });
}

void StateServer::Open(const v1::OpenRequest& request, const CallLimit& limit, Reply<v1::OpenResponse> reply) {
  reply = impl_->Counted(Call::kOpen, std::move(reply));
  const std::string& name = request.spec().name();
  auto job = impl_->Find(name);
  const bool unknown = model::ReasonOf(job.status()) == model::kUnknownJob;
  if (!request.dry_run() || !unknown) reply = impl_->ForgetAfterError(name, request.epoch(), std::move(reply));
  if (const absl::Status known = model::CheckSentOpen(request); !known.ok()) return reply(known);
  if (request.dry_run() && unknown) job = impl_->Planner(name);
  if (!job.ok()) return reply(job.status());
  (*job)->Open(request, limit, std::move(reply));
}

void StateServer::RefuseOpen(const v1::OpenRequest& request, const absl::Status& refusal,
                             Reply<v1::OpenResponse> reply) {
  if (request.dry_run()) return reply(refusal);
  impl_->ForgetAfterError(request.spec().name(), request.epoch(), std::move(reply))(refusal);
}

void StateServer::Norm(const v1::NormRequest& request, Reply<v1::NormResponse> reply) {
  reply = impl_->Counted(Call::kNorm, std::move(reply));
  const auto job = impl_->Find(request.job());
  if (!job.ok()) return reply(job.status());
  (*job)->Norm(request, std::move(reply));
}

void StateServer::Seal(const v1::SealRequest& request, const CallLimit& limit, Reply<model::SealAnswer> reply) {
  reply = impl_->Counted(Call::kSeal, std::move(reply));
  if (const absl::Status known = model::CheckKnown(request); !known.ok()) return reply(known);
  const auto job = impl_->Find(request.job());
  if (!job.ok()) return reply(job.status());
  (*job)->seals().Seal(request, limit, std::move(reply));
}

void StateServer::Commit(const v1::CommitRequest& request, Reply<v1::CommitResponse> reply) {
  reply = impl_->Counted(Call::kCommit, std::move(reply));
  if (const absl::Status known = model::CheckKnown(request); !known.ok()) return reply(known);
  const auto job = impl_->Find(request.job());
  if (!job.ok()) return reply(job.status());
  (*job)->Commit(request, std::move(reply));
}

void StateServer::Pin(const v1::PinRequest& request, const CallLimit& limit, Reply<v1::PinResponse> reply) {
  reply = impl_->Counted(Call::kPin, std::move(reply));
  const auto job = impl_->Find(request.job());
  if (!job.ok()) return reply(job.status());
  (*job)->Pin(request, limit, std::move(reply));
}

void StateServer::Unpin(const v1::UnpinRequest& request, Reply<v1::UnpinResponse> reply,
                        std::shared_ptr<Caller> caller) {
  reply = impl_->Counted(Call::kUnpin, std::move(reply));
  const auto job = impl_->Find(request.job());
  if (!job.ok()) return reply(job.status());
  (*job)->Unpin(request, std::move(caller), std::move(reply));
}

void StateServer::Push(const v1::PushRequest& header, PushedBytes payload, const CallLimit& limit,
                       Reply<v1::PushResponse> reply, Checksum checksum, std::shared_ptr<model::LentGradients> lent) {
  reply = impl_->Counted(Call::kPush, std::move(reply));
  if (const absl::Status known = model::CheckKnown(header); !known.ok()) return reply(known);
  const auto job = impl_->Find(header.job());
  if (!job.ok()) return reply(job.status());
  (*job)->pushes().Push(header, std::move(payload), limit, std::move(reply), checksum, std::move(lent));
}

absl::StatusOr<std::unique_ptr<model::Loan>> StateServer::Lend(const model::LoanRequest& request) {
  BALLAST_ASSIGN_OR_RETURN(const std::shared_ptr<Job> job, impl_->Find(request.job));
  return job->loans().Lend(request);
}

void StateServer::AwaitApplied(const std::string& job, int64_t version, std::optional<uint32_t> unit,
                               const CallLimit& limit, Reply<v1::CommitResponse> reply) {
  const auto found = impl_->Find(job);
  if (!found.ok()) return reply(found.status());
  (*found)->AwaitApplied(version, unit, limit, std::move(reply));
}

absl::StatusOr<storage::Arena> StateServer::MapAnswers(uint64_t bytes) const {
  const storage::DramTier& dram = *impl_->tiers->dram();
  if (!dram.beside_gpu()) return storage::Arena();
  return dram.Map(bytes);
}

bool StateServer::takes_loans() const { return !impl_->options.working_copies; }

void StateServer::Pull(const v1::PullRequest& request, const CallLimit& limit, Allocate allocate, Reply<uint32_t> reply,
                       Checksum checksum) {
  reply = impl_->Counted(Call::kPull, std::move(reply));
  const auto job = impl_->Find(request.job());
  if (!job.ok()) return reply(job.status());
  (*job)->pulls().Pull(request, limit, std::move(allocate), std::move(reply), checksum);
}

void StateServer::Lease(const v1::PullRequest& request, const CallLimit& limit, Reply<model::LeasedBytes> reply) {
  reply = impl_->Counted(Call::kPull, std::move(reply));
  const auto job = impl_->Find(request.job());
  if (!job.ok()) return reply(job.status());
  (*job)->pulls().Lease(request, limit, std::move(reply));
}

void StateServer::Export(const v1::ExportRequest& request, const CallLimit& limit, Reply<ExportedChunk> reply) {
  reply = impl_->Counted(Call::kExport, std::move(reply));
  const auto job = impl_->Find(request.job());
  if (!job.ok()) return reply(job.status());
  (*job)->exports().Export(request, limit, std::move(reply));
}

const std::string& StateServer::server_id() const { return impl_->server_id; }
uint64_t StateServer::disk() const { return impl_->disk; }
storage::TierBytes StateServer::budget() const { return impl_->tiers->budget(); }
const ServerCounters& StateServer::counters() const { return impl_->counters; }
storage::TierTraffic StateServer::traffic() const { return impl_->tiers->traffic(); }

}  // namespace ballast::services
