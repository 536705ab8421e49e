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

// The share of a narrower set's speed that a wider one must reach. Two sets that both wait for memory differ by a few
// per cent on a busy machine; a mistake that costs less than this is for the benchmark's ratios to show.
inline constexpr double kWiderSpeedMin = 0.85;

// `times`: the widest set first. Each set that is slower is named once, beside the fastest narrower one.
std::vector<SlowIsa> SlowerThanNarrower(const std::vector<IsaTime>& times);

}  // namespace ballast::bench
