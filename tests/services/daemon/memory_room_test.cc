#include "ballast/services/daemon/memory_room.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "ballast/tests/scratch_directory.h"

namespace ballast::services {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr uint64_t kDram = uint64_t{4} << 30;

// A machine whose control group /jobs/one lies below /jobs.
class MemoryRoomTest : public ::testing::Test {
 protected:
  MemoryRoomTest() {
    Put("proc/self/cgroup", "0::/jobs/one");
    Put("proc/self/mountinfo", "30 20 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw");
  }

  std::string root() const { return folder_.path(); }
  void Put(const std::string& path, const std::string& text) {
    const std::filesystem::path file = std::filesystem::path(root()) / path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text << "\n";
  }
  void Limit(const std::string& group, uint64_t bytes) {
    Put("sys/fs/cgroup" + group + "/memory.max", absl::StrCat(bytes));
  }

 private:
  ScratchDirectory folder_;
};

TEST_F(MemoryRoomTest, NoLimitIsEnough) {
  Put("sys/fs/cgroup/jobs/memory.max", "max");
  const MemoryAllowance allowance = AllowedMemory(kDram, root());
  EXPECT_EQ(allowance.room, MemoryRoom::kEnough);
  EXPECT_FALSE(allowance.limit.has_value());
  EXPECT_THAT(allowance.mend, IsEmpty());
}

TEST_F(MemoryRoomTest, TheBudgetAndWhatOverloadAddsMustFit) {
  Limit("/jobs/one", kDram + kBesideBudgetBytes);
  const MemoryAllowance enough = AllowedMemory(kDram, root());
  EXPECT_EQ(enough.room, MemoryRoom::kEnough);
  EXPECT_THAT(enough.mend, IsEmpty());

  Limit("/jobs/one", kDram + kBesideBudgetBytes - 1);
  const MemoryAllowance tight = AllowedMemory(kDram, root());
  EXPECT_EQ(tight.room, MemoryRoom::kTight);
  EXPECT_THAT(tight.mend, HasSubstr("raise the limit to 5.38 GiB"));

  Limit("/jobs/one", kDram);
  EXPECT_EQ(AllowedMemory(kDram, root()).room, MemoryRoom::kTight);
  Limit("/jobs/one", kDram - 1);
  EXPECT_EQ(AllowedMemory(kDram, root()).room, MemoryRoom::kTooLittle);
}

TEST_F(MemoryRoomTest, TheTightestGroupAboveCounts) {
  Limit("/jobs/one", kDram + 2 * kBesideBudgetBytes);
  Limit("/jobs", kDram / 2);
  const MemoryAllowance allowance = AllowedMemory(kDram, root());
  EXPECT_EQ(allowance.room, MemoryRoom::kTooLittle);
  ASSERT_TRUE(allowance.limit.has_value());
  EXPECT_EQ(allowance.limit->amount, static_cast<double>(kDram / 2));
  EXPECT_EQ(allowance.found, absl::StrCat("2.00 GiB by ", root(), "/sys/fs/cgroup/jobs/memory.max"));
}

}  // namespace
}  // namespace ballast::services
