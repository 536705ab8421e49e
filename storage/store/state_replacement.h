// Updates that replace a chunk's whole state: by the state that a durable pin keeps, or by another server's.
#pragma once

#include <cstddef>

#include "absl/status/status.h"
#include "ballast/storage/store/chunk_update.h"
#include "ballast/storage/store/state_update.h"
#include "ballast/storage/store/store_core.h"

namespace ballast::storage {

// Has the store the state that `update` names? DATA_LOSS (VERSION_GONE). Threads: the store's thread.
absl::Status CheckReplacement(const StoreCore& core, const StoredChunk& chunk, const ChunkUpdate& update);

// Replaces the state at `state`, in host memory, or in the chunk's own memory on a device, and makes the working copy.
// `stores`: the new state goes to the disk. REQUIRES: update.replaces(), and CheckReplacement is OK.
// Errors: StateRestore's. Then the chunk has neither state, and the store refuses every further run.
// Threads: the store's thread.
absl::Status ReplaceState(StoreCore* core, StoredChunk& chunk, const ChunkUpdate& update, std::byte* state, bool stores,
                          const Compute& with) ABSL_EXCLUSIVE_LOCKS_REQUIRED(chunk.mutex);

}  // namespace ballast::storage
