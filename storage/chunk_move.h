// Moves of a chunk's state between tiers, between two runs of its store.
//
// At every moment the chunk has one valid state: the new place is filled, and checked where it was read, before the
// chunk points to it, under its lock; then the old place is given back. Of a durable store the extent is the durable
// version all the time: down to NVMe, memory is dropped once the extent holds the same version; up, the extent stays.
// So what a durable pin keeps is never a move's to free.
//
// A working copy leaves HBM with its state, and never comes back: from DRAM it is read without the GPU's bus.
#pragma once

#include <cstddef>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "ballast/storage/chunk_reader.h"
#include "ballast/storage/stored_chunk.h"
#include "ballast/storage/tier/tiers.h"

namespace ballast::storage {

struct StateMove {
  TierKind to = TierKind::kDram;  // another tier than the state's
  // Where to on NVMe; empty if the chunk's own extent holds its state already (durable, not dirty).
  NvmeExtent extent;
  bool keep_extent = false;      // of a durable store, when the state leaves NVMe
  absl::Span<std::byte> buffer;  // of one state: for NVMe to HBM
};

// `move.extent` becomes the chunk's, or, as the place that it left, the caller's.
// Errors: RESOURCE_EXHAUSTED (BUDGET), DATA_LOSS (CHECKSUM), INTERNAL (IO); then nothing has changed.
// Threads: the one that runs the store. Blocks for the transfer.
absl::Status MoveState(Tiers* tiers, ChunkReader* reader, StoredChunk& chunk, StateMove& move);

}  // namespace ballast::storage
