#include "ballast/storage/store/store_scrub.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "ballast/kernels/kernels.h"
#include "ballast/storage/store/store_core.h"

namespace ballast::storage {

std::vector<ScrubbedExtent> StoreScrub::ExtentsOf(const StoreCore& core, const StoredChunk& chunk) {
  std::vector<ScrubbedExtent> extents;
  const bool durable = core.versions.has_value();
  ScrubbedExtent newest{.chunk = chunk.index, .entry = durable ? core.versions->Of(chunk).newest() : DurableChunk()};
  bool wanted = true;
  {
    absl::ReaderMutexLock lock(&chunk.mutex);
    wanted = !chunk.history.is_void();
    newest.in_memory = chunk.memory.tier() != TierKind::kNvme;
    newest.moments_unread = chunk.on_disk.moments_unread();
    newest.dirty = durable && core.versions->Of(chunk).dirty();
    newest.updated_in = chunk.history.updated_in();
    if (!durable && !newest.in_memory && !chunk.history.zero()) {
      newest.entry = {.id = chunk.index,
                      .offset = chunk.on_disk.extent().offset(),
                      .bytes = chunk.state_bytes(),
                      .elements = chunk.elements,
                      .digests = chunk.on_disk.digests(),
                      .file = chunk.on_disk.extent().file_id()};
    }
  }
  if (wanted && newest.entry.bytes > 0) extents.push_back(newest);
  if (!durable) return extents;
  for (const DurableChunk& entry : core.versions->pins.Of(chunk.index)) {
    if (newest.entry.version >= 0 && entry.offset == newest.entry.offset && entry.file == newest.entry.file) continue;
    extents.push_back({.chunk = chunk.index, .entry = entry, .kept = true});
  }
  return extents;
}

bool StoreScrub::Advance(const StoreCore& core) {
  if (!std::exchange(begun_, true)) {
    pass_bytes_ = 0;
    for (const StoredChunk* chunk : core.chunks.All()) {
      for (const ScrubbedExtent& extent : ExtentsOf(core, *chunk)) pass_bytes_ += extent.entry.bytes;
    }
  }
  for (const uint64_t count = core.chunks.count(); chunk_ < count; ++chunk_, extent_ = 0) {
    const absl::StatusOr<StoredChunk*> chunk = core.chunks.Find(chunk_);
    if (!chunk.ok()) continue;  // removed
    const std::vector<ScrubbedExtent> extents = ExtentsOf(core, **chunk);
    if (extent_ >= extents.size()) continue;
    current_ = extents[extent_++];
    at_ = 0;
    digests_ = {};
    return true;
  }
  chunk_ = extent_ = 0;
  begun_ = false;
  return false;
}

absl::Status StoreScrub::Finish(const StoreCore& core, const StoredChunk& chunk) const {
  const DurableChunk& entry = current_->entry;
  if (entry.version >= 0) BALLAST_RETURN_IF_ERROR(core.restore.CheckLabel(chunk, entry, label_.data()));
  return CompareDigests({&core.tiers->nvme()->file(entry.file), entry.offset, entry.digests}, chunk, digests_);
}

ScrubPiece StoreScrub::Next(const StoreCore& core, absl::Span<std::byte> buffer) {
  ScrubPiece piece;
  if (!current_.has_value() && !Advance(core)) {
    piece.pass_over = true;
    return piece;
  }
  const absl::StatusOr<StoredChunk*> found = core.chunks.Find(current_->chunk);
  if (!found.ok()) {
    current_.reset();
    return piece;
  }
  const std::vector<ScrubbedExtent> extents = ExtentsOf(core, **found);
  const auto same =
      std::find_if(extents.begin(), extents.end(), [this](const auto& e) { return e.Matches(*current_); });
  if (same == extents.end()) {
    current_.reset();
    return piece;
  }
  const StoredChunk& chunk = **found;
  const DurableChunk& entry = current_->entry;
  const absl::Span<std::byte> read = buffer.subspan(0, std::min<uint64_t>(buffer.size(), entry.bytes - at_));
  piece.found = core.tiers->nvme()->file(entry.file).Read(entry.offset + at_, read);
  piece.bytes = read.size();
  core.tiers->CountTraffic(TierKind::kNvme, read.size(), 0);
  for (int i = 0; i < chunk.layout.array_count(); ++i) {
    const auto array = static_cast<StateArray>(i);
    const uint64_t begin = chunk.layout.ArrayAt(array, chunk.elements);
    const uint64_t from = std::max(begin, at_);
    const uint64_t to = std::min(begin + chunk.layout.ArrayBytes(array, chunk.elements), at_ + read.size());
    uint32_t& digest = digests_[static_cast<size_t>(i)];
    if (from < to) digest = kernels::Crc32c(read.subspan(from - at_, to - from), digest);
  }
  const uint64_t label = chunk.layout.LabelAt(chunk.elements);
  const uint64_t from = std::max(label, at_), to = std::min(label + label_.size(), at_ + read.size());
  if (from < to) std::memcpy(&label_[from - label], &read[from - at_], to - from);
  at_ += read.size();
  if (piece.found.ok() && at_ < entry.bytes) return piece;
  if (piece.found.ok()) piece.found = Finish(core, chunk);
  piece.checked = same == extents.end() ? *current_ : *same;
  current_.reset();
  return piece;
}

// The bytes are the extent's own, so a crash on the way leaves the extent damaged, as it was, or whole.
absl::Status StoreScrub::Rewrite(StoreCore* core, const ScrubbedExtent& extent) {
  BALLAST_RETURN_IF_ERROR(core->failed());
  BALLAST_ASSIGN_OR_RETURN(StoredChunk* const chunk, core->chunks.Find(extent.chunk));
  const DurableChunk& entry = extent.entry;
  NvmeFile* home = nullptr;
  {
    absl::ReaderMutexLock lock(&chunk->mutex);
    home = chunk->on_disk.extent().home();
  }
  const auto no_poll = [] {};
  const Compute with{.pool = core->compute, .poll = no_poll};
  alignas(kIoAlignment) std::array<std::byte, StateLayout::kLabelBytes> label;
  EncodeLabel(entry, chunk->layout, core->versions->extents.job(), absl::MakeSpan(label));
  const uint64_t bytes = chunk->layout.LabelAt(chunk->elements);
  Arena copy;  // of state in HBM
  std::byte* state = chunk->memory.state();
  if (chunk->memory.tier() == TierKind::kHbm) {
    BALLAST_ASSIGN_OR_RETURN(copy, Arena::Map(chunk->state_bytes()));
    state = copy.bytes().data();
    BALLAST_RETURN_IF_ERROR(core->tiers->hbm()->CopyOut(chunk->memory.state(), copy.bytes().first(bytes)));
  }
  // The extent may be right, and its read have failed: memory that differs must not replace it.
  if (DigestState(chunk->View(state), with) != entry.digests) {
    return model::Error(absl::StatusCode::kDataLoss, model::kChecksum,
                        absl::StrCat("the state of chunk ", chunk->id, " in memory is not version ", entry.version,
                                     " any more: this machine's memory may be faulty"));
  }
  BALLAST_RETURN_IF_ERROR(home->Write(entry.offset, {state, bytes}));
  BALLAST_RETURN_IF_ERROR(home->Write(entry.offset + chunk->layout.LabelAt(chunk->elements), label));
  core->tiers->CountTraffic(TierKind::kNvme, 0, entry.bytes);
  // After a failed sync nobody knows which writes of the file the disk has.
  return core->EndWith(Lasting(core->tiers->nvme()->Sync({entry.file})));
}

}  // namespace ballast::storage
