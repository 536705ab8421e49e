// What one lease has: parts that come, copies of others, and its end at any moment.
#include "ballast/client/transfers/leases.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <thread>
#include <vector>

namespace ballast::client {
namespace {

using ::testing::HasSubstr;

class LeasedPartsTest : public ::testing::Test {
 protected:
  std::shared_ptr<LeasedParts> Begin(std::vector<UnitRange> ranges, uint64_t bytes_max = 100,
                                     absl::Duration age_max = absl::Hours(1)) {
    return *leases_->Begin(3, std::move(ranges), kernels::Dtype::kBf16, bytes_max, age_max);
  }
  model::LeasedBytes Bytes(size_t count) { return {absl::MakeConstSpan(memory_).subspan(0, count), token_}; }
  // Leases that are held.
  int64_t held() const { return token_.use_count() - 1; }

  const std::vector<std::byte> memory_ = std::vector<std::byte>(64);
  const std::shared_ptr<const void> token_ = std::make_shared<int>();
  const std::shared_ptr<Leases> leases_ = std::make_shared<Leases>(std::make_shared<BufferPool>());
};

TEST_F(LeasedPartsTest, PartsComeInAnyOrderAndStayInTheirs) {
  const auto lease = Begin({{10, 14}, {20, 22}, {30, 31}});
  EXPECT_EQ(lease->version(), 3);
  EXPECT_TRUE(lease->Come(2, Bytes(2)));
  EXPECT_FALSE(lease->Come(1, {})) << "refused";
  const absl::Span<std::byte> room = lease->RoomFor(1);
  ASSERT_EQ(room.size(), 4u);
  EXPECT_TRUE(lease->Come(0, Bytes(8)));
  EXPECT_EQ(held(), 2);
  const auto parts = lease->parts();
  ASSERT_EQ(parts->size(), 3u);
  EXPECT_EQ((*parts)[0].range.begin, 10u);
  EXPECT_EQ((*parts)[0].bytes.data(), memory_.data());
  EXPECT_EQ((*parts)[1].bytes.data(), room.data());
  EXPECT_EQ((*parts)[2].bytes.size(), 2u);
  EXPECT_EQ(leases_->leased_bytes(), 10u);
  EXPECT_EQ(leases_->copied_bytes(), 4u);
  lease->End();
  EXPECT_EQ(held(), 0);
  EXPECT_THAT(lease->parts().status().ToString(), HasSubstr("given back"));
  EXPECT_TRUE(leases_->empty());
}

TEST_F(LeasedPartsTest, ALeaseOfAnotherSizeIsRefused) {
  const auto lease = Begin({{0, 4}});
  EXPECT_FALSE(lease->Come(0, Bytes(6)));
  EXPECT_EQ(held(), 0);
  lease->End();
}

TEST_F(LeasedPartsTest, WhatComesAfterTheEndIsGivenBack) {
  const auto lease = Begin({{0, 4}, {4, 8}});
  EXPECT_TRUE(lease->Come(0, Bytes(8)));
  lease->End();
  EXPECT_TRUE(lease->Come(1, Bytes(8)));
  EXPECT_EQ(held(), 0);
  EXPECT_TRUE(lease->RoomFor(1).empty());
  lease->End();
}

TEST_F(LeasedPartsTest, PartsComeWhileTheLeaseEnds) {
  for (int i = 0; i < 200; ++i) {
    const auto lease = Begin({{0, 4}, {4, 8}});
    std::thread comes([&] {
      (void)lease->Come(0, Bytes(8));
      (void)lease->Come(1, Bytes(8));
    });
    lease->End();
    comes.join();
    ASSERT_EQ(held(), 0);
  }
}

TEST_F(LeasedPartsTest, BytesAndAgeAreBounded) {
  const auto large = Begin({{0, 200}});
  EXPECT_TRUE(large->leases()) << "it is alone";
  EXPECT_FALSE(Begin({{0, 1}})->leases()) << "beside the large one";
  large->End();
  const auto small = Begin({{0, 20}});
  EXPECT_TRUE(Begin({{0, 30}})->leases());
  EXPECT_FALSE(Begin({{0, 1}})->leases());
  leases_->EndAll();
  EXPECT_TRUE(Begin({{0, 20}})->leases());
  EXPECT_FALSE(Begin({{0, 1}}, 100, absl::ZeroDuration())->leases()) << "the first is older";
  leases_->EndAll();
  EXPECT_TRUE(leases_->empty());
  EXPECT_THAT(small->parts().status().ToString(), HasSubstr("given back"));
}

TEST_F(LeasedPartsTest, WhatIsCopiedIsNotLeased) {
  const auto first = Begin({{0, 20}, {20, 50}});
  EXPECT_FALSE(Begin({{0, 1}})->leases());
  EXPECT_FALSE(first->Come(1, {})) << "refused";
  EXPECT_EQ(first->RoomFor(1).size(), 60u);
  EXPECT_TRUE(Begin({{0, 30}})->leases());
  leases_->EndAll();
}

TEST_F(LeasedPartsTest, LeasesThatAreGivenBackEarlyAreBounded) {
  std::vector<std::shared_ptr<LeasedParts>> abandoned;
  for (int i = 0; i < 2; ++i) {
    abandoned.push_back(Begin({{0, 30}}));
    abandoned.back()->tally().Start();
    abandoned.back()->End();
  }
  EXPECT_TRUE(leases_->empty());
  const absl::Status busy = leases_->Begin(3, {{0, 1}}, kernels::Dtype::kBf16, 100, absl::Hours(1)).status();
  EXPECT_THAT(busy.ToString(), HasSubstr("120 bytes of leases that were given back"));
  abandoned[0]->tally().Finish({});
  EXPECT_TRUE(leases_->Begin(3, {{0, 1}}, kernels::Dtype::kBf16, 100, absl::Hours(1)).ok());
  abandoned[1]->tally().Finish({});
  leases_->EndAll();
}

}  // namespace
}  // namespace ballast::client
