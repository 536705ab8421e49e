// Large memory and the processes that are forked from its owner's: the data loaders of trainers.
#include "ballast/storage/memory/arena.h"

#include <gtest/gtest.h>
#include <spdlog/sinks/ostream_sink.h>
#include <spdlog/spdlog.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <utility>

#include "ballast/tests/storage/in_child.h"

// The linker gives all calls of madvise to the test, which passes them on unless the system is to refuse.
extern "C" int __real_madvise(void* address, size_t bytes, int advice);
namespace {
bool madvise_refused = false;
}  // namespace
extern "C" int __wrap_madvise(void* address, size_t bytes, int advice) {
  if (!madvise_refused) return __real_madvise(address, bytes, advice);
  errno = ENOMEM;
  return -1;
}

namespace ballast::storage {
namespace {

constexpr uint64_t kArenaBytes = uint64_t{16} << 20, kPage = 4096;

// Page faults of this process while all of `bytes` is written.
int64_t FaultsOfWriting(absl::Span<std::byte> bytes) {
  const auto faults = [] {
    rusage usage = {};
    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_minflt;
  };
  const int64_t before = faults();
  std::memset(bytes.data(), 1, bytes.size());
  return faults() - before;
}

bool IsMapped(absl::Span<const std::byte> bytes) {
  unsigned char resident[kArenaBytes / kPage];
  return mincore(const_cast<std::byte*>(bytes.data()), bytes.size(), resident) == 0;
}

class ArenaForkTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto arena = Arena::Map(kArenaBytes);
    ASSERT_TRUE(arena.ok()) << arena.status();
    arena_ = *std::move(arena);
    std::memset(arena_->bytes().data(), 7, kArenaBytes);
  }
  std::optional<Arena> arena_;
};

TEST_F(ArenaForkTest, AForkedChildDoesNotHaveIt) {
  ASSERT_TRUE(IsMapped(arena_->bytes()));
  EXPECT_EQ(InChild([&] { return IsMapped(arena_->bytes()) ? 1 : 0; }), 0);
}

TEST_F(ArenaForkTest, AWriteBesideAForkedChildCopiesNoPage) {
  int told[2];
  ASSERT_EQ(pipe(told), 0);
  const pid_t child = fork();
  if (child == 0) {  // lives until the pipe's other end is closed
    close(told[1]);
    char byte;
    (void)!read(told[0], &byte, 1);
    _exit(0);
  }
  EXPECT_LT(FaultsOfWriting(arena_->bytes()), static_cast<int64_t>(kArenaBytes / kPage / 16));
  close(told[1]);
  ASSERT_EQ(waitpid(child, nullptr, 0), child);
  close(told[0]);
}

TEST_F(ArenaForkTest, AForkedChildThatDestroysItsCopyLeavesWhatLiesThereNow) {
  const int code = InChild([&] {
    std::byte* const at = arena_->bytes().data();
    void* const own = mmap(at, kArenaBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    if (own != at) return 1;
    *at = std::byte{3};
    { const Arena moved = *std::move(arena_); }
    arena_.reset();
    return IsMapped({at, kArenaBytes}) && *at == std::byte{3} ? 0 : 2;
  });
  EXPECT_EQ(code, 0);
  EXPECT_EQ(arena_->bytes()[kArenaBytes - 1], std::byte{7});
}

// Not for each chunk: a job has thousands.
TEST(ArenaTest, WhatTheSystemRefusesIsSaidOnce) {
  std::ostringstream log;
  auto& sinks = spdlog::default_logger()->sinks();
  sinks.push_back(std::make_shared<spdlog::sinks::ostream_sink_mt>(log));
  madvise_refused = true;
  for (int i = 0; i < 3; ++i) {
    auto arena = Arena::Map(kArenaBytes);
    ASSERT_TRUE(arena.ok()) << arena.status();
    arena->Discard(arena->bytes().first(kPage));
  }
  madvise_refused = false;
  sinks.pop_back();
  const auto times = [&](const std::string& text) {
    int count = 0;
    for (size_t at = 0; (at = log.str().find(text, at)) != std::string::npos; ++at) ++count;
    return count;
  };
  EXPECT_EQ(times("forked children share"), 1) << log.str();
  EXPECT_EQ(times("stay"), 1) << log.str();
}

}  // namespace
}  // namespace ballast::storage
