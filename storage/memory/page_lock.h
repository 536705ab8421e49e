// Page-locks memory for the GPU. The build chooses one of two sources; without CUDA, PageLock refuses.
#pragma once

#include <cstddef>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace ballast::storage {

// Page-locks `bytes` for GPU `device`, and for all other GPUs as well. Leaves the device selected in the calling
// thread: without a selection CUDA would take GPU 0, and hold memory there for this process.
// UNAVAILABLE (UNSUPPORTED) without that GPU; RESOURCE_EXHAUSTED (BUDGET) if a limit stopped it, with its text.
absl::Status PageLock(absl::Span<std::byte> bytes, int device);
void PageUnlock(absl::Span<std::byte> bytes, int device);

}  // namespace ballast::storage
