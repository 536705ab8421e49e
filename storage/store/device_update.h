// An update of a chunk whose state lies in a GPU's memory.
#pragma once

#include "absl/status/status.h"
#include "ballast/storage/store/chunk_update.h"
#include "ballast/storage/store/stored_chunk.h"
#include "ballast/storage/tier/hbm_tier.h"

namespace ballast::storage {

// Queues the update's values, their rounding, and its segments. REQUIRES: update.values_of == StateArray::kMaster.
absl::Status QueueUpdate(const ChunkUpdate& update, const StoredChunk& chunk, HbmQueue& queue);

// Applies an update of any array, and waits for the device.
absl::Status UpdateOnDevice(HbmTier* hbm, const ChunkUpdate& update, StoredChunk& chunk)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(chunk.mutex);

}  // namespace ballast::storage
