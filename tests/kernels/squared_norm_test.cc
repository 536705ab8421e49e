#include <gtest/gtest.h>

#include <bit>
#include <random>
#include <vector>

#include "ballast/kernels/kernels.h"
#include "ballast/tests/kernels/samples.h"

namespace ballast::kernels {
namespace {

std::vector<bf16> Random(size_t n, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<bf16> x(n);
  for (bf16& b : x) b = ToBf16(AnyFloat(random, /*finite=*/true));
  for (bf16& b : x) {
    if ((b & 0x7fff) == 0x7f80) b = 0;
  }
  return x;
}

TEST(SquaredNorm, EmptyIsZero) {
  const NormResult got = SquaredNorm({});
  EXPECT_TRUE(got.finite);
  EXPECT_EQ(got.squared_norm, 0);
}

TEST(SquaredNorm, SmallExactSum) {
  // 3^2 + 4^2
  EXPECT_EQ(SquaredNorm(std::vector<bf16>{0x4040, 0xc080}).squared_norm, 25);
}

// Bits of a norm do not depend on what follows the span or how it is aligned.
TEST(SquaredNorm, AlignmentDoesNotMatter) {
  const std::vector<bf16> x = Random(5000, 1);
  const uint64_t expected = std::bit_cast<uint64_t>(SquaredNorm(x).squared_norm);
  for (size_t shift = 1; shift < 40; ++shift) {
    std::vector<bf16> moved(shift, 0x7fc0);
    moved.insert(moved.end(), x.begin(), x.end());
    moved.resize(moved.size() + 33, 0x7f80);
    const NormResult got = SquaredNorm(absl::MakeConstSpan(moved).subspan(shift, x.size()));
    ASSERT_TRUE(got.finite);
    ASSERT_EQ(std::bit_cast<uint64_t>(got.squared_norm), expected) << shift;
  }
}

// A complete subtree can be computed apart, as tiers and servers may, and zero padding up to a leaf changes nothing.
TEST(SquaredNorm, TreeCanBeCut) {
  for (const size_t leaves : {2, 3, 5, 7, 8, 13, 64, 100}) {
    const std::vector<bf16> x = Random(leaves * 4096 - 100, leaves);
    const size_t left = std::bit_floor(leaves - 1) * 4096;
    const auto all = absl::MakeConstSpan(x);
    const double cut = SquaredNorm(all.first(left)).squared_norm + SquaredNorm(all.subspan(left)).squared_norm;
    EXPECT_EQ(SquaredNorm(x).squared_norm, cut) << leaves;
    std::vector<bf16> padded = x;
    padded.resize(leaves * 4096);
    EXPECT_EQ(SquaredNorm(padded).squared_norm, cut) << leaves;
  }
}

TEST(SquaredNorm, LargestFiniteValuesDoNotOverflow) {
  const std::vector<bf16> x(1 << 20, 0x7f7f);
  const NormResult got = SquaredNorm(x);
  EXPECT_TRUE(got.finite);
  EXPECT_GT(got.squared_norm, 1e82);
}

TEST(SquaredNorm, OneBadValueIsFoundAnywhere) {
  std::vector<bf16> x = Random(2000, 3);
  for (size_t i = 0; i < x.size(); ++i) {
    const bf16 kept = x[i];
    for (const bf16 bad : {0x7f80, 0xff80, 0x7f81, 0xffc0}) {
      x[i] = bad;
      ASSERT_FALSE(SquaredNorm(x).finite) << i;
    }
    x[i] = kept;
  }
  EXPECT_TRUE(SquaredNorm(x).finite);
}

}  // namespace
}  // namespace ballast::kernels
