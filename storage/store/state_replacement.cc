#include "ballast/storage/store/state_replacement.h"

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"

namespace ballast::storage {
namespace {

absl::Status Import(StoreCore* core, StoredChunk& chunk, const WholeState& imported, std::byte* state, bool stores,
                    const Compute& with) ABSL_EXCLUSIVE_LOCKS_REQUIRED(chunk.mutex) {
  BALLAST_RETURN_IF_ERROR(core->EndWith(core->restore.Imported(chunk, imported, state, with)));
  chunk.history.Begin();
  if (core->versions.has_value()) core->versions->pins.Imported(chunk.index);
  if (!stores) return absl::OkStatus();
  ArrayDigests digests = {};
  for (size_t i = 0; i < imported.arrays.size(); ++i) digests[i] = imported.arrays[i].crc32c;
  chunk.on_disk.SetDigests(digests);
  return absl::OkStatus();
}

absl::Status Restore(StoreCore* core, StoredChunk& chunk, int64_t pin, std::byte* state, bool stores,
                     const Compute& with) ABSL_EXCLUSIVE_LOCKS_REQUIRED(chunk.mutex) {
  const DurableChunk* const pinned = core->versions->pins.Find(pin, chunk.index);
  BALLAST_RETURN_IF_ERROR(core->EndWith(pinned != nullptr ? core->restore.Version(chunk, *pinned, state, with)
                                                          : core->restore.Zero(chunk, state, with)));
  if (stores && pinned != nullptr) {
    chunk.on_disk.SetDigests(pinned->digests);
  } else if (stores && chunk.memory.tier() != TierKind::kHbm) {
    chunk.on_disk.SetDigests(DigestState(chunk.View(state), with));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckReplacement(const StoreCore& core, const StoredChunk& chunk, const ChunkUpdate& update) {
  // A chunk that the pin does not keep was zero then, unless the pin lacks it.
  const bool replaces = update.restored.has_value();
  if (!replaces || (core.versions.has_value() && !core.versions->pins.Lacks(*update.restored, chunk.index))) {
    return absl::OkStatus();
  }
  return model::Error(absl::StatusCode::kDataLoss, model::kVersionGone,
                      absl::StrCat("version ", *update.restored, " of chunk ", chunk.id, " is not pinned here"));
}

absl::Status ReplaceState(StoreCore* core, StoredChunk& chunk, const ChunkUpdate& update, std::byte* state, bool stores,
                          const Compute& with) {
  BALLAST_RETURN_IF_ERROR(update.imported != nullptr ? Import(core, chunk, *update.imported, state, stores, with)
                                                     : Restore(core, chunk, *update.restored, state, stores, with));
  chunk.on_disk.EndMoments();
  return absl::OkStatus();
}

}  // namespace ballast::storage
