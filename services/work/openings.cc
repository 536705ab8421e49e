#include "ballast/services/work/openings.h"

#include <optional>
#include <vector>

#include "ballast/proto/model/status.h"
#include "ballast/services/records/log_records.h"
#include "ballast/storage/faults/failpoint.h"

namespace ballast::services {

Outcome<v1::OpenResponse> Openings::Try(const v1::OpenRequest& request) {
  const v1::Epoch promised = core_->machine->Describe().promised();
  const model::EpochPlan* open = core_->machine->plan();
  const bool is_open = open != nullptr && model::Compare(open->open().epoch(), request.epoch()) == 0;
  // Repeats and requests out of turn take no space: the machine alone answers them.
  const bool in_turn = !is_open && model::Compare(promised, request.epoch()) == 0;
  if (!in_turn && !request.dry_run()) return core_->machine->Open(request);
  const std::string bytes = request.SerializeAsString();
  if (opening_ == nullptr) {
    opening_ = std::make_unique<Opening>();
    opening_->request = bytes;
    core_->clerk->Post([this, request] { Prepare(request); });
    return std::nullopt;
  }
  if (!opening_->done || opening_->request != bytes) return std::nullopt;
  BALLAST_RETURN_IF_ERROR(opening_->status);
  if (request.dry_run()) return opening_->answer;
  // The job's first Open only now has a journal.
  BALLAST_RETURN_IF_ERROR(journal_->MakeRoom(2, request.ByteSizeLong() + kDecisionBytesMax));
  return core_->machine->Open(request, opening_->plan);
}

void Openings::Prepare(const v1::OpenRequest& request) {
  absl::Status status = Space::CheckSupported(request.spec());
  std::shared_ptr<const model::EpochPlan> plan;
  if (status.ok()) {
    absl::StatusOr<model::EpochPlan> made = model::EpochPlan::Make(request);
    status = made.status();
    if (status.ok()) plan = std::make_shared<const model::EpochPlan>(*std::move(made));
  }
  core_->LockedOnWorker([&](Replies* replies) {
    core_->mu.AssertHeld();
    if (!status.ok()) return Finish(status, replies);
    opening_->plan = plan;
    std::optional<Space::Chunks> held;
    if (!request.dry_run()) held = space_->AllHeld(*plan);
    if (held.has_value()) return Finish(*std::move(held), replies);
    core_->worker->Post([this, plan] { TakeSpace(plan); });
  });
}

void Openings::TakeSpace(const std::shared_ptr<const model::EpochPlan>& plan) {
  v1::OpenResponse answer;
  absl::StatusOr<Space::Chunks> chunks = space_->Take(*plan, plan->open().dry_run() ? &answer : nullptr);
  storage::Pass("fence/space_taken");
  core_->LockedOnWorker([&](Replies* replies) {
    core_->mu.AssertHeld();
    opening_->answer = std::move(answer);
    Finish(std::move(chunks), replies);
  });
}

void Openings::Finish(absl::StatusOr<Space::Chunks> chunks, Replies* replies) {
  opening_->done = true;
  opening_->status = chunks.status();
  if (chunks.ok()) opening_->chunks = *std::move(chunks);
  core_->waiting.Wake(&core_->machine_queue, replies);
  if (!opening_->adopted) space_->KeepSpares(opening_->chunks);
  opening_.reset();
  core_->moved = true;  // another Open may have waited for the end of this Open
}

void Openings::Opened(std::shared_ptr<const model::EpochPlan> plan) {
  core_->plan = std::move(plan);
  core_->chunks = opening_->chunks;
  opening_->adopted = true;
  core_->lent = nullptr;
  core_->by_index.clear();
  const model::EpochPlan& open = *core_->plan;
  const std::vector<uint64_t> indices = ChunksOf(open, core_->around.server_id);
  for (size_t i = 0; i < core_->chunks.size(); ++i) {
    HeldChunk& chunk = *core_->chunks[i];
    chunk.layout = open.layout().chunks()[indices[i]];
    chunk.intake.Reset(chunk.layout, open);
    if (!chunk.version.has_value()) {
      chunk.version = open.open().base();
      chunk.first_version = open.open().base();
    }
    if (core_->machine->state_lost()) {
      // State was lost: the chunk holds no version that anybody may see.
      chunk.version = core_->machine->committed();
      chunk.first_version = core_->machine->committed() + 1;
    }
    core_->by_index[indices[i]] = core_->chunks[i];
  }
  journal_->Opened();
}

absl::Status Openings::Replay(Space::Chunks chunks, absl::FunctionRef<absl::Status()> open) {
  opening_ = std::make_unique<Opening>();
  opening_->chunks = std::move(chunks);
  const absl::Status status = open();
  opening_.reset();
  return status;
}

}  // namespace ballast::services
