#include "ballast/services/threads/deadlines.h"

#include <gtest/gtest.h>

#include <vector>

#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"

namespace ballast::services {
namespace {

TEST(Deadlines, CallBackInOrderOfTime) {
  absl::Mutex mu;
  std::vector<int> order;
  absl::Notification added, last;
  Deadlines deadlines;  // ends first: its thread may still be leaving a callback
  const absl::Time now = absl::Now();
  deadlines.Add(now, [&] { added.WaitForNotification(); });  // none of the others runs before all are there
  const auto note = [&](int i) {
    absl::MutexLock lock(&mu);
    order.push_back(i);
    if (order.size() == 3) last.Notify();
  };
  deadlines.Add(now + absl::Milliseconds(60), [&] { note(3); });
  deadlines.Add(now + absl::Milliseconds(20), [&] { note(1); });
  deadlines.Add(now + absl::Milliseconds(40), [&] { note(2); });
  added.Notify();
  ASSERT_TRUE(last.WaitForNotificationWithTimeout(absl::Minutes(1)));
  EXPECT_GE(absl::Now(), now + absl::Milliseconds(60));
  EXPECT_EQ(order, (std::vector<int>{1, 2, 3}));
}

TEST(Deadlines, CancelledOnesNeverRun) {
  bool ran = false;
  absl::Notification cancelled, later;
  Deadlines deadlines;
  deadlines.Add(absl::Now(), [&] { cancelled.WaitForNotification(); });
  const uint64_t id = deadlines.Add(absl::Now() + absl::Milliseconds(30), [&] { ran = true; });
  deadlines.Add(absl::Now() + absl::Milliseconds(60), [&] { later.Notify(); });
  deadlines.Cancel(id);
  deadlines.Cancel(id);
  cancelled.Notify();
  ASSERT_TRUE(later.WaitForNotificationWithTimeout(absl::Minutes(1)));
  EXPECT_FALSE(ran);
}

TEST(Deadlines, EndsWithSomeStillDue) {
  Deadlines deadlines;
  deadlines.Add(absl::InfiniteFuture(), [] { FAIL(); });
  deadlines.Add(absl::Now() + absl::Hours(1), [] { FAIL(); });
}

}  // namespace
}  // namespace ballast::services
