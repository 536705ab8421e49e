#include "ballast/services/space/openings.h"

#include <utility>
#include <vector>

#include "ballast/proto/base/status.h"
#include "ballast/proto/model/brief_open.h"
#include "ballast/services/job_state/job_core.h"
#include "ballast/services/journal/job_journal.h"
#include "ballast/services/journal/log_records.h"
#include "ballast/services/space/space.h"

namespace ballast::services {

Outcome<v1::OpenResponse> Openings::Try(const v1::OpenRequest& request) {
  const v1::Epoch promised = core_->machine->promised();
  const model::EpochPlan* open = core_->machine->plan();
  const bool is_open = open != nullptr && model::Compare(open->open().epoch(), request.epoch()) == 0;
  // Repeats and requests out of turn take no space: the machine alone answers them.
  const bool in_turn = !is_open && model::Compare(promised, request.epoch()) == 0;
  if (!in_turn) return core_->machine->Open(request);
  const std::string bytes = request.SerializeAsString();
  if (opening_ == nullptr) {
    opening_ = std::make_unique<Opening>();
    opening_->request = bytes;
    core_->clerk->Post([this, request] { Prepare(request); });
    return std::nullopt;
  }
  if (!opening_->done || opening_->request != bytes) return std::nullopt;
  BALLAST_RETURN_IF_ERROR(opening_->status);
  // The job's first Open only now has a journal.
  const uint64_t open_bytes = opening_->plan->open().ByteSizeLong();
  BALLAST_RETURN_IF_ERROR(journal_->MakeRoom(2, open_bytes + kDecisionBytesMax));
  return core_->machine->Open(request, opening_->plan);
}

absl::StatusOr<Openings::Plan> Openings::MakePlan(const v1::OpenRequest& request,
                                                  absl::FunctionRef<absl::Status()> interrupt) const {
  Plan before;
  {
    JobMutexLock lock(&core_->mu);
    before = core_->state.plan();
  }
  // The spec of a brief Open is one that was supported.
  if (!model::IsBrief(request)) BALLAST_RETURN_IF_ERROR(CheckSupported(request, core_->around.working_copies));
  BALLAST_ASSIGN_OR_RETURN(model::EpochPlan made, model::EpochPlan::Make(request, interrupt, before.get()));
  return std::make_shared<const model::EpochPlan>(std::move(made));
}

void Openings::Prepare(const v1::OpenRequest& request) {
  const absl::StatusOr<Plan> plan = MakePlan(request, [this] { return core_->Interrupted(); });
  core_->LockedOnWorker([&](Replies* replies) {
    core_->mu.AssertHeld();
    if (!plan.ok()) return Finish(plan.status(), replies);
    opening_->plan = *plan;
    std::optional<HeldChunks> held = space_->AllHeld(**plan);
    if (held.has_value()) return Finish(*std::move(held), replies);
    core_->worker->Post([this, plan = *plan] { TakeSpace(plan); });
  });
}

void Openings::TakeSpace(const Plan& plan) {
  absl::StatusOr<HeldChunks> chunks = space_->Take(*plan);
  core_->LockedOnWorker([&](Replies* replies) {
    core_->mu.AssertHeld();
    Finish(std::move(chunks), replies);
  });
}

Outcome<v1::OpenResponse> Openings::Try(const std::shared_ptr<DryRun>& run) {
  if (run->answer.has_value()) {
    BALLAST_RETURN_IF_ERROR(run->answer->status());
    return **run->answer;
  }
  if (std::exchange(run->asked, true)) return std::nullopt;
  // A request that runs out of time takes its bytes along.
  asking_[run->identity].push_back(run);
  core_->clerk->Post([this] { AskNext(); });
  return std::nullopt;
}

void Openings::AskNext() {
  std::shared_ptr<DryRun> next;
  {
    JobMutexLock lock(&core_->mu);
    auto turn = asking_.upper_bound(served_last_);
    if (turn == asking_.end()) turn = asking_.begin();
    served_last_ = turn->first;
    next = turn->second.front().lock();
    turn->second.pop_front();
    if (turn->second.empty()) asking_.erase(turn);
  }
  if (next != nullptr) Ask(next);
}

void Openings::Ask(const std::shared_ptr<DryRun>& run) {
  const absl::StatusOr<Plan> plan = MakePlan(run->request, [&] {
    // Only this task has it still.
    return run.use_count() == 1 ? absl::CancelledError("no request waits for the plan any more") : core_->Interrupted();
  });
  if (!plan.ok()) return Answer(run, plan.status());
  bool first_takes_space = false, reads_store = false;
  {
    JobMutexLock lock(&core_->mu);
    // No Open begins to take space before this task of the clerk ends.
    first_takes_space = core_->state.plan() == nullptr && opening_ != nullptr && opening_->plan != nullptr;
    reads_store = space_->ReadsStore(**plan);
  }
  if (first_takes_space) {
    // Its log may take minutes to write.
    v1::OpenResponse answer;
    answer.set_plan(
        "The job's first Open takes its space here. The next Open waits for its end, and finds its chunks.");
    return Answer(run, std::move(answer));
  }
  if (!reads_store) return AskForSpace(run, *plan);
  core_->worker->Post([this, waiting = std::weak_ptr<DryRun>(run), plan = *plan] {
    if (const std::shared_ptr<DryRun> still = waiting.lock()) AskForSpace(still, plan);
  });
}

void Openings::AskForSpace(const std::shared_ptr<DryRun>& run, const Plan& plan) { Answer(run, space_->Try(*plan)); }

void Openings::Answer(const std::shared_ptr<DryRun>& run, absl::StatusOr<v1::OpenResponse> answer) {
  core_->LockedOnWorker([&](Replies*) {
    core_->mu.AssertHeld();
    run->answer = std::move(answer);
    core_->Moved();
  });
}

void Openings::Finish(absl::StatusOr<HeldChunks> chunks, Replies* replies) {
  opening_->done = true;
  opening_->status = chunks.status();
  if (chunks.ok()) opening_->chunks = *std::move(chunks);
  core_->WakeMachine(replies);
  if (!opening_->adopted) space_->KeepSpares(opening_->chunks);
  opening_.reset();
  core_->Moved();  // another Open may have waited for the end of this Open
}

void Openings::Opened(std::shared_ptr<const model::EpochPlan> plan, bool keeps_slices) {
  const std::vector<uint64_t> indices = ChunksOf(*plan, core_->around.server_id);
  core_->state.Open(std::move(plan), opening_->chunks, indices, keeps_slices);
  opening_->adopted = true;
  const int64_t base = core_->state.plan()->open().base();
  for (const auto& chunk : core_->state.chunks()) {
    chunk->Register(base);
    if (core_->machine->state_lost()) chunk->Lose(core_->machine->committed());
  }
  journal_->Opened(keeps_slices);
}

absl::Status Openings::Replay(HeldChunks chunks, absl::FunctionRef<absl::Status()> open) {
  opening_ = std::make_unique<Opening>();
  opening_->chunks = std::move(chunks);
  const absl::Status status = open();
  opening_.reset();
  return status;
}

}  // namespace ballast::services
