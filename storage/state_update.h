// An update computed on state in the host's memory: values, then the optimizer. Digests of the state before and after
// are taken piece by piece, while a piece is in the processor's cache: a pass of their own over the state would cost as
// much as the update.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/functional/function_ref.h"
#include "absl/types/span.h"
#include "ballast/kernels/thread_pool.h"
#include "ballast/storage/chunk_store.h"
#include "ballast/storage/extent_label.h"
#include "ballast/storage/placement/state_layout.h"

namespace ballast::storage {

// Who computes: the pool's threads if there is one, and the caller, who calls `poll` between pieces.
struct Compute {
  kernels::ThreadPool* pool = nullptr;
  absl::FunctionRef<void()> poll;
};

// CRC32C of each array, with its padding.
ArrayDigests DigestState(const StateView& state, const Compute& compute);

// CRC32C of bytes that lie apart from any state.
uint32_t DigestBytes(absl::Span<const std::byte> bytes, const Compute& compute);

// Makes the whole chunk's working copy from its master.
void RoundMaster(const StateView& state, std::byte* working, const Compute& compute);

struct UpdateDigests {
  // Which are wanted.
  bool of_old = false;
  bool of_new = false;
  ArrayDigests old_state = {};
  ArrayDigests new_state = {};
};

// Changes state and working copy (its whole chunk's; null if there is none) as `update` says. REQUIRES: `update` is
// valid for the chunk, its segments begin at multiples of kernels::kMomentBlock.
void UpdateState(const ChunkUpdate& update, const StateView& state, std::byte* working, const Compute& compute,
                 UpdateDigests* digests);

// What the optimizer works on from element `at` of the chunk on, in `segment`; the gradient is in the host's memory.
kernels::UpdateSpan SpanOf(const ChunkUpdate& update, const ChunkUpdate::SegmentUpdate& segment, const StateView& state,
                           std::byte* working, uint64_t at, uint64_t n);
// The update's key for elements from `at` of the chunk on.
kernels::RandomKey RandomAt(const ChunkUpdate& update, uint64_t at);

}  // namespace ballast::storage
