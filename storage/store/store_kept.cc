// How class ChunkStore hands what its durable pins keep to another server, and takes it from one.
#include <algorithm>
#include <cstring>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/storage/memory/arena.h"
#include "ballast/storage/store/store_core.h"

namespace ballast::storage {

absl::StatusOr<KeptState> ChunkStore::ReadKept(int64_t version, uint64_t index) const {
  StoreCore& core = *core_;
  BALLAST_RETURN_IF_ERROR(core.failed());
  BALLAST_ASSIGN_OR_RETURN(const StoredChunk* const chunk, core.chunks.Find(index));
  BALLAST_RETURN_IF_ERROR(CheckWhole(*chunk));
  if (!core.versions.has_value() || core.versions->pins.Lacks(version, index)) return NotKept(version, *chunk);
  const DurableChunk* const entry = core.versions->pins.Find(version, index);
  if (entry == nullptr) return KeptState();
  BALLAST_RETURN_IF_ERROR(CheckFits(*chunk, *entry));
  BALLAST_RETURN_IF_ERROR(core.tiers->nvme()->CheckThere(entry->file));
  BALLAST_ASSIGN_OR_RETURN(const Arena memory, Arena::Map(entry->bytes));
  BALLAST_RETURN_IF_ERROR(core.tiers->nvme()->file(entry->file).Read(entry->offset, memory.bytes()));
  core.tiers->CountTraffic(TierKind::kNvme, entry->bytes, 0);
  core.tiers->CountMove(TierKind::kNvme, TierKind::kDram, MoveReason::kPin, entry->bytes);
  const auto no_poll = [] {};
  std::byte* const state = memory.bytes().data();
  BALLAST_RETURN_IF_ERROR(core.restore.CheckState(*chunk, *entry, state, {.pool = core.compute, .poll = no_poll}));
  KeptState kept{.version = entry->version};
  const StateView view = chunk->View(state);
  for (int i = 0; i < chunk->layout.array_count(); ++i) {
    const auto array = static_cast<StateArray>(i);
    const std::byte* const begin = view.array(array);
    kept.state.arrays.push_back(
        {{begin, begin + chunk->layout.ArrayBytes(array, chunk->elements)}, entry->digests[static_cast<size_t>(i)]});
  }
  return kept;
}

namespace {

// As the disk is to have it: the arrays at their places, and the label.
void Assemble(const StoreCore& core, const StoredChunk& chunk, const DurableChunk& entry, const WholeState& whole,
              std::byte* state) {
  const StateView view = chunk.View(state);
  for (size_t i = 0; i < whole.arrays.size(); ++i) {
    const std::vector<std::byte>& array = whole.arrays[i].bytes;
    std::memcpy(view.array(static_cast<StateArray>(i)), array.data(), array.size());
  }
  EncodeLabel(entry, chunk.layout, core.versions->extents.job(),
              {state + chunk.layout.LabelAt(chunk.elements), StateLayout::kLabelBytes});
}

ArrayDigests ToldDigests(const WholeState& whole) {
  ArrayDigests digests = {};
  for (size_t i = 0; i < whole.arrays.size(); ++i) digests[i] = whole.arrays[i].crc32c;
  return digests;
}

}  // namespace

// The bytes are the extent's own, so a crash on the way leaves the extent damaged, as it was, or whole.
absl::Status ChunkStore::MendKept(int64_t version, uint64_t index, const KeptState& kept) {
  StoreCore& core = *core_;
  BALLAST_RETURN_IF_ERROR(core.failed());
  BALLAST_ASSIGN_OR_RETURN(const StoredChunk* const chunk, core.chunks.Find(index));
  const DurableChunk* const entry = core.versions->pins.Find(version, index);
  if (entry == nullptr) return NotKept(version, *chunk);
  if (ReadKept(version, index).ok()) return absl::OkStatus();
  BALLAST_RETURN_IF_ERROR(CheckFits(*chunk, *entry));
  BALLAST_RETURN_IF_ERROR(core.tiers->nvme()->CheckThere(entry->file));
  if (!kept.state.arrays.empty()) BALLAST_RETURN_IF_ERROR(CheckWholeState(*chunk, kept.state));
  if (ToldDigests(kept.state) != entry->digests) {
    return model::Error(absl::StatusCode::kDataLoss, model::kDiverged,
                        absl::StrCat("the other server keeps another state of chunk ", chunk->id, " for version ",
                                     version, " than this one, whose bytes are damaged"));
  }
  BALLAST_ASSIGN_OR_RETURN(const Arena memory, Arena::Map(entry->bytes));
  Assemble(core, *chunk, *entry, kept.state, memory.bytes().data());
  BALLAST_RETURN_IF_ERROR(core.tiers->nvme()->home(entry->file)->Write(entry->offset, memory.bytes()));
  core.tiers->CountTraffic(TierKind::kNvme, 0, entry->bytes);
  return core.EndWith(core.tiers->nvme()->Sync({entry->file}));
}

std::optional<int64_t> ChunkStore::PinOf(const ScrubbedExtent& extent) const {
  if (!core_->versions.has_value()) return std::nullopt;
  return core_->versions->pins.PinAt(extent.chunk, extent.entry);
}

absl::Status ChunkStore::ImportKept(int64_t version, uint64_t index, const KeptState& kept, Admit admit) {
  StoreCore& core = *core_;
  BALLAST_RETURN_IF_ERROR(core.failed());
  BALLAST_ASSIGN_OR_RETURN(const StoredChunk* const chunk, core.chunks.Find(index));
  KeptExtents& pins = core.versions->pins;
  if (pins.Find(version, index) != nullptr) {
    // From before a restart, or before the chunk's newest state was found damaged: these bytes may be rotten, too.
    // Where they cannot be mended, a restore of the version is refused, as it was before.
    const absl::Status mended = MendKept(version, index, kept);
    const bool bad_copy = absl::IsInvalidArgument(mended) || model::ReasonOf(mended) == model::kChecksum;
    return bad_copy ? mended : core.failed();
  }
  if (kept.state.arrays.empty()) {
    pins.AddZero(version, index);
    return absl::OkStatus();
  }
  BALLAST_RETURN_IF_ERROR(CheckWholeState(*chunk, kept.state));
  const ArrayDigests digests = ToldDigests(kept.state);
  if (pins.Share(version, index, kept.version, digests)) return absl::OkStatus();

  const uint64_t bytes = chunk->state_bytes();
  BALLAST_RETURN_IF_ERROR(admit(bytes));
  BALLAST_ASSIGN_OR_RETURN(const Arena memory, Arena::Map(bytes));
  BALLAST_ASSIGN_OR_RETURN(NvmeExtent extent,
                           core.tiers->nvme()->Allocate(bytes, absl::StrCat("chunk ", chunk->id, " of kept version ",
                                                                            version, ", a copy of another server's")));
  DurableChunk entry = core.versions->EntryOf(*chunk, kept.version, extent);
  entry.digests = digests;
  Assemble(core, *chunk, entry, kept.state, memory.bytes().data());
  BALLAST_RETURN_IF_ERROR(core.EndWith(extent.home()->Write(extent.offset(), memory.bytes())));
  core.tiers->CountTraffic(TierKind::kNvme, 0, bytes);
  core.tiers->CountMove(TierKind::kDram, TierKind::kNvme, MoveReason::kPin, bytes);
  pins.Add(version, index, entry, std::move(extent));
  return absl::OkStatus();
}

absl::Status ChunkStore::SyncKept(int64_t version) {
  std::vector<NvmeFileId> files;
  for (const DurableChunk& entry : KeptBy(version)) files.push_back(entry.file);
  std::sort(files.begin(), files.end());
  files.erase(std::unique(files.begin(), files.end()), files.end());
  if (files.empty()) return absl::OkStatus();
  return core_->EndWith(core_->tiers->nvme()->Sync(std::move(files)));
}

std::vector<uint64_t> ChunkStore::KeptBytes() const {
  if (!core_->versions.has_value()) return {};
  return core_->versions->pins.Bytes(chunk_count());
}

std::vector<DurableChunk> ChunkStore::KeptBy(int64_t version, absl::Span<const uint64_t> without) const {
  const std::set<uint64_t> left_out(without.begin(), without.end());
  std::vector<DurableChunk> kept;
  const KeptExtents& pins = core_->versions->pins;
  for (const uint64_t chunk : pins.ChunksOf(version)) {
    if (!left_out.contains(chunk)) kept.push_back(*pins.Find(version, chunk));
  }
  return kept;
}

}  // namespace ballast::storage
