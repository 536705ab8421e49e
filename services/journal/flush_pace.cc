#include "ballast/services/journal/flush_pace.h"

#include <algorithm>

namespace ballast::services {

uint64_t FlushesDue(absl::Span<const int64_t> needed_from, uint64_t steps_free) {
  uint64_t due = 0;
  // One step stays free for the next step's slices, which come while these chunks are on their way to the disk.
  const uint64_t spare = steps_free - std::min<uint64_t>(steps_free, 1);
  for (uint64_t i = 0; i < needed_from.size(); ++i) {
    const auto freed_before = static_cast<uint64_t>(needed_from[i] - needed_from.front());
    const uint64_t steps_left = std::max<uint64_t>(1, spare + freed_before);
    due = std::max(due, (i + steps_left) / steps_left);  // i + 1 chunks, rounded up
  }
  return due;
}

}  // namespace ballast::services
