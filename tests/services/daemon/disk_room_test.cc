#include "ballast/services/daemon/disk_room.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/statvfs.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "ballast/tests/scratch_directory.h"
#include "ballast/tests/small_disk.h"

namespace ballast::services {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr uint64_t kFarTooMuch = uint64_t{1} << 50;

TEST(DiskRoomTest, TheBudgetMustFitBesideTheCatalog) {
  const ScratchDirectory folder;
  StateServerOptions options;
  options.data_directory = folder.path() + "/data";
  options.budget.nvme = 1;
  const std::vector<DiskAllowance> enough = AllowedDisks(options);
  ASSERT_EQ(enough.size(), 1u);
  EXPECT_EQ(enough[0].room, DiskRoom::kEnough) << enough[0].found;
  EXPECT_THAT(enough[0].mend, IsEmpty());

  options.budget.nvme = kFarTooMuch;
  const std::vector<DiskAllowance> little = AllowedDisks(options);
  ASSERT_EQ(little.size(), 1u);
  EXPECT_EQ(little[0].room, DiskRoom::kTooLittle);
  EXPECT_THAT(little[0].found, HasSubstr(folder.path()));
  EXPECT_THAT(little[0].wanted, HasSubstr("1048576.00 GiB (budget.nvme) and 256.0 MiB"));
  EXPECT_THAT(little[0].mend, HasSubstr("or budget.nvme: at most "));
  EXPECT_FALSE(std::filesystem::exists(options.data_directory)) << "a look makes no directory";
}

TEST(DiskRoomTest, DirectoriesOfOneDiskShareItsSpace) {
  const ScratchDirectory folder;
  struct statvfs info = {};
  ASSERT_EQ(statvfs(folder.path().c_str(), &info), 0);
  const uint64_t most = info.f_bavail * info.f_frsize / 3 * 2;  // each alone fits
  StateServerOptions options;
  options.data_directory = folder.path() + "/data";
  options.nvme_devices = {{folder.path() + "/one", most, 0}, {folder.path() + "/two", most, 0}};
  options.budget.nvme = 2 * most;
  const std::vector<DiskAllowance> allowances = AllowedDisks(options);
  ASSERT_EQ(allowances.size(), 1u);
  EXPECT_EQ(allowances[0].room, DiskRoom::kTooLittle);
  EXPECT_THAT(allowances[0].wanted, HasSubstr(folder.path() + "/one and " + folder.path() + "/two"));
}

TEST(DiskRoomTest, EachDiskMustHaveItsOwnPart) {
  const SmallDisk disk(uint64_t{8} << 20);
  if (!disk.mounted()) GTEST_SKIP() << "no mount: " << disk.why_not();
  const ScratchDirectory folder;
  StateServerOptions options;
  options.data_directory = folder.path() + "/data";
  options.nvme_devices = {{disk.path(), uint64_t{512} << 20, 0}};
  options.budget.nvme = uint64_t{512} << 20;
  const std::vector<DiskAllowance> allowances = AllowedDisks(options);
  ASSERT_EQ(allowances.size(), 2u);
  EXPECT_EQ(allowances[0].room, DiskRoom::kEnough) << allowances[0].found;
  EXPECT_EQ(allowances[1].room, DiskRoom::kTooLittle);
  EXPECT_THAT(allowances[1].found, HasSubstr("8.0 MiB on " + disk.path()));
  EXPECT_EQ(allowances[1].mend, "free 504.0 MiB, or budget.nvme: at most 8.0 MiB");
}

}  // namespace
}  // namespace ballast::services
