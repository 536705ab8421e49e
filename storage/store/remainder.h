// The fp32 master of a chunk that keeps a remainder (StateLayout::keeps_remainder): made from the working copy and the
// remainder, and taken apart again.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "ballast/storage/placement/state_layout.h"

namespace ballast::storage {

// Reads the masters of elements from `at` on, as many as `to` has. `working`: the chunk's working copy.
// REQUIRES: state.layout->keeps_remainder().
void JoinMaster(const StateView& state, const std::byte* working, uint64_t at, absl::Span<float> to);

// Sets the remainders of elements from `at` on. The working copy is up to the caller.
// REQUIRES: state.layout->keeps_remainder(); `at` is a multiple of 8, and so is the end unless it is the chunk's.
void SetRemainder(absl::Span<const float> master, uint64_t at, const StateView& state);

}  // namespace ballast::storage
