// One chunk as the store keeps it.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "ballast/kernels/kernels.h"
#include "ballast/storage/chunk_store.h"
#include "ballast/storage/placement/placement.h"
#include "ballast/storage/tier/dram_tier.h"
#include "ballast/storage/tier/nvme_tier.h"

namespace ballast::storage {

// CRC32C of each array of a state, padding included. One each, so that a read of one array need not fetch the others.
using ArrayDigests = std::array<uint32_t, kStateArrays>;

// Each array of a state starts at a multiple of 4096 bytes, in memory and on disk.
inline uint64_t ArrayBytes(uint64_t elements) { return StateBytes(elements) / kStateArrays; }

// The state that lies at `base`, in the host's memory or the GPU's.
struct StateView {
  std::byte* base = nullptr;
  uint64_t elements = 0;
  float* array(StateArray which) const {
    return reinterpret_cast<float*>(base + static_cast<uint64_t>(which) * ArrayBytes(elements));
  }
};

// A chunk's state as some pins see it: those made after run `from` (inclusive) and before run `to`.
struct PinnedCopy {
  uint64_t from = 0;
  uint64_t to = 0;
  bool zero = false;  // before the first update; takes no space
  NvmeExtent extent;  // empty: `dram`
  DramBlock dram;
  ArrayDigests digests = {};  // of the extent
};

struct StoredChunk {
  StoredChunk(uint64_t i, uint64_t n, ChunkPlacement p) : index(i), elements(n), placement(p) {}

  const uint64_t index;
  const uint64_t elements;
  const ChunkPlacement placement;
  std::byte* state = nullptr;        // host or device memory; null on NVMe
  kernels::bf16* working = nullptr;  // host or device memory

  // Writers hold it while they change what `state` and `working` point to, readers while they copy.
  mutable absl::Mutex mutex;
  uint64_t updated_in ABSL_GUARDED_BY(mutex) = 0;  // the run, from 1; 0: all zero, and an extent not written yet
  NvmeExtent extent ABSL_GUARDED_BY(mutex);
  ArrayDigests digests ABSL_GUARDED_BY(mutex) = {};
  std::byte* staged ABSL_GUARDED_BY(mutex) = nullptr;  // the newest state, while the extent does not hold it yet
  std::vector<PinnedCopy> copies ABSL_GUARDED_BY(mutex);
};

}  // namespace ballast::storage
