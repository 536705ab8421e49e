// Values of a moment on their way into a state: fp32 in an update, coded in the state's format.
#pragma once

#include <cstddef>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "ballast/kernels/optimizer.h"
#include "ballast/storage/chunk_store.h"
#include "ballast/storage/placement/state_layout.h"

namespace ballast::storage {

// Whole blocks of a moment, but for a segment's last, and where in the state they belong.
struct MomentPiece {
  absl::Span<const std::byte> values;
  absl::Span<const std::byte> scales;  // empty but for 8-bit formats
  kernels::MomentSpan to;
};

// Codes the update's values piece by piece, by an update's rounding; `state` may be on a device, and is not touched.
// REQUIRES: `update` is valid for the chunk and writes a moment. Errors: `put`'s.
absl::Status ForMomentPieces(const ChunkUpdate& update, const StateView& state,
                             absl::FunctionRef<absl::Status(const MomentPiece&)> put);

// Into a state in the host's memory.
void WriteMoments(const ChunkUpdate& update, const StateView& state);

}  // namespace ballast::storage
