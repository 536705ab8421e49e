// Values that a state holds in another format than an update brings them: of a moment, and of frozen chunks.
#pragma once

#include <cstddef>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "ballast/kernels/optimizer.h"
#include "ballast/storage/placement/state_layout.h"
#include "ballast/storage/store/chunk_update.h"

namespace ballast::storage {

// Whole blocks of a moment (a segment's last block may be partial), and their place in the state.
struct MomentPiece {
  absl::Span<const std::byte> values;
  absl::Span<const std::byte> scales;  // empty except for 8-bit formats
  kernels::MomentSpan to;
};

// Codes the update's values piece by piece, rounded as an optimizer update rounds. `state` may be on a device; only
// `put` writes to the state. REQUIRES: `update` is valid for the chunk and writes a moment. Errors: `put`'s.
absl::Status ForMomentPieces(const ChunkUpdate& update, const StateView& state,
                             absl::FunctionRef<absl::Status(const MomentPiece&)> put);

// Codes the update's values into a state in the host's memory.
void WriteMoments(const ChunkUpdate& update, const StateView& state);

// Codes the update's values into a frozen chunk's state, and where they name the trainer's memory, writes there what
// the state then says.
void WriteFrozen(const ChunkUpdate& update, const StateView& state);

// Elements [begin, begin + count) of a frozen chunk's state, as fp32 or in the working dtype.
void ReadFrozen(const StateView& state, uint64_t begin, uint64_t count, kernels::Dtype dtype, std::byte* to);

}  // namespace ballast::storage
