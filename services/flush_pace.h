// How many chunks go to the disk with a step, so that a job's gradient log never runs full, and no chunk goes more
// often than that takes.
#pragma once

#include <cstdint>

#include "absl/types/span.h"

namespace ballast::services {

// `needed_from`: of each chunk whose state is newer than its extent, the version from which on the log is needed to
// make it again; ascending. `steps_free`: steps that the log takes before it is full. Returns how many of them, the
// first, should be flushed with this step.
//
// Each flush has a time: the chunk that needs the log from version v on must be flushed before the log has taken what
// is free and what is freed once it is cut at v. So a log is in use nearly whole, and every chunk is flushed once in
// about as many steps as it holds; chunks whose times coincide are spread evenly over the steps that are left.
uint64_t FlushesDue(absl::Span<const int64_t> needed_from, uint64_t steps_free);

}  // namespace ballast::services
