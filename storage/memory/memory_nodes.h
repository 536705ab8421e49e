// Memory on machines with several NUMA nodes (sockets). An update's kernels run on threads of all nodes over all of a
// block, so a block's pages should lie on all nodes in turn; by default a page lies on the node of the thread that
// touched the page first.
#pragma once

#include <cstddef>
#include <vector>

#include "absl/types/span.h"

namespace ballast::storage {

// The nodes that this process may use for memory and for threads; nodes without processors have a GPU's memory, or
// slower memory. Empty if the system does not report nodes, or if somebody chose a policy for the process (`numactl`),
// which then applies.
std::vector<int> MemoryNodes();

// Pages that are touched from now on lie on `nodes` in turn. REQUIRES: aligned to pages. False if the system refuses.
bool Interleave(absl::Span<std::byte> bytes, absl::Span<const int> nodes);

}  // namespace ballast::storage
