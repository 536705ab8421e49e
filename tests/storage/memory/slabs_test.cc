#include "ballast/storage/memory/slabs.h"

#include <map>
#include <random>

#include "gtest/gtest.h"

namespace ballast::storage {
namespace {

constexpr uint64_t kSlabBytes = uint64_t{1} << 20;

TEST(Slabs, ABufferLiesInOneSlab) {
  Slabs slabs;
  EXPECT_TRUE(slabs.Take(1).empty());
  slabs.Add(*Arena::Map(kSlabBytes));
  slabs.Add(*Arena::Map(kSlabBytes));
  EXPECT_EQ(slabs.bytes(), 2 * kSlabBytes);
  EXPECT_TRUE(slabs.Take(kSlabBytes + 1).empty());
  const absl::Span<std::byte> first = slabs.Take(kSlabBytes), second = slabs.Take(kSlabBytes);
  EXPECT_EQ(first.size(), kSlabBytes);
  EXPECT_EQ(second.size(), kSlabBytes);
  EXPECT_TRUE(slabs.Take(1).empty());
  slabs.Return(first);
  slabs.Return(second);
  EXPECT_TRUE(slabs.Take(2 * kSlabBytes).empty()) << "slabs that happen to be neighbours are not joined";
}

TEST(Slabs, NoTwoBuffersOverlapAndAllComesBack) {
  const uint32_t seed = 20261126;
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  Slabs slabs;
  slabs.Add(*Arena::Map(4 * kSlabBytes));
  std::map<std::byte*, absl::Span<std::byte>> taken;
  for (int i = 0; i < 20'000; ++i) {
    if (taken.empty() || random() % 2 == 0) {
      const absl::Span<std::byte> buffer = slabs.Take(random() % (kSlabBytes / 2) + 1);
      if (buffer.empty()) continue;
      ASSERT_EQ(reinterpret_cast<uintptr_t>(buffer.data()) % 4096, 0u);
      const auto next = taken.lower_bound(buffer.data());
      ASSERT_TRUE(next == taken.end() || buffer.data() + buffer.size() <= next->first);
      ASSERT_TRUE(next == taken.begin() || std::prev(next)->second.end() <= buffer.data());
      taken[buffer.data()] = buffer;
    } else {
      auto one = taken.begin();
      std::advance(one, random() % taken.size());
      slabs.Return(one->second);
      taken.erase(one);
    }
  }
  for (const auto& [at, buffer] : taken) slabs.Return(buffer);
  EXPECT_EQ(slabs.Take(4 * kSlabBytes).size(), 4 * kSlabBytes);
}

TEST(Slabs, OnlyWhatIsUnusedIsGivenBack) {
  Slabs slabs;
  slabs.Add(*Arena::Map(2 * kSlabBytes));
  slabs.Add(*Arena::Map(kSlabBytes));
  const absl::Span<std::byte> used = slabs.Take(4096);  // of the first
  slabs.Shrink(0);
  EXPECT_EQ(slabs.bytes(), 2 * kSlabBytes);
  slabs.Return(used);
  slabs.Shrink(2 * kSlabBytes);
  EXPECT_EQ(slabs.bytes(), 2 * kSlabBytes);
  slabs.Shrink(2 * kSlabBytes - 1);
  EXPECT_EQ(slabs.bytes(), 0u);
}

}  // namespace
}  // namespace ballast::storage
