// How class ChunkStore hands chunks to another server: whole states are read, states that count no more are void, and
// chunks are removed.
#include <algorithm>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ballast/storage/store/store_core.h"

namespace ballast::storage {
namespace {

// What the state must read as, where the store knows.
std::optional<ArrayDigests> DigestsOf(const StoreCore& core, const StoredChunk& chunk) {
  absl::ReaderMutexLock lock(&chunk.mutex);
  if (chunk.history.zero()) return std::nullopt;
  const bool on_disk = chunk.memory.tier() == TierKind::kNvme;
  const DurableProgress* const progress = core.ProgressOf(chunk.index);
  const bool clean = progress != nullptr && progress->written() && !progress->dirty();
  return on_disk || clean ? std::optional(chunk.on_disk.digests()) : std::nullopt;
}

}  // namespace

absl::StatusOr<WholeState> ChunkStore::ReadWhole(uint64_t index) const {
  StoreCore& core = *core_;
  BALLAST_RETURN_IF_ERROR(core.failed());
  BALLAST_ASSIGN_OR_RETURN(const StoredChunk* const chunk, core.chunks.Find(index));
  BALLAST_RETURN_IF_ERROR(CheckWhole(*chunk));
  BALLAST_RETURN_IF_ERROR(CheckNotVoid(*chunk));
  const std::optional<ArrayDigests> digests = DigestsOf(core, *chunk);
  const auto no_poll = [] {};
  WholeState whole;
  absl::ReaderMutexLock reading(&chunk->reading);
  for (int i = 0; i < chunk->layout.array_count(); ++i) {
    const auto array = static_cast<StateArray>(i);
    WholeState::Array& to = whole.arrays.emplace_back();
    to.bytes.resize(chunk->layout.ArrayBytes(array, chunk->elements));
    BALLAST_RETURN_IF_ERROR(core.buffers.reader.ReadStored(
        *chunk, array, 0, to.bytes.size(), [&](uint64_t at, absl::Span<const std::byte> bytes) {
          std::copy(bytes.begin(), bytes.end(), to.bytes.begin() + static_cast<std::ptrdiff_t>(at));
        }));
    to.crc32c = DigestBytes(to.bytes, {.pool = core.compute, .poll = no_poll});
    if (!digests.has_value() || to.crc32c == (*digests)[static_cast<size_t>(i)]) continue;
    return model::Error(absl::StatusCode::kDataLoss, model::kChecksum,
                        absl::StrCat("array ", i, " of chunk ", chunk->id, " in ", TierName(chunk->memory.tier()),
                                     " is not what was written any more: this machine's memory may be faulty"));
  }
  return whole;
}

void ChunkStore::Void(absl::Span<const uint64_t> chunks) {
  for (const uint64_t index : chunks) {
    const absl::StatusOr<StoredChunk*> chunk = core_->chunks.Find(index);
    if (chunk.ok()) core_->Void(**chunk);
  }
}

void StoreCore::Void(StoredChunk& chunk) {
  if (versions.has_value()) versions->Void(chunk);
  absl::MutexLock lock(&chunk.mutex);
  chunk.history.Void();
  chunk.on_disk.EndMoments();
}

absl::Status StoreCore::CheckNoneVoid() const {
  for (const StoredChunk* chunk : chunks.All()) {
    absl::ReaderMutexLock lock(&chunk->mutex);
    if (!chunk->history.is_void()) continue;
    return model::Error(absl::StatusCode::kUnavailable, model::kBusy,
                        absl::StrCat("chunk ", chunk->id, " has no state until one comes from another server"));
  }
  return absl::OkStatus();
}

uint64_t StoreCore::Remove(StoredChunk& chunk) {
  chunks.Remove(chunk);
  SharedMemory shared;
  OwnMemory own;
  NvmeExtent extent;
  {
    absl::MutexLock reading(&chunk.reading);
    absl::MutexLock lock(&chunk.mutex);
    own = chunk.memory.Remove(&shared);
    extent = chunk.on_disk.MoveTo({});
    chunk.history.DropUnused({});
  }
  const bool gives_parts = tiers->hbm() == nullptr;  // page-locked memory goes as a whole
  if (gives_parts && shared.state != nullptr) shared.block->GiveBack({shared.state, chunk.state_bytes()});
  if (gives_parts && shared.working != nullptr) shared.block->GiveBackOfRest({shared.working, chunk.working_bytes()});
  if (!versions.has_value()) return 0;
  versions->pins.Remove(chunk.index);
  return extent.bytes() > 0 ? 0 : chunk.state_bytes();
}

absl::Status ChunkStore::Remove(absl::Span<const uint64_t> chunks) {
  StoreCore& core = *core_;
  BALLAST_RETURN_IF_ERROR(core.failed());
  std::set<StoredChunk*> removed;
  for (const uint64_t index : chunks) {
    BALLAST_ASSIGN_OR_RETURN(StoredChunk* const chunk, core.chunks.Find(index));
    removed.insert(chunk);
  }
  for (StoredChunk* const chunk : removed) {
    if (core.versions.has_value()) core.versions->Forget(*chunk);
  }
  BALLAST_RETURN_IF_ERROR(core.Harden());
  uint64_t room_bytes = 0;
  for (StoredChunk* const chunk : removed) room_bytes += core.Remove(*chunk);
  core.chunks.FreeUnshared();
  const std::vector<StoredChunk*> left = core.chunks.All();
  const bool on_nvme = std::any_of(left.begin(), left.end(),
                                   [](const StoredChunk* chunk) { return chunk->memory.tier() == TierKind::kNvme; });
  if (core.versions.has_value()) {
    core.versions->extents.GiveBack(room_bytes, left.size(), core.chunks.largest_bytes());
  }
  if (!on_nvme) core.buffers.ReleaseStaging();
  if (left.empty()) core.buffers.Release();
  return absl::OkStatus();
}

}  // namespace ballast::storage
