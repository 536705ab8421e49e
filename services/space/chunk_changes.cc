#include "ballast/services/space/chunk_changes.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/services/job_state/job_core.h"
#include "ballast/services/job_state/job_entry.h"
#include "ballast/services/job_state/slice_room.h"
#include "ballast/services/journal/earlier_extents.h"
#include "ballast/services/space/chunk_moves.h"
#include "ballast/services/space/new_chunks.h"
#include "ballast/storage/tier/nvme_tier.h"

namespace ballast::services {

// A state that a restart found counts if it is of the least version or later. Which step changed it last, the log does
// not say, but for those that it replays.
void ChunkChanges::Opened() {
  const int64_t replayed_from = std::max(core_->machine->committed(), core_->state.plan()->open().base());
  for (const auto& [id, least] : core_->machine->unfilled()) {
    const std::shared_ptr<HeldChunk> chunk = core_->state.Find(id);
    if (chunk == nullptr) continue;  // EndReplay finds it
    const bool found = core_->state.recovering() && chunk->filled() && chunk->came_back().value_or(-1) >= least;
    if (found) {
      chunk->SetChanged(std::max(chunk->changed(), std::min(*chunk->came_back(), replayed_from)));
    } else {
      chunk->Void(replayed_from);
    }
  }
}

void ChunkChanges::TableDurable() {
  core_->worker->Post([this] { Free(); });
}

HeldChunks ChunkChanges::Lacked() const {
  HeldChunks lacked;
  for (const auto& chunk : core_->state.chunks()) {
    if (!chunk->filled()) lacked.push_back(chunk);
  }
  return lacked;
}

void ChunkChanges::Free() {
  std::shared_ptr<storage::ChunkStore> store;
  HeldChunks leaving, lacked;
  {
    JobMutexLock lock(&core_->mu);
    if (!core_->Refusal().ok()) return;
    store = core_->state.store();
    leaving = core_->state.TakeLeaving();
    lacked = Lacked();
    if (!leaving.empty()) moves_->Forget();
  }
  if (store == nullptr) return;
  HeldChunks all = leaving;
  all.insert(all.end(), lacked.begin(), lacked.end());
  // Nobody takes a lease of these chunks any more.
  absl::Status freed = core_->leases->Await(
      [&] { return std::all_of(all.begin(), all.end(), [](const auto& c) { return c->leases.held() == 0; }); },
      [this] { return core_->Interrupted(); });
  if (!freed.ok()) return;  // the job ends
  freed = Forget(store.get(), leaving, lacked);
  core_->LockedOnWorker([&](Replies* replies) {
    core_->mu.AssertHeld();
    for (const auto& chunk : all) {
      core_->waiting.Wake(&chunk->pulls, replies);
      core_->WakePushes(chunk.get(), replies);
    }
    if (!freed.ok()) {
      core_->Fail(model::Annotate(freed, "chunks that this server gave up could not be freed"), core_->Remedy(),
                  replies);
    }
  });
}

void ChunkChanges::Unreserve(const storage::ChunkStore& store, const HeldChunks& chunks) {
  uint64_t bytes = 0;
  for (const auto& chunk : chunks) {
    if (chunk->logged || chunk->is_frozen()) continue;
    bytes += chunk->elements * SliceBytesPerElement(store.layout().optimizer());
  }
  std::shared_ptr<SliceMemory> memory;
  {
    JobMutexLock lock(&core_->mu);
    memory = room_->memory();
  }
  memory->Unreserve(std::min(bytes, memory->reserved_bytes()));
}

absl::Status ChunkChanges::Forget(storage::ChunkStore* store, const HeldChunks& leaving, const HeldChunks& lacked) {
  if (leaving.empty() && lacked.empty()) return absl::OkStatus();
  std::vector<std::string> keys;
  std::vector<uint64_t> gone, voided, damaged;
  for (const auto& chunk : leaving) gone.push_back(chunk->store_index);
  for (const auto& chunk : lacked) (chunk->damage().ok() ? voided : damaged).push_back(chunk->store_index);
  for (const HeldChunks* const chunks : {&leaving, &lacked}) {
    for (const auto& chunk : *chunks) keys.push_back(ChunkKey(core_->name, chunk->id));
  }
  if (store->records()) {
    // No entry of theirs is written later: a second guard, since a restart would see by least versions and digests that
    // such a state does not count.
    BALLAST_RETURN_IF_ERROR(store->Harden());
    BALLAST_RETURN_IF_ERROR(core_->around.catalog->Erase(keys));
  }
  store->Void(voided);
  store->Void(damaged);
  if (leaving.empty()) return absl::OkStatus();
  if (store->records()) BALLAST_RETURN_IF_ERROR(LeavePins(*store, gone));
  BALLAST_RETURN_IF_ERROR(store->Remove(gone));
  Unreserve(*store, leaving);
  spdlog::info("job '{}': gave up {} chunks, which other servers have", core_->name, leaving.size());
  return absl::OkStatus();
}

std::vector<v1::PinnedVersion> ChunkChanges::Pins() const {
  std::vector<v1::PinnedVersion> pins;
  JobMutexLock lock(&core_->mu);
  for (const auto& [version, pin] : core_->machine->pins()) pins.push_back(pin);
  return pins;
}

absl::Status ChunkChanges::LeavePins(const storage::ChunkStore& store, absl::Span<const uint64_t> chunks) {
  if (chunks.empty()) return absl::OkStatus();
  for (const v1::PinnedVersion& pin : Pins()) {
    const std::vector<storage::DurableChunk> left = store.KeptBy(pin.version(), chunks);
    if (left.size() == store.KeptBy(pin.version()).size()) continue;
    BALLAST_RETURN_IF_ERROR(WritePin(core_->around.catalog, core_->name, pin, left));
  }
  return absl::OkStatus();
}

// The extent is freed at once. Two entries may have named it.
void ChunkChanges::FreeExtent(const storage::DurableChunk& extent) const {
  if (core_->around.tiers->nvme() != nullptr) (void)core_->around.tiers->nvme()->TakeKept(extent.offset, extent.file);
}

absl::Status ChunkChanges::FreeEarlier(const storage::ChunkStore* store) {
  std::vector<std::string> keys;
  const std::vector<storage::DurableChunk> left = earlier_->TakeChunks();
  for (const storage::DurableChunk& chunk : left) keys.push_back(ChunkKey(core_->name, chunk.id));
  if (!left.empty()) BALLAST_RETURN_IF_ERROR(core_->around.catalog->Erase(keys));
  std::vector<storage::DurableChunk> kept;
  for (const v1::PinnedVersion& pin : Pins()) {
    const std::vector<storage::DurableChunk> left_of_pin = earlier_->TakePin(pin.version());
    if (left_of_pin.empty()) continue;
    const auto stays = store == nullptr ? std::vector<storage::DurableChunk>() : store->KeptBy(pin.version());
    BALLAST_RETURN_IF_ERROR(WritePin(core_->around.catalog, core_->name, pin, stays));
    kept.insert(kept.end(), left_of_pin.begin(), left_of_pin.end());
  }
  for (const storage::DurableChunk& chunk : left) FreeExtent(chunk);
  for (const storage::DurableChunk& chunk : kept) FreeExtent(chunk);
  if (!left.empty()) {
    spdlog::info("job '{}': freed {} chunks that the server gave up before its restart", core_->name, left.size());
  }
  return absl::OkStatus();
}

absl::Status ChunkChanges::GiveUp(HeldChunk* chunk) {
  if (chunk->damage().ok()) {
    chunk->Damage(model::Error(
        absl::StatusCode::kDataLoss, model::kDiverged,
        absl::StrCat("according to the log of job '", core_->name, "', this server has chunk ", chunk->id,
                     ", and the catalog names no state of it that may count: the catalog's entry is lost or an older "
                     "copy. Run `ballastctl verify --rebuild`")));
  }
  if (!core_->machine->HasOtherHolder(chunk->id)) return chunk->damage();
  core_->machine->MarkUnfilled(chunk->id, *chunk->version());
  ++core_->counters.damaged_chunks;
  spdlog::error("job '{}': this server copies chunk {} from another one, since it has nothing of it that counts: {}",
                core_->name, chunk->id, std::string(chunk->damage().message()));
  return absl::OkStatus();
}

absl::Status ChunkChanges::EndReplay() {
  std::shared_ptr<storage::ChunkStore> store;
  HeldChunks leaving, lacked;
  {
    JobMutexLock lock(&core_->mu);
    const std::map<uint64_t, int64_t> unfilled = core_->machine->unfilled();
    for (const auto& chunk : core_->state.chunks()) {
      const bool lacks = unfilled.contains(chunk->id);
      if (!lacks && !chunk->filled()) BALLAST_RETURN_IF_ERROR(GiveUp(chunk.get()));
      if (!lacks || !chunk->filled()) continue;
      // A chunk that has come from the log alone was given up since, and what came of it then is not there.
      const bool found = chunk->came_back().has_value();
      if (!found || !core_->machine->MarkFilled(chunk->id, *chunk->came_back()).ok()) chunk->Void(*chunk->version());
    }
    store = core_->state.store();
    leaving = core_->state.TakeLeaving();
    lacked = Lacked();
    if (core_->state.plan() == nullptr || !core_->state.plan()->open().has_table()) return absl::OkStatus();
  }
  if (store != nullptr) BALLAST_RETURN_IF_ERROR(Forget(store.get(), leaving, lacked));
  return FreeEarlier(store.get());
}

}  // namespace ballast::services
