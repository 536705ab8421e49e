// Bounds on the steps of gradients that a durable job's log holds.
#pragma once

#include <algorithm>
#include <cstdint>

namespace ballast::services {

// The step that is applied, the step in flight, and one that a cut has still to free.
inline constexpr uint64_t kLogStepsMin = 3;
// Flushed versions share a sync and a record over four steps (VersionedExtents::kRunsMax), and two more are applied and
// in flight.
inline constexpr uint64_t kLogStepsFirst = 6;
// By then flushes write less than half of what the log itself writes, and a replay takes as many steps.
inline constexpr uint64_t kLogStepsMax = 16;
inline constexpr uint64_t kLogStepsConfiguredMax = 1024;
// Longer logs are worth their disk where steps wait for flushes for more than this share of their time.
inline constexpr double kFlushWaitShareMax = 0.1;

// How many steps a new log holds. `configured`: 0 for none.
constexpr uint64_t FirstLogSteps(uint64_t configured) { return configured > 0 ? configured : kLogStepsFirst; }
// Share of the state in memory that each step flushes with a log of so many steps. Nearly the whole log is then in use,
// except for the room of the next step and of flushed versions that are not recorded yet.
constexpr double FlushedShare(uint64_t steps) { return 1.0 / static_cast<double>(std::max(steps, kLogStepsMin) - 2); }

}  // namespace ballast::services
