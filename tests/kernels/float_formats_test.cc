// The small float formats, one element at a time, against rounding in double.
#include "ballast/kernels/float_formats.h"

#include <gtest/gtest.h>

#include <random>

#include "ballast/tests/kernels/rounding_reference.h"
#include "ballast/tests/kernels/samples.h"

namespace ballast::kernels {
namespace {

TEST(FloatFormats, EveryCodeComesBack) {
  for (const Dtype dtype : kSmallDtypes) {
    const uint32_t codes = 1u << (8 * ElementBytes(dtype));
    for (uint32_t code = 0; code < codes; ++code) {
      const float x = WidenOne(dtype, code);
      const uint32_t back = NarrowOne(dtype, x);
      // A NaN may become the format's own.
      if (std::isnan(x)) {
        ASSERT_TRUE(std::isnan(WidenOne(dtype, back))) << static_cast<int>(dtype) << " " << code;
      } else {
        ASSERT_EQ(back, code) << static_cast<int>(dtype);
      }
    }
  }
}

TEST(FloatFormats, KnownValues) {
  EXPECT_EQ(ToF16(1.0f), 0x3c00);
  EXPECT_EQ(ToF16(65504.0f), 0x7bff);
  EXPECT_EQ(ToF16(65519.996f), 0x7bff);
  EXPECT_EQ(ToF16(65520.0f), 0x7c00);
  EXPECT_EQ(ToF16(0x1p-24f), 0x0001);
  EXPECT_EQ(ToF16(0x1p-25f), 0x0000);
  EXPECT_EQ(ToF16(std::bit_cast<float>(0xff812345u)), 0xfe09);
  EXPECT_EQ(ToE4m3(448.0f), 0x7e);
  EXPECT_EQ(ToE4m3(464.0f), 0x7e);
  EXPECT_EQ(ToE4m3(464.1f), 0x7f);
  EXPECT_EQ(ToE4m3(-HUGE_VALF), 0xff);
  EXPECT_EQ(ToE4m3(0x1p-9f), 0x01);
  EXPECT_EQ(ToE5m2(57344.0f), 0x7b);
  EXPECT_EQ(ToE5m2(61440.0f), 0x7c);
  EXPECT_EQ(ToE5m2(std::bit_cast<float>(0x7f800001u)), 0x7f);
}

// Every upper half of an fp32, with nine lower halves: halfway cases and their neighbours in each format.
TEST(FloatFormats, TiesAndTheirNeighboursRoundAsInDouble) {
  for (const Dtype dtype : kSmallDtypes) {
    for (uint32_t upper = 0; upper < 65536; ++upper) {
      for (const uint32_t low : {0x0000u, 0x0001u, 0x0fffu, 0x1000u, 0x1001u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
        const float x = std::bit_cast<float>(upper << 16 | low);
        ASSERT_TRUE(RoundsRight(dtype, x)) << static_cast<int>(dtype) << " " << std::bit_cast<uint32_t>(x);
      }
    }
  }
}

TEST(FloatFormats, RandomBitsRoundAsInDouble) {
  std::mt19937 random(3);
  for (const Dtype dtype : kSmallDtypes) {
    for (int i = 0; i < 1'000'000; ++i) {
      const float x = std::bit_cast<float>(static_cast<uint32_t>(random()));
      ASSERT_TRUE(RoundsRight(dtype, x)) << static_cast<int>(dtype) << " " << std::bit_cast<uint32_t>(x);
    }
  }
}

}  // namespace
}  // namespace ballast::kernels
