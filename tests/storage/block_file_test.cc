#include "ballast/storage/io/block_file.h"

#include <sys/stat.h>

#include "ballast/proto/model/status.h"
#include "ballast/storage/io/arena.h"
#include "ballast/storage/io/file_lock.h"
#include "ballast/tests/scratch_directory.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ballast::storage {
namespace {

using ::testing::HasSubstr;

TEST(BlockFileTest, ExclusiveMeansOneOpener) {
  ScratchDirectory directory;
  auto first = BlockFile::Open(directory / "f", BlockFile::Mode::kExclusive);
  ASSERT_TRUE(first.ok()) << first.status();
  auto second = BlockFile::Open(directory / "f", BlockFile::Mode::kExclusive);
  EXPECT_EQ(second.status().code(), absl::StatusCode::kFailedPrecondition);
  first->reset();
  EXPECT_TRUE(BlockFile::Open(directory / "f", BlockFile::Mode::kExclusive).ok());
}

TEST(BlockFileTest, ReserveTakesDiskSpaceAndDiscardGivesItBack) {
  ScratchDirectory directory;
  auto file = *BlockFile::Open(directory / "f", BlockFile::Mode::kExclusive);
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
  auto file = *BlockFile::Open(directory / "f", BlockFile::Mode::kExclusive);
  const absl::Status status = file->Reserve(0, uint64_t{1} << 50);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_THAT(status.ToString(), HasSubstr(file->path()));
}

TEST(BlockFileTest, MissingDirectory) {
  const absl::Status status = BlockFile::Open("/nowhere/f", BlockFile::Mode::kExclusive).status();
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
