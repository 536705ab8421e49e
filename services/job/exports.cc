#include "ballast/services/job/exports.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/services/job/damaged_chunks.h"
#include "ballast/services/job/kept_copies.h"
#include "ballast/services/job/waiter.h"
#include "ballast/services/job_state/job_core.h"

namespace ballast::services {

Exports::Exports(JobCore* core, DamagedChunks* damaged)
    : core_(core), damaged_(damaged), room_(core->around.answer_room, core->around.answers) {}

void Exports::Export(const v1::ExportRequest& request, const CallLimit& limit, Reply<ExportedChunk> reply) {
  const auto wanted = std::make_shared<Request>(
      Request{.least = request.least(), .bytes = request.ByteSizeLong(), .limit = limit, .reply = reply});
  if (request.has_kept_version()) wanted->kept_version = request.kept_version();
  core_->EnterAnew(
      wanted->bytes,
      [this, request, wanted](Replies* replies) {
        core_->mu.AssertHeld();
        Begin(request, wanted, replies);
      },
      reply);
}

absl::Status Exports::CheckJob(const v1::ExportRequest& request) const {
  BALLAST_RETURN_IF_ERROR(core_->Refusal());
  const std::string who = absl::StrCat("job '", core_->name, "' on server '", core_->around.server_id, "'");
  const model::EpochPlan* const plan = core_->state.plan().get();
  if (plan == nullptr) {
    return model::Error(absl::StatusCode::kFailedPrecondition, model::kNotOpen,
                        absl::StrCat(who, " was not opened yet"));
  }
  if (request.life() == 0 || request.life() != plan->open().table().life()) {
    return model::Error(absl::StatusCode::kNotFound, model::kUnknownJob,
                        absl::StrCat(who,
                                     " is not the job that the asking server has: the name was dropped and made "
                                     "again"));
  }
  if (request.spec_digest() != plan->open().spec_digest()) {
    return model::Error(absl::StatusCode::kFailedPrecondition, model::kBehind,
                        absl::StrCat(who, " has not opened the spec of the asking server's epoch, or has a later one: ",
                                     "ask again once the job's group has opened both"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<HeldChunk>> Exports::Find(const v1::ExportRequest& request) const {
  BALLAST_RETURN_IF_ERROR(CheckJob(request));
  if (std::shared_ptr<HeldChunk> chunk = core_->state.Find(request.chunk()); chunk != nullptr) return chunk;
  return model::Error(
      absl::StatusCode::kInvalidArgument, model::kBadRequest,
      absl::StrCat("job '", core_->name, "' on server '", core_->around.server_id, "' does not have chunk ",
                   request.chunk(), " of ", core_->state.plan()->layout().chunks().size()));
}

absl::StatusOr<ExportedChunk> Exports::TellKept(const v1::ExportRequest& request) const {
  BALLAST_RETURN_IF_ERROR(CheckJob(request));
  if (!KeptCopies::HoldersOf(*core_->state.plan()).contains(core_->around.server_id)) {
    return model::Error(absl::StatusCode::kUnavailable, model::kBusy,
                        absl::StrCat("server '", core_->around.server_id, "' holds nothing of job '", core_->name,
                                     "' yet, and may not know all kept versions"));
  }
  ExportedChunk told;
  for (const auto& [version, pin] : core_->machine->pins()) {
    v1::ExportResponse::Kept* const kept = told.head.add_kept();
    *kept->mutable_decision() = pin.decision();
    *kept->mutable_tensor_steps() = pin.tensor_steps();
    kept->set_registration_count(pin.registration_count());
  }
  return told;
}

absl::Status Exports::CheckHas(const std::shared_ptr<HeldChunk>& chunk) const {
  BALLAST_RETURN_IF_ERROR(core_->Refusal());
  BALLAST_RETURN_IF_ERROR(core_->machine->StateStatus());
  const uint64_t index = chunk->layout().index;
  const bool here = core_->state.Find(index) == chunk;
  if (here && chunk->filled()) return absl::OkStatus();
  if (here && core_->machine->unfilled().contains(index) && core_->machine->IsHolder(index)) {
    absl::Status lost = model::Error(absl::StatusCode::kFailedPrecondition, model::kNotFilled,
                                     absl::StrCat("what server '", core_->around.server_id, "' had of chunk ", index,
                                                  " of job '", core_->name, "' is damaged, and it copies the chunk"));
    model::SetDetail(model::kLostChunk, absl::StrCat(index), &lost);
    return lost;
  }
  return model::Error(absl::StatusCode::kFailedPrecondition, model::kNotOpen,
                      absl::StrCat("server '", core_->around.server_id, "' lacks chunk ", index, " of job '",
                                   core_->name, "': it copies the chunk itself, or gave it up"));
}

void Exports::Begin(const v1::ExportRequest& request, const RequestPtr& wanted, Replies* replies) {
  if (request.tell_kept()) {
    return replies->push_back([reply = wanted->reply, told = TellKept(request)]() mutable { reply(std::move(told)); });
  }
  const absl::StatusOr<std::shared_ptr<HeldChunk>> chunk = Find(request);
  if (!chunk.ok()) return replies->push_back([reply = wanted->reply, status = chunk.status()] { reply(status); });
  wanted->chunk = *chunk;
  const storage::StateLayout layout = core_->state.store()->layout().Of((*chunk)->form);
  wanted->state_bytes = layout.StateBytes((*chunk)->elements);
  Park(
      wanted,
      [this, wanted](Replies* out) {
        core_->mu.AssertHeld();
        return Try(wanted, out);
      },
      [this, wanted] {
        core_->mu.AssertHeld();
        return absl::StrCat("chunk ", wanted->chunk->layout().index, " was at version ", *wanted->chunk->version(),
                            ", wanted at ", wanted->least, " or later", core_->LeaseWait());
      },
      &(*chunk)->pulls, replies);
}

void Exports::Park(const RequestPtr& wanted, std::function<bool(Replies*)> ready,
                   std::function<std::string()> waits_for, Waiting::Queue* queue, Replies* replies) {
  core_->waiting.Submit(MakeWaiter(wanted->bytes, wanted->limit, wanted->reply, std::move(ready), std::move(waits_for)),
                        queue, replies);
}

bool Exports::Try(const RequestPtr& wanted, Replies* replies) {
  absl::Status status = CheckHas(wanted->chunk);
  const bool newest = !wanted->kept_version.has_value();
  if (status.ok() && newest && *wanted->chunk->version() < wanted->least) return false;
  if (status.ok() && wanted->room == nullptr) wanted->room = room_.Take(wanted->state_bytes);
  if (status.ok() && wanted->room == nullptr) {
    replies->push_back([this, job = core_->owner().lock(), wanted] { AwaitRoom(wanted); });
    return true;
  }
  if (status.ok()) status = PostRead(wanted);
  if (!status.ok()) replies->push_back([reply = wanted->reply, status] { reply(status); });
  return true;
}

void Exports::AwaitRoom(const RequestPtr& wanted) {
  core_->Enter([this, wanted](Replies* replies) {
    core_->mu.AssertHeld();
    // As in Pulls: whoever grants the room keeps neither the job nor the request.
    wanted->ticket = room_.Await(wanted->state_bytes, [this, job = core_->owner(),
                                                       waits = std::weak_ptr<Request>(wanted)](AnswerRoom::Lease room) {
      const std::shared_ptr<const void> alive = job.lock();
      const RequestPtr granted = waits.lock();
      if (alive == nullptr || granted == nullptr) return;
      core_->Enter([this, granted, room = std::move(room)](Replies* out) mutable {
        core_->mu.AssertHeld();
        granted->room = std::move(room);
        core_->waiting.Wake(&awaiting_room_, out);
      });
    });
    Park(
        wanted,
        [this, wanted](Replies* out) {
          core_->mu.AssertHeld();
          return (wanted->room != nullptr || !core_->Refusal().ok()) && Try(wanted, out);
        },
        [bytes = wanted->state_bytes] {
          return absl::StrCat("the state of ", bytes, " bytes waited for room: other answers are being sent");
        },
        &awaiting_room_, replies);
  });
}

absl::Status Exports::PostRead(const RequestPtr& wanted) {
  // Until the worker is there, the export counts as a request that waits.
  BALLAST_ASSIGN_OR_RETURN(std::shared_ptr<void> place, core_->waiting.places()->Hold(wanted->bytes));
  core_->worker->Post([this, wanted, place = std::move(place)]() mutable {
    place = nullptr;
    wanted->reply(Read(wanted));
  });
  return absl::OkStatus();
}

absl::Status Exports::Describe(const Request& wanted, v1::ExportResponse* head) const {
  BALLAST_RETURN_IF_ERROR(CheckHas(wanted.chunk));
  head->set_elements(wanted.chunk->elements);
  if (!wanted.kept_version.has_value()) {
    head->set_version(*wanted.chunk->version());
    // After a restart the disk may have a step whose decision the log has lost: then that step may be the last change.
    const int64_t version = *wanted.chunk->version();
    head->set_changed(version > core_->machine->committed() ? version : wanted.chunk->changed());
    return absl::OkStatus();
  }
  if (core_->machine->FindPin(*wanted.kept_version) != nullptr) return absl::OkStatus();
  return model::Error(absl::StatusCode::kFailedPrecondition, model::kVersionGone,
                      absl::StrCat("server '", core_->around.server_id, "' does not keep version ",
                                   *wanted.kept_version, " of job '", core_->name, "'"));
}

// No update runs meanwhile: the worker is here.
absl::StatusOr<ExportedChunk> Exports::Read(const RequestPtr& wanted) {
  if (wanted->limit.caller != nullptr && wanted->limit.caller->gone()) {
    return absl::CancelledError("the asking server is gone");
  }
  ExportedChunk exported{.room = std::move(wanted->room)};
  const uint64_t index = wanted->chunk->store_index;
  std::shared_ptr<storage::ChunkStore> store;
  {
    JobMutexLock lock(&core_->mu);
    BALLAST_RETURN_IF_ERROR(Describe(*wanted, &exported.head));
    store = core_->state.store();
  }
  if (wanted->kept_version.has_value()) {
    BALLAST_ASSIGN_OR_RETURN(storage::KeptState kept, store->ReadKept(*wanted->kept_version, index));
    exported.head.set_version(kept.version);
    exported.state = std::move(kept.state);
  } else {
    absl::StatusOr<storage::WholeState> state = store->ReadWhole(index);
    BALLAST_RETURN_IF_ERROR(damaged_->Found(wanted->chunk, state.status()));
    exported.state = *std::move(state);
  }
  for (const storage::WholeState::Array& array : exported.state.arrays) {
    core_->counters.exported_bytes.fetch_add(array.bytes.size(), std::memory_order_relaxed);
  }
  return exported;
}

}  // namespace ballast::services
