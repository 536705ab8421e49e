// Values of a moment: fp32 in an update, coded in the moment's format in a state.
#pragma once

#include <cstddef>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "ballast/kernels/optimizer.h"
#include "ballast/storage/chunk/chunk_update.h"
#include "ballast/storage/placement/state_layout.h"

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

}  // namespace ballast::storage
