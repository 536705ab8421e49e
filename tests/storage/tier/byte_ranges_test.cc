#include "ballast/storage/tier/byte_ranges.h"

#include <random>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ballast::storage {
namespace {

using ::testing::ElementsAre;

TEST(ByteRangesTest, NeighboursAreOneRange) {
  ByteRanges set;
  set.Add({0, 10});
  set.Add({20, 30});
  EXPECT_THAT(set.All(), ElementsAre(ByteRange{0, 10}, ByteRange{20, 30}));
  set.Add({10, 20});
  EXPECT_THAT(set.All(), ElementsAre(ByteRange{0, 30}));
  set.Remove({5, 7});
  EXPECT_THAT(set.All(), ElementsAre(ByteRange{0, 5}, ByteRange{7, 30}));
  EXPECT_THAT(set.In({4, 8}), ElementsAre(ByteRange{4, 5}, ByteRange{7, 8}));
  EXPECT_EQ(set.bytes(), 28u);
}

TEST(ByteRangesTest, FitFindsTheFirstRangeThatIsLargeEnough) {
  ByteRanges set;
  EXPECT_EQ(set.Fit(1), std::nullopt);
  EXPECT_EQ(set.last(), std::nullopt);
  set.Add({0, 4});
  set.Add({10, 20});
  set.Add({30, 38});
  EXPECT_EQ(set.Fit(3), (ByteRange{0, 4}));
  EXPECT_EQ(set.Fit(5), (ByteRange{10, 20}));
  EXPECT_EQ(set.Fit(11), std::nullopt);
  EXPECT_EQ(set.last(), (ByteRange{30, 38}));
}

TEST(ByteRangesTest, IsASetOfBytes) {
  constexpr uint64_t kBytes = 64;
  std::mt19937_64 random(1);
  ByteRanges set;
  std::vector<bool> model(kBytes);
  const auto range = [&] {
    const uint64_t begin = random() % kBytes;
    return ByteRange{begin, begin + random() % (kBytes - begin + 1)};
  };
  for (int i = 0; i < 2000; ++i) {
    const ByteRange changed = range();
    const bool add = random() % 2 == 0;
    add ? set.Add(changed) : set.Remove(changed);
    std::fill(model.begin() + static_cast<int64_t>(changed.begin), model.begin() + static_cast<int64_t>(changed.end),
              add);
    const ByteRange within = range();
    uint64_t inside = 0, all = 0;
    for (uint64_t at = 0; at < kBytes; ++at) {
      all += model[at];
      inside += model[at] && at >= within.begin && at < within.end;
    }
    ASSERT_EQ(set.bytes(), all) << i;
    ASSERT_EQ(set.BytesIn(within), inside) << i;
    uint64_t listed = 0;
    for (const ByteRange& part : set.In(within)) listed += part.bytes();
    ASSERT_EQ(listed, inside) << i;
  }
}

}  // namespace
}  // namespace ballast::storage
