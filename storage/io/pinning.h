// Page-locking for the GPU. The build chooses one of two sources; without CUDA nothing can be pinned, and says so.
#pragma once

#include <cstddef>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace ballast::storage {

// UNAVAILABLE (UNSUPPORTED) without a GPU; RESOURCE_EXHAUSTED (BUDGET) if a limit stopped it, with its text.
absl::Status PinMemory(absl::Span<std::byte> bytes);
void UnpinMemory(absl::Span<std::byte> bytes);

}  // namespace ballast::storage
