// How many chunks a step flushes, so that a job's gradient log never runs full, and no chunk is flushed more often than
// this takes.
#pragma once

#include <cstdint>

#include "absl/types/span.h"

namespace ballast::services {

// `needed_from`: for each chunk whose state is newer than its extent, the version from which on a replay of the chunk
// needs the log; ascending. `steps_free`: steps that the log can still take before it is full. Returns n: this step
// should flush the first n of the chunks.
//
// Each flush has a deadline. A chunk that needs the log from version v on must be flushed before the log has used its
// free room and the room that a cut at v frees. So nearly the whole log is in use, and a chunk is flushed once in about
// as many steps as the log holds. Chunks with equal deadlines are spread evenly over the remaining steps.
uint64_t FlushesDue(absl::Span<const int64_t> needed_from, uint64_t steps_free);

}  // namespace ballast::services
