// Moves of a chunk's state between memory and disk, between two runs of its store.
//
// At every moment the chunk has one valid state: the new place is filled, and checked where it was read, before the
// chunk points to it, under its lock; then the old place is given back. Of a durable store the extent is the durable
// version all the time: down, memory is dropped once the extent holds the same version; up, the extent stays. So what a
// durable pin keeps is never a move's to free.
#pragma once

#include "absl/status/status.h"
#include "ballast/storage/stored_chunk.h"
#include "ballast/storage/tier/tiers.h"

namespace ballast::storage {

// From DRAM to NVMe. `extent`: where to; empty if the chunk's own holds its state already (durable, not dirty).
// The memory is given back. Errors: INTERNAL (IO); then nothing has changed.
// Threads: the one that runs the store. Blocks for the write.
absl::Status MoveToNvme(Tiers* tiers, StoredChunk& chunk, NvmeExtent extent);

// From NVMe to DRAM. `keep_extent`: of a durable store.
// Errors: RESOURCE_EXHAUSTED (BUDGET), DATA_LOSS (CHECKSUM), INTERNAL (IO); then nothing has changed.
// Threads: as above. Blocks for the read.
absl::Status MoveToDram(Tiers* tiers, StoredChunk& chunk, bool keep_extent);

}  // namespace ballast::storage
