// Updates state in the host's memory: values, then the optimizer. Digests of the state before and after are taken block
// by block, while a block is in the processor's cache: a separate pass over the state would cost as much as the update.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/functional/function_ref.h"
#include "absl/types/span.h"
#include "ballast/kernels/thread_pool.h"
#include "ballast/storage/chunk/chunk_update.h"
#include "ballast/storage/chunk/extent_label.h"
#include "ballast/storage/placement/state_layout.h"

namespace ballast::storage {

// The threads for the computation: the pool's, if there is a pool, and the caller's, which calls `poll` between pieces.
struct Compute {
  kernels::ThreadPool* pool = nullptr;
  absl::FunctionRef<void()> poll;
};

// CRC32C of each array, with its padding.
ArrayDigests DigestState(const StateView& state, const Compute& compute);

// CRC32C of any bytes, computed in parallel.
uint32_t DigestBytes(absl::Span<const std::byte> bytes, const Compute& compute);

// Makes the whole chunk's working copy from its master. REQUIRES: the layout keeps no remainder.
void RoundMaster(const StateView& state, std::byte* working, const Compute& compute);

struct UpdateDigests {
  // The digests that the caller wants.
  bool of_old = false;
  bool of_new = false;
  ArrayDigests old_state = {};
  ArrayDigests new_state = {};
};

// Changes state and working copy (the whole chunk's; null if the store keeps none) as `update` says. REQUIRES: `update`
// is valid for the chunk, its segments begin at multiples of kernels::kMomentBlock.
void UpdateState(const ChunkUpdate& update, const StateView& state, std::byte* working, const Compute& compute,
                 UpdateDigests* digests);

// The kernel's arguments for `n` elements of `segment`, from element `at` of the chunk on; the gradient is in the
// host's memory.
// `master`: the element's.
kernels::UpdateSpan SpanOf(const ChunkUpdate& update, const ChunkUpdate::SegmentUpdate& segment, const StateView& state,
                           float* master, std::byte* working, uint64_t at, uint64_t n);
// The update's random key for elements from `at` of the chunk on.
kernels::RandomKey RandomAt(const ChunkUpdate& update, uint64_t at);

}  // namespace ballast::storage
