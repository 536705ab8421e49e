// One AdamW update of fp32 state with bf16 gradients and working parameters, by direct kernel call.
#pragma once

#include "absl/types/span.h"
#include "ballast/kernels/optimizer.h"

namespace ballast {

// All spans hold equal counts.
inline void AdamwStep(const kernels::Coefficients& c, absl::Span<const kernels::bf16> gradient,
                      absl::Span<float> master, absl::Span<float> moment1, absl::Span<float> moment2,
                      absl::Span<kernels::bf16> working) {
  kernels::UpdateSpan span{.n = gradient.size(),
                           .gradient = reinterpret_cast<const std::byte*>(gradient.data()),
                           .master = master.data(),
                           .moments = {},
                           .working = reinterpret_cast<std::byte*>(working.data())};
  span.moments[0].values = reinterpret_cast<std::byte*>(moment1.data());
  span.moments[1].values = reinterpret_cast<std::byte*>(moment2.data());
  kernels::Update({}, c, {}, span);
}

}  // namespace ballast
