// The queue over io_uring: one ring, owned by the thread that made the queue.
#pragma once

#include <memory>
#include <vector>

#include "ballast/storage/io/io_queue.h"

namespace ballast::storage {

// UNAVAILABLE (IO) with the reason if the kernel, a seccomp filter or a limit refuses the ring or its read and write
// operations. `registered`: memory to register with the ring. If it cannot be registered (memlock), it is used
// unregistered.
absl::StatusOr<std::unique_ptr<IoQueue>> MakeUringQueue(absl::Span<std::byte> registered);

}  // namespace ballast::storage
