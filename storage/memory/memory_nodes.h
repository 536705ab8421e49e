// Memory on machines with several NUMA nodes (sockets). An update's kernels run on threads of all nodes over all of a
// block, so a block's pages should lie on all nodes in turn; by default a page lies on the node of the thread that
// touched the page first.
#pragma once

#include <cstddef>
#include <vector>

#include "absl/types/span.h"

namespace ballast::storage {

// The nodes that this process may use for memory and for threads; nodes without processors hold a GPU's memory, or
// slower memory. Empty where the system does not tell, or where a policy was chosen for the process (`numactl`): this
// policy holds.
std::vector<int> MemoryNodes();

// Pages touched from now on lie on `nodes` in turn. REQUIRES: aligned to pages. False: the system refused.
bool Interleave(absl::Span<std::byte> bytes, absl::Span<const int> nodes);

}  // namespace ballast::storage
