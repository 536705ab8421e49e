#include <sys/stat.h>

#include "ballast/proto/model/status.h"
#include "ballast/storage/io/arena.h"
#include "ballast/storage/io/disk.h"
#include "ballast/storage/io/file_lock.h"
#include "ballast/tests/scratch_directory.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ballast::storage {
namespace {

using ::testing::HasSubstr;

TEST(BlockFileTest, ExclusiveMeansOneOpener) {
  ScratchDirectory directory;
  auto first = SystemDisk()->Open(directory / "f", Disk::Mode::kEmptied);
  ASSERT_TRUE(first.ok()) << first.status();
  auto second = SystemDisk()->Open(directory / "f", Disk::Mode::kEmptied);
  EXPECT_EQ(second.status().code(), absl::StatusCode::kFailedPrecondition);
  first->reset();
  EXPECT_TRUE(SystemDisk()->Open(directory / "f", Disk::Mode::kEmptied).ok());
}

TEST(BlockFileTest, ReserveTakesDiskSpaceAndDiscardGivesItBack) {
  ScratchDirectory directory;
  auto file = *SystemDisk()->Open(directory / "f", Disk::Mode::kEmptied);
  struct stat info;
  ASSERT_TRUE(file->Reserve(0, 1 << 20).ok());
  ASSERT_EQ(fstat(file->fd(), &info), 0);
  EXPECT_GE(info.st_blocks * 512, 1 << 20);
  file->Discard(0, 1 << 20);
  ASSERT_EQ(fstat(file->fd(), &info), 0);
  EXPECT_LT(info.st_blocks * 512, 1 << 20);
}

TEST(BlockFileTest, MoreThanTheDiskHolds) {
  ScratchDirectory directory;
  auto file = *SystemDisk()->Open(directory / "f", Disk::Mode::kEmptied);
  const absl::Status status = file->Reserve(0, uint64_t{1} << 50);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_THAT(status.ToString(), HasSubstr(file->path()));
}

TEST(BlockFileTest, MissingDirectory) {
  const absl::Status status = SystemDisk()->Open("/nowhere/f", Disk::Mode::kEmptied).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(status.ToString(), HasSubstr("/nowhere/f failed: No such file or directory"));
}

TEST(ArenaTest, AlignedZeroedAndWritable) {
  Arena arena = *Arena::Map(3 * 4096 + 1, /*pin=*/false);
  EXPECT_EQ(arena.bytes().size(), 4 * 4096);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(arena.bytes().data()) % (2 << 20), 0);
  for (const std::byte b : arena.bytes()) ASSERT_EQ(b, std::byte{0});
  arena.bytes().back() = std::byte{1};
  Arena moved = std::move(arena);
  EXPECT_TRUE(arena.bytes().empty());
  EXPECT_EQ(moved.bytes().back(), std::byte{1});
}

TEST(ArenaTest, ImpossibleSizeIsAnError) {
  const absl::Status status = Arena::Map(uint64_t{1} << 60, /*pin=*/false).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(model::ReasonOf(status), model::kBudget);
}

}  // namespace
}  // namespace ballast::storage
