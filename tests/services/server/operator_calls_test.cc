#include "ballast/services/server/operator_calls.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "ballast/proto/base/status.h"
#include "ballast/tests/services/answer.h"

namespace ballast::services {
namespace {

class OperatorCallsTest : public ::testing::Test {
 protected:
  ~OperatorCallsTest() override {
    calls_.Stop(absl::UnavailableError("the test ends"));
    if (!go_.HasBeenNotified()) go_.Notify();
    calls_.Join();
  }
  // A call whose work waits for `go_`.
  Answer<int> Begin(const CallLimit& limit = absl::InfiniteFuture()) {
    Answer<int> answer;
    calls_.Begin<int>(
        1, limit, "the disk",
        [this]() -> absl::StatusOr<int> {
          ++begun_;
          go_.WaitForNotification();
          return ++works_;
        },
        answer.reply());
    return answer;
  }

  absl::Notification go_;
  std::atomic<int> begun_{0}, works_{0};
  std::atomic<uint64_t> requests_{0}, bytes_{0};
  SharedBound requests_max_{100, &requests_}, bytes_max_{100, &bytes_};
  ThreadExecutor answers_{1};
  Deadlines deadlines_;
  OperatorCalls calls_{std::make_unique<ThreadExecutor>(1), 2, &answers_, &deadlines_, {&requests_max_, &bytes_max_}};
};

TEST_F(OperatorCallsTest, BeyondTheBoundIsBusy) {
  Answer<int> first = Begin(), second = Begin();
  EXPECT_EQ(requests_, 2u);
  EXPECT_EQ(model::ReasonOf(Begin().Wait().status()), model::kBusy);
  go_.Notify();
  EXPECT_EQ(first.Wait().value_or(0), 1);
  EXPECT_EQ(second.Wait().value_or(0), 2);
  EXPECT_EQ(requests_, 0u);
  EXPECT_EQ(Begin().Wait().value_or(0), 3);
}

TEST_F(OperatorCallsTest, ACallerThatGivesUpFreesNoThread) {
  const auto caller = std::make_shared<Caller>();
  Answer<int> first = Begin({absl::InfiniteFuture(), caller});
  while (begun_ == 0) absl::SleepFor(absl::Milliseconds(1));
  caller->Leave();
  EXPECT_EQ(first.Wait().status().code(), absl::StatusCode::kCancelled);
  Answer<int> second = Begin(absl::Now() + absl::Milliseconds(1));
  EXPECT_EQ(second.Wait().status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(requests_, 0u);
  EXPECT_EQ(model::ReasonOf(Begin().Wait().status()), model::kBusy);
  go_.Notify();
  calls_.Join();
  EXPECT_EQ(works_, 1) << "work that had not begun is left";
}

TEST_F(OperatorCallsTest, TheEndRefusesWhatWaits) {
  Answer<int> waits = Begin();
  calls_.Stop(model::Error(absl::StatusCode::kUnavailable, model::kServerDown, "stopping"));
  EXPECT_EQ(model::ReasonOf(waits.Wait().status()), model::kServerDown);
  EXPECT_EQ(model::ReasonOf(Begin().Wait().status()), model::kServerDown);
}

}  // namespace
}  // namespace ballast::services
