#include "ballast/storage/tier/device_header.h"

#include <memory>

#include "ballast/proto/base/status.h"
#include "ballast/tests/sim_disk/sim_disk.h"
#include "gtest/gtest.h"

namespace ballast::storage {
namespace {

class DeviceHeaderTest : public ::testing::Test {
 protected:
  SimDisk disk_{1};
  const std::unique_ptr<BlockFile> file_ = *disk_.Open("/device", Disk::Mode::kEmptied);
};

TEST_F(DeviceHeaderTest, AFileThatWasNeverWrittenHasNone) {
  EXPECT_EQ(ReadDeviceHeader(*file_)->has_value(), false);
  disk_.SetContent("/device", std::vector<std::byte>(kDeviceHeaderBytes));
  EXPECT_EQ(ReadDeviceHeader(*file_)->has_value(), false);
}

TEST_F(DeviceHeaderTest, OneCopyOfTwoIsEnough) {
  ASSERT_EQ(WriteDeviceHeader({.id = 77, .owner = "server-1"}, *file_), absl::OkStatus());
  disk_.Corrupt("/device", 100, 10);
  const auto header = ReadDeviceHeader(*file_);
  ASSERT_TRUE(header.ok()) << header.status();
  ASSERT_TRUE(header->has_value());
  EXPECT_EQ((*header)->id, 77u);
  EXPECT_EQ((*header)->owner, "server-1");
  disk_.Corrupt("/device", kIoAlignment + 100, 10);
  EXPECT_EQ(ReadDeviceHeader(*file_).status().code(), absl::StatusCode::kDataLoss);
}

}  // namespace
}  // namespace ballast::storage
