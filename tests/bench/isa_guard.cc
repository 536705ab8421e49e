#include "ballast/tests/bench/isa_guard.h"

#include <algorithm>

namespace ballast::bench {

std::vector<SlowIsa> SlowerThanNarrower(const std::vector<IsaTime>& times, double speed_min) {
  std::vector<SlowIsa> slow;
  for (auto wide = times.begin(); wide != times.end(); ++wide) {
    const auto narrow = std::min_element(wide + 1, times.end(),
                                         [](const IsaTime& a, const IsaTime& b) { return a.seconds < b.seconds; });
    if (narrow == times.end() || narrow->seconds >= speed_min * wide->seconds) continue;
    slow.push_back({.isa = wide->isa, .narrower = narrow->isa, .ratio = narrow->seconds / wide->seconds});
  }
  return slow;
}

}  // namespace ballast::bench
