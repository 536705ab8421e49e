#include "ballast/tests/bench/isa_guard.h"

#include <gtest/gtest.h>

namespace ballast::bench {
namespace {

TEST(IsaGuardTest, NamesASetThatIsSlowerThanANarrowerOne) {
  // AdamW on a Zen 4 whose wide loop asked for every second line ahead of use.
  const auto slow = SlowerThanNarrower({{"avx512", 1 / 0.69}, {"avx2", 1 / 0.93}, {"scalar", 4}});
  ASSERT_EQ(slow.size(), 1u);
  EXPECT_EQ(slow[0].isa, "avx512");
  EXPECT_EQ(slow[0].narrower, "avx2");
  EXPECT_NEAR(slow[0].ratio, 0.74, 0.01);
}

TEST(IsaGuardTest, ComparesWithEveryNarrowerSet) {
  const auto slow = SlowerThanNarrower({{"avx512", 1.5}, {"avx2", 2}, {"scalar", 1}});
  ASSERT_EQ(slow.size(), 2u);
  EXPECT_EQ(slow[0].narrower, "scalar");
  EXPECT_EQ(slow[1].isa, "avx2");
  EXPECT_EQ(slow[1].narrower, "scalar");
}

TEST(IsaGuardTest, LeavesNoiseAndSingleSetsAlone) {
  EXPECT_TRUE(SlowerThanNarrower({{"avx512", 1.1}, {"avx2", 1}, {"scalar", 9}}).empty());
  EXPECT_TRUE(SlowerThanNarrower({{"avx2", 1}}).empty());
  EXPECT_TRUE(SlowerThanNarrower({}).empty());
}

}  // namespace
}  // namespace ballast::bench
