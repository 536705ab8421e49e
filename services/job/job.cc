#include "ballast/services/job/job.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/brief_open.h"
#include "ballast/services/job/job_parts.h"
#include "ballast/services/journal/log_records.h"

namespace ballast::services {

std::shared_ptr<Job> Job::Make(const std::string& name, const JobSurroundings& surroundings) {
  // A deadline may fire while the job is being destroyed: the callback must neither keep nor touch the job.
  auto self = std::make_shared<std::weak_ptr<Job>>();
  std::shared_ptr<Job> job(new Job(name, surroundings, [self](uint64_t id) {
    if (const std::shared_ptr<Job> alive = self->lock()) alive->parts_->core.Expire(id);
  }));
  *self = job;
  job->parts_->core.SetOwner(job);
  return job;
}

Job::Parts::Parts(const std::string& name, const JobSurroundings& surroundings, StepHost* host,
                  std::function<void(uint64_t)> expire)
    : journal(name, &core, &room,
              [this] {
                core.mu.AssertHeld();
                flushes.Post();
              }),
      core(name, surroundings, &journal, journal.promises(), host, std::move(expire)),
      room(&core),
      read_pins(&core),
      flushes(&core, &journal),
      kept_copies(&core, &journal),
      kept(&core, &journal, &flushes, &kept_copies),
      prediction(&core),
      moves(&core, &flushes, &prediction),
      space(&core, &journal, &room, &flushes, &earlier, &moves, &prediction),
      changes(&core, &room, &earlier, &moves),
      openings(&core, &journal, &space),
      filling(&core, &kept_copies, &kept),
      damaged(&core, &filling, &kept_copies),
      updates(&core, &journal, &room, &flushes, &read_pins, &moves, &damaged),
      scrub(&core, &flushes, &damaged),
      recovery(&core, &journal, &room, &flushes, &earlier, &space, &openings, &changes, &updates),
      pushes(&core, &journal, &room),
      pulls(&core, &read_pins, &damaged),
      loans(&core),
      exports(&core, &damaged),
      seals(&core, &journal, &kept, &filling, &updates),
      copies(&core) {}

Job::Job(const std::string& name, const JobSurroundings& surroundings, std::function<void(uint64_t)> expire)
    : parts_(std::make_unique<Parts>(name, surroundings, static_cast<StepHost*>(this), std::move(expire))) {}

// The parts' tasks end before the parts do.
Job::~Job() {
  parts_->core.JoinThreads();
  parts_->pulls.JoinThreads();
}

void Job::ScrubNext(absl::Span<std::byte> buffer, std::shared_ptr<void> lease) {
  if (parts_->core.leases->awaited()) return;  // the worker waits for readers; other jobs are scrubbed meanwhile
  parts_->core.worker->Post([this, buffer, lease = std::move(lease)] { parts_->scrub.Next(buffer); });
}

absl::Time Job::last_scrubbed() const { return parts_->scrub.last_pass(); }

absl::Status Job::Replay(const PromiseRecord& promise) {
  JobMutexLock lock(&parts_->core.mu);
  return parts_->core.machine->Replay(promise);
}

Pushes& Job::pushes() { return parts_->pushes; }
Pulls& Job::pulls() { return parts_->pulls; }
Loans& Job::loans() { return parts_->loans; }
Exports& Job::exports() { return parts_->exports; }
Seals& Job::seals() { return parts_->seals; }
const storage::Account& Job::account() const { return *parts_->core.around.account; }
const JobCounters& Job::counters() const { return parts_->core.counters; }
std::optional<storage::JobHolding> Job::Holding() const { return parts_->moves.Holding(); }
void Job::MoveTo(const storage::Plan& plan, v1::JobMoves* answer) { parts_->moves.MoveTo(plan, answer); }
absl::Status Job::RemoveJournal() { return parts_->journal.Remove(); }

absl::Status Job::Recover(const JobEntry& entry) { return parts_->recovery.Recover(entry); }
absl::Status Job::EndRecovery() {
  BALLAST_RETURN_IF_ERROR(parts_->recovery.End());
  JobMutexLock lock(&parts_->core.mu);
  ResumeFilling();
  return absl::OkStatus();
}
absl::Status Job::ComeBack(const JobEntry& entry) { return parts_->recovery.ComeBack(entry); }

absl::Status Job::MakeThreads(bool dry_runs_alone) {
  BALLAST_RETURN_IF_ERROR(parts_->core.clerk->Prepare());
  if (dry_runs_alone) return absl::OkStatus();
  BALLAST_RETURN_IF_ERROR(parts_->core.worker->Prepare());
  return parts_->pulls.MakeThread();
}

void Job::Stop(const absl::Status& status) {
  Replies replies;
  {
    JobMutexLock lock(&parts_->core.mu);
    parts_->core.Refuse(status, &replies);
  }
  Run(std::move(replies));
  parts_->core.JoinThreads();
  parts_->pulls.JoinThreads();
  parts_->journal.Stop();
}

void Job::Discard() {
  JobMutexLock lock(&parts_->core.mu);
  if (parts_->core.state.store() != nullptr) parts_->core.state.store()->Discard();
}

v1::Epoch Job::promised() const {
  JobMutexLock lock(&parts_->core.mu);
  return parts_->core.machine->promised();
}

bool Job::Unopened() const {
  return parts_->core.machine->plan() == nullptr && parts_->core.Refusal().ok() && parts_->core.waiting.empty() &&
         !parts_->openings.busy();
}

std::optional<v1::Epoch> Job::UnopenedPromise(bool* locked) const {
  std::optional<v1::Epoch> promised;
  const bool looked = parts_->core.TryLook([&] {
    parts_->core.mu.AssertHeld();
    if (Unopened()) promised = parts_->core.machine->promised();
  });
  if (locked != nullptr) *locked = !looked;
  return promised;
}

bool Job::RefuseIfUnopened(const v1::Epoch& promised, const absl::Status& status) {
  bool refused = false;
  (void)parts_->core.TryLook([&] {
    parts_->core.mu.AssertHeld();
    if (!Unopened() || model::Compare(parts_->core.machine->promised(), promised) != 0) return;
    Replies nobody_waits;
    parts_->core.Refuse(status, &nobody_waits);
    refused = true;
  });
  return refused;
}

v1::ChunkNorm Job::Norm(uint64_t chunk, absl::string_view gradient_presence) {
  parts_->core.mu.AssertHeld();
  // It has all of its slices, and a push of a chunk that is not there is refused.
  return (*parts_->core.state.Held(chunk))->intake.Norm(gradient_presence);
}

void Job::Apply(const v1::PreparedRecord& prepared, const v1::Decision& decision) {
  parts_->core.mu.AssertHeld();
  std::shared_ptr<StepWork> work = parts_->updates.Prepare(prepared, decision);
  if (parts_->core.state.recovering()) {
    parts_->recovery.Apply(std::move(work));
  } else {
    parts_->updates.Post(std::move(work));
    ResumeFilling();
  }
}

void Job::ResumeFilling() { parts_->filling.Resume(); }

// The machine knows which chunks count no more if an Open forgets.
void Job::Opened(std::shared_ptr<const model::EpochPlan> plan, const OpenChange& change) {
  parts_->core.mu.AssertHeld();
  parts_->core.counters.steps.Opened();
  parts_->copies.Opened(*plan, change.forgets);
  parts_->openings.Opened(std::move(plan), change.keeps_slices);
  parts_->changes.Opened();
}

void Job::TableDurable() {
  parts_->core.mu.AssertHeld();
  parts_->changes.TableDurable();
  ResumeFilling();
}

void Job::AddDigests(int64_t step, v1::SealResponse* answer) {
  parts_->core.mu.AssertHeld();
  parts_->copies.AddDigests(step, answer);
}

void Job::PinDue(int64_t) {
  parts_->core.mu.AssertHeld();
  parts_->kept.PinDue();
}

void Job::PinChanged(const v1::PinnedVersion& pin) {
  parts_->core.mu.AssertHeld();
  parts_->kept.PinChanged(pin);
}

namespace {

using SharedPlan = std::shared_ptr<const model::EpochPlan>;

void TellKept(const JobState& state, v1::GetJobResponse* job) {
  const std::vector<uint64_t> bytes = state.KeptByShard();
  job->mutable_kept_bytes()->Assign(bytes.begin(), bytes.end());
}

}  // namespace

void Job::GetJob(bool with_open, Reply<v1::GetJobResponse> reply) {
  const auto plan = std::make_shared<SharedPlan>();
  parts_->core.Ask<v1::GetJobResponse>(
      0,
      [this, plan, with_open]() -> Outcome<v1::GetJobResponse> {
        parts_->core.mu.AssertHeld();
        v1::GetJobResponse job = parts_->core.Describe();
        const model::EpochPlan* const opened = parts_->core.machine->plan();
        const uint64_t of_table = opened == nullptr ? 0 : opened->open().table().life();
        job.set_life(of_table != 0 ? of_table : parts_->journal.life());
        job.set_leases_pins(true);
        TellKept(parts_->core.state, &job);
        if (with_open) *plan = parts_->core.state.plan();
        return job;
      },
      absl::InfiniteFuture(), "",
      // The lock is free here: an Open may take milliseconds to copy.
      [plan, reply = std::move(reply)](absl::StatusOr<v1::GetJobResponse> job) {
        if (job.ok() && *plan != nullptr) *job->mutable_open() = (*plan)->open();
        reply(std::move(job));
      });
}

void Job::Fence(const v1::FenceRequest& request, const CallLimit& limit, Reply<v1::FenceResponse> reply) {
  if (const absl::Status status = Peers::Check(request); !status.ok()) return reply(status);
  const auto plan = std::make_shared<SharedPlan>();
  parts_->core.Ask<v1::FenceResponse>(
      request.ByteSizeLong(),
      [this, plan, request]() -> Outcome<v1::FenceResponse> {
        parts_->core.mu.AssertHeld();
        BALLAST_RETURN_IF_ERROR(parts_->journal.MakeRoom(1, kSmallRecordBytesMax));
        Outcome<v1::FenceResponse> fenced = parts_->core.machine->Fence(request);
        if (fenced.ok() && fenced->has_value()) {
          ++parts_->core.counters.fences;
          parts_->peers.Set(request);
          *plan = parts_->core.state.plan();
          TellKept(parts_->core.state, (*fenced)->mutable_job());
        }
        return fenced;
      },
      limit, "the promise to become durable",
      [plan, group = request.group(), reply = std::move(reply)](absl::StatusOr<v1::FenceResponse> fenced) {
        if (fenced.ok() && *plan != nullptr) {
          *fenced->mutable_job()->mutable_open() = model::TellOpen((*plan)->open(), group);
        }
        reply(std::move(fenced));
      });
}

void Job::Open(const v1::OpenRequest& request, const CallLimit& limit, Reply<v1::OpenResponse> reply) {
  std::function<Outcome<v1::OpenResponse>()> evaluate = [this, request] {
    parts_->core.mu.AssertHeld();
    return parts_->openings.Try(request);
  };
  if (request.dry_run()) {
    evaluate = [this, run = std::make_shared<Openings::DryRun>(
                          request, limit.caller == nullptr ? "" : limit.caller->identity())] {
      parts_->core.mu.AssertHeld();
      return parts_->openings.Try(run);
    };
  }
  parts_->core.Ask<v1::OpenResponse>(request.ByteSizeLong(), std::move(evaluate), limit,
                                     "space for the job's chunks, behind the updates at work", std::move(reply));
}

void Job::Norm(const v1::NormRequest& request, Reply<v1::NormResponse> reply) {
  parts_->core.Ask<v1::NormResponse>(
      request.ByteSizeLong(),
      [this, request]() -> Outcome<v1::NormResponse> {
        parts_->core.mu.AssertHeld();
        BALLAST_ASSIGN_OR_RETURN(v1::NormResponse response, parts_->core.machine->Norm(request));
        return response;
      },
      absl::InfiniteFuture(), "", std::move(reply));
}

void Job::Commit(const v1::CommitRequest& request, Reply<v1::CommitResponse> reply) {
  v1::CommitRequest commit = request;
  commit.mutable_decision()->clear_blobs();  // the sealed ones count
  google::protobuf::RepeatedPtrField<v1::DifferingCopies> differing;
  differing.Swap(commit.mutable_differing());  // the machine has no use for them
  parts_->core.Ask<v1::CommitResponse>(
      commit.ByteSizeLong(),
      [this, commit, differing = std::move(differing)]() -> Outcome<v1::CommitResponse> {
        parts_->core.mu.AssertHeld();
        BALLAST_RETURN_IF_ERROR(parts_->journal.MakeRoom(1, commit.ByteSizeLong() + kDecisionBytesMax));
        BALLAST_ASSIGN_OR_RETURN(v1::CommitResponse response, parts_->core.machine->Commit(commit));
        parts_->copies.Note(differing);
        return response;
      },
      absl::InfiniteFuture(), "", std::move(reply));
}

void Job::AwaitApplied(int64_t version, std::optional<uint32_t> unit, const CallLimit& limit,
                       Reply<v1::CommitResponse> reply) {
  parts_->core.Ask<v1::CommitResponse>(
      0,
      [this, version, unit]() -> Outcome<v1::CommitResponse> {
        parts_->core.mu.AssertHeld();
        if (!parts_->updates.Show(version, unit)) return std::nullopt;
        v1::CommitResponse response;
        response.set_committed(parts_->core.machine->committed());
        return response;
      },
      limit, absl::StrCat("version ", version, " to be applied"), std::move(reply));
}

void Job::Pin(const v1::PinRequest& request, const CallLimit& limit, Reply<v1::PinResponse> reply) {
  if (request.durable()) return parts_->kept.Pin(request, limit, std::move(reply));
  parts_->core.Ask<v1::PinResponse>(
      request.ByteSizeLong(),
      [this, request, pin = std::make_shared<uint64_t>(0)] {
        parts_->core.mu.AssertHeld();
        return parts_->read_pins.Pin(request, pin.get());
      },
      limit, absl::StrCat("version ", request.version(), " of all chunks"), std::move(reply));
}

void Job::Unpin(const v1::UnpinRequest& request, std::shared_ptr<Caller> caller, Reply<v1::UnpinResponse> reply) {
  if (request.durable()) return parts_->kept.Unpin(request, std::move(caller), std::move(reply));
  parts_->core.Ask<v1::UnpinResponse>(
      request.ByteSizeLong(),
      [this, version = request.version(), holder = request.holder()]() -> Outcome<v1::UnpinResponse> {
        parts_->core.mu.AssertHeld();
        parts_->read_pins.Unpin(version, holder);
        return v1::UnpinResponse();
      },
      absl::InfiniteFuture(), "", std::move(reply));
}

}  // namespace ballast::services
