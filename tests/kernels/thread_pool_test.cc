#include "ballast/kernels/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <set>
#include <thread>
#include <vector>

namespace ballast::kernels {
namespace {

class ThreadPoolTest : public testing::TestWithParam<int> {};

TEST_P(ThreadPoolTest, DoesEveryPieceOnceAndReturnsWhenAllAreDone) {
  ThreadPool pool(GetParam());
  EXPECT_EQ(pool.threads(), GetParam());
  for (const uint64_t count : {0, 1, 2, 3, 7, 100, 1000}) {
    // Not atomic: each piece has its own place, and returning orders them before what follows.
    std::vector<int> done(count);
    pool.ParallelFor(count, [&](uint64_t i) { ++done[i]; });
    EXPECT_EQ(done, std::vector<int>(count, 1)) << count;
  }
}

TEST_P(ThreadPoolTest, BetweenRunsOnTheCallersThread) {
  ThreadPool pool(GetParam());
  const auto caller = std::this_thread::get_id();
  int between = 0;
  std::atomic<int> own = 0;
  pool.ParallelFor(
      200, [&](uint64_t) { own += std::this_thread::get_id() == caller ? 1 : 0; },
      [&] {
        EXPECT_EQ(std::this_thread::get_id(), caller);
        ++between;
      });
  EXPECT_EQ(between, own.load());
}

TEST_P(ThreadPoolTest, SeveralCallersShareIt) {
  ThreadPool pool(GetParam());
  std::vector<std::thread> callers;
  for (int c = 0; c < 4; ++c) {
    callers.emplace_back([&pool, c] {
      for (int round = 0; round < 200; ++round) {
        std::vector<uint64_t> value(static_cast<size_t>(c) + 5);
        pool.ParallelFor(value.size(), [&](uint64_t i) { value[i] = i * i + 1; });
        for (uint64_t i = 0; i < value.size(); ++i) ASSERT_EQ(value[i], i * i + 1);
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
}

INSTANTIATE_TEST_SUITE_P(Threads, ThreadPoolTest, testing::Values(1, 2, 5));

// Other threads than the caller's do work: a piece that waits for another one ends.
TEST(ThreadPool, PiecesRunSideBySide) {
  ThreadPool pool(3);
  std::atomic<int> here = 0;
  pool.ParallelFor(3, [&](uint64_t) {
    ++here;
    while (here.load() < 3) std::this_thread::yield();
  });
  EXPECT_EQ(here.load(), 3);
}

}  // namespace
}  // namespace ballast::kernels
