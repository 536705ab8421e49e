// Finds instruction sets whose kernels are slower than a narrower set's on the same machine.
#pragma once

#include <string>
#include <vector>

namespace ballast::bench {

struct IsaTime {
  std::string isa;
  double seconds = 0;  // the best of several rounds, for the same work
};

struct SlowIsa {
  std::string isa, narrower;
  double ratio = 0;  // speed / the narrower set's
};

// A wider set must reach this share of a narrower set's speed. Two sets bound by memory differ by a few per cent on a
// busy machine; the benchmark's ratios show the mistakes that cost less.
inline constexpr double kWiderSpeedMin = 0.85;

// `times` begins with the widest set. Names each set below `speed_min` once, beside the fastest of the narrower sets.
std::vector<SlowIsa> SlowerThanNarrower(const std::vector<IsaTime>& times, double speed_min = kWiderSpeedMin);

}  // namespace ballast::bench
