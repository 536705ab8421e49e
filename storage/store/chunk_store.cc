#include "ballast/storage/store/chunk_store.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ballast/storage/store/chunk_move.h"
#include "ballast/storage/store/store_addition.h"
#include "ballast/storage/store/store_core.h"
#include "ballast/storage/store/store_run.h"

namespace ballast::storage {
StoreCore::~StoreCore() {
  if (!versions.has_value() || versions->discarded()) return;
  versions->pins.Leave();
  for (StoredChunk* const chunk : chunks.All()) {
    absl::MutexLock lock(&chunk->mutex);
    // An extent that never held a version is freed.
    if (versions->Of(*chunk).written()) chunk->on_disk.Leave();
    // After a failed run the newest recorded version may be in a pin's copy.
    chunk->history.Leave();
  }
}

ChunkStore::ChunkStore(Tiers* tiers, const StateLayout& layout, kernels::ThreadPool* compute,
                       std::optional<DurableOptions> durable, std::shared_ptr<Account> account)
    : core_(std::make_unique<StoreCore>(tiers, layout, compute, std::move(durable), std::move(account))) {}
ChunkStore::~ChunkStore() = default;
void ChunkStore::Discard() {
  if (core_->versions.has_value()) core_->versions->Discard();
}

const DurableProgress* StoreCore::ProgressOf(uint64_t chunk) const {
  const absl::StatusOr<StoredChunk*> found = chunks.Find(chunk);
  return versions.has_value() && found.ok() ? &versions->Of(**found) : nullptr;
}

absl::Status StoreCore::CheckTier(uint64_t chunk, uint64_t elements, const StateLayout& of, TierKind state) const {
  const bool there =
      state == TierKind::kHbm ? tiers->hbm() != nullptr : state != TierKind::kNvme || tiers->nvme() != nullptr;
  if (!there) return Bad(model::kBadConfig, absl::StrCat("this server has no ", TierName(state), " tier"));
  if (state != TierKind::kHbm) return absl::OkStatus();
  if (!layout.working_copies()) {
    return Bad(model::kBadConfig, "state in hbm needs working copies, and this store keeps none");
  }
  if (IsFrozen(of.form())) {
    return Bad(model::kBadRequest, absl::StrCat("chunk ", chunk, " is frozen, and frozen chunks are not in hbm"));
  }
  if (of.keeps_remainder()) {
    return Bad(
        model::kBadRequest,
        absl::StrCat("chunk ", chunk, " keeps its master as remainder, which kernels on the ", "GPU do not read"));
  }
  if (!of.working_copies()) {
    return Bad(model::kBadRequest, absl::StrCat("chunk ", chunk, " has no working copy, which hbm needs"));
  }
  if (elements <= kHbmSpanElementsMax) return absl::OkStatus();
  return Bad(model::kBadRequest,
             absl::StrCat("chunk ", chunk, " of ", elements, " elements, hbm takes ", kHbmSpanElementsMax));
}

void StoreCore::DropCopy(StoredChunk& chunk) {
  const uint64_t bytes = chunk.working_bytes();
  std::byte* copy = nullptr;
  {
    absl::MutexLock lock(&chunk.mutex);
    copy = chunk.memory.DropWorking();
  }
  chunk.memory.shared()->GiveBackOfRest({copy, bytes});
  chunks.Replace(chunk);
}

absl::Status ChunkStore::Add(absl::Span<const uint64_t> elements, const Plan& plan) {
  std::vector<ChunkToAdd> added(elements.size());
  for (size_t i = 0; i < elements.size(); ++i) added[i].elements = elements[i];
  return Add(added, plan);
}

absl::Status ChunkStore::Add(absl::Span<const ChunkToAdd> added, const Plan& plan, Interrupt interrupt,
                             Dispensable dispensable) {
  return StoreAddition(core_.get(), added, plan).Run(interrupt, dispensable);
}

bool ChunkStore::durable() const { return core_->versions.has_value(); }

bool ChunkStore::records() const { return core_->versions.has_value() && core_->versions->extents.records(); }

bool ChunkStore::dirty(uint64_t chunk) const {
  const DurableProgress* const progress = core_->ProgressOf(chunk);
  return progress != nullptr && progress->dirty();
}

int64_t ChunkStore::durable_version(uint64_t chunk) const {
  const DurableProgress* const progress = core_->ProgressOf(chunk);
  return progress != nullptr ? progress->newest().version : -1;
}

int64_t ChunkStore::needed_from(uint64_t chunk) const {
  const DurableProgress* const progress = core_->ProgressOf(chunk);
  return progress != nullptr ? progress->needed_from() : -1;
}

std::optional<int64_t> ChunkStore::recoverable_from(uint64_t chunk) const {
  const DurableProgress* const progress = core_->ProgressOf(chunk);
  return progress != nullptr ? progress->recoverable_from() : std::nullopt;
}

uint64_t ChunkStore::spare_bytes_missing(absl::Span<const ChunkToAdd> added) const {
  if (!core_->versions.has_value() || added.empty()) return 0;
  uint64_t largest = core_->chunks.largest_bytes();
  for (const ChunkToAdd& chunk : added) {
    largest = std::max(largest, core_->layout.Of(chunk.form).StateBytes(chunk.elements));
  }
  return core_->versions->extents.SpareBytesMissing(present_count() + added.size(), largest);
}

uint64_t ChunkStore::chunk_count() const { return core_->chunks.count(); }

uint64_t ChunkStore::present_count() const { return core_->chunks.present(); }

bool ChunkStore::has_working_copy(uint64_t chunk) const {
  const absl::StatusOr<StoredChunk*> found = core_->chunks.Find(chunk);
  if (!found.ok()) return false;
  absl::ReaderMutexLock lock(&(*found)->mutex);
  return (*found)->memory.working() != nullptr;
}

absl::Span<const std::byte> ChunkStore::working_copy(uint64_t chunk) const {
  const absl::StatusOr<StoredChunk*> found = core_->chunks.Find(chunk);
  if (!found.ok() || !(*found)->mutex.ReaderTryLock()) return {};
  const ChunkMemory& memory = (*found)->memory;
  absl::Span<const std::byte> copy;
  if (memory.working() != nullptr && memory.placement().working == TierKind::kDram) {
    copy = {memory.working(), (*found)->working_bytes()};
  }
  (*found)->mutex.ReaderUnlock();
  return copy;
}

bool ChunkStore::may_drop_working_copies() const {
  const std::vector<StoredChunk*> all = core_->chunks.All();
  return std::any_of(all.begin(), all.end(), [this](const StoredChunk* chunk) { return core_->MayDropCopy(*chunk); });
}

absl::StatusOr<bool> ChunkStore::DropWorkingCopies() {
  uint64_t largest = 0;
  std::vector<uint64_t> with_copy;
  for (const StoredChunk* chunk : core_->chunks.All()) {
    largest = std::max(largest, chunk->elements);
    if (core_->MayDropCopy(*chunk)) with_copy.push_back(chunk->index);
  }
  // The first copies that are dropped make room for the memory of pulls too.
  const PullMemory pull = pull_memory_missing(largest, present_count());
  uint64_t freed = 0;
  size_t first = with_copy.size();
  while (first > 0 && freed <= 2 * pull.bytes()) {
    --first;
    freed += core_->layout.WorkingBytes((*core_->chunks.Find(with_copy[first]))->elements);
  }
  if (freed <= pull.bytes()) return false;
  BALLAST_RETURN_IF_ERROR(DropWorkingCopies(absl::MakeConstSpan(with_copy).subspan(first)));
  return true;
}

absl::Status ChunkStore::DropWorkingCopies(absl::Span<const uint64_t> chunks) {
  StoreCore& core = *core_;
  BALLAST_RETURN_IF_ERROR(core.failed());
  uint64_t largest = 0;
  std::vector<StoredChunk*> dropped;
  for (const StoredChunk* chunk : core.chunks.All()) largest = std::max(largest, chunk->elements);
  for (const uint64_t index : chunks) {
    const absl::StatusOr<StoredChunk*> chunk = core.chunks.Find(index);
    if (chunk.ok() && core.MayDropCopy(**chunk)) dropped.push_back(*chunk);
  }
  if (dropped.empty()) return absl::OkStatus();
  // Pulls need it as soon as the first copy is gone.
  BALLAST_RETURN_IF_ERROR(
      core.buffers.TakePullMemory(pull_memory_missing(largest, present_count()), DramTier::Limit::kBeyond));
  for (StoredChunk* const chunk : dropped) core.DropCopy(*chunk);
  return absl::OkStatus();
}

std::vector<PlacedChunk> ChunkStore::placed() const { return core_->chunks.placed(); }

uint64_t ChunkStore::slot_memory_bytes() const { return core_->buffers.slot_memory_bytes(); }

const StateLayout& ChunkStore::layout() const { return core_->layout; }

PullMemory ChunkStore::pull_memory_missing(uint64_t elements, uint64_t chunks) const {
  return core_->buffers.pull_memory_missing(core_->layout.WorkingBytes(elements), chunks);
}

uint64_t ChunkStore::staging_bytes_missing() const { return core_->buffers.staging_bytes_missing(); }

uint64_t ChunkStore::flush_buffer_bytes_missing() const { return core_->buffers.flush_buffer_bytes_missing(); }

ChunkStore::Residency ChunkStore::residency() const { return core_->chunks.residency(); }

absl::Status ChunkStore::Run(absl::Span<const ChunkUpdate> updates, absl::FunctionRef<void(size_t)> done,
                             const ReadBack& read_back, Interrupt interrupt, RunStageObserver observer,
                             Dispensable dispensable) {
  return StoreRun(core_.get(), done, observer, dispensable).Run(updates, read_back, interrupt);
}

absl::Status ChunkStore::Move(uint64_t index, TierKind to) {
  StoreCore& core = *core_;
  BALLAST_RETURN_IF_ERROR(core.failed());
  BALLAST_ASSIGN_OR_RETURN(StoredChunk * chunk, core.chunks.Find(index));
  const ChunkPlacement from = chunk->memory.placement();
  if (from.state == to) return absl::OkStatus();
  BALLAST_RETURN_IF_ERROR(core.CheckTier(index, chunk->elements, core.layout.Of(chunk->layout.form(), from), to));
  BALLAST_RETURN_IF_ERROR(core.Move(*chunk, to));
  core.chunks.Replace(*chunk);
  return absl::OkStatus();
}

absl::Status StoreCore::Move(StoredChunk& chunk, TierKind to) {
  const uint64_t bytes = chunk.state_bytes();
  StateMove move{.to = to, .extent = {}, .keep_extent = versions.has_value(), .buffer = {}};
  if (to == TierKind::kNvme) {
    BALLAST_RETURN_IF_ERROR(buffers.TakeStaging(bytes, DramTier::Limit::kBeyond));
    BALLAST_ASSIGN_OR_RETURN(move.extent, ExtentToMoveTo(chunk));
  } else if (chunk.memory.tier() == TierKind::kNvme) {
    move.buffer = buffers.staging.memory.bytes();
  }
  if (to == TierKind::kHbm && versions.has_value()) BALLAST_RETURN_IF_ERROR(buffers.reader.Prepare());
  // A chunk that goes to NVMe leaves its memory, and the extent has everything.
  if (to == TierKind::kHbm) BALLAST_RETURN_IF_ERROR(restore.Moments(chunk));
  const absl::Status moved = MoveState(tiers, account, &buffers.reader, chunk, move);
  // The extent was part of the room.
  if (!moved.ok() && versions.has_value() && move.extent.bytes() > 0) {
    versions->extents.AddRoom(move.extent.TakeRoom(), 0);
  }
  return moved;
}

absl::StatusOr<NvmeExtent> StoreCore::ExtentToMoveTo(const StoredChunk& chunk) {
  const uint64_t bytes = chunk.state_bytes();
  if (!versions.has_value()) {
    BALLAST_ASSIGN_OR_RETURN(NvmeExtent extent, tiers->nvme()->Allocate(bytes, "chunk state that moves to nvme"));
    extent.Charge(account);
    return extent;
  }
  if (versions->Of(chunk).dirty()) {
    return model::Error(absl::StatusCode::kFailedPrecondition, model::kBadRequest,
                        absl::StrCat("chunk ", chunk.index, " has changed since it was flushed: flush it first"));
  }
  {
    absl::ReaderMutexLock lock(&chunk.mutex);
    if (chunk.on_disk.extent().bytes() > 0) return NvmeExtent();  // the extent holds the state already
  }
  // Never updated, so never flushed: its place is part of the room.
  VersionedExtents& extents = versions->extents;
  if (!extents.HasRoom(bytes)) BALLAST_RETURN_IF_ERROR(Harden());
  if (extents.HasRoom(bytes)) return extents.Take(bytes);
  return model::Error(absl::StatusCode::kResourceExhausted, model::kBudget,
                      absl::StrCat("no room for the extent of chunk ", chunk.id, " until versions are hardened"));
}

}  // namespace ballast::storage
