// The lock of a job.
#include "ballast/services/job_state/job_mutex.h"

#include <thread>

#include "absl/synchronization/notification.h"
#include "gtest/gtest.h"

namespace ballast::services {
namespace {

TEST(JobMutexTest, PatienceEndsWhileSomebodyHoldsTheLock) {
  JobMutex mu;
  absl::Notification taken, release;
  std::thread holder([&] {
    const JobMutexLock lock(&mu);
    taken.Notify();
    release.WaitForNotification();
  });
  taken.WaitForNotification();
  EXPECT_FALSE(mu.LockWithin(absl::Milliseconds(1)));
  EXPECT_FALSE(mu.LockWithin(absl::ZeroDuration()));
  release.Notify();
  ASSERT_TRUE(mu.LockWithin(absl::InfiniteDuration()));
  mu.AssertHeld();
  mu.Unlock();
  holder.join();
}

TEST(JobMutexTest, OneHolderAtATime) {
  JobMutex mu;
  int count = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 2000; ++i) {
        const JobMutexLock lock(&mu);
        ++count;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(count, 8000);
}

TEST(JobMutexTest, AwaitLetsOthersInAndHoldsTheLockAgain) {
  JobMutex mu;
  bool ready = false;
  absl::Notification waits;
  std::thread other([&] {
    waits.WaitForNotification();
    const JobMutexLock lock(&mu);  // would wait for ever if Await kept it
    ready = true;
  });
  {
    const JobMutexLock lock(&mu);
    waits.Notify();
    const auto met = [&] {
      mu.AssertHeld();
      return ready;
    };
    mu.Await(absl::Condition(&met));
    mu.AssertHeld();
    EXPECT_TRUE(ready);
    EXPECT_FALSE(mu.LockWithin(absl::ZeroDuration()));
  }
  other.join();
}

TEST(JobMutexDeathTest, AClosureThatRunsWithoutTheLockEndsTheProgram) {
  const JobMutex mu;
  EXPECT_DEATH(mu.AssertHeld(), "");
}

}  // namespace
}  // namespace ballast::services
