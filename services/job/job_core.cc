#include "ballast/services/job/job_core.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "ballast/proto/model/status.h"

namespace ballast::services {

namespace {

// How long a thread that all jobs share waits for one job's lock. It is held for microseconds as a rule.
constexpr absl::Duration kLockPatience = absl::Milliseconds(5);

}  // namespace

absl::Status DeadlinePassed(const std::string& what) {
  return model::Error(absl::StatusCode::kDeadlineExceeded, model::kBusy,
                      absl::StrCat("the deadline passed while waiting for ", what,
                                   "; nothing was undone: send the same request again"));
}

JobCore::JobCore(const std::string& job, const JobSurroundings& surroundings, StepHost* host,
                 std::function<void(uint64_t)> expire)
    : name(job),
      around(surroundings),
      machine(new StepMachine(surroundings.server_id, host)),
      promises(job),
      waiting(surroundings.deadlines, surroundings.waiting, std::move(expire)),
      worker(surroundings.foundation->MakeExecutor(1)),
      clerk(surroundings.foundation->MakeExecutor(1)),
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
bool JobCore::PostToDoor(const std::function<void(Replies*)>& body) {
  absl::MutexLock lock(&door_mu_);
  if (door_closed_ || !door_->Prepare().ok()) return false;
  door_->Post([this, body] { LockedOnWorker(body); });
  return true;
}

void JobCore::Enter(std::function<void(Replies*)> body) {
  if (!mu.LockWithin(kLockPatience)) {
    if (PostToDoor(body)) return;
    mu.Lock();
  }
  Replies replies;
  body(&replies);
  Settle(&replies);
  mu.Unlock();
  Run(std::move(replies));
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
    if (const std::optional<uint64_t> lsn = promises.TakeSynced(journalled_lsn)) {
      machine->Synced(*lsn);
      moved = true;
    }
    if (const std::optional<PromiseLog::Durable> record = promises.NextToWrite()) {
      clerk->Post([this, record = *record] { WritePromise(record); });
    }
    if (!std::exchange(moved, false)) return;
    waiting.Wake(&machine_queue, replies);
  }
}

void JobCore::WritePromise(const PromiseLog::Durable& record) {
  const absl::Status written = PromiseLog::Write(around.catalog, record);
  LockedOnWorker([&](Replies* replies) {
    mu.AssertHeld();
    if (written.ok()) {
      promises.Written(record.lsn);
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

absl::Status JobCore::Refusal() const { return stopped.ok() ? failure : stopped; }

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
  if (!failure.ok()) return;
  failure = model::Error(
      cause.code(), model::ReasonOf(cause),
      absl::StrCat("job '", name, "' stopped on server '", around.server_id, "': ", cause.message(), ". ", remedy));
  waiting.RefuseAll(failure, replies);
}

std::string JobCore::Remedy() const {
  return recoverable || (plan != nullptr && plan->open().spec().pin_interval() > 0)
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
  const bool ahead =
      std::any_of(chunks.begin(), chunks.end(), [&](const auto& chunk) { return *chunk->version > committed; });
  if (!ahead) return absl::OkStatus();
  return model::Error(absl::StatusCode::kUnavailable, model::kBusy,
                      absl::StrCat("server '", around.server_id, "' lost the decision of step ", committed + 1,
                                   " and has chunks that it changed; pin once that is committed again"));
}

std::shared_ptr<HeldChunk> JobCore::FindSlice(const v1::PushRequest& header, uint32_t* slice) const {
  if (plan == nullptr) return nullptr;
  const auto found = plan->FindSlice(header.rank(), header.unit(), {header.begin(), header.end()});
  if (!found.has_value()) return nullptr;
  *slice = *found;
  const auto chunk = by_index.find(plan->slices()[*found].chunk);
  return chunk == by_index.end() ? nullptr : chunk->second;
}

void JobCore::WakePushes(HeldChunk* chunk, Replies* replies) {
  for (auto place = chunk->pushes.begin(); place != chunk->pushes.end();) {
    waiting.WakeInTurn(&place->second, replies);
    place = place->second.empty() ? chunk->pushes.erase(place) : std::next(place);
  }
}

}  // namespace ballast::services
