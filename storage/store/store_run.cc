#include "ballast/storage/store/store_run.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ballast/storage/log/payload_reader.h"
#include "ballast/storage/store/device_update.h"
#include "ballast/storage/store/state_replacement.h"

namespace ballast::storage {

StoreRun::StoreRun(StoreCore* core, absl::FunctionRef<void(size_t)> done, RunStageObserver observer,
                   Dispensable dispensable)
    : core_(*core), done_(done), observer_(observer), dispensable_(dispensable), caller_(core->compute) {}

absl::StatusOr<std::vector<StoredChunk*>> StoreRun::CheckUpdates(absl::Span<const ChunkUpdate> updates) const {
  std::vector<StoredChunk*> targets;
  targets.reserve(updates.size());
  std::vector<bool> seen(core_.chunks.count());
  for (const ChunkUpdate& update : updates) {
    BALLAST_ASSIGN_OR_RETURN(StoredChunk * chunk, core_.chunks.Find(update.chunk));
    BALLAST_RETURN_IF_ERROR(CheckUpdate(*chunk, update));
    BALLAST_RETURN_IF_ERROR(CheckReplacement(core_, *chunk, update));
    if (seen[update.chunk]) return Bad(model::kBadRequest, absl::StrCat("chunk ", update.chunk, " twice in one run"));
    seen[update.chunk] = true;
    targets.push_back(chunk);
  }
  return targets;
}

absl::StatusOr<std::unique_ptr<ChunkUpdate>> StoreRun::FetchLogged(size_t i, const ChunkUpdate& update) {
  auto fetched = std::make_unique<ChunkUpdate>(update);
  if (!update.logged_values.empty()) BALLAST_RETURN_IF_ERROR(FinishAll());  // no second update's values fit into memory
  for (const ChunkUpdate::LoggedValues& values : update.logged_values) {
    const absl::Span<std::byte> to = reads_->values_memory().subspan(values.begin * sizeof(float), values.place.bytes);
    BALLAST_RETURN_IF_ERROR(As(RunStage::kRead, [&] { return ReadPayload(reads_->log(), values.place, to); }));
    core_.tiers->CountTraffic(TierKind::kNvme, values.place.bytes, 0);
    core_.tiers->CountMove(TierKind::kNvme, TierKind::kDram, MoveReason::kReadBack, values.place.bytes);
    const auto* elements = reinterpret_cast<const float*>(reads_->values_memory().data());
    for (const auto& [begin, end, working] : values.parts) {
      fetched->values.push_back({begin, absl::MakeConstSpan(elements + begin, end - begin), working});
    }
  }
  if (update.logged_gradient.has_value()) {
    while (!begun_.empty() && !reads_->Arrived(i)) BALLAST_RETURN_IF_ERROR(FinishOldest());
    BALLAST_ASSIGN_OR_RETURN(fetched->gradient, pipeline_->LoadGradient(i));
    const uint32_t digest = DigestBytes(fetched->gradient, {.pool = core_.compute, .poll = poll_});
    if (digest != update.logged_gradient->crc32c) {
      BALLAST_RETURN_IF_ERROR(reads_->ReadAgain(i));
    }
  }
  return fetched;
}

absl::Status StoreRun::Run(absl::Span<const ChunkUpdate> updates, const ReadBack& read_back, Interrupt interrupt) {
  BALLAST_RETURN_IF_ERROR(core_.failed());
  BALLAST_ASSIGN_OR_RETURN(const std::vector<StoredChunk*> chunks, CheckUpdates(updates));
  std::vector<uint64_t> elements;
  for (const StoredChunk* chunk : chunks) elements.push_back(chunk->elements);
  const LogReads::Sizes sizes = LogReads::SizesOf(updates, elements);
  if (sizes.bytes_min() > 0 && (read_back.log == nullptr || read_back.memory.size() < sizes.bytes_min())) {
    return Bad(model::kBadRequest, absl::StrCat("updates that are in the log, with ", read_back.memory.size(),
                                                " bytes to read them into, expected ", sizes.bytes_min()));
  }
  BALLAST_ASSIGN_OR_RETURN(IoQueue* const queue, QueueFor(updates, chunks));
  BALLAST_RETURN_IF_ERROR(LoadMoments(updates, chunks, interrupt));
  run_ = core_.pins.BeginRun();
  reads_.emplace(updates, sizes, read_back, queue, core_.tiers);
  std::vector<bool> imported;  // nobody reads the old state
  for (const ChunkUpdate& update : updates) imported.push_back(update.imported != nullptr);
  pipeline_.emplace(chunks, &core_.buffers.staging, queue, core_.tiers, &*reads_, observer_, imported);
  observer_(RunStage::kCompute);
  absl::Status interrupted;
  const absl::Status status = End(BeginAll(updates, chunks, interrupt, &interrupted));
  return status.ok() ? interrupted : status;
}

absl::StatusOr<IoQueue*> StoreRun::QueueFor(absl::Span<const ChunkUpdate> updates,
                                            absl::Span<StoredChunk* const> chunks) {
  for (size_t i = 0; i < updates.size(); ++i) {
    if (Stores(updates[i], *chunks[i]) || updates[i].logged_gradient.has_value()) {
      return core_.buffers.staging.Queue(core_.tiers->disk());
    }
  }
  return nullptr;
}

absl::Status StoreRun::BeginAll(absl::Span<const ChunkUpdate> updates, absl::Span<StoredChunk* const> chunks,
                                Interrupt interrupt, absl::Status* interrupted) {
  for (size_t i = 0; i < updates.size(); ++i) {
    while (Enough()) BALLAST_RETURN_IF_ERROR(FinishOldest());
    *interrupted = interrupt();
    if (!interrupted->ok()) break;
    BALLAST_RETURN_IF_ERROR(Begin(i, updates[i], *chunks[i]));
  }
  return absl::OkStatus();
}

absl::Status StoreRun::End(absl::Status status) {
  if (lost_for_pins_ > kLostShown) {
    spdlog::error("job '{}': {} chunks in all are lost for pins of versions that a restore replaced",
                  core_.versions->extents.job(), lost_for_pins_);
  }
  // What was begun before an update that could not begin is whole.
  if (const absl::Status finished = FinishAll(); !finished.ok()) status = finished;
  const absl::Status drained = pipeline_->Drain();
  if (status.ok()) status = drained;
  // Hardens also after an error: dropping a pin next must not free a version before its successor is recorded.
  if (drained.ok() && core_.versions.has_value() && (core_.versions->extents.EndRun() || !status.ok())) {
    const absl::Status hardened = As(RunStage::kWrite, [&] { return core_.Harden(); });
    if (status.ok()) status = hardened;
  }
  // If a pin found no room, the pin can be dropped; an error of a device cannot be undone.
  if (!drained.ok() || !core_.failed().ok() || !absl::IsResourceExhausted(status)) {
    status = core_.EndWith(Lasting(status));
  }
  return status;
}

absl::Status StoreRun::LoadMoments(absl::Span<const ChunkUpdate> updates, absl::Span<StoredChunk* const> chunks,
                                   Interrupt interrupt) {
  std::vector<StoredChunk*> changed;
  for (size_t i = 0; i < updates.size(); ++i) {
    // A replaced state has all its arrays anew. CopyForPins reads those that pins want first.
    if (!updates[i].replaces()) changed.push_back(chunks[i]);
  }
  absl::Status interrupted;
  const auto asked = [&] { return interrupted = interrupt(); };
  const absl::Status status = As(RunStage::kRead, [&] { return core_.restore.Moments(changed, asked); });
  return !status.ok() && interrupted.ok() ? core_.EndWith(status) : status;
}

bool StoreRun::Enough() const {
  // More would not keep the device busier: updates wait in its own queues.
  constexpr uint64_t kDeviceAhead = 8;
  // Behind the oldest update: one at work, and two in the thread's queue for the time in which the run's thread
  // computes a piece, or ends and begins updates.
  constexpr uint64_t kPiecesPerThread = 3;
  if (begun_on_device_ == kDeviceAhead) return true;
  const int threads = core_.compute != nullptr ? core_.compute->threads() : 1;
  if (threads == 1) return begun_.size() > begun_on_device_;
  return begun_.size() > 1 &&
         pieces_begun_ - begun_.front().weight() >= kPiecesPerThread * static_cast<uint64_t>(threads);
}

bool StoreRun::Stores(const ChunkUpdate& update, const StoredChunk& chunk) const {
  if (chunk.memory.tier() == TierKind::kNvme) return true;
  return core_.versions.has_value() && (update.flush || update.imported != nullptr);
}

absl::Status StoreRun::Begin(size_t i, const ChunkUpdate& update, StoredChunk& chunk) {
  Begun next{.index = i, .chunk = &chunk, .update = &update, .state = chunk.memory.state()};
  if (!update.logged_values.empty() || update.logged_gradient.has_value()) {
    BALLAST_ASSIGN_OR_RETURN(next.fetched, FetchLogged(i, update));
    next.update = next.fetched.get();
  }
  const TierKind tier = chunk.memory.tier();
  if (tier == TierKind::kNvme) BALLAST_RETURN_IF_ERROR(LoadState(next));
  std::optional<CopyOnWrite> copy;
  if (next.copies()) {
    BALLAST_ASSIGN_OR_RETURN(copy, CopyForPins(next));
  }
  next.stores = Stores(update, chunk);
  // Takes all space before the chunk changes: a failure later would lead to applying the update twice.
  if (next.stores && core_.versions.has_value() && !(copy.has_value() && copy->takes_extent())) {
    BALLAST_ASSIGN_OR_RETURN(next.fresh, MakeRoom(chunk));
  }
  const bool on_device = tier == TierKind::kHbm;
  const bool waits = copy.has_value() || next.stores || update.values_of != StateArray::kMaster;
  if ((on_device && waits) || update.replaces()) {
    BALLAST_RETURN_IF_ERROR(FinishAll());
    BALLAST_RETURN_IF_ERROR(ApplyAtOnce(next, std::move(copy)));
    return Conclude(next);
  }
  BALLAST_RETURN_IF_ERROR(FinishBeforeReader(chunk));
  if (on_device) return StartOnDevice(std::move(next));
  StartPieces(std::move(next), std::move(copy));
  return absl::OkStatus();
}

absl::Status StoreRun::LoadState(Begun& next) {
  while (!begun_.empty() && !pipeline_->Loaded(next.index)) BALLAST_RETURN_IF_ERROR(FinishOldest());
  absl::Status* const unreadable = next.update->replaces() ? &next.unreadable : nullptr;
  BALLAST_ASSIGN_OR_RETURN(next.state, pipeline_->Load(next.index, unreadable));
  absl::ReaderMutexLock lock(&next.chunk->mutex);
  next.verified = next.chunk->history.zero();
  return absl::OkStatus();
}

absl::Status StoreRun::FinishBeforeReader(StoredChunk& chunk) {
  if (begun_.empty()) return absl::OkStatus();
  if (!chunk.reading.TryLock()) return FinishAll();
  chunk.reading.Unlock();
  return absl::OkStatus();
}

void StoreRun::StartPieces(Begun next, std::optional<CopyOnWrite> copy) {
  Begun& begun = begun_.emplace_back(std::move(next));
  StoredChunk& chunk = *begun.chunk;
  {
    absl::MutexLock reading(&chunk.reading);
    absl::MutexLock lock(&chunk.mutex);
    begun.read = chunk.on_disk.written();
    if (copy.has_value()) (*std::move(copy)).Install(chunk, run_);
    if (begun.changes()) chunk.history.Update(run_);
    chunk.BeginChange();
  }
  begun.work = std::make_unique<StateUpdate>(*begun.update, chunk.View(begun.state), chunk.memory.working(),
                                             Compute{.pool = core_.compute, .poll = poll_},
                                             UpdateDigests{.of_old = !begun.verified, .of_new = begun.digests_new()});
  const uint64_t pieces = begun.work->pieces();
  begun.pieces = std::make_unique<kernels::ThreadPool::Batch>(
      pieces, chunk.index * pieces, [work = begun.work.get()](uint64_t piece) { work->Run(piece); });
  pieces_begun_ += begun.weight();
  caller_.Begin(begun.pieces.get());
}

absl::Status StoreRun::StartOnDevice(Begun next) {
  StoredChunk& chunk = *next.chunk;
  absl::MutexLock reading(&chunk.reading);
  absl::MutexLock lock(&chunk.mutex);
  if (next.changes()) chunk.history.Update(run_);
  BALLAST_ASSIGN_OR_RETURN(next.on_device, core_.tiers->hbm()->Start([&](HbmQueue& queue) {
    return QueueUpdate(*next.update, chunk, queue);
  }));
  chunk.BeginChange();
  begun_.push_back(std::move(next));
  ++begun_on_device_;
  return absl::OkStatus();
}

absl::Status StoreRun::FinishOldest() {
  Begun oldest = std::move(begun_.front());
  begun_.pop_front();
  pieces_begun_ -= oldest.weight();
  absl::Status status;
  if (oldest.pieces != nullptr) {
    caller_.Finish(oldest.pieces.get(), poll_);
  } else {
    --begun_on_device_;
    status = oldest.on_device.Wait();
  }
  if (status.ok()) {
    status = Settle(oldest);
    if (absl::IsDataLoss(status) && dispensable_(oldest.index, status)) {
      Lose(oldest);
      return absl::OkStatus();
    }
  } else {
    absl::MutexLock lock(&oldest.chunk->mutex);
    oldest.chunk->EndChange();
  }
  if (status.ok()) status = Conclude(oldest);
  if (!status.ok()) Abandon();
  return status;
}

absl::Status StoreRun::FinishAll() {
  while (!begun_.empty()) BALLAST_RETURN_IF_ERROR(FinishOldest());
  return absl::OkStatus();
}

void StoreRun::Abandon() {
  for (Begun& begun : begun_) {
    if (begun.pieces != nullptr) caller_.Finish(begun.pieces.get(), poll_);
    (void)begun.on_device.Wait();
    absl::MutexLock lock(&begun.chunk->mutex);
    begun.chunk->EndChange();
  }
  begun_.clear();
  pieces_begun_ = begun_on_device_ = 0;
}

absl::Status StoreRun::Settle(Begun& begun) {
  StoredChunk& chunk = *begun.chunk;
  const UpdateDigests digests = begun.work != nullptr ? begun.work->Digests() : UpdateDigests();
  absl::MutexLock lock(&chunk.mutex);
  chunk.EndChange();
  if (!begun.verified) BALLAST_RETURN_IF_ERROR(CompareDigests(begun.read, chunk, digests.old_state));
  if (begun.stores) chunk.on_disk.SetDigests(digests.new_state);
  if (begun.work != nullptr && begun.update->digests != nullptr) *begun.update->digests = digests.new_state;
  NoteVersion(begun, chunk);
  return absl::OkStatus();
}

void StoreRun::Lose(Begun& begun) {
  if (begun.fresh.bytes() > 0) core_.versions->extents.AddRoom(begun.fresh.TakeRoom(), 0);
  pipeline_->Release(begun.index);
  if (begun.update->logged_gradient.has_value()) reads_->Release(begun.index);
  core_.Void(*begun.chunk);
}

absl::Status StoreRun::VerifyOld(Begun& next) {
  StoredChunk& chunk = *next.chunk;
  BALLAST_RETURN_IF_ERROR(next.unreadable);
  BALLAST_RETURN_IF_ERROR(As(RunStage::kRead, [&] { return core_.restore.Moments(chunk); }));
  if (std::exchange(next.verified, true)) return absl::OkStatus();
  const ArrayDigests found = DigestState(chunk.View(next.state), {.pool = core_.compute, .poll = poll_});
  absl::ReaderMutexLock lock(&chunk.mutex);
  return CompareDigests(chunk.on_disk.written(), chunk, found);
}

absl::StatusOr<std::optional<CopyOnWrite>> StoreRun::CopyForPins(Begun& next) {
  const std::vector<int64_t> pins = core_.PinsOf(*next.chunk);
  if (pins.empty()) return std::nullopt;
  BALLAST_RETURN_IF_ERROR(FinishAll());
  return CopyFor(pins, next);
}

absl::StatusOr<CopyOnWrite> StoreRun::CopyFor(absl::Span<const int64_t> pins, Begun& next) {
  StoredChunk& chunk = *next.chunk;
  if (const absl::Status unread = VerifyOld(next); !unread.ok()) {
    const ChunkUpdate& update = *next.update;
    if (!update.restored.has_value()) return unread;
    const absl::Status lost =
        model::Error(absl::StatusCode::kDataLoss, model::ReasonOf(unread),
                     absl::StrCat("chunk ", chunk.id, " of pinned version ", absl::StrJoin(pins, ", "),
                                  " is lost: its state could not be read when step ", update.version,
                                  " replaced it by version ", *update.restored, ". ", unread.message()));
    if (++lost_for_pins_ <= kLostShown) {
      spdlog::error("job '{}': {}", core_.versions->extents.job(), std::string(lost.message()));
    }
    return CopyOnWrite::Lost(chunk, lost);
  }
  const bool kept = core_.versions.has_value() && core_.versions->pins.KeepsNewest(chunk.index);
  const std::byte* const loaded = chunk.memory.tier() == TierKind::kNvme ? next.state : nullptr;
  return As(RunStage::kPin, [&] {
    return CopyOnWrite::Prepare(core_.tiers, core_.account, &core_.buffers.reader, chunk, loaded, kept);
  });
}

absl::Status StoreRun::ApplyAtOnce(Begun& next, std::optional<CopyOnWrite> copy) {
  StoredChunk& chunk = *next.chunk;
  const ChunkUpdate& update = *next.update;
  absl::MutexLock reading(&chunk.reading);
  {
    absl::MutexLock lock(&chunk.mutex);
    if (copy.has_value()) (*std::move(copy)).Install(chunk, run_);
    if (next.changes()) chunk.history.Update(run_);
    if (update.replaces()) {
      BALLAST_RETURN_IF_ERROR(As(RunStage::kRead, [&] {
        chunk.mutex.AssertHeld();
        return ReplaceState(&core_, chunk, update, next.state, next.stores, {.pool = core_.compute, .poll = poll_});
      }));
    } else {
      BALLAST_RETURN_IF_ERROR(UpdateOnDevice(core_.tiers->hbm(), update, chunk));
    }
    NoteVersion(next, chunk);
  }
  if (chunk.memory.tier() != TierKind::kHbm || !next.stores || !core_.versions.has_value()) return absl::OkStatus();
  observer_(RunStage::kWrite);
  const absl::Status spilled =
      core_.versions->Spill(&core_.buffers.reader, chunk, update.version, std::move(next.fresh));
  observer_(RunStage::kCompute);
  return core_.EndWith(spilled);
}

void StoreRun::NoteVersion(Begun& changed, StoredChunk& chunk) {
  const TierKind tier = chunk.memory.tier();
  const int64_t version = changed.update->version;
  if (tier == TierKind::kNvme) chunk.on_disk.Stage(changed.state);
  if (!core_.versions.has_value()) return;
  if (!changed.stores) {
    core_.versions->Update(chunk, version);
  } else if (tier != TierKind::kHbm) {
    core_.versions->Start(chunk, changed.state, version, std::move(changed.fresh));
  }
}

absl::Status StoreRun::Conclude(const Begun& changed) {
  const TierKind tier = changed.chunk->memory.tier();
  CountUpdate(*changed.update, *changed.chunk);
  if (changed.stores && tier != TierKind::kHbm) {
    BALLAST_RETURN_IF_ERROR(tier == TierKind::kNvme ? pipeline_->Store(changed.index)
                                                    : pipeline_->Flush(changed.index));
  }
  if (changed.update->logged_gradient.has_value()) reads_->Release(changed.index);
  done_(changed.index);
  return absl::OkStatus();
}

absl::StatusOr<NvmeExtent> StoreRun::MakeRoom(const StoredChunk& chunk) {
  if (chunk.memory.tier() == TierKind::kHbm) BALLAST_RETURN_IF_ERROR(core_.buffers.reader.Prepare());
  if (!core_.versions->extents.HasRoom(chunk.state_bytes())) {
    BALLAST_RETURN_IF_ERROR(FinishAll());  // their old versions' extents become free too
    BALLAST_RETURN_IF_ERROR(pipeline_->DrainStores());
    BALLAST_RETURN_IF_ERROR(As(RunStage::kWrite, [&] { return core_.Harden(); }));
  }
  return core_.versions->TakeFresh(chunk);
}

void StoreRun::CountUpdate(const ChunkUpdate& update, const StoredChunk& chunk) const {
  uint64_t elements = 0;
  for (const ChunkUpdate::SegmentUpdate& segment : update.segments) elements += segment.end - segment.begin;
  // NVMe state passes through DRAM; its way to the disk is counted by the pipeline.
  const TierKind memory = chunk.memory.tier() == TierKind::kHbm ? TierKind::kHbm : TierKind::kDram;
  const uint64_t state_bytes = elements * chunk.state_bytes() / chunk.elements;
  core_.tiers->CountTraffic(memory, state_bytes, state_bytes);
  const std::optional<TierKind> working = chunk.memory.placement().working;
  if (!working.has_value()) return;
  core_.tiers->CountTraffic(*working, 0, core_.layout.ParameterBytes(elements));
}

}  // namespace ballast::storage
