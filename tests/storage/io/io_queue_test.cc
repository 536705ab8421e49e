// The contract of IoQueue, over both implementations.
#include "ballast/storage/io/io_queue.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <set>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/storage/io/disk.h"
#include "ballast/storage/io/disk_counters.h"
#include "ballast/storage/io/piece.h"
#include "ballast/storage/memory/arena.h"
#include "ballast/tests/scratch_directory.h"
#include "ballast/tests/storage/in_child.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#define BALLAST_ADVANCE "_ZN7ballast7storage7AdvanceERNS0_5PieceEl"

namespace ballast::storage {

// The linker gives a queue's calls of Advance to the test, which passes them on: as they are, or as a device without
// memory would answer reads.
absl::StatusOr<bool> RealAdvance(Piece& piece, int64_t result) __asm__("__real_" BALLAST_ADVANCE);
absl::StatusOr<bool> SeenAdvance(Piece& piece, int64_t result) __asm__("__wrap_" BALLAST_ADVANCE);

namespace {
int busy_reads = 0;  // how many more reads find no memory
}  // namespace

absl::StatusOr<bool> SeenAdvance(Piece& piece, int64_t result) {
  if (piece.kind != IoRequest::Kind::kRead || busy_reads == 0) return RealAdvance(piece, result);
  --busy_reads;
  return RealAdvance(piece, -EAGAIN);
}

namespace {

using ::testing::HasSubstr;

constexpr uint64_t kMiB = uint64_t{1} << 20;

class IoQueueTest : public ::testing::TestWithParam<IoBackend> {
 protected:
  void SetUp() override {
    arena_ = *Arena::Map(8 * kMiB);
    // The upper half stays unregistered, so both ways are taken.
    auto queue = MakeIoQueue({.backend = GetParam(), .registered = Buffer(0, 4 * kMiB)});
    if (!queue.ok()) GTEST_SKIP() << "no io_uring here: " << queue.status();
    queue_ = *std::move(queue);
    file_ = *SystemDisk()->Open(directory_ / "file", Disk::Mode::kEmptied);
  }

  absl::Span<std::byte> Buffer(uint64_t at, uint64_t bytes) { return arena_.bytes().subspan(at, bytes); }

  void Fill(absl::Span<std::byte> buffer, uint32_t seed) {
    for (std::byte& b : buffer) {
      seed = seed * 1664525u + 1013904223u;
      b = static_cast<std::byte>(seed >> 24);
    }
  }

  std::vector<IoCompletion> ReapAll() {
    std::vector<IoCompletion> completions;
    while (queue_->in_flight() > 0) queue_->Reap(/*wait=*/true, &completions);
    return completions;
  }

  absl::Status Only(const IoRequest& request) {
    if (const absl::Status status = queue_->Submit(request); !status.ok()) return status;
    const std::vector<IoCompletion> completions = ReapAll();
    EXPECT_EQ(completions.size(), 1);
    EXPECT_EQ(completions.at(0).tag, request.tag);
    return completions.at(0).status;
  }

  ScratchDirectory directory_;
  Arena arena_;
  std::unique_ptr<BlockFile> file_;
  std::unique_ptr<IoQueue> queue_;
};

TEST_P(IoQueueTest, WhatIsWrittenIsReadBack) {
  // 3 MiB + 4096: several pieces, the last one short; from registered into unregistered memory.
  const uint64_t bytes = 3 * kMiB + kIoAlignment;
  Fill(Buffer(0, bytes), 1);
  ASSERT_TRUE(Only({IoRequest::Kind::kWrite, file_.get(), kIoAlignment, Buffer(0, bytes), 7}).ok());
  ASSERT_TRUE(Only({IoRequest::Kind::kRead, file_.get(), kIoAlignment, Buffer(4 * kMiB, bytes), 8}).ok());
  EXPECT_EQ(Buffer(0, bytes), Buffer(4 * kMiB, bytes));
}

TEST_P(IoQueueTest, SyncCompletesAndTakesNoBuffer) {
  ASSERT_TRUE(Only({IoRequest::Kind::kWrite, file_.get(), 0, Buffer(0, kIoAlignment), 1}).ok());
  EXPECT_TRUE(Only({IoRequest::Kind::kSync, file_.get(), 0, {}, 2}).ok());
  EXPECT_EQ(Only({IoRequest::Kind::kSync, file_.get(), 0, Buffer(0, kIoAlignment), 3}).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Only({IoRequest::Kind::kWrite, file_.get(), 0, {}, 4}).code(), absl::StatusCode::kInvalidArgument);
}

TEST_P(IoQueueTest, SyncErrorIsReported) {
  auto pipe = SystemDisk()->Open("/dev/null", Disk::Mode::kShared);  // a device that cannot be synced
  ASSERT_TRUE(pipe.ok()) << pipe.status();
  EXPECT_EQ(Only({IoRequest::Kind::kSync, pipe->get(), 0, {}, 1}).code(), absl::StatusCode::kInternal);
}

TEST_P(IoQueueTest, ManyInFlightCompleteOnceEach) {
  const uint64_t bytes = 4 * kMiB / kIoRequestsMax;
  Fill(Buffer(0, 4 * kMiB), 2);
  for (uint64_t i = 0; i < kIoRequestsMax; ++i) {
    ASSERT_TRUE(queue_->Submit({IoRequest::Kind::kWrite, file_.get(), i * bytes, Buffer(i * bytes, bytes), i}).ok());
  }
  std::set<uint64_t> tags;
  for (const IoCompletion& completion : ReapAll()) {
    EXPECT_TRUE(completion.status.ok()) << completion.status;
    EXPECT_TRUE(tags.insert(completion.tag).second) << completion.tag;
  }
  EXPECT_EQ(tags.size(), kIoRequestsMax);
  ASSERT_TRUE(file_->Read(0, Buffer(4 * kMiB, 4 * kMiB)).ok());
  EXPECT_EQ(Buffer(0, 4 * kMiB), Buffer(4 * kMiB, 4 * kMiB));
}

TEST_P(IoQueueTest, MorePiecesThanTheDepth) {
  for (uint64_t i = 0; i < 16; ++i) {
    ASSERT_TRUE(queue_->Submit({IoRequest::Kind::kWrite, file_.get(), i * 8 * kMiB, Buffer(0, 8 * kMiB), i}).ok());
  }
  EXPECT_EQ(ReapAll().size(), 16);
}

TEST_P(IoQueueTest, RefusesMoreThanItsBound) {
  for (uint64_t i = 0; i < kIoRequestsMax; ++i) {
    ASSERT_TRUE(queue_->Submit({IoRequest::Kind::kWrite, file_.get(), 0, Buffer(0, kIoAlignment), i}).ok());
  }
  const absl::Status status = queue_->Submit({IoRequest::Kind::kWrite, file_.get(), 0, Buffer(0, kIoAlignment), 99});
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(model::ReasonOf(status), model::kBusy);
  EXPECT_EQ(ReapAll().size(), kIoRequestsMax);
  EXPECT_TRUE(Only({IoRequest::Kind::kWrite, file_.get(), 0, Buffer(0, kIoAlignment), 1}).ok());
}

TEST_P(IoQueueTest, ReapOfNothingReturns) {
  std::vector<IoCompletion> completions;
  queue_->Reap(/*wait=*/true, &completions);
  EXPECT_TRUE(completions.empty());
}

TEST_P(IoQueueTest, DestructionFinishesWhatIsInFlight) {
  Fill(Buffer(0, 4 * kMiB), 3);
  ASSERT_TRUE(queue_->Submit({IoRequest::Kind::kWrite, file_.get(), 0, Buffer(0, 4 * kMiB), 1}).ok());
  queue_.reset();
  ASSERT_TRUE(file_->Read(0, Buffer(4 * kMiB, 4 * kMiB)).ok());
  EXPECT_EQ(Buffer(0, 4 * kMiB), Buffer(4 * kMiB, 4 * kMiB));
}

TEST_P(IoQueueTest, MisalignmentIsRefused) {
  const auto code = [&](uint64_t offset, absl::Span<std::byte> buffer) {
    return queue_->Submit({IoRequest::Kind::kRead, file_.get(), offset, buffer, 0}).code();
  };
  EXPECT_EQ(code(512, Buffer(0, 4096)), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(0, Buffer(512, 4096)), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(0, Buffer(0, 4000)), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(0, Buffer(0, 0)), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(queue_->in_flight(), 0);
}

TEST_P(IoQueueTest, ReadPastTheEndIsDataLossAndTheQueueGoesOn) {
  ASSERT_TRUE(Only({IoRequest::Kind::kWrite, file_.get(), 0, Buffer(0, kMiB), 1}).ok());
  const absl::Status status = Only({IoRequest::Kind::kRead, file_.get(), 0, Buffer(0, 4 * kMiB), 2});
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(status.ToString(), HasSubstr(file_->path()));
  EXPECT_TRUE(Only({IoRequest::Kind::kRead, file_.get(), 0, Buffer(0, kMiB), 3}).ok());
}

TEST_P(IoQueueTest, FullDiskIsReported) {
  auto full = SystemDisk()->Open("/dev/full", Disk::Mode::kShared);
  ASSERT_TRUE(full.ok()) << full.status();
  const absl::Status status = Only({IoRequest::Kind::kWrite, full->get(), 0, Buffer(0, kMiB), 1});
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(status.ToString(), HasSubstr("No space left on device"));
  EXPECT_THAT(status.ToString(), HasSubstr("/dev/full"));
}

TEST_P(IoQueueTest, DeviceErrorIsReported) {
  // Address 0 of a process is never mapped: a read of it is an I/O error on every Linux.
  auto broken = SystemDisk()->Open("/proc/self/mem", Disk::Mode::kShared);
  ASSERT_TRUE(broken.ok()) << broken.status();
  const absl::Status status = Only({IoRequest::Kind::kRead, broken->get(), 0, Buffer(0, 4096), 1});
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(status.ToString(), HasSubstr("read of 4096 bytes at offset 0 of /proc/self/mem"));
  EXPECT_THAT(status.ToString(), HasSubstr("Input/output error"));
}

// The thread pool rests in Transfer, see piece_test.cc.
class BusyDeviceTest : public IoQueueTest {
 protected:
  ~BusyDeviceTest() override { busy_reads = 0; }
};
INSTANTIATE_TEST_SUITE_P(Backends, BusyDeviceTest, ::testing::Values(IoBackend::kUring),
                         [](const auto&) { return "Uring"; });

TEST_P(BusyDeviceTest, RestsBetweenItsTriesWhileOthersGoOn) {
  Fill(Buffer(2 * kMiB, kIoAlignment), 5);
  ASSERT_TRUE(Only({IoRequest::Kind::kWrite, file_.get(), 0, Buffer(2 * kMiB, kIoAlignment), 1}).ok());
  busy_reads = kIoRetriesMax;  // however long the writes take, the read succeeds
  const auto began = std::chrono::steady_clock::now();
  ASSERT_TRUE(queue_->Submit({IoRequest::Kind::kRead, file_.get(), 0, Buffer(0, kIoAlignment), 2}).ok());
  std::vector<IoCompletion> completions;
  const auto came = [&](uint64_t tag) {
    return std::count_if(completions.begin(), completions.end(),
                         [&](const IoCompletion& completion) { return completion.tag == tag; });
  };
  // While these go on, a read without rests would be tried as often.
  for (int i = 1; i <= 2 * kIoRetriesMax; ++i) {
    ASSERT_TRUE(queue_->Submit({IoRequest::Kind::kWrite, file_.get(), kMiB, Buffer(kMiB, kIoAlignment), 3}).ok());
    while (came(3) < i) queue_->Reap(/*wait=*/true, &completions);
  }
  const auto taken = std::chrono::steady_clock::now() - began;
  std::chrono::microseconds rests{0}, rest = kIoRestMin;
  for (int tried = kIoRetriesMax - busy_reads; tried > 1; --tried) {
    rests += rest;
    rest = std::min(2 * rest, kIoRestMax);
  }
  EXPECT_TRUE(taken >= rests) << "tried " << kIoRetriesMax - busy_reads << " times";
  busy_reads = 0;
  while (came(2) == 0) queue_->Reap(/*wait=*/true, &completions);
  for (const IoCompletion& completion : completions) EXPECT_EQ(completion.status, absl::OkStatus());
  EXPECT_EQ(Buffer(0, kIoAlignment), Buffer(2 * kMiB, kIoAlignment));
}

TEST_P(BusyDeviceTest, GivesUpAfterItsBoundAndSaysSo) {
  ASSERT_TRUE(Only({IoRequest::Kind::kWrite, file_.get(), 0, Buffer(0, kMiB), 1}).ok());
  busy_reads = 1000;
  const absl::Status status = Only({IoRequest::Kind::kRead, file_.get(), 0, Buffer(0, kIoAlignment), 2});
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(status.ToString(), HasSubstr("tried 33 times, with rests of 1201 ms in all"));
  EXPECT_EQ(busy_reads, 1000 - kIoRetriesMax - 1);
  busy_reads = 0;
  EXPECT_TRUE(Only({IoRequest::Kind::kRead, file_.get(), 0, Buffer(0, kMiB), 3}).ok());
}

INSTANTIATE_TEST_SUITE_P(Backends, IoQueueTest, ::testing::Values(IoBackend::kUring, IoBackend::kThreads),
                         [](const auto& info) { return info.param == IoBackend::kUring ? "Uring" : "Threads"; });

TEST_P(IoQueueTest, EachRequestIsCountedOnce) {
  const uint64_t before = ProcessDiskCounters().operations[static_cast<size_t>(IoRequest::Kind::kWrite)].bytes;
  ASSERT_TRUE(Only({IoRequest::Kind::kWrite, file_.get(), 0, Buffer(0, 2 * kMiB), 1}).ok());
  EXPECT_EQ(ProcessDiskCounters().operations[static_cast<size_t>(IoRequest::Kind::kWrite)].bytes, before + 2 * kMiB);
}

// At a limit of threads the kernel makes none for what blocks either, and cancels it.
TEST(UringQueueTest, ASyncIsDoneWhereTheKernelMayMakeNoThread) {
  const ScratchDirectory directory;
  constexpr int kNoUring = 1, kFailed = 2;
  const int code = InChild([&] {
    auto queue = MakeIoQueue({.backend = IoBackend::kUring});
    if (!queue.ok()) return kNoUring;
    const auto file = *SystemDisk()->Open(directory / "file", Disk::Mode::kEmptied);
    // A user with this process alone, since the superuser has no limit.
    constexpr uid_t kNobodyElse = 64'999;
    const rlimit one = {1, 1};
    if (setrlimit(RLIMIT_NPROC, &one) != 0 || (geteuid() == 0 && setuid(kNobodyElse) != 0)) return kFailed;
    if (!(*queue)->Submit({IoRequest::Kind::kSync, file.get(), 0, {}, 7}).ok()) return kFailed;
    std::vector<IoCompletion> completions;
    while ((*queue)->in_flight() > 0) (*queue)->Reap(/*wait=*/true, &completions);
    if (completions.size() == 1 && completions[0].tag == 7 && completions[0].status.ok()) return 0;
    if (!completions.empty()) std::fprintf(stderr, "%s\n", completions[0].status.ToString().c_str());
    return kFailed;
  });
  if (code == kNoUring) GTEST_SKIP() << "no io_uring here";
  EXPECT_EQ(code, 0);
}

TEST(IoBackendProbeTest, AutoIsWhatTheProbeSays) {
  const std::string name = (*MakeIoQueue({}))->name();
  EXPECT_EQ(IoBackendProbe().substr(0, name.size()), name);
}

}  // namespace
}  // namespace ballast::storage
