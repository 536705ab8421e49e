#include "ballast/services/requests/job.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ballast/proto/model/status.h"
#include "ballast/services/records/log_records.h"

namespace ballast::services {

std::shared_ptr<Job> Job::Make(const std::string& name, const JobSurroundings& surroundings) {
  // A deadline may fire while the job is being destroyed: the callback must neither keep nor touch the job.
  auto self = std::make_shared<std::weak_ptr<Job>>();
  std::shared_ptr<Job> job(new Job(name, surroundings, [self](uint64_t id) {
    if (const std::shared_ptr<Job> alive = self->lock()) alive->core_.Expire(id);
  }));
  *self = job;
  job->core_.owner = job;
  return job;
}

Job::Job(const std::string& name, const JobSurroundings& surroundings, std::function<void(uint64_t)> expire)
    : core_(name, surroundings, this, std::move(expire)),
      room_(&core_),
      read_pins_(&core_),
      journal_(&core_, &room_,
               [this] {
                 core_.mu.AssertHeld();
                 flushes_.Post();
               }),
      flushes_(&core_, &journal_),
      kept_(&core_, &journal_, &flushes_),
      prediction_(&core_),
      moves_(&core_, &flushes_, &prediction_),
      space_(&core_, &journal_, &room_, &flushes_, &earlier_, &moves_, &prediction_),
      openings_(&core_, &journal_, &space_),
      updates_(&core_, &journal_, &room_, &flushes_, &read_pins_, &moves_),
      scrub_(&core_, &flushes_),
      recovery_(&core_, &journal_, &room_, &flushes_, &earlier_, &space_, &openings_, &updates_),
      pushes_(&core_, &journal_, &room_),
      pulls_(&core_, &read_pins_),
      loans_(&core_) {}

// The parts' tasks end before the parts do.
Job::~Job() {
  core_.JoinThreads();
  pulls_.JoinThreads();
}

void Job::ScrubNext(absl::Span<std::byte> buffer, std::shared_ptr<void> lease) {
  core_.worker->Post([this, buffer, lease = std::move(lease)] { scrub_.Next(buffer); });
}

absl::Time Job::last_scrubbed() const { return scrub_.last_pass(); }

absl::Status Job::Replay(const PromiseRecord& promise) {
  JobMutexLock lock(&core_.mu);
  return core_.machine->Replay(promise);
}

absl::Status Job::Recover(const JobEntry& entry) { return recovery_.Recover(entry); }
absl::Status Job::EndRecovery() { return recovery_.End(); }
absl::Status Job::ComeBack(const JobEntry& entry) { return recovery_.ComeBack(entry); }

absl::Status Job::MakeThreads(bool dry_runs_alone) {
  BALLAST_RETURN_IF_ERROR(core_.clerk->Prepare());
  if (dry_runs_alone) return absl::OkStatus();
  BALLAST_RETURN_IF_ERROR(core_.worker->Prepare());
  return pulls_.MakeThread();
}

void Job::Stop(const absl::Status& status) {
  Replies replies;
  {
    JobMutexLock lock(&core_.mu);
    if (core_.stopped.ok()) core_.stopped = status;
    core_.waiting.RefuseAll(core_.stopped, &replies);
  }
  Run(std::move(replies));
  core_.JoinThreads();
  pulls_.JoinThreads();
  journal_.Stop();
}

void Job::Discard() {
  JobMutexLock lock(&core_.mu);
  if (core_.store != nullptr) core_.store->Discard();
}

v1::Epoch Job::promised() const {
  JobMutexLock lock(&core_.mu);
  return core_.machine->promised();
}

bool Job::Unopened() const {
  return core_.machine->plan() == nullptr && core_.Refusal().ok() && core_.waiting.empty() && !openings_.busy();
}

bool Job::MayBeUnopened(const v1::Epoch& promised) const {
  bool may = false;
  (void)core_.TryLook([&] {
    core_.mu.AssertHeld();
    may = Unopened() && model::Compare(core_.machine->promised(), promised) == 0;
  });
  return may;
}

bool Job::RefuseIfUnopened(const v1::Epoch& promised, const absl::Status& status) {
  JobMutexLock lock(&core_.mu);
  if (!Unopened() || model::Compare(core_.machine->promised(), promised) != 0) return false;
  core_.stopped = status;
  return true;
}

void Job::Sync(uint64_t lsn) {
  core_.mu.AssertHeld();
  journal_.Sync(lsn);
}

v1::ChunkNorm Job::Norm(uint64_t chunk, absl::string_view gradient_presence) {
  core_.mu.AssertHeld();
  return core_.by_index.at(chunk)->intake.Norm(gradient_presence);
}

void Job::Apply(const v1::PreparedRecord& prepared, const v1::Decision& decision) {
  core_.mu.AssertHeld();
  std::shared_ptr<StepWork> work = updates_.Prepare(prepared, decision);
  if (core_.recovering) {
    recovery_.Apply(std::move(work));
  } else {
    updates_.Post(std::move(work));
  }
}

void Job::Opened(std::shared_ptr<const model::EpochPlan> plan) {
  core_.mu.AssertHeld();
  core_.counters.steps.Opened();
  openings_.Opened(std::move(plan));
}

void Job::PinDue(int64_t) {
  core_.mu.AssertHeld();
  kept_.PinDue();
}

void Job::PinChanged(const v1::PinnedVersion& pin) {
  core_.mu.AssertHeld();
  kept_.PinChanged(pin);
}

namespace {

using SharedPlan = std::shared_ptr<const model::EpochPlan>;

}  // namespace

void Job::GetJob(bool with_open, Reply<v1::GetJobResponse> reply) {
  const auto plan = std::make_shared<SharedPlan>();
  core_.Ask<v1::GetJobResponse>(
      0,
      [this, plan, with_open]() -> Outcome<v1::GetJobResponse> {
        core_.mu.AssertHeld();
        v1::GetJobResponse job = core_.Describe();
        job.set_life(journal_.life());
        if (with_open) *plan = core_.plan;
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
  core_.Ask<v1::FenceResponse>(
      request.ByteSizeLong(),
      [this, plan, request]() -> Outcome<v1::FenceResponse> {
        core_.mu.AssertHeld();
        BALLAST_RETURN_IF_ERROR(journal_.MakeRoom(1, kSmallRecordBytesMax));
        Outcome<v1::FenceResponse> fenced = core_.machine->Fence(request);
        if (fenced.ok() && fenced->has_value()) {
          ++core_.counters.fences;
          peers_.Set(request);
          *plan = core_.plan;
        }
        return fenced;
      },
      limit, "the promise to become durable",
      [plan, reply = std::move(reply)](absl::StatusOr<v1::FenceResponse> fenced) {
        if (fenced.ok() && *plan != nullptr) *fenced->mutable_job()->mutable_open() = (*plan)->open();
        reply(std::move(fenced));
      });
}

void Job::Open(const v1::OpenRequest& request, const CallLimit& limit, Reply<v1::OpenResponse> reply) {
  std::function<Outcome<v1::OpenResponse>()> evaluate = [this, request] {
    core_.mu.AssertHeld();
    return openings_.Try(request);
  };
  if (request.dry_run()) {
    evaluate = [this, run = std::make_shared<Openings::DryRun>(
                          request, limit.caller == nullptr ? "" : limit.caller->identity())] {
      core_.mu.AssertHeld();
      return openings_.Try(run);
    };
  }
  core_.Ask<v1::OpenResponse>(request.ByteSizeLong(), std::move(evaluate), limit,
                              "space for the job's chunks, behind the updates at work", std::move(reply));
}

void Job::Norm(const v1::NormRequest& request, Reply<v1::NormResponse> reply) {
  core_.Ask<v1::NormResponse>(
      request.ByteSizeLong(),
      [this, request]() -> Outcome<v1::NormResponse> {
        core_.mu.AssertHeld();
        BALLAST_ASSIGN_OR_RETURN(v1::NormResponse response, core_.machine->Norm(request));
        return response;
      },
      absl::InfiniteFuture(), "", std::move(reply));
}

std::optional<absl::Status> Job::ReadyToSeal(const v1::SealRequest& request) {
  const bool waits = request.wait_ms() > 0;
  BALLAST_RETURN_IF_ERROR(core_.Refusal());
  if (updates_.full()) {
    if (waits) return std::nullopt;
    return model::Error(
        absl::StatusCode::kUnavailable, model::kBusy,
        absl::StrCat("the job's update queue is full (", updates_.queued(), " steps); send the same seal again"));
  }
  BALLAST_RETURN_IF_ERROR(journal_.MakeRoomForSeal(request));
  if (request.header().kind() != v1::STEP_KIND_RESTORE) return absl::OkStatus();
  const absl::StatusOr<bool> checked = kept_.Checked(request);
  BALLAST_RETURN_IF_ERROR(checked.status());
  if (*checked) return absl::OkStatus();
  if (waits) return std::nullopt;
  return model::Error(absl::StatusCode::kUnavailable, model::kBusy,
                      "the pinned version is being read; send the same seal again");
}

namespace {

// What the step waits for, as the rank hears it; made when the answer is sent.
model::SealAnswer TellPending(uint32_t rank, const JobCore& core) ABSL_EXCLUSIVE_LOCKS_REQUIRED(job_lock) {
  ++core.around.counters->told_pending;
  return std::make_shared<model::SealAnswer::element_type>(core.machine->Pending(rank));
}

// A trainer's clock may say anything: a day is more than a step takes.
TrainerTimes TimesOf(const v1::SealRequest& request) {
  const auto time = [](uint64_t us) {
    return std::min(absl::Microseconds(static_cast<int64_t>(std::min<uint64_t>(us, 1'000'000'000'000))),
                    absl::Hours(24));
  };
  const v1::TrainerTimes& times = request.trainer_times();
  return {time(times.compute_us()), time(times.pull_wait_us()), time(times.gather_us()), time(times.push_wait_us())};
}

}  // namespace

void Job::NoteSealed(const v1::SealRequest& request) {
  if (request.step() <= core_.machine->committed()) return;  // it is decided: the answer says so
  const uint32_t world_size = core_.plan->open().tiling().world_size();
  if (request.rank() >= world_size) return;
  core_.counters.steps.Sealed(request.step(), request.attempt(), request.rank(), world_size, TimesOf(request));
}

bool Job::TrySeal(Sealing* sealing, Replies* replies) {
  v1::SealRequest& request = sealing->request;
  const std::optional<absl::Status> ready = ReadyToSeal(request);
  if (!ready.has_value()) return false;
  ++core_.around.counters->evaluated_seals;
  const bool agreed = core_.machine->seals_agree();
  absl::StatusOr<model::SealAnswer> answer =
      ready->ok() ? core_.machine->Seal(request) : absl::StatusOr<model::SealAnswer>(*ready);
  if (!answer.ok()) {
    // Different plans end the seals of all ranks. No other refusal changes what the others wait for.
    if (agreed != core_.machine->seals_agree()) core_.moved = true;
    replies->push_back([reply = sealing->reply, status = answer.status()] { reply(status); });
    return true;
  }
  journal_.NoteSealed(request);
  NoteSealed(request);
  if (*answer == nullptr && request.wait_ms() > 0) {
    if (core_.machine->Filed(request)) {
      request.clear_header();
      request.clear_blobs();
    }
    return false;
  }
  if (*answer == nullptr) answer = TellPending(request.rank(), core_);
  if ((**answer)->has_prepared()) core_.counters.steps.Prepared();
  replies->push_back([reply = sealing->reply, answer = *std::move(answer)] { reply(answer); });
  return true;
}

void Job::Seal(const v1::SealRequest& request, const CallLimit& limit, Reply<model::SealAnswer> reply) {
  const auto sealing = std::make_shared<Sealing>(Sealing{request, std::move(reply)});
  const absl::Time patience = absl::Now() + absl::Milliseconds(request.wait_ms());
  Waiter waiter;
  waiter.limit = {std::min(limit.deadline, patience), limit.caller};
  waiter.attempt = [this, sealing](Replies* replies) {
    core_.mu.AssertHeld();
    return TrySeal(sealing.get(), replies);
  };
  waiter.expire = [this, sealing, late = limit.deadline < patience](Replies* replies) {
    core_.mu.AssertHeld();
    if (late) {
      replies->push_back([sealing] { sealing->reply(DeadlinePassed("the step to be prepared")); });
    } else {
      replies->push_back([sealing, answer = TellPending(sealing->request.rank(), core_)] { sealing->reply(answer); });
    }
  };
  waiter.refuse = [sealing](const absl::Status& status, Replies* replies) {
    replies->push_back([sealing, status] { sealing->reply(status); });
  };
  core_.Enter([this, sealing, waiter = std::move(waiter)](Replies* replies) mutable {
    core_.mu.AssertHeld();
    if (TrySeal(sealing.get(), replies)) return;
    waiter.bytes = sealing->request.ByteSizeLong();  // what is left of it
    core_.waiting.Submit(std::move(waiter), &core_.machine_queue, replies);
  });
}

void Job::Commit(const v1::CommitRequest& request, Reply<v1::CommitResponse> reply) {
  v1::CommitRequest commit = request;
  commit.mutable_decision()->clear_blobs();  // the sealed ones count
  core_.Ask<v1::CommitResponse>(
      commit.ByteSizeLong(),
      [this, commit]() -> Outcome<v1::CommitResponse> {
        core_.mu.AssertHeld();
        BALLAST_RETURN_IF_ERROR(journal_.MakeRoom(1, commit.ByteSizeLong() + kDecisionBytesMax));
        BALLAST_ASSIGN_OR_RETURN(v1::CommitResponse response, core_.machine->Commit(commit));
        return response;
      },
      absl::InfiniteFuture(), "", std::move(reply));
}

void Job::AwaitApplied(int64_t version, std::optional<uint32_t> unit, const CallLimit& limit,
                       Reply<v1::CommitResponse> reply) {
  core_.Ask<v1::CommitResponse>(
      0,
      [this, version, unit]() -> Outcome<v1::CommitResponse> {
        core_.mu.AssertHeld();
        if (!updates_.Show(version, unit)) return std::nullopt;
        v1::CommitResponse response;
        response.set_committed(core_.machine->committed());
        return response;
      },
      limit, absl::StrCat("version ", version, " to be applied"), std::move(reply));
}

void Job::Pin(const v1::PinRequest& request, const CallLimit& limit, Reply<v1::PinResponse> reply) {
  if (request.durable()) return kept_.Pin(request, limit, std::move(reply));
  core_.Ask<v1::PinResponse>(
      request.ByteSizeLong(),
      [this, version = request.version(), pin = std::make_shared<uint64_t>(0)] {
        core_.mu.AssertHeld();
        return read_pins_.Pin(version, pin.get());
      },
      limit, absl::StrCat("version ", request.version(), " of all chunks"), std::move(reply));
}

void Job::Unpin(const v1::UnpinRequest& request, std::shared_ptr<Caller> caller, Reply<v1::UnpinResponse> reply) {
  if (request.durable()) return kept_.Unpin(request, std::move(caller), std::move(reply));
  core_.Ask<v1::UnpinResponse>(
      request.ByteSizeLong(),
      [this, version = request.version()]() -> Outcome<v1::UnpinResponse> {
        core_.mu.AssertHeld();
        read_pins_.Unpin(version);
        return v1::UnpinResponse();
      },
      absl::InfiniteFuture(), "", std::move(reply));
}

}  // namespace ballast::services
