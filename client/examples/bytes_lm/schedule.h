// Learning rate over the course of training: linear warm-up, then a cosine down to a tenth.
#pragma once

#include <cstdint>

namespace ballast::client {

struct Schedule {
  double peak = 2e-3;
  uint64_t warmup_steps = 10;
  uint64_t total_steps = 120;

  // For step 1, 2, ...; the peak is reached at step `warmup_steps`, a tenth of it at `total_steps` and after.
  // Source: Loshchilov & Hutter 2017, "SGDR", one cycle.
  double LearningRate(uint64_t step) const;
};

}  // namespace ballast::client
