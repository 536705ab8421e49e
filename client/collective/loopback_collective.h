// Ranks that are threads of one process.
#pragma once

#include <memory>
#include <vector>

#include "absl/time/time.h"
#include "ballast/client/collective/collective.h"

namespace ballast::client {

// The seats of one group, by rank: one thread each. A call fails with RANK_MISSING when a rank does not make it within
// `timeout`, with UNAVAILABLE when a rank's seat is gone.
std::vector<std::unique_ptr<Collective>> MakeLoopbackGroup(int world_size, absl::Duration timeout = absl::Seconds(120));

}  // namespace ballast::client
