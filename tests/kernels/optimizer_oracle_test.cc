// Update() in fp32 against the same optimizer in fp64 over 200 steps: our error is at most 1.05 times torch.optim's on
// the same inputs (golden/torch_errors.py). Lion, AdEMAMix and schedule-free AdamW, which torch does not have, against
// their papers' algorithms.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "ballast/kernels/optimizer.h"
#include "ballast/tests/kernels/golden/torch_errors.h"

namespace ballast::kernels {
namespace {

uint32_t Mix(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ x >> 16;
}

// As values() of torch_errors.py.
double Value(uint64_t step, uint64_t i) {
  const uint32_t bits = Mix(static_cast<uint32_t>(i) + static_cast<uint32_t>(step) * 0x9e3779b9u);
  const double x = (static_cast<double>(bits >> 8) - 0x1p23) / 0x1p23;
  return step == 0 ? x : std::ldexp(x, -static_cast<int>(i % 13));
}

// One element in fp64.
struct Oracle {
  double p, m = 0, v = 0, x = 0, s = 0;
  double z = 0;  // schedule-free; p is y there, x is x

  void Step(const OptimizerSpec& spec, const Hyper& h, uint64_t t, double gradient) {
    const auto step = static_cast<double>(t);
    double g = h.maximize ? -gradient : gradient;
    const bool decoupled = spec.kind == OptimizerKind::kAdamw || spec.kind == OptimizerKind::kLion ||
                           spec.kind == OptimizerKind::kAdemamix;
    const double before = p;
    if (decoupled)
      p *= 1 - h.learning_rate * h.weight_decay;
    else if (spec.kind != OptimizerKind::kAdamwScheduleFree)
      g += h.weight_decay * before;
    switch (spec.kind) {
      case OptimizerKind::kAdamw:
      case OptimizerKind::kAdam: {
        m = h.beta1 * m + (1 - h.beta1) * g;
        v = h.beta2 * v + (1 - h.beta2) * g * g;
        x = std::max(x, v);
        const double root = std::sqrt((spec.amsgrad ? x : v) / (1 - std::pow(h.beta2, step)));
        p -= h.learning_rate * (m / (1 - std::pow(h.beta1, step))) / (root + h.epsilon);
        break;
      }
      case OptimizerKind::kSgd:
        if (spec.momentum) {
          m = t == 1 ? g : h.beta1 * m + (1 - h.dampening) * g;
          g = spec.nesterov ? g + h.beta1 * m : m;
        }
        p -= h.learning_rate * g;
        break;
      case OptimizerKind::kAdagrad:
        v = (t == 1 ? h.initial_accumulator : v) + g * g;
        p -= h.learning_rate / (1 + (step - 1) * h.learning_rate_decay) * g / (std::sqrt(v) + h.epsilon);
        break;
      case OptimizerKind::kLion: {
        const double c = h.beta1 * m + (1 - h.beta1) * g;
        p -= h.learning_rate * (c > 0 ? 1 : c < 0 ? -1 : 0);
        m = h.beta2 * m + (1 - h.beta2) * g;
        break;
      }
      case OptimizerKind::kAdemamix: {
        m = h.beta1 * m + (1 - h.beta1) * g;
        s = h.beta3 * s + (1 - h.beta3) * g;
        v = h.beta2 * v + (1 - h.beta2) * g * g;
        const double mean = m / (1 - std::pow(h.beta1, step)) + h.alpha * s;
        p -= h.learning_rate * mean / (std::sqrt(v / (1 - std::pow(h.beta2, step))) + h.epsilon);
        break;
      }
      case OptimizerKind::kAdamwScheduleFree: {
        if (t == 1) z = x = p;
        v = h.beta2 * v + (1 - h.beta2) * gradient * gradient;
        const double root = std::sqrt(v / (1 - std::pow(h.beta2, step)));
        z -= h.learning_rate * (gradient / (root + h.epsilon) + h.weight_decay * p);
        x = (1 - h.average) * x + h.average * z;
        p = (1 - h.beta1) * z + h.beta1 * x;
        break;
      }
    }
  }
};

struct Outcome {
  std::vector<float> ours;
  std::vector<Oracle> oracle;

  double RootMeanSquare() const {
    double sum = 0;
    for (size_t i = 0; i < ours.size(); ++i) sum += (ours[i] - oracle[i].p) * (ours[i] - oracle[i].p);
    return std::sqrt(sum / static_cast<double>(ours.size()));
  }
};

Outcome Train(const OptimizerSpec& spec, const Hyper& hyper, uint64_t n) {
  Outcome outcome{std::vector<float>(n), std::vector<Oracle>(n)};
  for (uint64_t i = 0; i < n; ++i) {
    outcome.oracle[i].p = Value(0, i);
    outcome.ours[i] = static_cast<float>(Value(0, i));
  }
  std::vector<float> gradient(n), working(n), moments[kMomentsMax];
  UpdateSpan span{.n = n,
                  .gradient = reinterpret_cast<const std::byte*>(gradient.data()),
                  .master = outcome.ours.data(),
                  .moments = {},
                  .working = reinterpret_cast<std::byte*>(working.data())};
  for (size_t k = 0; k < kMomentsMax; ++k) {
    moments[k].resize(n);
    span.moments[k].values = reinterpret_cast<std::byte*>(moments[k].data());
  }
  for (uint64_t t = 1; t <= kTorchSteps; ++t) {
    for (uint64_t i = 0; i < n; ++i) {
      gradient[i] = static_cast<float>(Value(t, i));
      outcome.oracle[i].Step(spec, hyper, t, Value(t, i));
    }
    Update(spec, MakeCoefficients(spec, hyper, t, 1), {}, span);
  }
  return outcome;
}

TEST(OptimizerOracle, ErrorIsAtMostThatOfTorch) {
  for (const TorchErrors& torch : kTorchErrors) {
    const Outcome outcome = Train(torch.spec, torch.hyper, torch.n);
    // The two oracles agree, or the comparison means nothing.
    ASSERT_NEAR(outcome.oracle.front().p, torch.oracle_first, 1e-12) << torch.name;
    ASSERT_NEAR(outcome.oracle.back().p, torch.oracle_last, 1e-12) << torch.name;
    const double ours = outcome.RootMeanSquare();
    std::printf("%-20s ours %.3g, torch fused %.3g, single tensor %.3g\n", torch.name, ours, torch.fused,
                torch.single_tensor);
    EXPECT_LE(ours, 1.05 * std::min(torch.fused, torch.single_tensor)) << torch.name;
  }
}

TEST(OptimizerOracle, LionFollowsThePaper) {
  const Hyper hyper{.learning_rate = 1e-4, .beta1 = 0.9, .beta2 = 0.99, .weight_decay = 0.1};
  const Outcome outcome =
      Train({.kind = OptimizerKind::kLion, .gradient = Dtype::kF32, .working = Dtype::kF32}, hyper, 1003);
  // Allows twice the error of 200 independent roundings of values below 1.
  EXPECT_LE(outcome.RootMeanSquare(), 2 * std::sqrt(200.0) * 0x1p-25);
}

// In the paper's terms, y, z and x; one step's weight differs from the next's.
TEST(OptimizerOracle, ScheduleFreeFollowsThePaper) {
  const OptimizerSpec spec{.kind = OptimizerKind::kAdamwScheduleFree, .gradient = Dtype::kF32, .working = Dtype::kF32};
  Hyper hyper{.learning_rate = 2.5e-3, .beta1 = 0.9, .beta2 = 0.999, .epsilon = 1e-8, .weight_decay = 0.1};
  constexpr uint64_t kCount = 1003;
  std::vector<Oracle> oracle(kCount);
  std::vector<float> y(kCount), gradient(kCount), working(kCount), w(kCount), v(kCount);
  for (uint64_t i = 0; i < kCount; ++i) oracle[i].p = Value(0, i), y[i] = static_cast<float>(Value(0, i));
  const auto bytes = [](std::vector<float>& x) { return reinterpret_cast<std::byte*>(x.data()); };
  const UpdateSpan span{.n = kCount,
                        .gradient = bytes(gradient),
                        .master = y.data(),
                        .moments = {{{bytes(w)}, {bytes(v)}}},
                        .working = bytes(working)};
  for (uint64_t t = 1; t <= kTorchSteps; ++t) {
    hyper.average = 1 / static_cast<double>(t);
    for (uint64_t i = 0; i < kCount; ++i) {
      gradient[i] = static_cast<float>(Value(t, i));
      oracle[i].Step(spec, hyper, t, Value(t, i));
    }
    Update(spec, MakeCoefficients(spec, hyper, t, 1), {}, span);
  }
  double of_y = 0, of_x = 0, moved = 0;
  for (uint64_t i = 0; i < kCount; ++i) {
    const double x = y[i] + (1 - 1 / hyper.beta1) * w[i];
    of_y += (y[i] - oracle[i].p) * (y[i] - oracle[i].p);
    of_x += (x - oracle[i].x) * (x - oracle[i].x);
    moved += (oracle[i].x - oracle[i].p) * (oracle[i].x - oracle[i].p);
  }
  const auto mean = [](double sum) { return std::sqrt(sum / kCount); };
  EXPECT_LE(mean(of_y), 2 * std::sqrt(200.0) * 0x1p-25);
  EXPECT_LE(mean(of_x), 2 * std::sqrt(200.0) * 0x1p-25);
  EXPECT_GT(mean(moved), 1e-4) << "x is not y";
}

TEST(OptimizerOracle, AdemamixFollowsThePaper) {
  const Hyper hyper{.learning_rate = 1e-3,
                    .beta1 = 0.9,
                    .beta2 = 0.999,
                    .epsilon = 1e-8,
                    .weight_decay = 0.1,
                    .beta3 = 0.9999,
                    .alpha = 5};
  const OptimizerSpec spec{.kind = OptimizerKind::kAdemamix, .gradient = Dtype::kF32, .working = Dtype::kF32};
  const Outcome outcome = Train(spec, hyper, 1003);
  EXPECT_LE(outcome.RootMeanSquare(), 2 * std::sqrt(200.0) * 0x1p-25);
  // The slow mean counts: without it the result is another.
  Hyper without = hyper;
  without.alpha = 0;
  EXPECT_GT(std::fabs(Train(spec, without, 1003).oracle[5].p - outcome.oracle[5].p), 5e-4);
}

}  // namespace
}  // namespace ballast::kernels
