// Ranks as threads of one process.
#pragma once

#include <memory>
#include <vector>

#include "absl/time/time.h"
#include "ballast/client/collective/collective.h"

namespace ballast::client {

// Makes the seats of one group, by rank; each seat is for one thread. A call fails with RANK_MISSING if some rank does
// not make the call within `timeout`, with UNAVAILABLE if some rank's seat is destroyed.
std::vector<std::unique_ptr<Collective>> MakeLoopbackGroup(int world_size, absl::Duration timeout = absl::Seconds(120));

}  // namespace ballast::client
