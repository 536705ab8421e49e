#include "ballast/services/job/damaged_chunks.h"

#include <spdlog/spdlog.h>

#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/services/job/filling.h"
#include "ballast/services/job/kept_copies.h"
#include "ballast/services/job_state/job_core.h"
#include "ballast/services/job_state/job_entry.h"

namespace ballast::services {

std::shared_ptr<HeldChunk> DamagedChunks::Find(uint64_t store_index) const {
  for (const std::shared_ptr<HeldChunk>& chunk : core_->state.chunks()) {
    if (chunk->store_index != store_index) continue;
    return chunk->filled() && core_->machine->HasOtherHolder(chunk->layout().index) ? chunk : nullptr;
  }
  return nullptr;
}

bool DamagedChunks::MayGiveUp(uint64_t store_index) const {
  JobMutexLock lock(&core_->mu);
  return Find(store_index) != nullptr;
}

absl::Status DamagedChunks::GiveUp(storage::ChunkStore* store, uint64_t store_index, const absl::Status& found) {
  std::shared_ptr<HeldChunk> chunk;
  core_->LockedOnWorker([&](Replies* replies) {
    core_->mu.AssertHeld();
    if (core_->Refusal().ok()) chunk = Find(store_index);
    if (chunk == nullptr) return;
    chunk->Damage(found);  // nobody reads it, or takes a lease, from here on
    core_->waiting.Wake(&chunk->pulls, replies);
  });
  return chunk == nullptr ? found : End(store, chunk);
}

absl::Status DamagedChunks::End(storage::ChunkStore* store, const std::shared_ptr<HeldChunk>& chunk) {
  absl::Status found;
  bool recovering = false;
  {
    JobMutexLock lock(&core_->mu);
    found = chunk->damage();
    recovering = core_->state.recovering();
  }
  if (recovering) {
    store->Void({&chunk->store_index, 1});
    return absl::OkStatus();
  }
  BALLAST_RETURN_IF_ERROR(
      core_->leases->Await([&] { return chunk->leases.held() == 0; }, [this] { return core_->Interrupted(); }));
  absl::Status status = Forget(store, *chunk);
  core_->LockedOnWorker([&](Replies* replies) {
    core_->mu.AssertHeld();
    const uint64_t index = chunk->layout().index;
    const bool here = core_->state.Find(index) == chunk;  // an Open may have taken it away meanwhile
    if (status.ok() && here && !core_->machine->HasOtherHolder(index)) status = found;
    if (!status.ok()) {
      core_->Fail(model::Annotate(status, absl::StrCat("damaged chunk ", index, " could not be given up")),
                  core_->Remedy(), replies);
    }
    if (!status.ok() || !here) return;
    core_->machine->MarkUnfilled(index, *chunk->version());
    ++core_->counters.damaged_chunks;
    spdlog::error("job '{}': what this server has of chunk {} is damaged, and it copies the chunk from another one: {}",
                  core_->name, index, std::string(found.message()));
    core_->WakePushes(chunk.get(), replies);
    core_->Moved();  // a step may have waited for slices of the chunk
    filling_->Resume();
  });
  return status;
}

absl::Status DamagedChunks::Forget(storage::ChunkStore* store, const HeldChunk& chunk) {
  if (store->records()) {
    BALLAST_RETURN_IF_ERROR(store->Harden());  // no entry of the chunk is written later
    const std::string key = ChunkKey(core_->name, chunk.id);
    BALLAST_RETURN_IF_ERROR(core_->around.catalog->Erase({&key, 1}));
  }
  store->Void({&chunk.store_index, 1});
  return absl::OkStatus();
}

absl::Status DamagedChunks::Found(const std::shared_ptr<HeldChunk>& chunk, const absl::Status& read) {
  if (!absl::IsDataLoss(read)) return read;
  const auto state_of = [this](const HeldChunk& one) {
    core_->mu.AssertHeld();
    return std::pair(one.version(), one.first_version());
  };
  std::pair<std::optional<int64_t>, int64_t> state;
  {
    JobMutexLock lock(&core_->mu);
    if (Find(chunk->store_index) != chunk) return read;
    state = state_of(*chunk);
  }
  core_->worker->Post([this, chunk, read, state, state_of] {
    std::shared_ptr<storage::ChunkStore> store;
    {
      // An update or a copy may have replaced what was read.
      JobMutexLock lock(&core_->mu);
      if (state_of(*chunk) != state) return;
      store = core_->state.store();
    }
    (void)GiveUp(store.get(), chunk->store_index, read);  // the job has failed otherwise
  });
  return model::Error(absl::StatusCode::kFailedPrecondition, model::kNotFilled,
                      absl::StrCat("server '", core_->around.server_id, "' copies the chunk anew: ", read.message()));
}

bool DamagedChunks::FoundKept(const storage::ChunkStore& store, const storage::ScrubbedExtent& extent,
                              const absl::Status& found) {
  const std::optional<int64_t> version = store.PinOf(extent);
  if (!version.has_value()) return false;
  JobMutexLock lock(&core_->mu);
  return kept_->Mend(*version, extent.chunk, found);
}

}  // namespace ballast::services
