#include "ballast/services/job_state/job_core.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ballast/proto/base/status.h"

namespace ballast::services {

namespace {

// How long a thread that all jobs share waits for one job's lock. It is held for microseconds as a rule.
constexpr absl::Duration kLockPatience = absl::Milliseconds(5);

}  // namespace

JobCore::JobCore(const std::string& job, const JobSurroundings& surroundings, StepJournal* journal,
                 PromiseLog* promises, StepHost* host, std::function<void(uint64_t)> expire)
    : name(job),
      around(surroundings),
      machine(new StepMachine(surroundings.server_id, surroundings.disk, journal, host)),
      waiting(surroundings.deadlines, surroundings.waiting, std::move(expire)),
      worker(surroundings.foundation->MakeExecutor(1)),
      clerk(surroundings.foundation->MakeExecutor(1)),
      promises_(promises),
      places_(waiting.places()),
      door_(surroundings.foundation->MakeExecutor(1)) {}

JobCore::~JobCore() { JoinThreads(); }

// A task of either thread may post to the other; whatever comes after the end is dropped, and has been refused before.
void JobCore::JoinThreads() {
  {
    absl::MutexLock lock(&door_mu_);
    door_closed_ = true;
  }
  door_->Join();
  clerk->Join();
  worker->Join();
}

void JobCore::Locked(absl::FunctionRef<void(Replies*)> body) {
  Replies replies;
  {
    JobMutexLock lock(&mu);
    body(&replies);
    Settle(&replies);
  }
  Run(std::move(replies));
}

// False if the job is ending, when nobody keeps its lock any more, or no thread can be made.
bool JobCore::PostToDoor(std::function<void(Replies*)> body, std::shared_ptr<void> place) {
  absl::MutexLock lock(&door_mu_);
  if (door_closed_ || !door_->Prepare().ok()) return false;
  door_->Post([this, body = std::move(body), place = std::move(place)]() mutable {
    place = nullptr;  // a request that has to wait now takes one of its own
    LockedOnWorker(body);
  });
  return true;
}

void JobCore::RunAndUnlock(absl::FunctionRef<void(Replies*)> body) {
  Replies replies;
  body(&replies);
  Settle(&replies);
  mu.Unlock();
  Run(std::move(replies));
}

void JobCore::Enter(std::function<void(Replies*)> body) {
  if (!mu.LockWithin(kLockPatience)) {
    if (PostToDoor(body, nullptr)) return;
    mu.Lock();
  }
  RunAndUnlock(body);
}

void JobCore::EnterAnew(uint64_t bytes, std::function<void(Replies*)> body,
                        absl::FunctionRef<void(const absl::Status&)> refuse) {
  if (!mu.LockWithin(kLockPatience)) {
    absl::StatusOr<std::shared_ptr<void>> place = places_->Hold(bytes);
    if (!place.ok()) return refuse(place.status());
    if (PostToDoor(body, *std::move(place))) return;
    mu.Lock();
  }
  RunAndUnlock(body);
}

bool JobCore::TryLook(absl::FunctionRef<void()> look) const {
  if (!mu.LockWithin(kLockPatience)) return false;
  look();
  mu.Unlock();
  return true;
}

void JobCore::LockedOnWorker(absl::FunctionRef<void(Replies*)> body) {
  Replies replies, of_step;
  {
    JobMutexLock lock(&mu);
    body(&replies);
    Settle(&of_step);
  }
  for (auto& reply : of_step) around.step_answers->Post(std::move(reply));
  for (auto& reply : replies) around.answers->Post(std::move(reply));
}

void JobCore::Settle(Replies* replies) {
  for (;;) {
    if (const std::optional<uint64_t> lsn = promises_->TakeSynced()) {
      machine->Synced(*lsn);
      moved_ = true;
    }
    if (const std::optional<PromiseLog::Durable> record = promises_->NextToWrite()) {
      clerk->Post([this, record = *record] { WritePromise(record); });
    }
    if (std::exchange(fenced_, false)) {
      for (const auto& chunk : state.chunks()) WakePushes(chunk.get(), replies);
    }
    if (!std::exchange(moved_, false)) return;
    WakeMachine(replies);
  }
}

void JobCore::WritePromise(const PromiseLog::Durable& record) {
  const absl::Status written = PromiseLog::Write(around.catalog, record);
  LockedOnWorker([&](Replies* replies) {
    mu.AssertHeld();
    if (written.ok()) {
      promises_->Written(record.lsn);
    } else {
      Fail(written, kCatalogRemedy, replies);
    }
  });
}

void JobCore::Expire(uint64_t id) {
  LockedOnWorker([&](Replies* replies) {
    mu.AssertHeld();
    waiting.Expire(id, replies);
  });
}

void JobCore::Refuse(const absl::Status& status, Replies* replies) {
  if (stopped_.ok()) stopped_ = status;
  waiting.RefuseAll(stopped_, replies);
}

absl::Status JobCore::Refusal() const { return stopped_.ok() ? failure_ : stopped_; }

absl::Status JobCore::Interrupted() const {
  if (around.interrupt) BALLAST_RETURN_IF_ERROR(around.interrupt());
  JobMutexLock lock(&mu);
  return Refusal();
}

absl::Status JobCore::MayGrow(storage::TierKind tier, uint64_t bytes, std::shared_ptr<void>* lease) const {
  if (bytes == 0 || !around.may_grow) return absl::OkStatus();
  storage::TierBytes more;
  more[tier] = bytes;
  BALLAST_ASSIGN_OR_RETURN(*lease, around.may_grow(name, more));
  return absl::OkStatus();
}

void JobCore::Fail(const absl::Status& cause, absl::string_view remedy, Replies* replies) {
  if (!failure_.ok()) return;
  failure_ = model::Error(
      cause.code(), model::ReasonOf(cause),
      absl::StrCat("job '", name, "' stopped on server '", around.server_id, "': ", cause.message(), ". ", remedy));
  for (const auto& [key, value] : model::DetailsOf(cause)) model::SetDetail(key, value, &failure_);
  model::SetDetail(model::kStopped, "1", &failure_);
  waiting.RefuseAll(failure_, replies);
}

std::string JobCore::Remedy() const {
  return recoverable() || (state.plan() != nullptr && state.plan()->open().spec().pin_interval() > 0)
             ? "Other jobs go on; look after the disk and restart the server, which recovers the job"
             : absl::StrCat("Other jobs go on; drop this one (", model::kHowToDrop, ") and start it again");
}

v1::GetJobResponse JobCore::Describe() const {
  v1::GetJobResponse response = machine->DescribeProgress();
  response.set_server_id(around.server_id);
  return response;
}

absl::Status JobCore::CheckNoneAhead() const {
  const int64_t committed = machine->committed();
  const bool ahead = std::any_of(state.chunks().begin(), state.chunks().end(),
                                 [&](const auto& chunk) { return *chunk->version() > committed; });
  if (!ahead) return absl::OkStatus();
  return model::Error(absl::StatusCode::kUnavailable, model::kBusy,
                      absl::StrCat("server '", around.server_id, "' lost the decision of step ", committed + 1,
                                   " and has chunks that it changed; pin once that is committed again"));
}

std::string JobCore::LeaseWait() const {
  if (leases->held() == 0) return "";
  uint64_t count = 0;
  const HeldChunk* oldest = nullptr;
  for (const std::shared_ptr<HeldChunk>& chunk : state.chunks()) {
    if (chunk->leases.held() == 0 || !(chunk->update_runs() || leases->shut_out())) continue;
    count += chunk->leases.held();
    if (oldest == nullptr || chunk->leases.since() < oldest->leases.since()) oldest = chunk.get();
  }
  if (oldest == nullptr) return "";
  const absl::Duration age = absl::Trunc(absl::Now() - oldest->leases.since(), absl::Milliseconds(1));
  return absl::StrCat(", while the update waits for ", count,
                      count == 1 ? " lease that its reader has" : " leases that their readers have",
                      " not given back: chunk ", oldest->layout().index, " of unit ", oldest->layout().unit,
                      " has been leased for ", absl::FormatDuration(age));
}

void JobCore::WakePushes(HeldChunk* chunk, Replies* replies) {
  for (auto place = chunk->pushes.begin(); place != chunk->pushes.end();) {
    waiting.WakeInTurn(&place->second, replies);
    place = place->second.empty() ? chunk->pushes.erase(place) : std::next(place);
  }
}

}  // namespace ballast::services
