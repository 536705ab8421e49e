#include "ballast/services/job.h"

#include <algorithm>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ballast/proto/model/status.h"
#include "ballast/services/job_parts.h"
#include "ballast/storage/faults/failpoint.h"
#include "ballast/storage/faults/seeded_bugs.h"

namespace ballast::services {
namespace {

// Decided steps that may wait for the job's thread. Several wait only if steps touch few of this server's chunks.
constexpr int kUpdatesQueuedMax = 8;
// Bound of small records in the journal: a promise, or the fixed part of a prepared step.
constexpr uint64_t kSmallRecordBytesMax = 4096;

absl::Status DeadlinePassed(const std::string& what) {
  return model::Error(absl::StatusCode::kDeadlineExceeded, model::kBusy,
                      absl::StrCat("the deadline passed while waiting for ", what,
                                   "; nothing was undone: send the same request again"));
}

uint64_t NewLife() {
  std::random_device random;
  return uint64_t{random()} << 32 | random();
}

}  // namespace

std::shared_ptr<Job> Job::Make(const std::string& name, const JobSurroundings& surroundings) {
  // A deadline may fire while the job is being destroyed: the callback must neither keep nor touch the job.
  auto self = std::make_shared<std::weak_ptr<Job>>();
  std::shared_ptr<Job> job(new Job(name, surroundings, [self](uint64_t id) {
    if (const std::shared_ptr<Job> alive = self->lock()) alive->Expire(id);
  }));
  *self = job;
  return job;
}

Job::Job(const std::string& name, const JobSurroundings& surroundings, std::function<void(uint64_t)> expire)
    : name_(name),
      around_(surroundings),
      log_(name),
      machine_(new StepMachine(surroundings.server_id, this)),
      life_(NewLife()),
      waiting_(surroundings.deadlines, surroundings.waiting, std::move(expire)),
      stage_(surroundings.foundation->MakeExecutor(1)) {}

Job::~Job() { stage_->Join(); }

absl::Status Job::Replay(const PromiseRecord& promise) {
  absl::MutexLock lock(&mu_);
  return machine_->Replay(promise);
}

void Job::Locked(absl::FunctionRef<void(Replies*)> body) {
  Replies replies;
  {
    absl::MutexLock lock(&mu_);
    body(&replies);
    Settle(&replies);
  }
  Run(std::move(replies));
}

void Job::LockedOnStage(absl::FunctionRef<void(Replies*)> body) {
  Replies replies;
  {
    absl::MutexLock lock(&mu_);
    body(&replies);
    Settle(&replies);
  }
  for (auto& reply : replies) around_.executor->Post(std::move(reply));
}

void Job::Settle(Replies* replies) {
  for (;;) {
    // A durable job without its journal is stopping: nothing more is reported as durable.
    const uint64_t journalled = !durable_             ? ~uint64_t{0}
                                : journal_ != nullptr ? std::max(journal_->log().durable_lsn(), before_journal_lsn_)
                                                      : 0;
    const bool acked_unsynced = Seeded(storage::StorageBug::kAckedUnsynced);
    if (const std::optional<uint64_t> lsn = log_.TakeSynced(acked_unsynced ? ~uint64_t{0} : journalled)) {
      machine_->Synced(*lsn);
      storage::Pass("journal/durable");
      moved_ = true;
    }
    if (const std::optional<PromiseLog::Durable> record = log_.NextToWrite()) {
      stage_->Post([this, record = *record] {
        const absl::Status written = PromiseLog::Write(around_.catalog, record);
        LockedOnStage([&](Replies* later) {
          mu_.AssertHeld();
          if (written.ok()) {
            log_.Written(record.lsn);
          } else {
            Fail(written, kCatalogRemedy, later);
          }
        });
      });
    }
    if (!std::exchange(moved_, false)) return;
    waiting_.Wake(&machine_queue_, replies);
  }
}

void Job::Expire(uint64_t id) {
  Locked([&](Replies* replies) {
    mu_.AssertHeld();
    waiting_.Expire(id, replies);
  });
}

absl::Status Job::Refusal() const { return stopped_.ok() ? failure_ : stopped_; }

void Job::Fail(const absl::Status& cause, absl::string_view remedy, Replies* replies) {
  if (!failure_.ok()) return;
  failure_ = model::Error(
      cause.code(), model::ReasonOf(cause),
      absl::StrCat("job '", name_, "' stopped on server '", around_.server_id, "': ", cause.message(), ". ", remedy));
  waiting_.RefuseAll(failure_, replies);
}

std::string Job::Remedy() const {
  return durable_ || (plan_ != nullptr && plan_->open().spec().pin_interval() > 0)
             ? "Other jobs go on; look after the disk and restart the server, which recovers the job"
             : absl::StrCat("Other jobs go on; drop this one (", model::kHowToDrop, ") and start it again");
}

void Job::Stop(const absl::Status& status) {
  Replies replies;
  {
    absl::MutexLock lock(&mu_);
    if (stopped_.ok()) stopped_ = status;
    waiting_.RefuseAll(stopped_, &replies);
  }
  Run(std::move(replies));
  stage_->Join();
  std::shared_ptr<Journal> journal;  // destroyed without the lock, which its thread takes
  bool spilt = false;
  {
    absl::MutexLock lock(&mu_);
    journal.swap(journal_);
    spilt = journal != nullptr && !durable_;
  }
  if (journal != nullptr) around_.foundation->StopPumping(&journal->log());
  journal.reset();
  if (spilt) around_.tiers->Return(storage::TierKind::kNvme, std::exchange(journal_bytes_, 0));
}

v1::GetJobResponse Job::Describe() const {
  v1::GetJobResponse response = machine_->Describe();
  response.set_server_id(around_.server_id);
  return response;
}

v1::Epoch Job::promised() const {
  absl::MutexLock lock(&mu_);
  return machine_->Describe().promised();
}

uint64_t Job::Append(const StepRecord& record) {
  mu_.AssertHeld();
  if (!std::holds_alternative<SliceRecord>(record)) moved_ = true;
  const uint64_t lsn = log_.Append(record);
  if (journal_ != nullptr) Journalise(record, lsn);
  return lsn;
}

void Job::Sync(uint64_t lsn) {
  mu_.AssertHeld();
  log_.Sync(lsn);
  if (journal_ != nullptr && durable_) journal_->log().Sync(lsn);
}

v1::ChunkNorm Job::Norm(uint64_t chunk, absl::string_view gradient_presence) {
  mu_.AssertHeld();
  return by_index_.at(chunk)->intake.Norm(gradient_presence);
}

void Job::Opened(const model::EpochPlan& plan) {
  mu_.AssertHeld();
  plan_ = std::make_shared<const model::EpochPlan>(plan);
  chunks_ = opening_->chunks;
  opening_->adopted = true;
  lent_ = nullptr;
  by_index_.clear();
  const std::vector<uint64_t> indices = ChunksOf(plan, around_.server_id);
  for (size_t i = 0; i < chunks_.size(); ++i) {
    HeldChunk& chunk = *chunks_[i];
    chunk.layout = plan.layout().chunks()[indices[i]];
    chunk.intake.Reset(chunk.layout, plan);
    if (!chunk.version.has_value()) {
      chunk.version = plan.open().base();
      chunk.first_version = plan.open().base();
    }
    if (machine_->state_lost()) {
      // State was lost: the chunk holds no version that anybody may see.
      chunk.version = machine_->committed();
      chunk.first_version = machine_->committed() + 1;
    }
    by_index_[indices[i]] = chunks_[i];
  }
  uint64_t elements = 0, read_back = 0;
  for (const auto& chunk : chunks_) {
    elements += chunk->elements;
    if (chunk->intake.Logs(v1::SLICE_KIND_GRADIENT)) read_back += chunk->elements;
  }
  read_back_share_ = elements == 0 ? 0 : static_cast<double>(read_back) / static_cast<double>(elements);
  // Slices of older epochs are void, the log need not keep them.
  const int64_t released = Seeded(storage::StorageBug::kReleasedTooMuch) ? -1 : machine_->committed();
  if (journal_ != nullptr) journal_->log().Release(released);
  logged_attempt_ = {-1, 0};
  norm_bytes_max_ = sealed_bytes_max_ = 0;
  step_bytes_ = 0;
  for (const auto& chunk : chunks_) {
    norm_bytes_max_ += NormBytesMax(chunk->layout);
    step_bytes_ += storage::RecordCostMax(Journal::kSliceBodyBytesMax,
                                          chunk->elements * store_->layout().gradient_element_bytes());
  }
}

template <typename Response>
void Job::Ask(uint64_t bytes, std::function<Outcome<Response>()> evaluate, absl::Time deadline, const std::string& what,
              Reply<Response> reply) {
  Waiter waiter;
  waiter.bytes = bytes;
  waiter.deadline = deadline;
  waiter.attempt = [this, evaluate = std::move(evaluate), reply](Replies* replies) {
    mu_.AssertHeld();
    const absl::Status refusal = Refusal();
    Outcome<Response> outcome = refusal.ok() ? evaluate() : Outcome<Response>(refusal);
    if (outcome.ok() && !outcome->has_value()) return false;
    if (outcome.ok()) {
      replies->push_back([reply, response = std::move(**outcome)]() mutable { reply(std::move(response)); });
    } else {
      replies->push_back([reply, status = outcome.status()] { reply(status); });
    }
    return true;
  };
  waiter.expire = [reply, what](Replies* replies) {
    replies->push_back([reply, what] { reply(DeadlinePassed(what)); });
  };
  waiter.refuse = [reply](const absl::Status& status, Replies* replies) {
    replies->push_back([reply, status] { reply(status); });
  };
  Locked([&](Replies* replies) {
    mu_.AssertHeld();
    waiting_.Submit(std::move(waiter), &machine_queue_, replies);
  });
}

void Job::GetJob(Reply<v1::GetJobResponse> reply) {
  Ask<v1::GetJobResponse>(
      0,
      [this]() -> Outcome<v1::GetJobResponse> {
        mu_.AssertHeld();
        return Describe();
      },
      absl::InfiniteFuture(), "", std::move(reply));
}

void Job::Fence(const v1::FenceRequest& request, absl::Time deadline, Reply<v1::FenceResponse> reply) {
  Ask<v1::FenceResponse>(
      request.ByteSizeLong(),
      [this, request]() -> Outcome<v1::FenceResponse> {
        mu_.AssertHeld();
        BALLAST_RETURN_IF_ERROR(MakeJournalRoom(1, kSmallRecordBytesMax));
        return machine_->Fence(request);
      },
      deadline, "the promise to become durable", std::move(reply));
}

void Job::Open(const v1::OpenRequest& request, absl::Time deadline, Reply<v1::OpenResponse> reply) {
  Ask<v1::OpenResponse>(
      request.ByteSizeLong(),
      [this, request] {
        mu_.AssertHeld();
        return TryOpen(request);
      },
      deadline, "space for the job's chunks, behind the updates at work", std::move(reply));
}

Outcome<v1::OpenResponse> Job::TryOpen(const v1::OpenRequest& request) {
  const v1::Epoch promised = machine_->Describe().promised();
  const model::EpochPlan* open = machine_->plan();
  const bool is_open = open != nullptr && model::Compare(open->open().epoch(), request.epoch()) == 0;
  // Repeats and requests out of turn take no space: the machine alone answers them.
  const bool in_turn = !is_open && model::Compare(promised, request.epoch()) == 0;
  if (!in_turn && !request.dry_run()) return machine_->Open(request);
  const std::string bytes = request.SerializeAsString();
  if (opening_ == nullptr) {
    opening_ = std::make_unique<Opening>();
    opening_->request = bytes;
    stage_->Post([this, request] { PrepareOpen(request); });
    return std::nullopt;
  }
  if (!opening_->done || opening_->request != bytes) return std::nullopt;
  BALLAST_RETURN_IF_ERROR(opening_->status);
  if (request.dry_run()) return opening_->answer;
  // The job's first Open only now has a journal.
  BALLAST_RETURN_IF_ERROR(MakeJournalRoom(2, request.ByteSizeLong() + kDecisionBytesMax));
  return machine_->Open(request);
}

void Job::Norm(const v1::NormRequest& request, Reply<v1::NormResponse> reply) {
  Ask<v1::NormResponse>(
      request.ByteSizeLong(),
      [this, request]() -> Outcome<v1::NormResponse> {
        mu_.AssertHeld();
        BALLAST_ASSIGN_OR_RETURN(v1::NormResponse response, machine_->Norm(request));
        return response;
      },
      absl::InfiniteFuture(), "", std::move(reply));
}

void Job::Seal(const v1::SealRequest& request, absl::Time deadline, Reply<v1::SealResponse> reply) {
  const absl::Time began = absl::Now();
  const absl::Time patience = began + absl::Milliseconds(request.wait_ms());
  Waiter waiter;
  waiter.bytes = request.ByteSizeLong();
  waiter.deadline = std::min(deadline, patience);
  waiter.attempt = [this, request, reply, began](Replies* replies) {
    mu_.AssertHeld();
    absl::Status refusal = Refusal();
    if (refusal.ok() && updates_queued_ >= kUpdatesQueuedMax) {
      if (request.wait_ms() > 0) return false;
      refusal = model::Error(absl::StatusCode::kUnavailable, model::kBusy,
                             absl::StrCat(updates_queued_,
                                          " decided steps wait for the update stage, which is all that "
                                          "may; send the same seal again"));
    }
    // The written record has the seal of the first rank, whichever rank seals last.
    const uint64_t sealed_bytes = std::max<uint64_t>(sealed_bytes_max_, request.ByteSizeLong());
    constexpr uint64_t kStepCountBytesMax = 10;  // a step count of a restore, as protobuf encodes it
    const uint64_t step_counts = machine_->tensor_steps().size() * kStepCountBytesMax;
    if (refusal.ok()) {
      refusal = MakeJournalRoom(1, sealed_bytes + norm_bytes_max_ + step_counts + kSmallRecordBytesMax);
    }
    if (refusal.ok() && request.header().kind() == v1::STEP_KIND_RESTORE) {
      const absl::StatusOr<bool> checked = CheckedPin(request);
      refusal = checked.status();
      if (checked.ok() && !*checked) {
        if (request.wait_ms() > 0) return false;
        refusal = model::Error(absl::StatusCode::kUnavailable, model::kBusy,
                               "the pinned version is being read; send the same seal again");
      }
    }
    Outcome<v1::SealResponse> outcome = refusal.ok() ? machine_->Seal(request) : Outcome<v1::SealResponse>(refusal);
    if (!outcome.ok()) {
      moved_ = true;  // different plans end the seals of all ranks
      replies->push_back([reply, status = outcome.status()] { reply(status); });
      return true;
    }
    sealed_bytes_max_ = sealed_bytes;
    const bool pending = !outcome->has_value() || (*outcome)->has_pending();
    if (pending && request.wait_ms() > 0) return false;
    v1::SealResponse response = outcome->has_value() ? std::move(**outcome) : machine_->Pending(request.rank());
    if (response.has_prepared()) around_.counters->seal_wait.Observe(absl::Now() - began);
    replies->push_back([reply, response = std::move(response)] { reply(response); });
    return true;
  };
  waiter.expire = [this, reply, deadline, patience, rank = request.rank()](Replies* replies) {
    mu_.AssertHeld();
    if (deadline < patience) {
      replies->push_back([reply] { reply(DeadlinePassed("the step to be prepared")); });
    } else {
      replies->push_back([reply, response = machine_->Pending(rank)] { reply(response); });
    }
  };
  waiter.refuse = [reply](const absl::Status& status, Replies* replies) {
    replies->push_back([reply, status] { reply(status); });
  };
  Locked([&](Replies* replies) {
    mu_.AssertHeld();
    waiting_.Submit(std::move(waiter), &machine_queue_, replies);
  });
}

void Job::Commit(const v1::CommitRequest& request, Reply<v1::CommitResponse> reply) {
  Ask<v1::CommitResponse>(
      request.ByteSizeLong(),
      [this, request]() -> Outcome<v1::CommitResponse> {
        mu_.AssertHeld();
        BALLAST_RETURN_IF_ERROR(MakeJournalRoom(1, request.ByteSizeLong() + kDecisionBytesMax));
        BALLAST_ASSIGN_OR_RETURN(v1::CommitResponse response, machine_->Commit(request));
        return response;
      },
      absl::InfiniteFuture(), "", std::move(reply));
}

void Job::AwaitApplied(int64_t version, std::optional<uint32_t> unit, absl::Time deadline,
                       Reply<v1::CommitResponse> reply) {
  Ask<v1::CommitResponse>(
      0,
      [this, version, unit]() -> Outcome<v1::CommitResponse> {
        mu_.AssertHeld();
        const bool all = updated_ >= version || (machine_->committed() >= version && updates_queued_ == 0);
        const auto shows = [&](const auto& chunk) { return chunk->layout.unit != *unit || *chunk->version >= version; };
        if (!all && !(unit.has_value() && std::all_of(chunks_.begin(), chunks_.end(), shows))) return std::nullopt;
        v1::CommitResponse response;
        response.set_committed(machine_->committed());
        return response;
      },
      deadline, absl::StrCat("version ", version, " to be applied"), std::move(reply));
}

// For pins.cc and durable_pins.cc.
template void Job::Ask(uint64_t, std::function<Outcome<v1::PinResponse>()>, absl::Time, const std::string&,
                       Reply<v1::PinResponse>);
template void Job::Ask(uint64_t, std::function<Outcome<v1::UnpinResponse>()>, absl::Time, const std::string&,
                       Reply<v1::UnpinResponse>);

}  // namespace ballast::services
