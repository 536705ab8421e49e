#include "ballast/kernels/thread_pool.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <atomic>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <mutex>
#include <set>
#include <string>
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

// The first piece ends only when a piece of the caller's next batch has ended.
TEST(ThreadPool, BatchesOfACallerOverlap) {
  ThreadPool pool(2);
  ThreadPool::Caller caller(&pool);
  std::atomic<bool> second_ended = false;
  ThreadPool::Batch first(1, 0, [&](uint64_t) {
    while (!second_ended.load()) std::this_thread::yield();
  });
  ThreadPool::Batch second(1, 1, [&](uint64_t) { second_ended = true; });
  caller.Begin(&first);
  caller.Begin(&second);
  caller.Finish(&first, [] {});
  EXPECT_TRUE(second_ended.load());
  caller.Finish(&second, [] {});
}

TEST(ThreadPool, ACallerWithoutAPoolComputesAlone) {
  ThreadPool::Caller caller(nullptr);
  std::vector<uint64_t> done;
  int between = 0;
  ThreadPool::Batch batch(3, 7, [&](uint64_t i) { done.push_back(i); });
  caller.Begin(&batch);
  EXPECT_TRUE(done.empty());
  caller.Finish(&batch, [&] { ++between; });
  EXPECT_EQ(done, (std::vector<uint64_t>{0, 1, 2}));
  EXPECT_EQ(between, 3);
}

// A thread that is held up keeps the pieces of its queue from nobody: home 0 is the queue of one thread of three.
TEST(ThreadPool, OthersTakeThePiecesOfAThreadThatIsHeldUp) {
  ThreadPool pool(4);
  ThreadPool::Caller held(&pool), caller(&pool);
  std::atomic<bool> release = false;
  std::atomic<int> holding = 0;
  const auto hold = [&](uint64_t) {
    ++holding;
    while (!release.load()) std::this_thread::yield();
  };
  ThreadPool::Batch two(2, 0, hold);
  held.Begin(&two);
  while (holding.load() < 2) std::this_thread::yield();
  std::atomic<int> done = 0;
  std::vector<std::unique_ptr<ThreadPool::Batch>> batches;
  for (uint64_t home = 0; home < 6; ++home) {
    batches.push_back(std::make_unique<ThreadPool::Batch>(2, home, [&](uint64_t) { ++done; }));
    caller.Begin(batches.back().get());
  }
  while (done.load() < 12) std::this_thread::yield();  // by the third thread: the caller has not computed yet
  for (const auto& batch : batches) caller.Finish(batch.get(), [] {});
  release = true;
  held.Finish(&two, [] {});
}

// One caller has begun three batches before the other begins its own: a thread serves both, a piece each.
TEST(ThreadPool, CallersAreServedInTurn) {
  ThreadPool pool(2);
  ThreadPool::Caller many(&pool), few(&pool);
  std::atomic<bool> release = false, holding = false;
  std::string served;  // by the pool's only thread
  std::atomic<int> done = 0;
  const auto note = [&](char who) {
    return [&served, &done, who](uint64_t) {
      served += who;
      ++done;
    };
  };
  ThreadPool::Batch hold(1, 0, [&](uint64_t) {
    holding = true;
    while (!release.load()) std::this_thread::yield();
  });
  many.Begin(&hold);
  while (!holding.load()) std::this_thread::yield();
  ThreadPool::Batch first(2, 0, note('a')), second(1, 0, note('b')), third(2, 0, note('c')), other(3, 0, note('x'));
  for (ThreadPool::Batch* batch : {&first, &second, &third}) many.Begin(batch);
  few.Begin(&other);
  release = true;
  while (done.load() < 8) std::this_thread::yield();
  EXPECT_EQ(served, "axaxbxcc");
  for (ThreadPool::Batch* batch : {&hold, &first, &second, &third}) many.Finish(batch, [] {});
  few.Finish(&other, [] {});
}

// Or a job whose batches keep coming would leave another job's pieces to that job's own thread.
TEST(ThreadPool, TheOldestBatchIsServedFirst) {
  ThreadPool pool(2);
  std::atomic<bool> busy = false, release_worker = false, release_callers = false;
  std::atomic<int> waiting = 0;
  std::mutex mutex;
  std::vector<int> served;  // by the pool's only thread
  const auto await = [](const std::atomic<bool>& flag) {
    while (!flag.load()) std::this_thread::yield();
  };
  std::thread first([&] {
    const auto caller = std::this_thread::get_id();
    pool.ParallelFor(2, [&](uint64_t) {
      if (std::this_thread::get_id() == caller) return await(release_callers);
      busy = true;
      await(release_worker);
    });
  });
  await(busy);
  std::vector<std::thread> others;
  for (int batch = 0; batch < 3; ++batch) {
    others.emplace_back([&, batch] {
      const auto caller = std::this_thread::get_id();
      pool.ParallelFor(2, [&](uint64_t) {
        if (std::this_thread::get_id() == caller) {
          ++waiting;
          return await(release_callers);
        }
        const std::lock_guard<std::mutex> lock(mutex);
        served.push_back(batch);
      });
    });
    while (waiting.load() <= batch) std::this_thread::yield();
  }
  release_worker = true;
  for (bool all = false; !all; std::this_thread::yield()) {
    const std::lock_guard<std::mutex> lock(mutex);
    all = served.size() == 3;
  }
  release_callers = true;
  first.join();
  for (std::thread& other : others) other.join();
  EXPECT_EQ(served, (std::vector<int>{0, 1, 2}));
}

TEST(ThreadPoolDeathTest, ComputesWithoutThreadsThatTheSystemDoesNotMake) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers need more addresses";
#endif
  const auto compute = [] {
    std::ifstream file("/proc/self/statm");
    uint64_t pages = 0;
    file >> pages;
    const rlimit none = {pages * 4096 + (1 << 20), pages * 4096 + (1 << 20)};
    setrlimit(RLIMIT_AS, &none);
    std::atomic<uint64_t> pieces = 0;
    ThreadPool pool(4);
    pool.ParallelFor(100, [&](uint64_t) { ++pieces; });  // on this thread alone
    std::_Exit(pieces == 100 ? 0 : 1);
  };
  EXPECT_EXIT(compute(), ::testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace ballast::kernels
