// AdamW by our kernels behind a C interface, for adam.py. Arrays hold `n` elements; a chunk is `chunk` of them.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "ballast/kernels/kernels.h"
#include "ballast/kernels/optimizer.h"
#include "ballast/kernels/thread_pool.h"

namespace {

using namespace ballast::kernels;

constexpr uint64_t kPiece = uint64_t{1} << 16;

struct AdamwArrays {
  uint64_t n;
  uint64_t chunk;
  const uint16_t* gradient;  // bf16
  float* master;
  float* moment1;
  float* moment2;
  uint16_t* working;  // bf16
};

struct AdamwHyper {
  double learning_rate, beta1, beta2, epsilon, weight_decay;
};

void Step(ThreadPool& pool, const AdamwArrays& a, const AdamwHyper& h, uint64_t t, float factor) {
  const OptimizerSpec spec;
  const Coefficients c = MakeCoefficients(spec,
                                          {.learning_rate = h.learning_rate,
                                           .beta1 = h.beta1,
                                           .beta2 = h.beta2,
                                           .epsilon = h.epsilon,
                                           .weight_decay = h.weight_decay},
                                          t, factor);
  pool.ParallelFor((a.n + kPiece - 1) / kPiece, [&](uint64_t i) {
    const uint64_t at = i * kPiece;
    UpdateSpan span{.n = std::min(kPiece, a.n - at),
                    .gradient = reinterpret_cast<const std::byte*>(a.gradient + at),
                    .master = a.master + at,
                    .moments = {},
                    .working = reinterpret_cast<std::byte*>(a.working + at)};
    span.moments[0].values = reinterpret_cast<std::byte*>(a.moment1 + at);
    span.moments[1].values = reinterpret_cast<std::byte*>(a.moment2 + at);
    Update(spec, c, {}, span);
  });
}

}  // namespace

extern "C" {

void* ballast_pool_new(int threads) { return new ThreadPool(threads); }

void ballast_adamw_step(void* pool, const AdamwArrays* arrays, const AdamwHyper* hyper, uint64_t t) {
  Step(*static_cast<ThreadPool*>(pool), *arrays, *hyper, t, 1);
}

// As a server does a step: norms of chunks, their sum, clip factor, update. Returns the scaled norm.
double ballast_adamw_use(void* pool, const AdamwArrays* arrays, const AdamwHyper* hyper, uint64_t t, double scale,
                         double max_norm) {
  const uint64_t chunks = (arrays->n + arrays->chunk - 1) / arrays->chunk;
  std::vector<NormResult> norms(chunks);
  static_cast<ThreadPool*>(pool)->ParallelFor(chunks, [&](uint64_t i) {
    const uint64_t at = i * arrays->chunk;
    norms[i] = SquaredNorm({arrays->gradient + at, std::min(arrays->chunk, arrays->n - at)});
  });
  double squared = 0;
  for (const NormResult& norm : norms) {
    if (!norm.finite) return INFINITY;  // the step is skipped
    squared += norm.squared_norm;
  }
  const double norm = scale * std::sqrt(squared);
  const double clip = std::min(1.0, max_norm / (norm + 1e-6));
  Step(*static_cast<ThreadPool*>(pool), *arrays, *hyper, t, static_cast<float>(scale * clip));
  return norm;
}

}  // extern "C"
