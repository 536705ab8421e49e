// Tells a forked child from its parent: threads, connections, loans and leases belong to the parent.
#pragma once

#include <cstdint>

namespace ballast::client {

// Forks in this process's ancestry since the first call. Never blocks.
uint64_t ForkCount();

}  // namespace ballast::client
