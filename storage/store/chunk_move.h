// Moves of a chunk's state between tiers, between two runs of its store.
//
// At every moment the chunk has one valid state. A move fills the new place, and checks the digests of a state that it
// read from disk. Then the chunk points to the new place, under its lock, and the old place is given back. In a durable
// store the extent always holds the durable version: a move down to NVMe drops the memory once the extent holds the
// same version, and a move up leaves the extent. So a move never frees what a durable pin keeps.
//
// A working copy leaves HBM with its state and never comes back: reads from DRAM do not use the GPU's bus.
#pragma once

#include <cstddef>
#include <memory>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "ballast/storage/store/chunk_reader.h"
#include "ballast/storage/store/stored_chunk.h"
#include "ballast/storage/tier/tiers.h"

namespace ballast::storage {

struct StateMove {
  TierKind to = TierKind::kDram;  // differs from the state's tier
  // Target on NVMe; empty if the chunk's own extent holds its state already (durable, not dirty).
  NvmeExtent extent;
  bool keep_extent = false;      // durable store: the chunk keeps its extent when its state leaves NVMe
  absl::Span<std::byte> buffer;  // room for one state, used from NVMe to HBM
};

// On OK the chunk owns the new place, and `move.extent` is an extent that the chunk gave up, if any: it is the caller's
// now. `account`: pays for the new memory.
// Errors: RESOURCE_EXHAUSTED (BUDGET), DATA_LOSS (CHECKSUM), INTERNAL (IO); then nothing has changed.
// Threads: the store's thread. Blocks for the transfer.
absl::Status MoveState(Tiers* tiers, const std::shared_ptr<Account>& account, ChunkReader* reader, StoredChunk& chunk,
                       StateMove& move);

}  // namespace ballast::storage
