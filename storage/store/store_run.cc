#include "ballast/storage/store/store_run.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ballast/storage/log/log_reader.h"
#include "ballast/storage/update/coded_values.h"

namespace ballast::storage {
namespace {

// Pieces for each thread behind the oldest update: one at work, and two in its queue for the time in which the run's
// thread computes a piece, or ends and begins updates.
constexpr uint64_t kPiecesPerThread = 3;

}  // namespace

StoreRun::StoreRun(StoreCore* core, absl::FunctionRef<void(size_t)> done, RunStageObserver observer)
    : core_(*core), done_(done), observer_(observer), caller_(core->compute) {}

absl::StatusOr<std::vector<StoredChunk*>> StoreRun::CheckUpdates(absl::Span<const ChunkUpdate> updates) const {
  std::vector<StoredChunk*> targets;
  targets.reserve(updates.size());
  std::vector<bool> seen;
  for (const ChunkUpdate& update : updates) {
    BALLAST_ASSIGN_OR_RETURN(StoredChunk * chunk, core_.Find(update.chunk));
    BALLAST_RETURN_IF_ERROR(CheckUpdate(*chunk, update));
    if (seen.size() <= update.chunk) seen.resize(update.chunk + 1);
    if (update.restored.has_value() &&
        (!core_.durable_pins.has_value() || !core_.durable_pins->Has(*update.restored))) {
      return model::Error(absl::StatusCode::kDataLoss, model::kVersionGone,
                          absl::StrCat("version ", *update.restored, " of chunk ", chunk->id, " is not pinned here"));
    }
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
  BALLAST_RETURN_IF_ERROR(core_.failed);
  BALLAST_ASSIGN_OR_RETURN(const std::vector<StoredChunk*> chunks, CheckUpdates(updates));
  std::vector<uint64_t> elements;
  for (const StoredChunk* chunk : chunks) elements.push_back(chunk->elements);
  const LogReads::Sizes sizes = LogReads::SizesOf(updates, elements);
  if (sizes.bytes_min() > 0 && (read_back.log == nullptr || read_back.memory.size() < sizes.bytes_min())) {
    return Bad(model::kBadRequest, absl::StrCat("updates that are in the log, with ", read_back.memory.size(),
                                                " bytes to read them into, expected ", sizes.bytes_min()));
  }
  IoQueue* queue = nullptr;
  const auto moves = [](const StoredChunk* c, const ChunkUpdate& u) {
    return c->placement.state == TierKind::kNvme || u.flush || u.logged_gradient.has_value();
  };
  if (!std::equal(chunks.begin(), chunks.end(), updates.begin(),
                  [&](auto* c, const ChunkUpdate& u) { return !moves(c, u); })) {
    BALLAST_ASSIGN_OR_RETURN(queue, core_.staging.Queue(core_.tiers->disk()));
  }
  BALLAST_RETURN_IF_ERROR(LoadMoments(updates, chunks, interrupt));
  {
    absl::MutexLock lock(&core_.mutex);
    run_ = ++core_.runs;
  }
  reads_.emplace(updates, sizes, read_back, queue, core_.tiers);
  pipeline_.emplace(chunks, &core_.staging, queue, core_.tiers, &*reads_, observer_);
  observer_(RunStage::kCompute);
  absl::Status status, interrupted;
  for (size_t i = 0; i < updates.size() && status.ok(); ++i) {
    while (Enough() && status.ok()) status = FinishOldest();
    if (!status.ok()) break;
    interrupted = interrupt();
    if (!interrupted.ok()) break;
    status = Begin(i, updates[i], *chunks[i]);
  }
  if (lost_for_pins_ > kLostShown) {
    spdlog::error("job '{}': {} chunks in all are lost for pins of versions that a restore replaced",
                  core_.versions->job(), lost_for_pins_);
  }
  // What was begun before an update that could not begin is whole.
  if (const absl::Status finished = FinishAll(); !finished.ok()) status = finished;
  const absl::Status drained = pipeline_->Drain();
  if (status.ok()) status = drained;
  // Hardens also after an error: dropping a pin next must not free a version before its successor is recorded.
  if (drained.ok() && core_.versions.has_value() && (core_.versions->EndRun() || !status.ok())) {
    const absl::Status hardened = As(RunStage::kWrite, [&] { return core_.Harden(); });
    if (status.ok()) status = hardened;
  }
  // If a pin found no room, the pin can be dropped; an error of a device cannot be undone.
  if (!drained.ok() || !core_.failed.ok() || !absl::IsResourceExhausted(status)) {
    status = core_.failed = StoreCore::Lasting(status);
  }
  return status.ok() ? interrupted : status;
}

absl::Status StoreRun::LoadMoments(absl::Span<const ChunkUpdate> updates, absl::Span<StoredChunk* const> chunks,
                                   Interrupt interrupt) {
  std::vector<StoredChunk*> changed;
  for (size_t i = 0; i < updates.size(); ++i) {
    // A restore overwrites all arrays. CopyForPins reads those that pins want first.
    if (!updates[i].restored.has_value()) changed.push_back(chunks[i]);
  }
  absl::Status interrupted;
  const auto asked = [&] { return interrupted = interrupt(); };
  const absl::Status status = As(RunStage::kRead, [&] { return core_.LoadMoments(changed, asked); });
  if (!status.ok() && interrupted.ok()) core_.failed = status;
  return status;
}

bool StoreRun::Enough() const {
  // More would not keep the device busier: updates wait in its own queues.
  constexpr uint64_t kDeviceAhead = 8;
  if (begun_on_device_ == kDeviceAhead) return true;
  const int threads = core_.compute != nullptr ? core_.compute->threads() : 1;
  if (threads == 1) return begun_.size() > begun_on_device_;
  return begun_.size() > 1 &&
         pieces_begun_ - begun_.front().weight() >= kPiecesPerThread * static_cast<uint64_t>(threads);
}

absl::Status StoreRun::Begin(size_t i, const ChunkUpdate& update, StoredChunk& chunk) {
  Begun next{.index = i, .chunk = &chunk, .update = &update, .state = chunk.state};
  if (!update.logged_values.empty() || update.logged_gradient.has_value()) {
    BALLAST_ASSIGN_OR_RETURN(next.fetched, FetchLogged(i, update));
    next.update = next.fetched.get();
  }
  const TierKind tier = chunk.placement.state;
  if (tier == TierKind::kNvme) {
    while (!begun_.empty() && !pipeline_->Loaded(i)) BALLAST_RETURN_IF_ERROR(FinishOldest());
    BALLAST_ASSIGN_OR_RETURN(next.state, pipeline_->Load(i, update.restored.has_value() ? &next.unreadable : nullptr));
    absl::ReaderMutexLock lock(&chunk.mutex);
    next.verified = chunk.updated_in == 0;
  }
  std::optional<CopyOnWrite> copy;
  if (const std::vector<int64_t> pins = core_.PinsOf(chunk); next.changes() && !pins.empty()) {
    BALLAST_RETURN_IF_ERROR(FinishAll());
    BALLAST_ASSIGN_OR_RETURN(copy, CopyForPins(next, pins));
  }
  next.stores = tier == TierKind::kNvme || (update.flush && core_.versions.has_value());
  // Takes all space before the chunk changes: a failure later would lead to applying the update twice.
  if (next.stores && core_.versions.has_value() && !(copy.has_value() && copy->takes_extent())) {
    BALLAST_ASSIGN_OR_RETURN(next.fresh, MakeRoom(chunk));
  }
  const bool on_device = tier == TierKind::kHbm;
  const bool waits = copy.has_value() || next.stores || update.values_of != StateArray::kMaster;
  if ((on_device && waits) || update.restored.has_value()) {
    BALLAST_RETURN_IF_ERROR(FinishAll());
    BALLAST_RETURN_IF_ERROR(ApplyAtOnce(next, std::move(copy)));
    return Conclude(next);
  }
  if (!begun_.empty()) {
    // A read of the chunk may hang: earlier updates do not wait for it.
    if (chunk.reading.TryLock()) {
      chunk.reading.Unlock();
    } else {
      BALLAST_RETURN_IF_ERROR(FinishAll());
    }
  }
  if (on_device) return StartOnDevice(std::move(next));
  StartPieces(std::move(next), std::move(copy));
  return absl::OkStatus();
}

void StoreRun::StartPieces(Begun next, std::optional<CopyOnWrite> copy) {
  Begun& begun = begun_.emplace_back(std::move(next));
  StoredChunk& chunk = *begun.chunk;
  {
    absl::MutexLock reading(&chunk.reading);
    absl::MutexLock lock(&chunk.mutex);
    begun.expected = chunk.digests;
    begun.read_file = chunk.extent.bytes() > 0 ? &chunk.extent.file() : nullptr;
    begun.read_from = chunk.extent.offset();
    if (copy.has_value()) (*std::move(copy)).Install(chunk);
    if (begun.changes()) chunk.updated_in = run_;
    chunk.changing = true;
  }
  begun.work = std::make_unique<StateUpdate>(*begun.update, chunk.View(begun.state), chunk.working,
                                             Compute{.pool = core_.compute, .poll = poll_},
                                             UpdateDigests{.of_old = !begun.verified, .of_new = begun.stores});
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
  if (next.changes()) chunk.updated_in = run_;
  BALLAST_ASSIGN_OR_RETURN(next.on_device, core_.tiers->hbm()->Start([&](HbmQueue& queue) {
    return QueueUpdate(*next.update, chunk, queue);
  }));
  chunk.changing = true;
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
  } else {
    absl::MutexLock lock(&oldest.chunk->mutex);
    oldest.chunk->changing = false;
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
    begun.chunk->changing = false;
  }
  begun_.clear();
  pieces_begun_ = begun_on_device_ = 0;
}

absl::Status StoreRun::Settle(Begun& begun) {
  StoredChunk& chunk = *begun.chunk;
  const UpdateDigests digests = begun.work != nullptr ? begun.work->Digests() : UpdateDigests();
  absl::MutexLock lock(&chunk.mutex);
  chunk.changing = false;
  if (!begun.verified) {
    BALLAST_RETURN_IF_ERROR(
        CompareDigests(*begun.read_file, chunk, begun.read_from, begun.expected, digests.old_state));
  }
  if (begun.stores) chunk.digests = digests.new_state;
  NoteVersion(begun, chunk);
  return absl::OkStatus();
}

absl::Status StoreRun::VerifyOld(Begun& next) {
  StoredChunk& chunk = *next.chunk;
  BALLAST_RETURN_IF_ERROR(next.unreadable);
  BALLAST_RETURN_IF_ERROR(As(RunStage::kRead, [&] { return core_.LoadMoments(chunk); }));
  if (std::exchange(next.verified, true)) return absl::OkStatus();
  const ArrayDigests found = DigestState(chunk.View(next.state), {.pool = core_.compute, .poll = poll_});
  absl::ReaderMutexLock lock(&chunk.mutex);
  return CompareDigests(chunk.extent.file(), chunk, chunk.extent.offset(), chunk.digests, found);
}

absl::StatusOr<CopyOnWrite> StoreRun::CopyForPins(Begun& next, absl::Span<const int64_t> pins) {
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
      spdlog::error("job '{}': {}", core_.versions->job(), std::string(lost.message()));
    }
    return CopyOnWrite::Lost(chunk, run_, lost);
  }
  const bool kept = core_.durable_pins.has_value() && core_.durable_pins->KeepsNewest(chunk.index);
  const std::byte* const loaded = chunk.placement.state == TierKind::kNvme ? next.state : nullptr;
  return As(RunStage::kPin,
            [&] { return CopyOnWrite::Prepare(core_.tiers, core_.account, &core_.reader, chunk, run_, loaded, kept); });
}

absl::Status StoreRun::ApplyAtOnce(Begun& next, std::optional<CopyOnWrite> copy) {
  StoredChunk& chunk = *next.chunk;
  const ChunkUpdate& update = *next.update;
  const bool in_hbm = chunk.placement.state == TierKind::kHbm;
  const Compute with{.pool = core_.compute, .poll = poll_};
  absl::MutexLock reading(&chunk.reading);
  {
    absl::MutexLock lock(&chunk.mutex);
    if (copy.has_value()) (*std::move(copy)).Install(chunk);
    if (next.changes()) chunk.updated_in = run_;
    if (update.restored.has_value()) {
      // A failed read leaves the chunk with neither state: nobody may use the chunk.
      const DurableChunk* const pinned = core_.durable_pins->Find(*update.restored, chunk.index);
      core_.failed = As(RunStage::kRead, [&] {
        return pinned != nullptr ? core_.ReadDurable(chunk, *pinned, next.state, with)
                                 : core_.Clear(chunk, next.state, with);
      });
      BALLAST_RETURN_IF_ERROR(core_.failed);
      chunk.moments_unread = false;
      if (next.stores && pinned != nullptr) {
        chunk.digests = pinned->digests;
      } else if (next.stores && !in_hbm) {
        chunk.digests = DigestState(chunk.View(next.state), with);
      }
    } else {
      BALLAST_RETURN_IF_ERROR(ApplyOnDevice(update, chunk));
    }
    NoteVersion(next, chunk);
  }
  if (!in_hbm || !next.stores || !core_.versions.has_value()) return absl::OkStatus();
  observer_(RunStage::kWrite);
  core_.failed = SpillVersion(chunk, update.version, std::move(next.fresh));
  observer_(RunStage::kCompute);
  return core_.failed;
}

void StoreRun::NoteVersion(Begun& changed, StoredChunk& chunk) {
  const TierKind tier = chunk.placement.state;
  const int64_t version = changed.update->version;
  if (tier == TierKind::kNvme) chunk.staged = changed.state;
  if (!chunk.dirty) chunk.needed_from = version - 1;
  chunk.dirty = core_.versions.has_value() && !changed.stores;
  if (!changed.stores || !core_.versions.has_value()) return;
  if (!std::exchange(chunk.unrecorded_from, chunk.unrecorded_from.value_or(chunk.needed_from)).has_value()) {
    core_.unrecorded.push_back(&chunk);
  }
  if (tier != TierKind::kHbm) StartVersion(chunk, changed.state, version, std::move(changed.fresh));
}

absl::Status StoreRun::Conclude(const Begun& changed) {
  const TierKind tier = changed.chunk->placement.state;
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
  if (chunk.placement.state == TierKind::kHbm) BALLAST_RETURN_IF_ERROR(core_.reader.Prepare());
  if (!core_.versions->HasRoom(chunk.state_bytes())) {
    BALLAST_RETURN_IF_ERROR(FinishAll());  // their old versions' extents become free too
    BALLAST_RETURN_IF_ERROR(pipeline_->DrainStores());
    BALLAST_RETURN_IF_ERROR(As(RunStage::kWrite, [&] { return core_.Harden(); }));
  }
  // Failing that, the version goes to a device that fails, if it has room, whose error then says why.
  if (!core_.versions->HasRoom(chunk.state_bytes())) (void)core_.versions->Gather(chunk.state_bytes());
  if (core_.versions->HasBytes(chunk.state_bytes())) {
    // The caller gives up a pin where a pin's copy finds no space, and no pin is in the way here.
    absl::StatusOr<NvmeExtent> fresh = core_.versions->Take(chunk.state_bytes());
    if (!fresh.ok()) return StoreCore::Lasting(fresh.status());
    return fresh;
  }
  return model::Error(absl::StatusCode::kInternal, model::kBudget,
                      absl::StrCat("no room for a new version of chunk ", chunk.id, " of ", chunk.state_bytes(),
                                   " bytes although all older ones are free"));
}

DurableChunk StoreRun::EntryOf(const StoredChunk& chunk, int64_t version, const NvmeExtent& extent) const {
  return {.life = core_.versions->life(),
          .id = chunk.id,
          .version = version,
          .offset = extent.offset(),
          .bytes = chunk.state_bytes(),
          .elements = chunk.elements,
          .digests = {},
          .file = extent.file_id()};
}

void StoreRun::TakeVersion(StoredChunk& chunk, const DurableChunk& entry, NvmeExtent fresh) {
  NvmeExtent old;
  if (fresh.bytes() > 0) old = std::exchange(chunk.extent, std::move(fresh));
  chunk.digests = entry.digests;
  chunk.newest = entry;
  if (old.bytes() > 0) core_.versions->AddRoom(core_.durable_pins->TakeOver(chunk.index, &old), 0);
  core_.versions->Written(entry, std::move(old));
}

void StoreRun::StartVersion(StoredChunk& chunk, std::byte* state, int64_t version, NvmeExtent fresh) {
  DurableChunk entry = EntryOf(chunk, version, fresh.bytes() > 0 ? fresh : chunk.extent);
  entry.digests = chunk.digests;
  EncodeLabel(entry, chunk.layout, core_.versions->job(),
              {state + chunk.layout.LabelAt(chunk.elements), StateLayout::kLabelBytes});
  TakeVersion(chunk, entry, std::move(fresh));
}

absl::Status StoreRun::SpillVersion(StoredChunk& chunk, int64_t version, NvmeExtent fresh) {
  NvmeFile* file = fresh.home();
  DurableChunk entry = EntryOf(chunk, version, fresh);
  if (fresh.bytes() == 0) {
    absl::ReaderMutexLock lock(&chunk.mutex);
    file = chunk.extent.home();
    entry = EntryOf(chunk, version, chunk.extent);
  }
  const absl::StatusOr<ArrayDigests> spilled = core_.reader.Spill(chunk, file, entry.offset);
  absl::Status written = spilled.status();
  if (spilled.ok()) {
    entry.digests = *spilled;
    alignas(kIoAlignment) std::array<std::byte, StateLayout::kLabelBytes> label;
    EncodeLabel(entry, chunk.layout, core_.versions->job(), absl::MakeSpan(label));
    written = file->Write(entry.offset + chunk.layout.LabelAt(chunk.elements), label);
  }
  if (!written.ok()) {
    // The chunk stays at the extent with its last version: a restart looks for the version there, Discard frees it.
    if (fresh.bytes() > 0) core_.versions->AddRoom(fresh.TakeRoom(), 0);
    return written;
  }
  absl::MutexLock lock(&chunk.mutex);
  TakeVersion(chunk, entry, std::move(fresh));
  return absl::OkStatus();
}

absl::Status StoreRun::ApplyOnDevice(const ChunkUpdate& update, StoredChunk& chunk) {
  if (update.values_of == StateArray::kMaster) {
    return core_.tiers->hbm()->Run([&](HbmQueue& queue) { return QueueUpdate(update, chunk, queue); });
  }
  return ForMomentPieces(update, chunk.View(chunk.state), [this](const MomentPiece& piece) {
    return core_.tiers->hbm()->Run([&](HbmQueue& queue) -> absl::Status {
      BALLAST_RETURN_IF_ERROR(queue.CopyIn(piece.values, piece.to.values));
      if (piece.scales.empty()) return absl::OkStatus();
      return queue.CopyIn(piece.scales, reinterpret_cast<std::byte*>(piece.to.scales));
    });
  });
}

absl::Status StoreRun::QueueUpdate(const ChunkUpdate& update, const StoredChunk& chunk, HbmQueue& queue) const {
  const StateView state = chunk.View(chunk.state);
  const kernels::OptimizerSpec& optimizer = core_.layout.optimizer();
  const bool on_device = chunk.placement.working == TierKind::kHbm;
  const auto working = [&](uint64_t at) {
    std::byte* const to = chunk.working + at * core_.layout.working_element_bytes();
    return on_device ? HbmWorking{.device = to} : HbmWorking{.host = to};
  };
  for (const ChunkUpdate::Values& values : update.values) {
    const auto* from = reinterpret_cast<const std::byte*>(values.values.data());
    auto* to = reinterpret_cast<std::byte*>(state.master() + values.begin);
    BALLAST_RETURN_IF_ERROR(queue.CopyIn({from, values.values.size() * sizeof(float)}, to));
  }
  // Rounds the whole chunk: values may begin anywhere, the device kernel may not.
  if (!update.values.empty()) {
    BALLAST_RETURN_IF_ERROR(queue.Round(state.master(), chunk.elements, optimizer.working, working(0)));
  }
  std::vector<HbmSegment> together;  // segments whose gradients are parts of the chunk's gradient
  for (const ChunkUpdate::SegmentUpdate& segment : update.segments) {
    const uint64_t at = segment.begin, n = segment.end - segment.begin;
    if (n == 0) continue;
    const HbmSegment one{.coefficients = segment.coefficients,
                         .random = RandomAt(update, at),
                         .span = SpanOf(update, segment, state, state.master() + at, nullptr, at, n),
                         .working = working(at)};
    if (segment.gradient == nullptr) {
      together.push_back(one);
    } else {
      BALLAST_RETURN_IF_ERROR(queue.Update(optimizer, {&one, 1}));
    }
  }
  return queue.Update(optimizer, together);
}

void StoreRun::CountUpdate(const ChunkUpdate& update, const StoredChunk& chunk) const {
  uint64_t elements = 0;
  for (const ChunkUpdate::SegmentUpdate& segment : update.segments) elements += segment.end - segment.begin;
  // NVMe state passes through DRAM; its way to the disk is counted by the pipeline.
  const TierKind memory = chunk.placement.state == TierKind::kHbm ? TierKind::kHbm : TierKind::kDram;
  const uint64_t state_bytes = elements * chunk.state_bytes() / chunk.elements;
  core_.tiers->CountTraffic(memory, state_bytes, state_bytes);
  if (!chunk.placement.working.has_value()) return;
  core_.tiers->CountTraffic(*chunk.placement.working, 0, elements * core_.layout.working_element_bytes());
}

}  // namespace ballast::storage
