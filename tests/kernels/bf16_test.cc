#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <vector>

#include "ballast/kernels/kernels.h"

namespace ballast::kernels {
namespace {

TEST(Bf16, All65536RoundTrip) {
  std::vector<bf16> all(65536), back(65536);
  for (uint32_t i = 0; i < 65536; ++i) all[i] = static_cast<bf16>(i);
  std::vector<float> wide(65536);
  F32FromBf16(all, absl::MakeSpan(wide));
  Bf16FromF32(wide, absl::MakeSpan(back));
  for (uint32_t i = 0; i < 65536; ++i) {
    // A signalling NaN comes back quiet; all else comes back as it was.
    const bool nan = (i & 0x7fff) > 0x7f80;
    EXPECT_EQ(back[i], nan ? (i | 0x40) : i);
    EXPECT_EQ(std::isnan(wide[i]), nan);
    EXPECT_EQ(ToBf16(FromBf16(all[i])), back[i]);
  }
}

TEST(Bf16, Extremes) {
  EXPECT_EQ(ToBf16(1.0f), 0x3f80);
  EXPECT_EQ(ToBf16(-0.0f), 0x8000);
  // Halfway to the next power of two rounds to even: Inf.
  EXPECT_EQ(ToBf16(std::bit_cast<float>(0x7f7f8000u)), 0x7f80);
  EXPECT_EQ(ToBf16(std::bit_cast<float>(0x7f7f7fffu)), 0x7f7f);
  // Denormals are kept.
  EXPECT_EQ(ToBf16(std::bit_cast<float>(0x00010000u)), 0x0001);
  EXPECT_EQ(ToBf16(std::bit_cast<float>(0x00008001u)), 0x0001);
  EXPECT_EQ(ToBf16(std::bit_cast<float>(0x00008000u)), 0x0000);
  // A NaN whose payload is in the lower half only must not become Inf.
  EXPECT_EQ(ToBf16(std::bit_cast<float>(0x7f800001u)), 0x7fc0);
}

}  // namespace
}  // namespace ballast::kernels
