#include "ballast/storage/store/store_versions.h"

#include <array>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"

namespace ballast::storage {

absl::Status Lasting(const absl::Status& status) {
  if (!absl::IsResourceExhausted(status)) return status;
  return model::Error(absl::StatusCode::kInternal, model::ReasonOf(status), status.message());
}

void StoreVersions::Discard() {
  discarded_ = true;
  extents.Discard();
}

DurableChunk StoreVersions::EntryOf(const StoredChunk& chunk, int64_t version, const NvmeExtent& extent) const {
  return {.life = extents.life(),
          .id = chunk.id,
          .version = version,
          .offset = extent.offset(),
          .bytes = chunk.state_bytes(),
          .elements = chunk.elements,
          .digests = {},
          .file = extent.file_id()};
}

void StoreVersions::Forget(const StoredChunk& chunk) {
  extents.Forget(chunk.id);
  std::erase(unrecorded_, chunk.index);
  progress_[chunk.index] = DurableProgress(std::nullopt);
}

void StoreVersions::Expect(const StoredChunk& chunk, int64_t version) {
  if (progress_[chunk.index].Store(version)) unrecorded_.push_back(chunk.index);
}

void StoreVersions::Take(StoredChunk& chunk, const DurableChunk& entry, NvmeExtent fresh) {
  NvmeExtent old;
  if (fresh.bytes() > 0) old = chunk.on_disk.MoveTo(std::move(fresh));
  chunk.on_disk.SetDigests(entry.digests);
  progress_[chunk.index].Write(entry);
  if (old.bytes() > 0) extents.AddRoom(pins.TakeOver(chunk.index, &old), 0);
  extents.Written(entry, std::move(old));
}

void StoreVersions::Start(StoredChunk& chunk, std::byte* state, int64_t version, NvmeExtent fresh) {
  Expect(chunk, version);
  DurableChunk entry = EntryOf(chunk, version, fresh.bytes() > 0 ? fresh : chunk.on_disk.extent());
  entry.digests = chunk.on_disk.digests();
  EncodeLabel(entry, chunk.layout, extents.job(),
              {state + chunk.layout.LabelAt(chunk.elements), StateLayout::kLabelBytes});
  Take(chunk, entry, std::move(fresh));
}

absl::Status StoreVersions::Spill(ChunkReader* reader, StoredChunk& chunk, int64_t version, NvmeExtent fresh) {
  Expect(chunk, version);
  NvmeFile* file = fresh.home();
  DurableChunk entry = EntryOf(chunk, version, fresh);
  if (fresh.bytes() == 0) {
    absl::ReaderMutexLock lock(&chunk.mutex);
    file = chunk.on_disk.extent().home();
    entry = EntryOf(chunk, version, chunk.on_disk.extent());
  }
  const absl::StatusOr<ArrayDigests> spilled = reader->Spill(chunk, file, entry.offset);
  absl::Status written = spilled.status();
  if (spilled.ok()) {
    entry.digests = *spilled;
    alignas(kIoAlignment) std::array<std::byte, StateLayout::kLabelBytes> label;
    EncodeLabel(entry, chunk.layout, extents.job(), absl::MakeSpan(label));
    written = file->Write(entry.offset + chunk.layout.LabelAt(chunk.elements), label);
  }
  if (!written.ok()) {
    // The chunk stays at the extent with its last version: a restart looks for the version there, Discard frees it.
    if (fresh.bytes() > 0) extents.AddRoom(fresh.TakeRoom(), 0);
    return written;
  }
  absl::MutexLock lock(&chunk.mutex);
  Take(chunk, entry, std::move(fresh));
  return absl::OkStatus();
}

absl::StatusOr<NvmeExtent> StoreVersions::TakeFresh(const StoredChunk& chunk) {
  const uint64_t bytes = chunk.state_bytes();
  // Failing that, the version goes to a device that fails, if it has room, whose error then says why.
  if (!extents.HasRoom(bytes)) (void)extents.Gather(bytes);
  if (extents.HasBytes(bytes)) {
    // The caller gives up a pin where a pin's copy finds no space, and no pin is in the way here.
    absl::StatusOr<NvmeExtent> fresh = extents.Take(bytes);
    if (!fresh.ok()) return Lasting(fresh.status());
    return fresh;
  }
  return model::Error(absl::StatusCode::kInternal, model::kBudget,
                      absl::StrCat("no room for a new version of chunk ", chunk.id, " of ", bytes,
                                   " bytes although all older ones are free"));
}

absl::Status StoreVersions::Harden() {
  BALLAST_RETURN_IF_ERROR(extents.Harden());
  for (const uint64_t chunk : unrecorded_) progress_[chunk].Record();
  unrecorded_.clear();
  return absl::OkStatus();
}

}  // namespace ballast::storage
