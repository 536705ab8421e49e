// How class ChunkStore takes back states left on the disk by an earlier run, and keeps versions there: durable pins.
#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ballast/storage/counters/disk_counters.h"
#include "ballast/storage/io/reads_ahead.h"
#include "ballast/storage/memory/arena.h"
#include "ballast/storage/store/store_core.h"
#include "ballast/storage/update/state_update.h"

namespace ballast::storage {
namespace {

// Slots for states on their way through extra memory: a state is checked while the next states come from the disk.
constexpr uint64_t kBounceSlots = 3;

absl::Status CheckFits(const StoredChunk& chunk, const DurableChunk& durable) {
  if (durable.elements == chunk.elements && durable.bytes == chunk.state_bytes() && durable.id == chunk.id) {
    return absl::OkStatus();
  }
  return model::Error(absl::StatusCode::kDataLoss, model::kIo,
                      absl::StrCat("the catalog's entry of chunk ", durable.id, " with ", durable.elements,
                                   " elements is for another chunk than ", chunk.id, " with ", chunk.elements));
}

// REQUIRES: the chunk's moments are unread.
ReadAhead MomentsOf(const StoredChunk& chunk) ABSL_SHARED_LOCKS_REQUIRED(chunk.mutex) {
  const uint64_t begin = chunk.layout.ArrayAt(StateArray::kMoment1, chunk.elements);
  const uint64_t end = chunk.layout.LabelAt(chunk.elements);
  return {chunk.extent.offset() + begin, end - begin, chunk.state + begin, &chunk.extent.file()};
}

}  // namespace

absl::Status StoreCore::RestoreAll(absl::Span<const ChunkToAdd> added, const std::vector<StoredChunk*>& chunks,
                                   Interrupt interrupt) {
  enum class Part { kLabel, kMaster, kWhole };
  std::vector<ReadAhead> reads;
  std::vector<std::pair<Part, size_t>> parts;  // of the state of which of `added`, by read
  BALLAST_ASSIGN_OR_RETURN(const Arena labels, Arena::Map(kReadsAheadMax * StateLayout::kLabelBytes));
  uint64_t slot_bytes = 0;  // of the largest read without a place of its own
  const auto add = [&](Part part, size_t i, ReadAhead read) {
    if (read.to == nullptr) slot_bytes = std::max(slot_bytes, read.bytes);
    reads.push_back(read);
    parts.emplace_back(part, i);
  };
  for (size_t i = 0; i < added.size(); ++i) {
    if (!added[i].durable.has_value()) continue;
    const DurableChunk& durable = *added[i].durable;
    const StoredChunk& chunk = *chunks[i];
    BALLAST_RETURN_IF_ERROR(CheckFits(chunk, durable));
    std::byte* const to = chunk.placement.state == TierKind::kDram ? chunk.state : nullptr;
    const BlockFile* const file = &tiers->nvme()->file(durable.file);
    if (chunk.placement.state == TierKind::kHbm || chunk.layout.array_count() == 1) {
      add(Part::kWhole, i, {durable.offset, durable.bytes, to, file});
      continue;
    }
    // At most kReadsAheadMax reads are held, so a label's place is free again when its turn comes round.
    std::byte* const label = labels.bytes().data() + reads.size() % kReadsAheadMax * StateLayout::kLabelBytes;
    add(Part::kLabel, i,
        {durable.offset + chunk.layout.LabelAt(chunk.elements), StateLayout::kLabelBytes, label, file});
    add(Part::kMaster, i, {durable.offset, chunk.layout.ArrayBytes(StateArray::kMaster, chunk.elements), to, file});
  }
  if (reads.empty()) return absl::OkStatus();
  ReadSlots slots = {staging.memory.bytes(), slot_bytes};
  Arena bounce;
  if (slot_bytes > slots.memory.size()) {
    BALLAST_ASSIGN_OR_RETURN(bounce, tiers->dram()->Map(kBounceSlots * slot_bytes));
    slots.memory = bounce.bytes();
  }
  BALLAST_ASSIGN_OR_RETURN(IoQueue* const queue, staging.Queue(tiers->disk()));
  const auto take = [&](size_t i, std::byte* data, absl::FunctionRef<void()> poll) -> absl::Status {
    const auto [part, index] = parts[i];
    StoredChunk& chunk = *chunks[index];
    const DurableChunk& durable = *added[index].durable;
    const Compute with{.pool = compute, .poll = poll};
    if (part == Part::kLabel) {
      tiers->CountTraffic(TierKind::kNvme, reads[i].bytes, 0);
      return CheckLabel(chunk, durable, data);
    }
    BALLAST_RETURN_IF_ERROR(interrupt());
    if (part == Part::kWhole) {
      BALLAST_RETURN_IF_ERROR(TakeRead(chunk, durable, data, with));
    } else {
      tiers->CountTraffic(TierKind::kNvme, reads[i].bytes, 0);
      BALLAST_RETURN_IF_ERROR(
          CheckArray(*reads[i].file, chunk, durable.offset, durable.digests, StateArray::kMaster, data, with));
      if (chunk.working != nullptr) RoundMaster(chunk.View(data), chunk.working, with);
    }
    const bool unread = part == Part::kMaster && chunk.placement.state == TierKind::kDram;
    TakeDurable(chunk, durable, reads[i].bytes, unread);
    return absl::OkStatus();
  };
  return ForEachRead(queue, reads, slots, take);
}

void StoreCore::TakeDurable(StoredChunk& chunk, const DurableChunk& durable, uint64_t read_bytes,
                            bool moments_unread) const {
  absl::MutexLock lock(&chunk.mutex);
  chunk.updated_in = 1;
  chunk.digests = durable.digests;
  chunk.moments_unread = moments_unread;
  tiers->CountRestored(durable.bytes);
  tiers->CountMove(TierKind::kNvme, chunk.placement.state, MoveReason::kRecovery, read_bytes);
}

absl::Status StoreCore::LoadMoments(absl::Span<StoredChunk* const> chunks, Interrupt interrupt) {
  std::vector<ReadAhead> reads;
  std::vector<StoredChunk*> unread;
  for (StoredChunk* const chunk : chunks) {
    absl::ReaderMutexLock lock(&chunk->mutex);
    if (!chunk->moments_unread) continue;
    reads.push_back(MomentsOf(*chunk));
    unread.push_back(chunk);
  }
  if (reads.empty()) return absl::OkStatus();
  BALLAST_ASSIGN_OR_RETURN(IoQueue* const queue, staging.Queue(tiers->disk()));
  const auto take = [&](size_t i, std::byte*, absl::FunctionRef<void()> poll) {
    BALLAST_RETURN_IF_ERROR(interrupt());
    return TakeMoments(*unread[i], *reads[i].file, reads[i].bytes, {.pool = compute, .poll = poll});
  };
  return ForEachRead(queue, reads, {}, take);
}

absl::Status StoreCore::LoadMoments(StoredChunk& chunk) {
  ReadAhead moments;
  {
    absl::ReaderMutexLock lock(&chunk.mutex);
    if (!chunk.moments_unread) return absl::OkStatus();
    moments = MomentsOf(chunk);
  }
  BALLAST_RETURN_IF_ERROR(moments.file->Read(moments.offset, {moments.to, moments.bytes}));
  const auto no_poll = [] {};
  return TakeMoments(chunk, *moments.file, moments.bytes, {.pool = compute, .poll = no_poll});
}

absl::Status StoreCore::TakeMoments(StoredChunk& chunk, const BlockFile& file, uint64_t read_bytes,
                                    const Compute& with) {
  uint64_t state_at = 0;
  ArrayDigests expected = {};
  {
    absl::ReaderMutexLock lock(&chunk.mutex);
    state_at = chunk.extent.offset();
    expected = chunk.digests;
  }
  for (int moment = 1; moment < chunk.layout.array_count(); ++moment) {
    const auto array = static_cast<StateArray>(moment);
    const std::byte* const bytes = chunk.View(chunk.state).array(array);
    BALLAST_RETURN_IF_ERROR(CheckArray(file, chunk, state_at, expected, array, bytes, with));
  }
  tiers->CountTraffic(TierKind::kNvme, read_bytes, 0);
  tiers->CountMove(TierKind::kNvme, TierKind::kDram, MoveReason::kRecovery, read_bytes);
  // Readers of moments that wait for the disk have them from the extent.
  absl::MutexLock reading(&chunk.reading);
  absl::MutexLock lock(&chunk.mutex);
  chunk.moments_unread = false;
  return absl::OkStatus();
}

absl::Status StoreCore::CheckLabel(const StoredChunk& chunk, const DurableChunk& durable,
                                   const std::byte* label) const {
  DurableChunk found;
  std::string job;
  uint64_t layout_bits = 0;
  if (DecodeLabel({label, StateLayout::kLabelBytes}, &found, &job, &layout_bits) && job == versions->job() &&
      layout_bits == LayoutBits(chunk.layout) && found.Encode() == durable.Encode()) {
    return absl::OkStatus();
  }
  ++ProcessDiskCounters().wrong_extents;
  return model::Error(
      absl::StatusCode::kDataLoss, model::kChecksum,
      absl::StrCat("the state of chunk ", chunk.id, " at version ", durable.version, " is not at offset ",
                   durable.offset, " of ", tiers->nvme()->file(durable.file).path(),
                   ", where the catalog says: its label is damaged or another's. Run `ballastctl "
                   "verify`"));
}

absl::Status StoreCore::CheckArray(const BlockFile& file, const StoredChunk& chunk, uint64_t state_at,
                                   const ArrayDigests& expected, StateArray array, const std::byte* bytes,
                                   const Compute& with) const {
  const uint32_t found = DigestBytes({bytes, chunk.layout.ArrayBytes(array, chunk.elements)}, with);
  const uint32_t digest = expected[static_cast<size_t>(array)];
  if (found == digest) return absl::OkStatus();
  const uint64_t offset = state_at + chunk.layout.ArrayAt(array, chunk.elements);
  return ChecksumError(file, chunk.index, array, offset, digest, found);
}

absl::Status StoreCore::CheckRestored(const StoredChunk& chunk, const DurableChunk& durable, const std::byte* state,
                                      const Compute& with) const {
  BALLAST_RETURN_IF_ERROR(CheckLabel(chunk, durable, state + chunk.layout.LabelAt(chunk.elements)));
  const ArrayDigests digests = DigestState(chunk.View(const_cast<std::byte*>(state)), with);
  return CompareDigests(tiers->nvme()->file(durable.file), chunk, durable.offset, durable.digests, digests);
}

absl::Status StoreCore::ReadDurable(const StoredChunk& chunk, const DurableChunk& durable, std::byte* state,
                                    const Compute& with) const {
  Arena bounce;
  if (chunk.placement.state == TierKind::kHbm) {
    BALLAST_ASSIGN_OR_RETURN(bounce, Arena::Map(durable.bytes));
    state = bounce.bytes().data();
  }
  BALLAST_RETURN_IF_ERROR(tiers->nvme()->file(durable.file).Read(durable.offset, {state, durable.bytes}));
  tiers->CountMove(TierKind::kNvme, chunk.placement.state, MoveReason::kRestore, durable.bytes);
  return TakeRead(chunk, durable, state, with);
}

absl::Status StoreCore::TakeRead(const StoredChunk& chunk, const DurableChunk& durable, std::byte* state,
                                 const Compute& with) const {
  tiers->CountTraffic(TierKind::kNvme, chunk.state_bytes(), 0);
  BALLAST_RETURN_IF_ERROR(CheckRestored(chunk, durable, state, with));
  return TakeState(chunk, state, with);
}

absl::Status StoreCore::Clear(const StoredChunk& chunk, std::byte* state, const Compute& with) const {
  Arena bounce;
  if (chunk.placement.state == TierKind::kHbm) {
    BALLAST_ASSIGN_OR_RETURN(bounce, Arena::Map(chunk.state_bytes()));
    state = bounce.bytes().data();
  }
  std::memset(state, 0, chunk.state_bytes());
  return TakeState(chunk, state, with);
}

absl::Status StoreCore::TakeState(const StoredChunk& chunk, std::byte* state, const Compute& with) const {
  const uint64_t bytes = chunk.state_bytes();
  const kernels::Dtype working = layout.optimizer().working;
  if (chunk.placement.state == TierKind::kHbm) {
    const bool on_device = chunk.placement.working == TierKind::kHbm;
    return tiers->hbm()->Run([&](HbmQueue& queue) -> absl::Status {
      BALLAST_RETURN_IF_ERROR(queue.CopyIn({state, bytes}, chunk.state));
      return queue.Round(chunk.View(chunk.state).master(), chunk.elements, working,
                         on_device ? HbmWorking{.device = chunk.working} : HbmWorking{.host = chunk.working});
    });
  }
  if (chunk.working != nullptr) RoundMaster(chunk.View(state), chunk.working, with);
  return absl::OkStatus();
}

absl::Status StoreCore::Lasting(const absl::Status& status) {
  if (!absl::IsResourceExhausted(status)) return status;
  return model::Error(absl::StatusCode::kInternal, model::ReasonOf(status), status.message());
}

absl::Status ChunkStore::Harden() { return core_->Harden(); }

absl::Status StoreCore::Harden() {
  BALLAST_RETURN_IF_ERROR(failed);
  if (!versions.has_value()) return absl::OkStatus();
  failed = Lasting(versions->Harden());
  BALLAST_RETURN_IF_ERROR(failed);
  for (StoredChunk* const chunk : unrecorded) chunk->unrecorded_from.reset();
  unrecorded.clear();
  return absl::OkStatus();
}

absl::StatusOr<std::vector<DurableChunk>> ChunkStore::PinDurably(int64_t version, bool automatic, Interrupt interrupt,
                                                                 Admit admit) {
  StoreCore& core = *core_;
  BALLAST_RETURN_IF_ERROR(core.failed);
  std::vector<StoredChunk*> chunks;
  {
    absl::MutexLock lock(&core.mutex);
    for (StoredChunk& chunk : core.chunks) {
      if (chunk.has_state()) chunks.push_back(&chunk);
    }
  }
  uint64_t bytes = 0;
  std::vector<ChunkUpdate> flushes;
  for (const StoredChunk* chunk : chunks) {
    const bool there = !chunk->dirty;
    if (!there || core.durable_pins->NeedsBytes(chunk->index, automatic)) bytes += chunk->state_bytes();
    if (there) continue;
    ChunkUpdate& flush = flushes.emplace_back();
    flush.chunk = chunk->index;
    flush.version = version;
    flush.flush = true;
  }
  if (!automatic) BALLAST_RETURN_IF_ERROR(admit(bytes));
  BALLAST_ASSIGN_OR_RETURN(NvmeRoom reserve, core.durable_pins->Reserve(bytes, automatic));
  if (!flushes.empty()) {
    // Space was taken, so a shortage now is an error of the store, not a refused pin.
    BALLAST_RETURN_IF_ERROR(StoreCore::Lasting(Run(
        flushes, [](size_t) {}, /*read_back=*/{}, interrupt)));
  }
  BALLAST_RETURN_IF_ERROR(Harden());
  if (!core.versions->records() && !chunks.empty()) {
    std::vector<NvmeFileId> files;
    for (const StoredChunk* chunk : chunks) files.push_back(chunk->newest.file);
    core.failed = StoreCore::Lasting(core.tiers->nvme()->Sync(files));
    BALLAST_RETURN_IF_ERROR(core.failed);
  }
  std::vector<DurableChunk> kept;
  core.durable_pins->Expect(version);
  for (const StoredChunk* chunk : chunks) {
    core.durable_pins->Keep(version, chunk->index, chunk->newest, &reserve, automatic);
    kept.push_back(chunk->newest);
  }
  return kept;
}

absl::Status ChunkStore::AdoptPin(int64_t version, Admit admit) {
  KeptExtents& pins = *core_->durable_pins;
  const uint64_t bytes = pins.AsideBytes(version);
  BALLAST_RETURN_IF_ERROR(admit(bytes));
  BALLAST_ASSIGN_OR_RETURN(NvmeRoom reserve, pins.Reserve(bytes));
  pins.Adopt(version, std::move(reserve));
  return absl::OkStatus();
}

void ChunkStore::ExpectPin(int64_t version) { core_->durable_pins->Expect(version); }

absl::Status ChunkStore::TakeBackPin(int64_t version, uint64_t index, const DurableChunk& kept, bool automatic) {
  BALLAST_ASSIGN_OR_RETURN(const StoredChunk* chunk, core_->Find(index));
  BALLAST_RETURN_IF_ERROR(CheckFits(*chunk, kept));
  KeptExtents& pins = *core_->durable_pins;
  if (chunk->newest.version < 0 || chunk->newest.offset != kept.offset || chunk->newest.file != kept.file) {
    return pins.TakeBack(version, index, kept, automatic);
  }
  NvmeRoom reserve;
  if (!pins.KeepsNewest(index)) {
    BALLAST_ASSIGN_OR_RETURN(reserve, pins.Reserve(kept.bytes));
  }
  pins.Keep(version, index, kept, &reserve);
  return absl::OkStatus();
}

absl::Status ChunkStore::VerifyPin(int64_t version, Interrupt interrupt) {
  StoreCore& core = *core_;
  if (!core.durable_pins->Has(version)) {
    return model::Error(absl::StatusCode::kFailedPrecondition, model::kVersionGone,
                        absl::StrCat("version ", version, " is not pinned here"));
  }
  std::vector<ReadAhead> reads;
  std::vector<const StoredChunk*> chunks;
  uint64_t largest = 0;
  for (const uint64_t index : core.durable_pins->ChunksOf(version)) {
    BALLAST_ASSIGN_OR_RETURN(const StoredChunk* chunk, core.Find(index));
    const DurableChunk& kept = *core.durable_pins->Find(version, index);
    BALLAST_RETURN_IF_ERROR(CheckFits(*chunk, kept));
    reads.push_back({.offset = kept.offset, .bytes = kept.bytes, .file = &core.tiers->nvme()->file(kept.file)});
    chunks.push_back(chunk);
    largest = std::max(largest, kept.bytes);
  }
  if (reads.empty()) return absl::OkStatus();
  BALLAST_ASSIGN_OR_RETURN(const Arena memory, Arena::Map(kBounceSlots * largest));
  BALLAST_ASSIGN_OR_RETURN(IoQueue* const queue, core.staging.Queue(core.tiers->disk()));
  const auto check = [&](size_t i, std::byte* state, absl::FunctionRef<void()> poll) {
    BALLAST_RETURN_IF_ERROR(interrupt());
    core.tiers->CountTraffic(TierKind::kNvme, reads[i].bytes, 0);
    core.tiers->CountMove(TierKind::kNvme, TierKind::kDram, MoveReason::kPin, reads[i].bytes);
    const DurableChunk& kept = *core.durable_pins->Find(version, chunks[i]->index);
    return core.CheckRestored(*chunks[i], kept, state, {.pool = core.compute, .poll = poll});
  };
  return ForEachRead(queue, reads, {memory.bytes(), largest}, check);
}

ScrubPiece ChunkStore::ScrubNext(absl::Span<std::byte> buffer) { return core_->scrub.Next(*core_, buffer); }
uint64_t ChunkStore::scrub_pass_bytes() const { return core_->scrub.pass_bytes(); }
std::vector<ScrubbedExtent> ChunkStore::Extents(uint64_t chunk) const {
  const absl::StatusOr<StoredChunk*> found = core_->Find(chunk);
  return found.ok() ? StoreScrub::ExtentsOf(*core_, **found) : std::vector<ScrubbedExtent>();
}
absl::Status ChunkStore::LoadMoments(uint64_t chunk) {
  BALLAST_ASSIGN_OR_RETURN(StoredChunk* const found, core_->Find(chunk));
  return core_->LoadMoments(*found);
}
absl::Status ChunkStore::Rewrite(const ScrubbedExtent& extent) { return StoreScrub::Rewrite(core_.get(), extent); }

void ChunkStore::UnpinDurably(int64_t version) {
  // As in Unpin: an extent of the pin may be the chunk's recorded extent.
  if (Harden().ok()) core_->durable_pins->Drop(version);
}

}  // namespace ballast::storage
