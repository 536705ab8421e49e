#include "ballast/client/examples/bytes_lm/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace ballast::client {

double Schedule::LearningRate(uint64_t step) const {
  constexpr double kFinalShare = 0.1;
  if (step < warmup_steps) return peak * static_cast<double>(step) / static_cast<double>(warmup_steps);
  if (total_steps <= warmup_steps) return peak;
  const double progress =
      std::min(1.0, static_cast<double>(step - warmup_steps) / static_cast<double>(total_steps - warmup_steps));
  return peak * (kFinalShare + (1 - kFinalShare) * 0.5 * (1 + std::cos(std::numbers::pi * progress)));
}

}  // namespace ballast::client
