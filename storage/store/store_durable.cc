// How class ChunkStore takes back states left on the disk by an earlier run, and keeps versions there: durable pins.
#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ballast/storage/counters/disk_counters.h"
#include "ballast/storage/faults/failpoint.h"
#include "ballast/storage/faults/seeded_bugs.h"
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

}  // namespace

absl::Status StoreCore::RestoreAll(absl::Span<const ChunkToAdd> added, const std::vector<StoredChunk*>& chunks,
                                   Interrupt interrupt) {
  std::vector<ReadAhead> reads;
  std::vector<size_t> restored;  // of `added`
  uint64_t device_bytes = 0;     // the largest state that passes through memory of its own
  for (size_t i = 0; i < added.size(); ++i) {
    if (!added[i].durable.has_value()) continue;
    const DurableChunk& durable = *added[i].durable;
    const StoredChunk& chunk = *chunks[i];
    BALLAST_RETURN_IF_ERROR(CheckFits(chunk, durable));
    const TierKind tier = chunk.placement.state;
    if (tier == TierKind::kHbm) device_bytes = std::max(device_bytes, durable.bytes);
    reads.push_back({durable.offset, durable.bytes, tier == TierKind::kDram ? chunk.state : nullptr});
    restored.push_back(i);
  }
  if (reads.empty()) return absl::OkStatus();
  ReadSlots slots = {staging.memory.bytes(), staging.slot_bytes};
  Arena bounce;
  if (device_bytes > slots.slot_bytes) {
    BALLAST_ASSIGN_OR_RETURN(bounce, tiers->dram()->Map(kBounceSlots * device_bytes));
    slots = {bounce.bytes(), device_bytes};
  }
  BALLAST_ASSIGN_OR_RETURN(IoQueue* const queue, staging.Queue(tiers->disk()));
  const auto take = [&](size_t i, std::byte* state, absl::FunctionRef<void()> poll) {
    BALLAST_RETURN_IF_ERROR(interrupt());
    StoredChunk& chunk = *chunks[restored[i]];
    const DurableChunk& durable = *added[restored[i]].durable;
    BALLAST_RETURN_IF_ERROR(TakeRead(chunk, durable, state, {.pool = compute, .poll = poll}));
    absl::MutexLock lock(&chunk.mutex);
    chunk.updated_in = 1;
    chunk.digests = durable.digests;
    tiers->CountRestored(durable.bytes);
    tiers->CountMove(TierKind::kNvme, chunk.placement.state, MoveReason::kRecovery, durable.bytes);
    Pass("recovery/chunk_restored");
    return absl::OkStatus();
  };
  return ForEachRead(queue, tiers->nvme()->file(), reads, slots, take);
}

absl::Status StoreCore::CheckLabel(const StoredChunk& chunk, const DurableChunk& durable,
                                   absl::Span<const std::byte> label) const {
  const BlockFile& file = tiers->nvme()->file();
  DurableChunk found;
  std::string job;
  uint64_t layout_bits = 0;
  const bool labelled = DecodeLabel(label, &found, &job, &layout_bits) && job == versions->job() &&
                        layout_bits == LayoutBits(chunk.layout) && found.Encode() == durable.Encode();
  if (labelled) return absl::OkStatus();
  ++ProcessDiskCounters().wrong_extents;
  return model::Error(absl::StatusCode::kDataLoss, model::kChecksum,
                      absl::StrCat("the state of chunk ", chunk.id, " at version ", durable.version,
                                   " is not at offset ", durable.offset, " of ", file.path(),
                                   ", where the catalog says: its label is damaged or another's. Run `ballastctl "
                                   "verify`"));
}

absl::Status StoreCore::CheckRestored(const StoredChunk& chunk, const DurableChunk& durable, const std::byte* state,
                                      const Compute& with) const {
  BALLAST_RETURN_IF_ERROR(
      CheckLabel(chunk, durable, {state + chunk.layout.LabelAt(chunk.elements), StateLayout::kLabelBytes}));
  if (Seeded(StorageBug::kRestoreDigestUnchecked)) return absl::OkStatus();
  const ArrayDigests digests = DigestState(chunk.View(const_cast<std::byte*>(state)), with);
  return CompareDigests(tiers->nvme()->file(), chunk, durable.offset, durable.digests, digests);
}

absl::Status StoreCore::ReadDurable(const StoredChunk& chunk, const DurableChunk& durable, std::byte* state,
                                    const Compute& with) const {
  Arena bounce;
  if (chunk.placement.state == TierKind::kHbm) {
    BALLAST_ASSIGN_OR_RETURN(bounce, Arena::Map(durable.bytes));
    state = bounce.bytes().data();
  }
  BALLAST_RETURN_IF_ERROR(tiers->nvme()->file().Read(durable.offset, {state, durable.bytes}));
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

absl::StatusOr<std::vector<DurableChunk>> ChunkStore::PinDurably(int64_t version, bool automatic, Interrupt interrupt) {
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
  BALLAST_ASSIGN_OR_RETURN(NvmeRoom reserve, core.durable_pins->Reserve(bytes, automatic));
  if (!flushes.empty()) {
    // Space was taken, so a shortage now is an error of the store, not a refused pin.
    BALLAST_RETURN_IF_ERROR(StoreCore::Lasting(Run(
        flushes, [](size_t) {}, /*read_back=*/{}, interrupt)));
  }
  BALLAST_RETURN_IF_ERROR(Harden());
  if (!core.versions->records() && !chunks.empty()) {
    Pass("extent/sync");
    if (!Seeded(StorageBug::kExtentSyncDropped)) core.failed = StoreCore::Lasting(core.tiers->nvme()->Sync());
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

absl::Status ChunkStore::AdoptPin(int64_t version) {
  KeptExtents& pins = *core_->durable_pins;
  BALLAST_ASSIGN_OR_RETURN(NvmeRoom reserve, pins.Reserve(pins.AsideBytes(version)));
  pins.Adopt(version, std::move(reserve));
  return absl::OkStatus();
}

void ChunkStore::ExpectPin(int64_t version) { core_->durable_pins->Expect(version); }

absl::Status ChunkStore::TakeBackPin(int64_t version, uint64_t index, const DurableChunk& kept, bool automatic) {
  BALLAST_ASSIGN_OR_RETURN(const StoredChunk* chunk, core_->Find(index));
  BALLAST_RETURN_IF_ERROR(CheckFits(*chunk, kept));
  KeptExtents& pins = *core_->durable_pins;
  if (chunk->newest.version < 0 || chunk->newest.offset != kept.offset) {
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
    reads.push_back({.offset = kept.offset, .bytes = kept.bytes});
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
  return ForEachRead(queue, core.tiers->nvme()->file(), reads, {memory.bytes(), largest}, check);
}

ScrubPiece ChunkStore::ScrubNext(absl::Span<std::byte> buffer) { return core_->scrub.Next(*core_, buffer); }
uint64_t ChunkStore::scrub_pass_bytes() const { return core_->scrub.pass_bytes(); }
std::vector<ScrubbedExtent> ChunkStore::Extents(uint64_t chunk) const {
  const absl::StatusOr<StoredChunk*> found = core_->Find(chunk);
  return found.ok() ? StoreScrub::ExtentsOf(*core_, **found) : std::vector<ScrubbedExtent>();
}
absl::Status ChunkStore::Rewrite(const ScrubbedExtent& extent) { return StoreScrub::Rewrite(core_.get(), extent); }

void ChunkStore::UnpinDurably(int64_t version) {
  // As in Unpin: an extent of the pin may be the chunk's recorded extent.
  if (Harden().ok()) core_->durable_pins->Drop(version);
}

}  // namespace ballast::storage
