// A forked child keeps nothing of its parent's files: no lock, no transfer, no ring.
#include "ballast/proto/base/descriptor.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "ballast/storage/io/disk.h"
#include "ballast/storage/io/file_lock.h"
#include "ballast/storage/memory/arena.h"
#include "ballast/tests/scratch_directory.h"
#include "ballast/tests/storage/in_child.h"

namespace ballast::storage {
namespace {

// A forked child that lives as long as this object, and runs once this is made.
class Child {
 public:
  Child() {
    int told[2];
    if (pipe(told) != 0) std::abort();
    char byte = 'r';
    pid_ = fork();
    if (pid_ == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      (void)!write(told[1], &byte, 1);
      while (true) pause();
    }
    EXPECT_EQ(read(told[0], &byte, 1), 1);
    for (const int fd : told) close(fd);
  }
  ~Child() {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }

 private:
  pid_t pid_;
};

bool IsOpen(int fd) { return fcntl(fd, F_GETFD) != -1; }

TEST(DescriptorTest, AForkedChildKeepsNoLock) {
  ScratchDirectory directory;
  auto lock = std::make_optional(*FileLock::Take(directory / "LOCK", "it"));
  const Child child;
  lock.reset();
  const auto again = FileLock::Take(directory / "LOCK", "it");
  EXPECT_TRUE(again.ok()) << again.status();
}

TEST(DescriptorTest, AForkedChildKeepsNoFileByItsRing) {
  ScratchDirectory directory;
  auto file = *SystemDisk()->Open(directory / "f", Disk::Mode::kEmptied);
  ASSERT_TRUE(file->Reserve(0, 1 << 20).ok());
  const Arena memory = *Arena::Map(1 << 20);
  auto queue = *SystemDisk()->MakeQueue({});
  ASSERT_TRUE(
      queue->Submit({.kind = IoRequest::Kind::kRead, .file = file.get(), .offset = 0, .buffer = memory.bytes()}).ok());
  const Child child;
  std::vector<IoCompletion> done;
  queue->Reap(/*wait=*/true, &done);
  ASSERT_EQ(done.size(), 1u);
  EXPECT_TRUE(done[0].status.ok()) << done[0].status;
  queue.reset();
  file.reset();
  const auto again = SystemDisk()->Open(directory / "f", Disk::Mode::kKept);
  EXPECT_TRUE(again.ok()) << again.status();
}

TEST(DescriptorTest, AForkedChildClosesItsCopyAndNothingElseLater) {
  auto descriptor = std::make_optional<model::Descriptor>(open("/dev/null", O_RDONLY | O_CLOEXEC));
  const int number = descriptor->get();
  const int code = InChild([&] {
    if (IsOpen(number)) return 1;
    if (open("/dev/zero", O_RDONLY | O_CLOEXEC) != number) return 2;  // the lowest number that is free
    model::Descriptor moved = *std::move(descriptor);
    moved = model::Descriptor();
    descriptor.reset();
    return IsOpen(number) ? 0 : 3;
  });
  EXPECT_EQ(code, 0);
  EXPECT_TRUE(IsOpen(number));
  descriptor.reset();
  EXPECT_FALSE(IsOpen(number));
}

}  // namespace
}  // namespace ballast::storage
