#include "ballast/services/threads/turns.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"

namespace ballast::services {
namespace {

using ::testing::ElementsAre;
using ::testing::UnorderedElementsAre;

class TurnsTest : public ::testing::Test {
 protected:
  void Post(size_t queue, const std::string& name) {
    turns_.queue(queue)->Post([this, name] {
      absl::MutexLock lock(&mu_);
      ran_.push_back(name);
    });
  }
  // Holds the only thread until `go`.
  void Hold(absl::Notification* go) {
    absl::Notification held;
    turns_.queue(0)->Post([&held, go] {
      held.Notify();
      go->WaitForNotification();
    });
    held.WaitForNotification();
  }

  absl::Mutex mu_;
  std::vector<std::string> ran_;
  Turns turns_{std::make_unique<ThreadExecutor>(1), 3};
};

TEST_F(TurnsTest, ALongQueueDelaysItsOwnerAlone) {
  absl::Notification go;
  Hold(&go);
  for (int i = 0; i < 4; ++i) Post(0, absl::StrCat("a", i));
  Post(1, "b0");
  Post(1, "b1");
  Post(2, "c0");
  go.Notify();
  turns_.Join();
  EXPECT_THAT(ran_, ElementsAre("a0", "b0", "c0", "a1", "b1", "a2", "a3"));
}

TEST_F(TurnsTest, NumbersGoAroundTheQueues) {
  EXPECT_EQ(turns_.queue(1), turns_.queue(4));
  EXPECT_NE(turns_.queue(1), turns_.queue(2));
}

TEST_F(TurnsTest, WhatIsPostedAfterTheEndNeverRuns) {
  Post(0, "a");
  turns_.Join();
  Post(1, "b");
  turns_.Join();
  EXPECT_THAT(ran_, UnorderedElementsAre("a"));
}

}  // namespace
}  // namespace ballast::services
