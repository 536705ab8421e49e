// Memory on machines of several NUMA nodes (sockets). An update's kernels run on threads of all nodes over all of a
// block, so its pages should lie on all nodes in turn; left alone they lie where the thread ran that touched them.
#pragma once

#include <cstddef>
#include <vector>

#include "absl/types/span.h"

namespace ballast::storage {

// Those that this process's memory may lie on and that have processors which it may use: others hold a GPU's memory, or
// slower one. None where the system does not tell, or somebody chose a policy for the process (`numactl`): that holds.
std::vector<int> MemoryNodes();

// Pages that are touched from now on lie on `nodes` in turn. REQUIRES: aligned to pages. False: the system forbids it.
bool Interleave(absl::Span<std::byte> bytes, absl::Span<const int> nodes);

}  // namespace ballast::storage
