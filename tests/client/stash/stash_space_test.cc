// The space of a stash: DRAM within its budget, then extents of a file, also those that are about to come back.
#include "ballast/client/python/native/stash/stash_space.h"

#include <memory>
#include <thread>
#include <utility>

#include "ballast/proto/base/status.h"
#include "ballast/tests/sim_disk/sim_disk.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ballast::stash {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kPiece = uint64_t{1} << 20;

class StashSpaceTest : public ::testing::Test {
 protected:
  std::unique_ptr<StashSpace> WithFile(uint64_t nvme) {
    auto space = std::make_unique<StashSpace>(storage::TierBytes{.nvme = nvme}, std::nullopt);
    auto file = disk_.Open("stash", storage::Disk::Mode::kEmptied);
    EXPECT_TRUE(file.ok()) << file.status();
    space->UseFile(*std::move(file));
    return space;
  }

  storage::SimDisk disk_{1};
};

TEST_F(StashSpaceTest, DramIsTakenUntilTheBudgetIsSpentAndAgainOnceItCameBack) {
  StashSpace space({.dram = 2 * kPiece}, std::nullopt);
  const absl::Span<std::byte> first = space.TakeDram(kPiece), second = space.TakeDram(kPiece);
  EXPECT_EQ(first.size(), kPiece);
  EXPECT_EQ(second.size(), kPiece);
  EXPECT_TRUE(space.TakeDram(kPiece).empty());
  space.ReturnDram(first);
  EXPECT_EQ(space.TakeDram(kPiece).data(), first.data());
}

TEST_F(StashSpaceTest, WithoutAFileTheBudgetOfDramIsNamed) {
  StashSpace space({.dram = kPiece}, std::nullopt);
  ASSERT_FALSE(space.TakeDram(kPiece).empty());
  EXPECT_EQ(space.file(), nullptr);
  const absl::Status refused = space.TakeExtent(kPiece).status();
  EXPECT_EQ(model::ReasonOf(refused), model::kBudget) << refused;
}

TEST_F(StashSpaceTest, SpaceThatNobodyGivesBackIsNotWaitedFor) {
  const std::unique_ptr<StashSpace> space = WithFile(kPiece);
  const auto extent = space->TakeExtent(kPiece);
  ASSERT_TRUE(extent.ok()) << extent.status();
  const absl::Status refused = space->TakeExtent(kPiece).status();
  EXPECT_EQ(model::ReasonOf(refused), model::kBudget) << refused;
  EXPECT_THAT(refused.ToString(), HasSubstr("1048576 of 1048576 bytes of nvme in use"));
}

TEST_F(StashSpaceTest, SpaceThatLeavesIsWaitedFor) {
  const std::unique_ptr<StashSpace> space = WithFile(kPiece);
  auto extent = space->TakeExtent(kPiece);
  ASSERT_TRUE(extent.ok()) << extent.status();
  space->Leaves();
  std::thread other([&] { space->Return(*std::move(extent)); });
  const auto next = space->TakeExtent(kPiece);
  other.join();
  EXPECT_TRUE(next.ok()) << next.status();
}

}  // namespace
}  // namespace ballast::stash
