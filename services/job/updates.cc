#include "ballast/services/job/updates.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <array>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ballast/proto/base/status.h"
#include "ballast/services/job/copies.h"
#include "ballast/services/job/damaged_chunks.h"
#include "ballast/services/job/read_pins.h"
#include "ballast/services/job/step_work.h"
#include "ballast/services/job_state/job_core.h"
#include "ballast/services/job_state/job_entry.h"
#include "ballast/services/job_state/slice_room.h"
#include "ballast/services/journal/flushes.h"
#include "ballast/services/journal/job_journal.h"
#include "ballast/services/space/chunk_moves.h"
#include "ballast/storage/store/state_update.h"

namespace ballast::services {
namespace {

uint64_t LoggedBytes(const storage::ChunkUpdate& update) {
  uint64_t bytes = update.logged_gradient.has_value() ? update.logged_gradient->bytes : 0;
  for (const storage::ChunkUpdate::LoggedValues& values : update.logged_values) bytes += values.place.bytes;
  return bytes;
}

// What the buffers have in the trainer's memory is there still, and the trainer does not take it back from here on.
absl::Status UseLent(const StepWork& work) {
  for (const Intake::Buffers& buffers : work.buffers) {
    for (const std::shared_ptr<SliceMemory::Buffer>& buffer : buffers) {
      if (buffer->lent() == nullptr || buffer->lent()->Use()) continue;
      return model::Error(absl::StatusCode::kFailedPrecondition, model::kStateLost,
                          "the trainer took gradients back that it had lent for this step");
    }
  }
  return absl::OkStatus();
}

// The store has applied the chunk's update. Error: lent `buffers` no longer hold what was pushed, so the chunk may not
// be announced.
absl::Status CheckUnchanged(const Intake::Buffers& buffers, const HeldChunk& chunk, kernels::ThreadPool* compute) {
  for (const std::shared_ptr<SliceMemory::Buffer>& buffer : buffers) {
    if (buffer->lent() == nullptr) continue;
    const uint32_t crc32c = storage::DigestBytes({buffer->data(), buffer->bytes()}, {.pool = compute, .poll = [] {}});
    if (crc32c == buffer->crc32c()) continue;
    return model::Error(
        absl::StatusCode::kDataLoss, model::kChecksum,
        absl::StrCat("the trainer lent the gradient of chunk ", chunk.id,
                     " and changed it before its update had ended: the CRC32C was ", buffer->crc32c(),
                     " when it came, and ", crc32c,
                     " after the update. Lent gradients must stay unchanged until their owner is dropped"));
  }
  return absl::OkStatus();
}

}  // namespace

bool Updates::full() const { return queued_ >= kQueuedStepsMax; }

bool Updates::Show(int64_t version, std::optional<uint32_t> unit) const {
  if (updated_ >= version || (core_->machine->committed() >= version && queued_ == 0)) return true;
  return unit.has_value() &&
         std::all_of(core_->state.chunks().begin(), core_->state.chunks().end(),
                     [&](const auto& chunk) { return chunk->layout().unit != *unit || *chunk->version() >= version; });
}

std::shared_ptr<LentMemory> Updates::TakeLent(const v1::PreparedRecord& prepared) {
  if (core_->state.lent() == nullptr || core_->state.lent()->request().step != prepared.step() ||
      model::Compare(core_->state.lent()->request().epoch, prepared.epoch()) != 0) {
    return nullptr;
  }
  core_->state.lent()->applied = true;
  return core_->state.lent();
}

std::shared_ptr<StepWork> Updates::Prepare(const v1::PreparedRecord& prepared, const v1::Decision& decision) {
  const std::shared_ptr<LentMemory> lent = TakeLent(prepared);
  // The log need not have slices of a skipped step any more.
  if (core_->state.recovering() && !decision.verdict().skip()) {
    VoidGivenUp(prepared);
    GiveUpUnheld(prepared);
  }
  auto work = std::make_shared<StepWork>(WorkOf({.chunks = core_->state.chunks(),
                                                 .layout = &core_->state.store()->layout(),
                                                 .seed = core_->state.plan()->open().spec().seed(),
                                                 .tensor_steps = core_->machine->tensor_steps(),
                                                 .lent = lent.get(),
                                                 .logged = core_->recoverable(),
                                                 .has_copies = HasCopies(*core_->state.plan())},
                                                prepared, decision));
  if (lent != nullptr) work->lent = lent->Use();
  if (core_->state.recovering()) work->incomplete = CheckAllHeld(*work, prepared);
  room_->Expect(Commit(*work, core_->state.chunks(), !core_->around.working_copies && !core_->recoverable()));
  return work;
}

void Updates::VoidGivenUp(const v1::PreparedRecord& prepared) {
  if (!core_->state.plan()->open().has_table()) return;
  for (const auto& chunk : core_->state.chunks()) {
    const bool has_state = chunk->came_back().has_value() || *chunk->version() >= prepared.step();
    if (has_state || chunk->intake.Holds(prepared.header(), prepared.attempt())) continue;
    chunk->Void(*chunk->version());
  }
}

void Updates::GiveUpUnheld(const v1::PreparedRecord& prepared) {
  if (prepared.header().kind() == v1::STEP_KIND_RESTORE) return;
  for (const auto& chunk : core_->state.chunks()) {
    if (!chunk->filled() || !core_->machine->HasOtherHolder(chunk->id)) continue;
    const absl::Status held = CheckHeld(*chunk, prepared);
    if (held.ok()) continue;
    const bool fills = core_->machine->unfilled().contains(chunk->id);
    fills ? chunk->Void(*chunk->version()) : chunk->Damage(held);
  }
}

absl::Status Updates::CheckAllHeld(const StepWork& work, const v1::PreparedRecord& prepared) const {
  for (const auto& chunk : work.changed) {
    if (chunk->filled()) BALLAST_RETURN_IF_ERROR(CheckHeld(*chunk, prepared));
  }
  return absl::OkStatus();
}

absl::Status Updates::CheckHeld(const HeldChunk& chunk, const v1::PreparedRecord& prepared) const {
  const int64_t restored = prepared.header().restored_version();
  if (*chunk.version() < prepared.step() && prepared.header().kind() == v1::STEP_KIND_RESTORE &&
      core_->machine->FindPin(restored) == nullptr) {
    return model::Error(absl::StatusCode::kDataLoss, model::kDiverged,
                        absl::StrCat("version ", restored, ", which step ", prepared.step(),
                                     " restores, is not pinned any more in the catalog of job '", core_->name, "'"));
  }
  if (*chunk.version() >= prepared.step() || chunk.intake.Holds(prepared.header(), prepared.attempt())) {
    return absl::OkStatus();
  }
  return model::Error(absl::StatusCode::kDataLoss, model::kDiverged,
                      absl::StrCat("chunk ", chunk.id, " of job '", core_->name, "' is at version ", *chunk.version(),
                                   ", and the log ", journal_->log_path(), " does not hold all slices that step ",
                                   prepared.step(), " applies to it. Run `ballastctl verify --rebuild`"));
}

void Updates::PassOverOthers(StepWork* work, Replies* replies) {
  const PassedOverUpdates passed = ballast::services::PassOverOthers(work);
  for (const auto& chunk : passed.chunks) {
    core_->waiting.Wake(&chunk->pulls, replies);
    core_->WakePushes(chunk.get(), replies);
  }
  for (size_t i = 0; i < passed.buffers; ++i) room_->Returned(replies);
}

absl::Status Updates::PrepareReadBack(StepWork* work) {
  std::vector<uint64_t> elements;
  for (const auto& chunk : work->touched) elements.push_back(chunk->elements);
  BALLAST_ASSIGN_OR_RETURN(work->read_back, room_->PrepareReadBack(work->updates, elements));
  return absl::OkStatus();
}

void Updates::Post(std::shared_ptr<StepWork> work) {
  ++queued_;
  core_->counters.steps.Decided(work->step);
  core_->worker->Post([this, work = std::move(work)] { RunStep(work.get()); });
}

void Updates::RunStep(StepWork* work) {
  std::shared_ptr<storage::ChunkStore> store;
  const storage::BlockFile* log = nullptr;  // stays until the worker has ended
  bool refused = false;
  core_->LockedOnWorker([&](Replies* replies) {
    core_->mu.AssertHeld();
    refused = !core_->Refusal().ok();
    if (refused) return;
    store = core_->state.store();
    log = journal_->file();
    PassOverOthers(work, replies);
    for (const auto& chunk : work->touched) chunk->BeginUpdate();
    for (const auto& chunk : work->untouched) {
      chunk->Reach(work->step);
      core_->waiting.Wake(&chunk->pulls, replies);
    }
    if (!work->updates.empty()) return;
    work->lent = nullptr;
    updated_ = work->step;
    core_->Moved();
  });
  if (refused) return;
  StepLog& steps = core_->counters.steps;
  const Working working(&steps.clock(), Stage::kKernel);
  steps.UpdateBegan(work->step);
  const std::vector<uint64_t> others = flushes_->Mark(store.get(), work->step, absl::MakeSpan(work->updates));
  absl::Status status = PrepareReadBack(work);
  if (status.ok()) status = Run(store.get(), work, log);
  work->lent = nullptr;  // also after an error: a trainer has its memory back before anything else blocks
  steps.Updated(work->step);
  steps.clock().SetWorker(Stage::kFlush);
  if (status.ok()) flushes_->SetApplied(work->step);
  if (status.ok()) status = flushes_->Run(store.get(), others);
  if (status.ok()) status = flushes_->Harden(store.get());
  if (status.ok()) flushes_->Cut(*store);
  steps.Flushed(work->step);
  if (status.ok()) NoteCommitted(work->step);
  if (status.ok()) log_length_.AfterStep(*store);
  core_->LockedOnWorker([&](Replies* replies) {
    core_->mu.AssertHeld();
    --queued_;
    core_->Moved();
    moves_->Resume();  // moves may have found no room before this step
    if (!status.ok()) {
      core_->Fail(model::Annotate(status, absl::StrCat("step ", work->step, " could not be applied to its chunks")),
                  core_->Remedy(), replies);
    }
  });
}

void Updates::NoteCommitted(int64_t step) {
  const absl::Status written = WriteCommitted(core_->around.catalog, core_->name, step);
  if (written.ok() || std::exchange(said_unwritten_, true)) return;
  spdlog::error("job '{}' goes on from step {} until it next needs the catalog, which takes no more writes: {}",
                core_->name, step, std::string(written.message()));
}

// Chunks without leases do not wait for those with leases: these come last, as their leases end.
absl::StatusOr<size_t> Updates::AwaitLeases(StepWork* work, size_t first) {
  size_t free = PutLeasedLast(work, first);
  if (free > 0) return free;
  StepClock& clock = core_->counters.steps.clock();
  clock.SetUpdate(Stage::kIdle);  // it is the trainer who reads
  const absl::Status status = core_->leases->Await(
      [&] {
        return std::any_of(work->touched.begin() + static_cast<std::ptrdiff_t>(first), work->touched.end(),
                           [](const auto& chunk) { return chunk->leases.held() == 0; });
      },
      [this] { return core_->Interrupted(); });
  clock.SetUpdate(Stage::kKernel);
  BALLAST_RETURN_IF_ERROR(status);
  return PutLeasedLast(work, first);
}

absl::Status Updates::LoadMoments(storage::ChunkStore* store, StepWork* work) {
  std::vector<uint64_t> chunks;
  {
    JobMutexLock lock(&core_->mu);
    if (!core_->state.plan()->open().has_table()) return absl::OkStatus();
    for (size_t i = 0; i < work->updates.size(); ++i) {
      const bool left = work->touched[i]->came_back().has_value() && !work->updates[i].replaces();
      if (left) chunks.push_back(work->updates[i].chunk);
    }
  }
  if (chunks.empty()) return absl::OkStatus();
  std::vector<std::pair<uint64_t, absl::Status>> damaged;
  const auto dispensable = [&](size_t i, const absl::Status& found) {
    if (!damaged_->MayGiveUp(chunks[i])) return false;
    damaged.emplace_back(chunks[i], found);
    return true;
  };
  core_->counters.steps.clock().SetUpdate(Stage::kStateRead);
  BALLAST_RETURN_IF_ERROR(store->LoadMoments(chunks, dispensable));
  core_->counters.steps.clock().SetUpdate(Stage::kKernel);
  for (const auto& [chunk, found] : damaged) BALLAST_RETURN_IF_ERROR(damaged_->GiveUp(store, chunk, found));
  if (damaged.empty()) return absl::OkStatus();
  core_->LockedOnWorker([&](Replies* replies) {
    core_->mu.AssertHeld();
    PassOverOthers(work, replies);
    if (!work->updates.empty()) return;
    updated_ = work->step;
    core_->Moved();
  });
  return absl::OkStatus();
}

absl::Status Updates::Run(storage::ChunkStore* store, StepWork* work, const storage::BlockFile* log) {
  storage::ReadBack read_back{.log = log, .memory = {}};
  if (work->read_back != nullptr) read_back.memory = {work->read_back->data(), work->read_back->bytes()};
  // A restore reads the whole state, and a restart finds it decided, or the state lost: either brings it once more. Any
  // other update is finished, unless the job fails for it: it takes no longer than a step, and may write to memory that
  // the trainer lends.
  const bool restores = std::any_of(work->updates.begin(), work->updates.end(),
                                    [](const storage::ChunkUpdate& update) { return update.restored.has_value(); });
  absl::Status changed;  // a lent gradient: no later update begins, and none that has begun is announced
  const auto interrupt = [&] {
    if (!changed.ok()) return changed;
    return restores ? core_->Interrupted() : absl::OkStatus();
  };
  BALLAST_RETURN_IF_ERROR(LoadMoments(store, work));
  BALLAST_RETURN_IF_ERROR(UseLent(*work));
  size_t finished = 0;
  const auto done = [&](size_t) {
    const size_t i = finished++;
    if (changed.ok()) changed = CheckUnchanged(work->buffers[i], *work->touched[i], core_->around.compute);
    if (!changed.ok()) return;
    // Before the next step's slices of this chunk come: the reservation holds either.
    const size_t returned = std::exchange(work->buffers[i], {}).size();
    if (finished == work->updates.size()) work->lent = nullptr;
    Done(work, i, returned, absl::OkStatus());
  };
  HeldChunks damaged;
  const auto dispensable = [&](size_t, const absl::Status& found) {
    if (!damaged_->MayGiveUp(work->updates[finished].chunk)) return false;
    const size_t i = finished++;
    damaged.push_back(work->touched[i]);
    Done(work, i, std::exchange(work->buffers[i], {}).size(), found);
    return true;
  };
  const auto entered = [clock = &core_->counters.steps.clock()](storage::RunStage stage) {
    static constexpr std::array<Stage, storage::kRunStages> kOf = {Stage::kKernel, Stage::kStateRead,
                                                                   Stage::kStateWrite, Stage::kPin};
    clock->SetUpdate(kOf[static_cast<size_t>(stage)]);
  };
  const storage::TierKind copies =
      core_->around.tiers->nvme() != nullptr ? storage::TierKind::kNvme : storage::TierKind::kDram;
  for (;;) {
    if (finished == work->updates.size()) break;
    BALLAST_ASSIGN_OR_RETURN(const size_t free, AwaitLeases(work, finished));
    const auto left = absl::MakeConstSpan(work->updates).subspan(finished, free);
    // Without space for a pinned copy, the chunk and all later chunks are untouched: the pin yields, not the training.
    std::shared_ptr<void> lease;
    const absl::Status may = core_->MayGrow(copies, store->CopyBytes(left), &lease);
    if (!may.ok() && pins_->GiveUpOldest(store, may)) continue;
    const absl::Status status = store->Run(left, done, read_back, interrupt, entered, dispensable);
    if (!changed.ok()) return changed;
    if (status.ok()) continue;
    if (!absl::IsResourceExhausted(status) || !pins_->GiveUpOldest(store, status)) return status;
  }
  for (const auto& chunk : damaged) BALLAST_RETURN_IF_ERROR(damaged_->End(store, chunk));
  return absl::OkStatus();
}

void Updates::Done(StepWork* work, size_t i, size_t returned, const absl::Status& damage) {
  const bool last = i + 1 == work->updates.size();
  core_->LockedOnWorker([&](Replies* replies) {
    core_->mu.AssertHeld();
    if (work->replayed) work->replayed(LoggedBytes(work->updates[i]));
    if (last) {
      updated_ = work->step;
      core_->Moved();
    }
    HeldChunk& chunk = *work->touched[i];
    // Somebody may wait for a unit.
    if (!last && work->touched[i + 1]->layout().unit != chunk.layout().unit) core_->Moved();
    if (damage.ok()) {
      chunk.EndUpdate(work->step);
      const std::optional<storage::ArrayDigests>* const digests = work->updates[i].digests;
      if (digests != nullptr && digests->has_value()) chunk.SetDigested({.version = work->step, .arrays = **digests});
    } else {
      chunk.Damage(damage);
      chunk.PassOverUpdate(work->step);
    }
    core_->waiting.Wake(&chunk.pulls, replies);
    core_->WakePushes(&chunk, replies);
    for (size_t buffer = 0; buffer < returned; ++buffer) room_->Returned(replies);
  });
}

}  // namespace ballast::services
