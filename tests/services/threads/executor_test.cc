#include "ballast/services/threads/executor.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>

#include "absl/synchronization/notification.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/base/threads.h"
#include "ballast/services/threads/deadlines.h"

namespace ballast::services {
namespace {

// No room for a further thread's stack: as at any limit, the system makes no thread.
void LetNoThreadBeMade() {
  std::ifstream status("/proc/self/statm");
  uint64_t pages = 0;
  status >> pages;
  rlimit limit = {};
  limit.rlim_cur = limit.rlim_max = pages * 4096 + (1 << 20);
  setrlimit(RLIMIT_AS, &limit);
}

TEST(ThreadExecutor, RunsWhatIsPostedOncePrepared) {
  ThreadExecutor executor(1);
  ASSERT_EQ(executor.Prepare(), absl::OkStatus());
  ASSERT_EQ(executor.Prepare(), absl::OkStatus());
  absl::Notification ran;
  executor.Post([&] { ran.Notify(); });
  ran.WaitForNotification();
}

TEST(ThreadExecutorDeathTest, AThreadThatCannotBeMadeIsAnErrorWithTheLimitsName) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers need more addresses";
#endif
  const auto prepare = [] {
    LetNoThreadBeMade();
    ThreadExecutor executor(1);
    const absl::Status status = executor.Prepare();
    const bool named = status.message().find(model::ThreadsAllowed().name) != absl::string_view::npos;
    const bool right = absl::IsResourceExhausted(status) && model::ReasonOf(status) == model::kLimit && named;
    std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
    std::_Exit(right ? 0 : 1);
  };
  EXPECT_EXIT(prepare(), ::testing::ExitedWithCode(0), "no further thread");
}

TEST(DeadlinesDeathTest, WithoutAThreadTheySaySo) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers need more addresses";
#endif
  const auto make = [] {
    LetNoThreadBeMade();
    const Deadlines deadlines;
    std::_Exit(absl::IsResourceExhausted(deadlines.made()) ? 0 : 1);
  };
  EXPECT_EXIT(make(), ::testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace ballast::services
