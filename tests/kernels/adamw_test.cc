// AdamW against an fp64 oracle: the formula itself, not its rounding.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "ballast/tests/adamw_step.h"

namespace ballast::kernels {
namespace {

constexpr Hyper kHyper{.learning_rate = 1e-3, .beta1 = 0.9, .beta2 = 0.95, .epsilon = 1e-8, .weight_decay = 0.1};

TEST(AdamwCoefficients, AreRoundedOnceFromFp64) {
  const Hyper hyper{.learning_rate = 6e-4, .beta1 = 0.9, .beta2 = 0.999, .epsilon = 1e-8, .weight_decay = 0.1};
  const Coefficients c = MakeCoefficients({}, hyper, 1, 0.5f);
  EXPECT_EQ(c.factor, 0.5f);
  EXPECT_EQ(c.take2, static_cast<float>(1 - 0.999));
  EXPECT_NE(c.take2, 1.0f - 0.999f);
  EXPECT_EQ(c.weight_decay, static_cast<float>(6e-4 * 0.1));
  EXPECT_EQ(c.step_size, static_cast<float>(6e-4 / (1 - 0.9)));
  EXPECT_EQ(c.eps, 1e-8f);
}

TEST(AdamwCoefficients, FollowTheStepCount) {
  for (const uint64_t t : {uint64_t{1}, uint64_t{2}, uint64_t{3}, uint64_t{1000}, uint64_t{1000000}}) {
    const Coefficients c = MakeCoefficients({}, kHyper, t, 1);
    const double bias1 = 1 - std::pow(0.9, static_cast<double>(t)), bias2 = 1 - std::pow(0.95, static_cast<double>(t));
    EXPECT_NEAR(c.step_size, 1e-3 / bias1, 1e-3 / bias1 * 1e-7) << t;
    EXPECT_NEAR(c.root_scale, 1 / std::sqrt(bias2), 1e-7 / std::sqrt(bias2)) << t;
  }
}

TEST(Adamw, FollowsTheOracleOver200Steps) {
  std::mt19937_64 random(7);
  std::normal_distribution<float> normal;
  constexpr size_t kElements = 1003;
  std::vector<float> p(kElements), m(kElements), v(kElements);
  std::vector<double> op(kElements), om(kElements), ov(kElements);
  std::vector<bf16> gradient(kElements), working(kElements);
  for (size_t i = 0; i < kElements; ++i) op[i] = p[i] = normal(random);
  for (uint64_t t = 1; t <= 200; ++t) {
    for (bf16& g : gradient) g = ToBf16(normal(random));
    const float factor = 0.25f;
    AdamwStep(MakeCoefficients({}, kHyper, t, factor), gradient, absl::MakeSpan(p), absl::MakeSpan(m),
              absl::MakeSpan(v), absl::MakeSpan(working));
    for (size_t i = 0; i < kElements; ++i) {
      const double g = 0.25 * FromBf16(gradient[i]);
      om[i] = 0.9 * om[i] + 0.1 * g;
      ov[i] = 0.95 * ov[i] + 0.05 * g * g;
      const double m_hat = om[i] / (1 - std::pow(0.9, t)), v_hat = ov[i] / (1 - std::pow(0.95, t));
      op[i] -= 1e-3 * 0.1 * op[i] + 1e-3 * m_hat / (std::sqrt(v_hat) + 1e-8);
    }
  }
  for (size_t i = 0; i < kElements; ++i) {
    EXPECT_NEAR(p[i], op[i], 2e-5) << i;
    EXPECT_NEAR(m[i], om[i], 1e-6) << i;
    EXPECT_NEAR(v[i], ov[i], 1e-6) << i;
    EXPECT_EQ(working[i], ToBf16(p[i])) << i;
  }
}

TEST(Adamw, PaddingStaysZero) {
  std::vector<float> p(300), m(300), v(300);
  std::vector<bf16> gradient(300), working(300, 0xffff);
  AdamwStep(MakeCoefficients({}, kHyper, 1, 1), gradient, absl::MakeSpan(p), absl::MakeSpan(m), absl::MakeSpan(v),
            absl::MakeSpan(working));
  EXPECT_EQ(p, std::vector<float>(300));
  EXPECT_EQ(working, std::vector<bf16>(300));
}

}  // namespace
}  // namespace ballast::kernels
