// How class ChunkStore keeps versions on the disk: durable pins, and the scrub of what lies there.
#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ballast/storage/io/reads_ahead.h"
#include "ballast/storage/memory/arena.h"
#include "ballast/storage/store/store_core.h"

namespace ballast::storage {
namespace {

// Slots for states on their way through extra memory: a state is checked while the next states come from the disk.
constexpr uint64_t kBounceSlots = 3;

}  // namespace

absl::Status ChunkStore::Harden() { return core_->Harden(); }

absl::Status StoreCore::Harden() {
  BALLAST_RETURN_IF_ERROR(failed_);
  if (!versions.has_value()) return absl::OkStatus();
  return EndWith(Lasting(versions->Harden()));
}

absl::StatusOr<std::vector<DurableChunk>> ChunkStore::PinDurably(int64_t version, bool automatic, Interrupt interrupt,
                                                                 Admit admit) {
  StoreCore& core = *core_;
  BALLAST_RETURN_IF_ERROR(core.failed());
  BALLAST_RETURN_IF_ERROR(core.CheckNoneVoid());
  StoreVersions& versions = *core.versions;
  std::vector<StoredChunk*> chunks = core.chunks.All();
  std::erase_if(chunks, [&](const StoredChunk* chunk) { return !versions.Of(*chunk).has_state(); });
  uint64_t bytes = 0;
  std::vector<ChunkUpdate> flushes;
  for (const StoredChunk* chunk : chunks) {
    const bool there = !versions.Of(*chunk).dirty();
    if (!there || versions.pins.NeedsBytes(chunk->index, automatic)) bytes += chunk->state_bytes();
    if (there) continue;
    ChunkUpdate& flush = flushes.emplace_back();
    flush.chunk = chunk->index;
    flush.version = version;
    flush.flush = true;
  }
  if (!automatic) BALLAST_RETURN_IF_ERROR(admit(bytes));
  BALLAST_ASSIGN_OR_RETURN(NvmeRoom reserve, versions.pins.Reserve(bytes, automatic));
  if (!flushes.empty()) {
    // Space was taken, so a shortage now is an error of the store, not a refused pin.
    BALLAST_RETURN_IF_ERROR(Lasting(Run(
        flushes, [](size_t) {}, /*read_back=*/{}, interrupt)));
  }
  BALLAST_RETURN_IF_ERROR(Harden());
  if (!versions.extents.records() && !chunks.empty()) {
    std::vector<NvmeFileId> files;
    for (const StoredChunk* chunk : chunks) files.push_back(versions.Of(*chunk).newest().file);
    BALLAST_RETURN_IF_ERROR(core.EndWith(Lasting(core.tiers->nvme()->Sync(files))));
  }
  std::vector<DurableChunk> kept;
  versions.pins.Expect(version);
  for (const StoredChunk* chunk : chunks) {
    const DurableChunk& newest = versions.Of(*chunk).newest();
    versions.pins.Keep(version, chunk->index, newest, &reserve, automatic);
    kept.push_back(newest);
  }
  return kept;
}

absl::Status ChunkStore::AdoptPin(int64_t version, Admit admit) {
  KeptExtents& pins = core_->versions->pins;
  const uint64_t bytes = pins.AsideBytes(version);
  BALLAST_RETURN_IF_ERROR(admit(bytes));
  BALLAST_ASSIGN_OR_RETURN(NvmeRoom reserve, pins.Reserve(bytes));
  pins.Adopt(version, std::move(reserve));
  return absl::OkStatus();
}

void ChunkStore::ExpectPin(int64_t version) { core_->versions->pins.Expect(version); }

absl::Status ChunkStore::TakeBackPin(int64_t version, uint64_t index, const DurableChunk& kept, bool automatic) {
  BALLAST_ASSIGN_OR_RETURN(const StoredChunk* chunk, core_->chunks.Find(index));
  BALLAST_RETURN_IF_ERROR(CheckFits(*chunk, kept));
  KeptExtents& pins = core_->versions->pins;
  const DurableChunk& newest = core_->versions->Of(*chunk).newest();
  if (newest.version < 0 || newest.offset != kept.offset || newest.file != kept.file) {
    return pins.TakeBack(version, index, kept, automatic);
  }
  NvmeRoom reserve;
  if (!pins.KeepsNewest(index)) {
    BALLAST_ASSIGN_OR_RETURN(reserve, pins.Reserve(kept.bytes));
  }
  pins.Keep(version, index, kept, &reserve);
  return absl::OkStatus();
}

absl::Status ChunkStore::VerifyPin(int64_t version, Interrupt interrupt, Dispensable mends) {
  StoreCore& core = *core_;
  const KeptExtents& pins = core.versions->pins;
  if (!pins.Has(version)) {
    return model::Error(absl::StatusCode::kFailedPrecondition, model::kVersionGone,
                        absl::StrCat("version ", version, " is not pinned here"));
  }
  if (const std::vector<uint64_t> lacked = pins.LackedBy(version); !lacked.empty()) {
    BALLAST_ASSIGN_OR_RETURN(const StoredChunk* const chunk, core.chunks.Find(lacked.front()));
    return NotKept(version, *chunk);
  }
  std::vector<ReadAhead> reads;
  std::vector<const StoredChunk*> chunks;
  uint64_t largest = 0;
  for (const uint64_t index : pins.ChunksOf(version)) {
    BALLAST_ASSIGN_OR_RETURN(const StoredChunk* chunk, core.chunks.Find(index));
    const DurableChunk& kept = *pins.Find(version, index);
    BALLAST_RETURN_IF_ERROR(CheckFits(*chunk, kept));
    reads.push_back({.offset = kept.offset, .bytes = kept.bytes, .file = &core.tiers->nvme()->file(kept.file)});
    chunks.push_back(chunk);
    largest = std::max(largest, kept.bytes);
  }
  if (reads.empty()) return absl::OkStatus();
  BALLAST_ASSIGN_OR_RETURN(const Arena memory, Arena::Map(kBounceSlots * largest));
  BALLAST_ASSIGN_OR_RETURN(IoQueue* const queue, core.buffers.staging.Queue(core.tiers->disk()));
  const auto check = [&](size_t i, std::byte* state, absl::FunctionRef<void()> poll) {
    BALLAST_RETURN_IF_ERROR(interrupt());
    core.tiers->CountTraffic(TierKind::kNvme, reads[i].bytes, 0);
    core.tiers->CountMove(TierKind::kNvme, TierKind::kDram, MoveReason::kPin, reads[i].bytes);
    const DurableChunk& kept = *pins.Find(version, chunks[i]->index);
    const absl::Status found = core.restore.CheckState(*chunks[i], kept, state, {.pool = core.compute, .poll = poll});
    return absl::IsDataLoss(found) && mends(chunks[i]->index, found) ? absl::OkStatus() : found;
  };
  return ForEachRead(queue, reads, {memory.bytes(), largest}, check);
}

ScrubPiece ChunkStore::ScrubNext(absl::Span<std::byte> buffer) { return core_->scrub.Next(*core_, buffer); }
uint64_t ChunkStore::scrub_pass_bytes() const { return core_->scrub.pass_bytes(); }
std::vector<ScrubbedExtent> ChunkStore::Extents(uint64_t chunk) const {
  const absl::StatusOr<StoredChunk*> found = core_->chunks.Find(chunk);
  return found.ok() ? StoreScrub::ExtentsOf(*core_, **found) : std::vector<ScrubbedExtent>();
}
absl::Status ChunkStore::LoadMoments(uint64_t chunk) {
  BALLAST_ASSIGN_OR_RETURN(StoredChunk* const found, core_->chunks.Find(chunk));
  return core_->restore.Moments(*found);
}
absl::Status ChunkStore::LoadMoments(absl::Span<const uint64_t> chunks, Dispensable dispensable) {
  BALLAST_RETURN_IF_ERROR(core_->failed());
  std::vector<StoredChunk*> found;
  for (const uint64_t index : chunks) {
    BALLAST_ASSIGN_OR_RETURN(found.emplace_back(), core_->chunks.Find(index));
  }
  return core_->restore.Moments(found, Uninterrupted, [&](size_t i, const absl::Status& damage) {
    const bool goes_on = dispensable(i, damage);
    if (goes_on) core_->Void(*found[i]);
    return goes_on;
  });
}
absl::Status ChunkStore::Rewrite(const ScrubbedExtent& extent) { return StoreScrub::Rewrite(core_.get(), extent); }

void ChunkStore::UnpinDurably(int64_t version) {
  // As in Unpin: an extent of the pin may be the chunk's recorded extent.
  if (Harden().ok()) core_->versions->pins.Drop(version);
}

}  // namespace ballast::storage
