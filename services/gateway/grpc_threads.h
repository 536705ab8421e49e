// The threads of gRPC 1.51, made before the first call. The library makes threads as work piles up, counts a refused
// thread as made, and never answers a call that falls to such a thread.
#pragma once

#include "absl/status/status.h"

namespace ballast::services {

// RESOURCE_EXHAUSTED (LIMIT) if the system makes fewer threads than gRPC may need. Before gRPC's server is built.
absl::Status CheckRoomForGrpc();

// Makes all threads that gRPC's executor may ever have. REQUIRES: gRPC runs. RESOURCE_EXHAUSTED (LIMIT) if a thread is
// missing.
absl::Status MakeThreadsOfGrpc();

}  // namespace ballast::services
