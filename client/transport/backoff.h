// How long a call waits before it is sent again to a server that was down or busy.
#pragma once

#include <algorithm>
#include <cmath>

#include "absl/time/time.h"

namespace ballast::client {

// The longest pause after so many tries: 5 ms, and 0.3 of all pauses before. So a server that was away for a second, as
// one that restarts, is asked again within 0.3 s, and one that stays away once a second.
inline absl::Duration LongestPause(int tries) {
  constexpr absl::Duration kMin = absl::Milliseconds(5), kMax = absl::Seconds(1);
  constexpr double kGrowth = 1.3;
  return std::min(kMax, kMin * std::pow(kGrowth, std::clamp(tries - 1, 0, 30)));
}

}  // namespace ballast::client
