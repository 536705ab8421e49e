// Large memory and the processes that are forked from its owner's: the data loaders of trainers.
#include "ballast/storage/memory/arena.h"

#include <gtest/gtest.h>
#include <spdlog/sinks/ostream_sink.h>
#include <spdlog/spdlog.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <functional>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/tests/storage/in_child.h"

// The linker gives all calls of these to the test, which passes them on unless the system is to refuse, or to have
// larger pages: then it takes a part of whole pages alone, and rounds a part's end up.
extern "C" int __real_madvise(void* address, size_t bytes, int advice);
extern "C" void* __real_mmap(void* address, size_t bytes, int protection, int flags, int fd, off_t offset);
extern "C" int __real_munmap(void* address, size_t bytes);
extern "C" long __real_sysconf(int name);  // NOLINT(google-runtime-int): the system's
namespace {
bool madvise_refused = false, mmap_refused = false;
size_t larger_page_bytes = 0;
int torn_pages = 0;

int OnPages(int (*call)(void* address, size_t bytes), void* address, size_t bytes) {
  const size_t page = larger_page_bytes != 0 ? larger_page_bytes : 1;
  if (reinterpret_cast<uintptr_t>(address) % page == 0) return call(address, (bytes + page - 1) / page * page);
  ++torn_pages;
  errno = EINVAL;
  return -1;
}
}  // namespace
extern "C" int __wrap_madvise(void* address, size_t bytes, int advice) {
  static thread_local int given = 0;
  given = advice;
  const auto call = [](void* at, size_t length) { return __real_madvise(at, length, given); };
  if (!madvise_refused) return OnPages(call, address, bytes);
  errno = ENOMEM;
  return -1;
}
extern "C" void* __wrap_mmap(void* address, size_t bytes, int protection, int flags, int fd, off_t offset) {
  if (mmap_refused) {
    errno = ENOMEM;
    return MAP_FAILED;
  }
  void* const at = __real_mmap(address, bytes + larger_page_bytes, protection, flags, fd, offset);
  if (larger_page_bytes == 0 || at == MAP_FAILED) return at;
  return static_cast<std::byte*>(at) + (larger_page_bytes - reinterpret_cast<uintptr_t>(at) % larger_page_bytes);
}
extern "C" int __wrap_munmap(void* address, size_t bytes) { return OnPages(__real_munmap, address, bytes); }
extern "C" long __wrap_sysconf(int name) {  // NOLINT(google-runtime-int): the system's
  return name == _SC_PAGESIZE && larger_page_bytes != 0 ? static_cast<long>(larger_page_bytes) : __real_sysconf(name);
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

uint64_t ResidentPages(absl::Span<std::byte> bytes) {
  unsigned char resident[kArenaBytes / kPage] = {};
  EXPECT_EQ(mincore(bytes.data(), bytes.size(), resident), 0);
  return static_cast<uint64_t>(std::count_if(resident, resident + bytes.size() / kPage, [](auto r) { return r & 1; }));
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

// Also if it is locked, as far as the limit of the process allows.
TEST(ArenaTest, MemoryForLaterBecomesResidentWithItsUse) {
  auto now = Arena::Map(kArenaBytes), later = Arena::Map(kArenaBytes, Arena::Touch::kLater);
  ASSERT_TRUE(now.ok() && later.ok());
  (void)later->Lock(Arena::Touch::kLater);
  EXPECT_EQ(ResidentPages(now->bytes()), kArenaBytes / kPage);
  EXPECT_EQ(ResidentPages(later->bytes()), 0u);
  later->bytes()[0] = std::byte{1};
  EXPECT_GE(ResidentPages(later->bytes()), 1u);
  EXPECT_LE(ResidentPages(later->bytes()), 512u) << "a huge page";
  std::memset(later->bytes().data(), 1, kArenaBytes);
  EXPECT_EQ(ResidentPages(later->bytes()), kArenaBytes / kPage);
}

// As on Arm: the system discards whole pages, and what shares one with the part stays.
TEST(ArenaTest, PagesOf64KiBKeepTheNeighbours) {
  constexpr uint64_t kLargePage = 65536;
  larger_page_bytes = kLargePage;
  auto arena = Arena::Map(kArenaBytes - kPage);
  ASSERT_TRUE(arena.ok()) << arena.status();
  const absl::Span<std::byte> bytes = arena->bytes();
  std::memset(bytes.data(), 7, bytes.size());
  arena->Discard(bytes.subspan(kPage, kPage));  // less than a page, in its middle and at its start
  arena->Discard(bytes.subspan(4 * kLargePage, kPage));
  const uint64_t begin = kLargePage - kPage, end = 3 * kLargePage + kPage;
  arena->Discard(bytes.subspan(begin, end - begin));
  for (uint64_t i = 0; i < bytes.size(); i += kPage / 2) {
    const bool discarded = i >= kLargePage && i < 3 * kLargePage;
    ASSERT_EQ(bytes[i], std::byte{discarded ? uint8_t{0} : uint8_t{7}}) << i;
  }
  *arena = Arena();
  larger_page_bytes = 0;
  EXPECT_EQ(torn_pages, 0);
}

TEST(ArenaTest, AMachineWithoutMemoryIsNamed) {
  mmap_refused = true;
  const absl::Status refused = Arena::Map(kArenaBytes).status();
  mmap_refused = false;
  EXPECT_EQ(model::ReasonOf(refused), model::kBudget);
  EXPECT_NE(refused.message().find("refused 16777216 bytes of memory: Cannot allocate memory. Free memory"),
            std::string::npos)
      << refused;
  EXPECT_EQ(refused.message().find("max_map_count"), std::string::npos) << refused;
}

// A lower budget would not help: chunks beside a GPU are mappings, whatever their size.
TEST(ArenaTest, TooManyMappingsAreNamedWithTheirLimit) {
  uint64_t most = 0;
  std::ifstream("/proc/sys/vm/max_map_count") >> most;
  if (most == 0 || most > (1 << 18)) GTEST_SKIP() << "this system allows " << most << " mappings";
  const std::string path = ::testing::TempDir() + "arena_test_refused";
  EXPECT_EQ(InChild([&] {
              // Neighbours of another protection: the kernel joins no two of them.
              constexpr int kProtections[] = {PROT_NONE, PROT_READ};
              for (uint64_t i = 0;; ++i) {
                void* const at = mmap(nullptr, kPage, kProtections[i % 2], MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
                if (at == MAP_FAILED) break;
              }
              const absl::Status refused = Arena::Map(kArenaBytes).status();
              std::ofstream(path) << refused;
              return absl::IsResourceExhausted(refused) ? 0 : 1;
            }),
            0);
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  unlink(path.c_str());
  EXPECT_NE(text.str().find(absl::StrCat("vm.max_map_count allows ", most)), std::string::npos) << text.str();
  EXPECT_NE(text.str().find(absl::StrCat("sysctl -w vm.max_map_count=", 2 * most)), std::string::npos) << text.str();
  EXPECT_EQ(text.str().find("lower the DRAM budget"), std::string::npos) << text.str();
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
