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

absl::Status ChunkChanges::Check(const model::EpochPlan& plan) const {
  const model::EpochPlan* const now = core_->machine->plan();
  if (now == nullptr || !plan.open().has_table() || core_->machine->pins().empty()) return absl::OkStatus();
  if (core_->machine->Forgets(plan.open())) return absl::OkStatus();
  const std::vector<uint64_t> next = ChunksOf(plan, core_->around.server_id);
  const auto gives_up = [&](const auto& chunk) { return !std::binary_search(next.begin(), next.end(), chunk->id); };
  const auto adds = [&](uint64_t id) { return id < now->layout().chunks().size() && core_->state.Find(id) == nullptr; };
  if (std::none_of(core_->state.chunks().begin(), core_->state.chunks().end(), gives_up) &&
      std::none_of(next.begin(), next.end(), adds)) {
    return absl::OkStatus();
  }
  return model::Error(
      absl::StatusCode::kUnimplemented, model::kUnsupported,
      absl::StrCat("server '", core_->around.server_id, "' keeps ", core_->machine->pins().size(),
                   " version(s) of job '", core_->name, "', the first is version ",
                   core_->machine->pins().begin()->first,
                   ", and this Open would give it other chunks, of which it would lack these versions: give them up "
                   "first (`ballastctl unpin`), or keep the table"));
}

// A state that a restart found counts if it is of the least version or later.
void ChunkChanges::Opened() {
  for (const auto& [id, least] : core_->machine->unfilled()) {
    const std::shared_ptr<HeldChunk> chunk = core_->state.Find(id);
    if (chunk == nullptr) continue;  // EndReplay finds it
    const bool found = core_->state.recovering() && chunk->filled() && chunk->came_back().value_or(-1) >= least;
    if (!found) chunk->Void(std::max(core_->machine->committed(), core_->state.plan()->open().base()));
  }
}

void ChunkChanges::TableDurable() {
  core_->worker->Post([this] { Free(); });
}

// A fetched state is checked again before it is written (StepMachine::CheckImport), so that a step that is prepared
// now voids nothing but what a restart found.
void ChunkChanges::PassedOver(absl::Span<const uint64_t> chunks, int64_t step) {
  if (!core_->state.recovering()) return;
  for (const uint64_t id : chunks) {
    const std::shared_ptr<HeldChunk> chunk = core_->state.Find(id);
    if (chunk != nullptr && *chunk->version() < step) chunk->Void(*chunk->version());
  }
}

std::vector<uint64_t> ChunkChanges::VoidChunks() const {
  std::vector<uint64_t> chunks;
  for (const auto& chunk : core_->state.chunks()) {
    if (!chunk->filled()) chunks.push_back(chunk->store_index);
  }
  return chunks;
}

void ChunkChanges::Free() {
  std::shared_ptr<storage::ChunkStore> store;
  HeldChunks leaving, lacked;
  std::vector<uint64_t> chunks;
  {
    JobMutexLock lock(&core_->mu);
    if (!core_->Refusal().ok()) return;
    store = core_->state.store();
    leaving = lacked = core_->state.TakeLeaving();
    const HeldChunks& all = core_->state.chunks();
    std::copy_if(all.begin(), all.end(), std::back_inserter(lacked), [](const auto& c) { return !c->filled(); });
    chunks = VoidChunks();
    if (!leaving.empty()) moves_->Forget();
  }
  if (store == nullptr) return;
  // Nobody takes a lease of these chunks any more.
  absl::Status removed = core_->leases->Await(
      [&] { return std::all_of(lacked.begin(), lacked.end(), [](const auto& c) { return c->leases.held() == 0; }); },
      [this] { return core_->Interrupted(); });
  if (!removed.ok()) return;  // the job ends
  removed = Remove(store.get(), leaving);
  if (removed.ok()) store->Void(chunks);
  core_->LockedOnWorker([&](Replies* replies) {
    core_->mu.AssertHeld();
    for (const auto& chunk : lacked) {
      core_->waiting.Wake(&chunk->pulls, replies);
      core_->WakePushes(chunk.get(), replies);
    }
    if (!removed.ok()) {
      core_->Fail(model::Annotate(removed, "chunks that this server gave up could not be freed"), core_->Remedy(),
                  replies);
    }
  });
}

absl::Status ChunkChanges::Remove(storage::ChunkStore* store, const HeldChunks& chunks) {
  if (chunks.empty()) return absl::OkStatus();
  std::vector<std::string> keys;
  std::vector<uint64_t> indices;
  uint64_t slice_bytes = 0;
  for (const auto& chunk : chunks) {
    keys.push_back(ChunkKey(core_->name, chunk->id));
    indices.push_back(chunk->store_index);
    if (!chunk->logged && !chunk->is_frozen()) {
      slice_bytes += chunk->elements * SliceBytesPerElement(store->layout().optimizer());
    }
  }
  if (store->records()) {
    BALLAST_RETURN_IF_ERROR(store->Harden());  // no entry of theirs is written later
    BALLAST_RETURN_IF_ERROR(core_->around.catalog->Erase(keys));
  }
  BALLAST_RETURN_IF_ERROR(store->Remove(indices));
  std::shared_ptr<SliceMemory> memory;
  {
    JobMutexLock lock(&core_->mu);
    memory = room_->memory();
  }
  memory->Unreserve(std::min(slice_bytes, memory->reserved_bytes()));
  spdlog::info("job '{}': gave up {} chunks, which other servers have", core_->name, chunks.size());
  return absl::OkStatus();
}

absl::Status ChunkChanges::FreeEarlier() {
  std::vector<std::string> keys;
  const std::vector<storage::DurableChunk> left = earlier_->TakeChunks();
  if (left.empty()) return absl::OkStatus();
  for (const storage::DurableChunk& chunk : left) keys.push_back(ChunkKey(core_->name, chunk.id));
  BALLAST_RETURN_IF_ERROR(core_->around.catalog->Erase(keys));
  for (const storage::DurableChunk& chunk : left) {
    // The extent is freed at once.
    if (core_->around.tiers->nvme() != nullptr) (void)core_->around.tiers->nvme()->TakeKept(chunk.offset, chunk.file);
  }
  spdlog::info("job '{}': freed {} chunks that the server gave up before its restart", core_->name, left.size());
  return absl::OkStatus();
}

absl::Status ChunkChanges::EndReplay() {
  std::shared_ptr<storage::ChunkStore> store;
  HeldChunks leaving;
  std::vector<uint64_t> chunks;
  {
    JobMutexLock lock(&core_->mu);
    const std::map<uint64_t, int64_t> unfilled = core_->machine->unfilled();
    for (const auto& chunk : core_->state.chunks()) {
      const bool lacks = unfilled.contains(chunk->id);
      if (!lacks && !chunk->filled()) {
        return model::Error(
            absl::StatusCode::kDataLoss, model::kDiverged,
            absl::StrCat("according to the log of job '", core_->name, "', this server has chunk ", chunk->id,
                         ", and the catalog names no state of it that may count: the "
                         "catalog's entry is lost or an older copy. Run `ballastctl verify --rebuild`"));
      }
      if (!lacks || !chunk->filled()) continue;
      if (!core_->machine->MarkFilled(chunk->id, *chunk->came_back()).ok()) chunk->Void(*chunk->version());
    }
    store = core_->state.store();
    leaving = core_->state.TakeLeaving();
    chunks = VoidChunks();
    if (core_->state.plan() == nullptr || !core_->state.plan()->open().has_table()) return absl::OkStatus();
  }
  if (store != nullptr) {
    BALLAST_RETURN_IF_ERROR(Remove(store.get(), leaving));
    store->Void(chunks);
  }
  return FreeEarlier();
}

}  // namespace ballast::services
