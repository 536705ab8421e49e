#include "ballast/storage/tier/nvme_room.h"

#include <memory>
#include <utility>

#include "ballast/storage/tier/ledger.h"
#include "ballast/tests/sim_disk/sim_disk.h"
#include "gtest/gtest.h"

namespace ballast::storage {
namespace {

constexpr uint64_t kUnit = kIoAlignment;

// Rooms in two files of one budget.
class NvmeRoomTest : public ::testing::Test {
 protected:
  FileRoom Promise(NvmeFile& file, uint64_t blocks) {
    return *file.Promise(blocks * kUnit, "a test", FileSpace::Shape::kAnyPieces);
  }
  std::unique_ptr<NvmeFile> Open(const char* path) {
    return std::make_unique<NvmeFile>(*disk_.Open(path, Disk::Mode::kEmptied), &ledger_, NvmeFile::Options{});
  }

  SimDisk disk_{1};
  Ledger ledger_{TierBytes{.nvme = 100 * kUnit}};
  const std::unique_ptr<NvmeFile> first_ = Open("/first"), second_ = Open("/second");
};

TEST_F(NvmeRoomTest, AFileHasOnePart) {
  NvmeRoom room = Promise(*first_, 2);
  room.Join(Promise(*second_, 3));
  room.Join(Promise(*first_, 4));
  room.Join(FileRoom());
  ASSERT_EQ(room.parts().size(), 2u);
  EXPECT_EQ(room.parts()[0].bytes(), 6 * kUnit);
  EXPECT_EQ(room.bytes(), 9 * kUnit);
  EXPECT_EQ(ledger_.used().nvme, 9 * kUnit);
}

TEST_F(NvmeRoomTest, WhatIsSplitOffLiesInOneFileIfAPartIsSoLarge) {
  NvmeRoom room = Promise(*first_, 2);
  room.Join(Promise(*second_, 4));
  NvmeRoom split = room.Split(3 * kUnit);
  ASSERT_EQ(split.parts().size(), 1u);
  EXPECT_EQ(split.parts()[0].file(), second_.get());
  EXPECT_EQ(room.bytes(), 3 * kUnit);
  NvmeRoom both = room.Split(3 * kUnit);
  EXPECT_EQ(both.parts().size(), 2u) << "no file has three blocks left";
  EXPECT_EQ(room.bytes(), 0u);
  EXPECT_TRUE(room.parts().empty());
}

TEST_F(NvmeRoomTest, WhatJoinsIsOfTheSamePartAndAccount) {
  const auto mine = std::make_shared<Account>();
  NvmeRoom room = Promise(*first_, 2);
  room.Mark(TierPart::kWorking);
  room.Charge(mine);
  room.Join(Promise(*second_, 1));
  EXPECT_EQ(room.parts()[1].part(), TierPart::kWorking);
  EXPECT_EQ(room.parts()[1].account(), mine);
}

TEST_F(NvmeRoomTest, ARoomReturnsItsBytes) {
  { const NvmeRoom room = Promise(*first_, 2); }
  EXPECT_EQ(ledger_.used().nvme, 0u);
  NvmeRoom left = Promise(*first_, 2);
  left.Leave();
  EXPECT_EQ(left.bytes(), 0u);
  EXPECT_EQ(ledger_.used().nvme, 0u);
}

}  // namespace
}  // namespace ballast::storage
