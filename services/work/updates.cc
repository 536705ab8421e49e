#include "ballast/services/work/updates.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <array>
#include <bit>
#include <map>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ballast/kernels/optimizer.h"
#include "ballast/proto/model/optimizer.h"
#include "ballast/proto/model/status.h"
#include "ballast/services/records/job_entry.h"

namespace ballast::services {
namespace {

// Coefficients of one step: the same for all segments of a group whose tensors have had equally many updates.
class StepCoefficients {
 public:
  StepCoefficients(const kernels::OptimizerSpec& optimizer, const v1::StepHeader& header, float factor)
      : optimizer_(optimizer), header_(header), factor_(factor) {}

  const kernels::Coefficients& Get(uint32_t group, uint64_t t) {
    const auto [entry, fresh] = cache_.try_emplace({group, t});
    if (fresh) {
      const kernels::Hyper hyper = model::HyperOf(header_.groups(static_cast<int>(group)));
      entry->second = kernels::MakeCoefficients(optimizer_, hyper, t, factor_);
    }
    return entry->second;
  }

 private:
  const kernels::OptimizerSpec& optimizer_;
  const v1::StepHeader& header_;
  const float factor_;
  std::map<std::pair<uint32_t, uint64_t>, kernels::Coefficients> cache_;
};

// Does a transaction change the chunk, unless it is skipped?
bool Changes(const v1::StepHeader& header, const model::Chunk& chunk) {
  return std::any_of(chunk.segments.begin(), chunk.segments.end(), [&](const model::Segment& segment) {
    return model::HasBit(header.value_presence(), segment.tensor) ||
           (header.kind() == v1::STEP_KIND_UPDATE && model::HasBit(header.gradient_presence(), segment.tensor));
  });
}

// Values that the trainer lends.
void TakeLentValues(const LentMemory& lent, const model::Chunk& chunk, const std::string& presence, uint64_t width,
                    storage::ChunkUpdate* update) {
  for (const model::Segment& segment : chunk.segments) {
    const uint64_t at = segment.in_chunk.begin, count = segment.in_chunk.size();
    const std::byte* const from = lent.Value(chunk, segment.tensor, at);
    if (from == nullptr || !model::HasBit(presence, segment.tensor)) continue;
    storage::ChunkUpdate::Values& values = update->values.emplace_back();
    values.begin = at;
    if (lent.value_dtype(segment.tensor) == kernels::Dtype::kF32) {
      values.values = {reinterpret_cast<const float*>(from), count};
    } else {
      values.narrow = {from, count * width};
    }
  }
}

// Where values become working parameters.
void LendTo(const LentMemory& lent, const model::Chunk& chunk, storage::ChunkUpdate* update) {
  const auto lend = [&](auto& part) {
    const auto segment = std::find_if(chunk.segments.begin(), chunk.segments.end(),
                                      [&](const model::Segment& s) { return part.begin < s.in_chunk.end; });
    part.working = lent.Working(chunk, segment->tensor, part.begin);
  };
  for (storage::ChunkUpdate::Values& values : update->values) lend(values);
  for (storage::ChunkUpdate::LoggedValues& values : update->logged_values) {
    for (auto& part : values.parts) lend(part);
  }
}

uint64_t LoggedBytes(const storage::ChunkUpdate& update) {
  uint64_t bytes = update.logged_gradient.has_value() ? update.logged_gradient->bytes : 0;
  for (const storage::ChunkUpdate::LoggedValues& values : update.logged_values) bytes += values.place.bytes;
  return bytes;
}

}  // namespace

bool Updates::full() const { return queued_ >= kQueuedMax; }

bool Updates::Show(int64_t version, std::optional<uint32_t> unit) const {
  if (updated_ >= version || (core_->machine->committed() >= version && queued_ == 0)) return true;
  return unit.has_value() && std::all_of(core_->chunks.begin(), core_->chunks.end(), [&](const auto& chunk) {
           return chunk->layout.unit != *unit || *chunk->version >= version;
         });
}

std::shared_ptr<LentMemory> Updates::TakeLent(const v1::PreparedRecord& prepared) {
  if (core_->lent == nullptr || core_->lent->request().step != prepared.step() ||
      model::Compare(core_->lent->request().epoch, prepared.epoch()) != 0) {
    return nullptr;
  }
  core_->lent->applied = true;
  return core_->lent;
}

std::shared_ptr<StepWork> Updates::Prepare(const v1::PreparedRecord& prepared, const v1::Decision& decision) {
  const v1::StepHeader& header = prepared.header();
  const bool skip = decision.verdict().skip();
  const bool update = !skip && header.kind() == v1::STEP_KIND_UPDATE;
  const absl::Span<const uint64_t> tensor_steps = core_->machine->tensor_steps();  // this step counted
  StepCoefficients coefficients(core_->store->layout().optimizer(), header,
                                std::bit_cast<float>(decision.verdict().factor_bits()));
  auto work = std::make_shared<StepWork>();
  work->step = decision.step();
  const std::shared_ptr<LentMemory> lent = TakeLent(prepared);
  if (lent != nullptr) work->lent = lent->Use();
  for (const std::shared_ptr<HeldChunk>& chunk : core_->chunks) {
    // A restore leaves alone a chunk that never had a state: no pin has it.
    const bool restore = header.kind() == v1::STEP_KIND_RESTORE && chunk->changed >= 0;
    const bool changes = !skip && (restore || Changes(header, chunk->layout));
    if (changes) chunk->changed = decision.step();
    if (*chunk->version >= decision.step()) {
      // After a restart: the state on the disk is ahead of the replayed log.
      chunk->intake.Clear();
      continue;
    }
    if (core_->recovering && changes && work->incomplete.ok()) work->incomplete = CheckHeld(*chunk, prepared);
    storage::ChunkUpdate change;
    change.chunk = chunk->store_index;
    change.version = decision.step();
    change.random = {.seed = core_->plan->open().spec().seed(),
                     .unit = chunk->layout.unit,
                     .step = static_cast<uint64_t>(decision.step()),
                     .first_element = chunk->layout.range.begin};
    Intake::Buffers buffers;
    if (!skip) chunk->intake.TakeValues(header.value_presence(), prepared.attempt(), &change, &buffers);
    if (lent != nullptr && !skip && chunk->intake.lent(v1::SLICE_KIND_VALUE)) {
      TakeLentValues(*lent, chunk->layout, header.value_presence(), core_->store->layout().working_element_bytes(),
                     &change);
    }
    change.values_of = static_cast<storage::StateArray>(header.value_array());
    if (lent != nullptr && header.value_array() == 0) LendTo(*lent, chunk->layout, &change);
    const bool lends = lent != nullptr && chunk->intake.lent(v1::SLICE_KIND_GRADIENT);
    for (const model::Segment& segment : chunk->layout.segments) {
      if (!update || !model::HasBit(header.gradient_presence(), segment.tensor)) continue;
      change.segments.push_back({segment.in_chunk.begin, segment.in_chunk.end,
                                 coefficients.Get(segment.group, tensor_steps[segment.tensor])});
      if (lent == nullptr) continue;
      const uint64_t at = segment.in_chunk.begin;
      if (lends) change.segments.back().gradient = lent->Gradient(chunk->layout, segment.tensor, at);
      change.segments.back().working = lent->Working(chunk->layout, segment.tensor, at);
    }
    if (!change.segments.empty() && !lends) chunk->intake.TakeGradient(&change, &buffers);
    chunk->intake.Clear();
    if (!core_->around.working_copies && !core_->recoverable)
      chunk->intake.ReleaseIdle();  // its buffer is not part of a reservation
    if (restore) {
      change.restored = header.restored_version();
      // A replay of the restore would need its pin, which may be gone by then: once all chunks are flushed, no chunk
      // needs the replay.
      change.flush = core_->recoverable;
    }
    const bool values = !change.values.empty() || !change.logged_values.empty();
    if (!values && change.segments.empty() && !change.restored.has_value()) {
      work->untouched.push_back(chunk);
    } else {
      ++chunk->updates_pending;
      work->touched.push_back(chunk);
      work->updates.push_back(std::move(change));
      room_->Expect(buffers.size());
      work->buffers.push_back(std::move(buffers));
    }
  }
  return work;
}

absl::Status Updates::CheckHeld(const HeldChunk& chunk, const v1::PreparedRecord& prepared) const {
  const int64_t restored = prepared.header().restored_version();
  if (*chunk.version < prepared.step() && prepared.header().kind() == v1::STEP_KIND_RESTORE &&
      core_->machine->FindPin(restored) == nullptr) {
    return model::Error(absl::StatusCode::kDataLoss, model::kDiverged,
                        absl::StrCat("version ", restored, ", which step ", prepared.step(),
                                     " restores, is not pinned any more in the catalog of job '", core_->name, "'"));
  }
  if (*chunk.version >= prepared.step() || chunk.intake.Holds(prepared.header(), prepared.attempt())) {
    return absl::OkStatus();
  }
  return model::Error(absl::StatusCode::kDataLoss, model::kDiverged,
                      absl::StrCat("chunk ", chunk.id, " of job '", core_->name, "' is at version ", *chunk.version,
                                   ", and the log ", journal_->log_path(), " does not hold all slices that step ",
                                   prepared.step(), " applies to it. Run `ballastctl verify --rebuild`"));
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
    store = core_->store;
    log = journal_->file();
    for (const auto& chunk : work->touched) chunk->next_started = true;
    for (const auto& chunk : work->untouched) {
      chunk->version = work->step;
      core_->waiting.Wake(&chunk->pulls, replies);
    }
    if (!work->updates.empty()) return;
    work->lent = nullptr;
    updated_ = work->step;
    core_->moved = true;
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
    core_->moved = true;
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

absl::Status Updates::Run(storage::ChunkStore* store, StepWork* work, const storage::BlockFile* log) {
  storage::ReadBack read_back{.log = log, .memory = {}};
  if (work->read_back != nullptr) read_back.memory = {work->read_back->data(), work->read_back->bytes()};
  // A restore reads the whole state, and a restart finds it decided, or the state lost: either brings it once more. Any
  // other update is finished: it takes no longer than a step, and may write to memory that the trainer lends.
  const bool restores = std::any_of(work->updates.begin(), work->updates.end(),
                                    [](const storage::ChunkUpdate& update) { return update.restored.has_value(); });
  const auto interrupt = [&] { return restores ? core_->Interrupted() : absl::OkStatus(); };
  size_t finished = 0;
  const auto done = [&](size_t) {
    const size_t i = finished++;
    // Before the next step's slices of this chunk come: the reservation holds either.
    const size_t returned = std::exchange(work->buffers[i], {}).size();
    if (finished == work->updates.size()) work->lent = nullptr;
    Done(work, i, returned);
  };
  const auto entered = [clock = &core_->counters.steps.clock()](storage::RunStage stage) {
    static constexpr std::array<Stage, storage::kRunStages> kOf = {Stage::kKernel, Stage::kStateRead,
                                                                   Stage::kStateWrite, Stage::kPin};
    clock->SetUpdate(kOf[static_cast<size_t>(stage)]);
  };
  const storage::TierKind copies =
      core_->around.tiers->nvme() != nullptr ? storage::TierKind::kNvme : storage::TierKind::kDram;
  for (;;) {
    if (finished == work->updates.size()) return absl::OkStatus();
    const auto left = absl::MakeConstSpan(work->updates).subspan(finished);
    // Without space for a pinned copy, the chunk and all later chunks are untouched: the pin yields, not the training.
    std::shared_ptr<void> lease;
    const absl::Status may = core_->MayGrow(copies, store->CopyBytes(left), &lease);
    if (!may.ok() && pins_->GiveUpOldest(store, may)) continue;
    const absl::Status status = store->Run(left, done, read_back, interrupt, entered);
    if (!absl::IsResourceExhausted(status) || !pins_->GiveUpOldest(store, status)) return status;
  }
}

void Updates::Done(StepWork* work, size_t i, size_t returned) {
  const bool last = i + 1 == work->updates.size();
  core_->LockedOnWorker([&](Replies* replies) {
    core_->mu.AssertHeld();
    if (work->replayed) work->replayed(LoggedBytes(work->updates[i]));
    if (last) {
      updated_ = work->step;
      core_->moved = true;
    }
    HeldChunk& chunk = *work->touched[i];
    // Somebody may wait for a unit.
    if (!last && work->touched[i + 1]->layout.unit != chunk.layout.unit) core_->moved = true;
    chunk.version = work->step;
    chunk.next_started = false;
    --chunk.updates_pending;
    core_->waiting.Wake(&chunk.pulls, replies);
    core_->WakePushes(&chunk, replies);
    for (size_t buffer = 0; buffer < returned; ++buffer) room_->Returned(replies);
  });
}

}  // namespace ballast::services
