// What class ChunkStore keeps on the disk beyond its own life: states that an earlier run left, and durable pins.
#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ballast/kernels/kernels.h"
#include "ballast/storage/io/arena.h"
#include "ballast/storage/io/failpoint.h"
#include "ballast/storage/io/seeded_bugs.h"
#include "ballast/storage/state_update.h"
#include "ballast/storage/store_parts.h"

namespace ballast::storage {

absl::Status ChunkStore::Impl::RestoreAll(absl::Span<const ChunkToAdd> added, const std::vector<StoredChunk*>& chunks) {
  struct Restored {
    StoredChunk* chunk;
    const DurableChunk* durable;
    std::byte* staging = nullptr;
    absl::Status status;
  };
  // Several at a time: one is checked while others are on their way from the disk. Those that are not to stay in DRAM
  // have the staging slots to go through, or one by one memory of their own.
  std::vector<Restored> restored;
  const uint64_t slots = staging.slot_bytes == 0 ? 0 : staging.memory.bytes().size() / staging.slot_bytes;
  uint64_t staged = 0;
  const auto restore = [&] {
    const auto one = [&](uint64_t i) {
      restored[i].status = Restore(*restored[i].chunk, *restored[i].durable, restored[i].staging);
    };
    if (compute != nullptr) {
      compute->ParallelFor(restored.size(), one);
    } else {
      for (uint64_t i = 0; i < restored.size(); ++i) one(i);
    }
    absl::Status status;
    for (const Restored& r : restored) status.Update(r.status);
    restored.clear();
    staged = 0;
    return status;
  };
  for (size_t i = 0; i < added.size(); ++i) {
    if (!added[i].durable.has_value()) continue;
    const TierKind tier = chunks[i]->placement.state;
    restored.push_back({chunks[i], &*added[i].durable});
    if (tier == TierKind::kNvme)
      restored.back().staging = staging.memory.bytes().data() + staged++ * staging.slot_bytes;
    if (tier == TierKind::kHbm || staged == std::max<uint64_t>(slots, 1)) BALLAST_RETURN_IF_ERROR(restore());
  }
  return restore();
}

absl::Status ChunkStore::Impl::CheckRestored(const StoredChunk& chunk, const DurableChunk& durable,
                                             const std::byte* state) const {
  const BlockFile& file = tiers->nvme()->file();
  DurableChunk found;
  std::string job;
  uint64_t layout_bits = 0;
  const absl::Span<const std::byte> label(state + layout.LabelAt(chunk.elements), StateLayout::kLabelBytes);
  const bool labelled = DecodeLabel(label, &found, &job, &layout_bits) && job == versions->job() &&
                        layout_bits == LayoutBits(layout) && found.Encode() == durable.Encode();
  if (!labelled) {
    return model::Error(absl::StatusCode::kDataLoss, model::kChecksum,
                        absl::StrCat("the state of chunk ", chunk.id, " at version ", durable.version,
                                     " is not at offset ", durable.offset, " of ", file.path(),
                                     ", where the catalog says: its label is damaged or another's. Run `ballastctl "
                                     "verify`"));
  }
  if (Seeded(StorageBug::kRestoreDigestUnchecked)) return absl::OkStatus();
  const ArrayDigests digests = DigestState({&layout, const_cast<std::byte*>(state), chunk.elements}, {nullptr, [] {}});
  return CompareDigests(file, chunk, durable.offset, durable.digests, digests);
}

absl::Status ChunkStore::Impl::Restore(StoredChunk& chunk, const DurableChunk& durable, std::byte* staging) {
  const uint64_t bytes = chunk.state_bytes();
  if (durable.elements != chunk.elements || durable.bytes != bytes || durable.id != chunk.id) {
    return model::Error(absl::StatusCode::kDataLoss, model::kIo,
                        absl::StrCat("the catalog's entry of chunk ", durable.id, " with ", durable.elements,
                                     " elements is for another chunk than ", chunk.id, " with ", chunk.elements));
  }
  const bool on_disk = chunk.placement.state == TierKind::kNvme;
  BALLAST_RETURN_IF_ERROR(ReadDurable(chunk, durable, on_disk ? staging : chunk.state));
  absl::MutexLock lock(&chunk.mutex);
  chunk.updated_in = 1;
  chunk.digests = durable.digests;
  Pass("recovery/chunk_restored");
  return absl::OkStatus();
}

absl::Status ChunkStore::Impl::ReadDurable(const StoredChunk& chunk, const DurableChunk& durable,
                                           std::byte* state) const {
  const uint64_t bytes = chunk.state_bytes();
  Arena bounce;
  if (chunk.placement.state == TierKind::kHbm) {
    BALLAST_ASSIGN_OR_RETURN(bounce, Arena::Map(bytes, /*pin=*/false));
    state = bounce.bytes().data();
  }
  BALLAST_RETURN_IF_ERROR(tiers->nvme()->file().Read(durable.offset, {state, bytes}));
  tiers->CountTraffic(TierKind::kNvme, bytes, 0);
  BALLAST_RETURN_IF_ERROR(CheckRestored(chunk, durable, state));
  const kernels::Dtype working = layout.optimizer().working;
  if (chunk.placement.state == TierKind::kHbm) {
    BALLAST_RETURN_IF_ERROR(tiers->hbm()->CopyIn({state, bytes}, chunk.state));
    const bool on_device = chunk.placement.working == TierKind::kHbm;
    BALLAST_RETURN_IF_ERROR(
        tiers->hbm()->Round(chunk.View(chunk.state).master(), chunk.elements, working,
                            on_device ? HbmWorking{.device = chunk.working} : HbmWorking{.host = chunk.working}));
  } else {
    kernels::FromF32({chunk.View(state).master(), chunk.elements}, working, chunk.working);
  }
  return absl::OkStatus();
}

absl::Status ChunkStore::Harden() { return impl_->Harden(); }

absl::Status ChunkStore::Impl::Harden() {
  BALLAST_RETURN_IF_ERROR(failed);
  if (!versions.has_value()) return absl::OkStatus();
  failed = versions->Harden();
  BALLAST_RETURN_IF_ERROR(failed);
  for (StoredChunk* const chunk : unrecorded) chunk->unrecorded_from.reset();
  unrecorded.clear();
  return absl::OkStatus();
}

absl::StatusOr<std::vector<DurableChunk>> ChunkStore::PinDurably(int64_t version) {
  Impl& impl = *impl_;
  BALLAST_RETURN_IF_ERROR(impl.failed);
  std::vector<StoredChunk*> chunks;
  {
    absl::MutexLock lock(&impl.mutex);
    for (StoredChunk& chunk : impl.chunks) {
      if (chunk.has_state()) chunks.push_back(&chunk);
    }
  }
  uint64_t bytes = 0;
  std::vector<ChunkUpdate> flushes;
  for (const StoredChunk* chunk : chunks) {
    const bool there = !chunk->dirty;
    if (!there || !impl.durable_pins->KeepsNewest(chunk->index)) bytes += chunk->state_bytes();
    if (there) continue;
    ChunkUpdate& flush = flushes.emplace_back();
    flush.chunk = chunk->index;
    flush.version = version;
    flush.flush = true;
  }
  BALLAST_ASSIGN_OR_RETURN(BudgetLease reserve, impl.durable_pins->Reserve(bytes));
  if (!flushes.empty()) {
    absl::Status flushed = Run(flushes, [](size_t) {});
    // Space was reserved: whatever is short now is no reason to refuse a pin and go on.
    if (absl::IsResourceExhausted(flushed)) {
      flushed = model::Error(absl::StatusCode::kInternal, model::kBudget, flushed.message());
    }
    BALLAST_RETURN_IF_ERROR(flushed);
  }
  BALLAST_RETURN_IF_ERROR(Harden());
  std::vector<DurableChunk> kept;
  for (const StoredChunk* chunk : chunks) {
    impl.durable_pins->Keep(version, chunk->index, chunk->newest, &reserve);
    kept.push_back(chunk->newest);
  }
  return kept;
}

absl::Status ChunkStore::TakeBackPin(int64_t version, uint64_t index, const DurableChunk& kept) {
  BALLAST_ASSIGN_OR_RETURN(const StoredChunk* chunk, impl_->Find(index));
  DurablePins& pins = *impl_->durable_pins;
  if (chunk->newest.version < 0 || chunk->newest.offset != kept.offset) return pins.TakeBack(version, index, kept);
  BudgetLease reserve;
  if (!pins.KeepsNewest(index)) {
    BALLAST_ASSIGN_OR_RETURN(reserve, pins.Reserve(kept.bytes));
  }
  pins.Keep(version, index, kept, &reserve);
  return absl::OkStatus();
}

absl::Status ChunkStore::VerifyPin(int64_t version) const {
  const Impl& impl = *impl_;
  {
    absl::ReaderMutexLock lock(&impl.mutex);
    for (const StoredChunk& chunk : impl.chunks) {
      if (!chunk.has_state() || impl.durable_pins->Find(version, chunk.index) != nullptr) continue;
      return model::Error(absl::StatusCode::kFailedPrecondition, model::kVersionGone,
                          absl::StrCat("chunk ", chunk.id, " had no state yet at version ", version));
    }
  }
  Arena memory;
  for (const uint64_t index : impl.durable_pins->ChunksOf(version)) {
    BALLAST_ASSIGN_OR_RETURN(const StoredChunk* chunk, impl.Find(index));
    const DurableChunk& kept = *impl.durable_pins->Find(version, index);
    const uint64_t bytes = chunk->state_bytes();
    if (memory.bytes().size() < bytes) {
      BALLAST_ASSIGN_OR_RETURN(memory, Arena::Map(bytes, /*pin=*/false));
    }
    std::byte* const state = memory.bytes().data();
    BALLAST_RETURN_IF_ERROR(impl.tiers->nvme()->file().Read(kept.offset, {state, bytes}));
    impl.tiers->CountTraffic(TierKind::kNvme, bytes, 0);
    BALLAST_RETURN_IF_ERROR(impl.CheckRestored(*chunk, kept, state));
  }
  return absl::OkStatus();
}

void ChunkStore::UnpinDurably(int64_t version) {
  // As in Unpin.
  if (Harden().ok()) impl_->durable_pins->Drop(version);
}

}  // namespace ballast::storage
