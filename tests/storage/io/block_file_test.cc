#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>

#include "ballast/proto/base/status.h"
#include "ballast/storage/io/disk.h"
#include "ballast/storage/io/file_lock.h"
#include "ballast/storage/memory/arena.h"
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

// A forked process holds the lock for a while; the opener has to wait.
TEST(BlockFileTest, LockOfADyingProcessIsWaitedFor) {
  ScratchDirectory directory;
  const std::string path = directory / "f";
  int locked[2], released[2];
  ASSERT_EQ(pipe(locked), 0);
  ASSERT_EQ(pipe(released), 0);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    const char answer = LockDescriptor(fd, path, absl::ZeroDuration()).ok() ? 'y' : 'n';
    if (write(locked[1], &answer, 1) != 1) _exit(2);
    usleep(300'000);  // the opener comes meanwhile; a late opener need not wait
    const char over = 'o';
    if (write(released[1], &over, 1) != 1) _exit(2);
    _exit(0);
  }
  char answer = 0;
  ASSERT_EQ(read(locked[0], &answer, 1), 1);
  ASSERT_EQ(answer, 'y');
  const auto file = SystemDisk()->Open(path, Disk::Mode::kKept);
  EXPECT_TRUE(file.ok()) << file.status();
  ASSERT_EQ(fcntl(released[0], F_SETFL, O_NONBLOCK), 0);
  EXPECT_EQ(read(released[0], &answer, 1), 1) << "opened beside the one that had it";
  ASSERT_EQ(waitpid(child, nullptr, 0), child);
  for (const int fd : {locked[0], locked[1], released[0], released[1]}) close(fd);
}

TEST(BlockFileTest, LockThatIsKeptIsAnErrorThatSaysHowLongItWaited) {
  ScratchDirectory directory;
  auto first = SystemDisk()->Open(directory / "f", Disk::Mode::kEmptied);
  ASSERT_TRUE(first.ok()) << first.status();
  const int fd = open((directory / "f").c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_GE(fd, 0);
  const absl::Status status = LockDescriptor(fd, directory / "f", absl::Milliseconds(20));
  EXPECT_EQ(model::ReasonOf(status), model::kBusy);
  EXPECT_THAT(status.ToString(), HasSubstr("/f is in use: its lock was not free within 20ms"));
  first->reset();
  EXPECT_TRUE(LockDescriptor(fd, directory / "f", absl::ZeroDuration()).ok());
  close(fd);
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
  Arena arena = *Arena::Map(3 * 4096 + 1);
  EXPECT_EQ(arena.bytes().size(), 4 * 4096);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(arena.bytes().data()) % (2 << 20), 0);
  for (const std::byte b : arena.bytes()) ASSERT_EQ(b, std::byte{0});
  arena.bytes().back() = std::byte{1};
  Arena moved = std::move(arena);
  EXPECT_TRUE(arena.bytes().empty());
  EXPECT_EQ(moved.bytes().back(), std::byte{1});
}

TEST(ArenaTest, ImpossibleSizeIsAnError) {
  const absl::Status status = Arena::Map(uint64_t{1} << 60).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(model::ReasonOf(status), model::kBudget);
}

}  // namespace
}  // namespace ballast::storage
