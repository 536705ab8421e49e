#include "ballast/services/threads/waiting.h"

#include <gtest/gtest.h>

#include <string>

#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "ballast/proto/base/status.h"
#include "ballast/services/threads/caller.h"

namespace ballast::services {
namespace {

class WaitingTest : public ::testing::Test {
 protected:
  // A waiter that answers `name` once `ready`.
  Waiter Make(const std::string& name, const bool* ready, absl::Time deadline = absl::InfiniteFuture()) {
    Waiter waiter;
    waiter.limit = deadline;
    const auto say = [this](const std::string& text, Replies* replies) {
      replies->push_back([this, text] { said_.push_back(text); });
    };
    waiter.attempt = [say, name, ready](Replies* replies) {
      if (*ready) say(name, replies);
      return *ready;
    };
    waiter.expire = [say, name](Replies* replies) { say(name + " expired", replies); };
    waiter.refuse = [say, name](const absl::Status& status, Replies* replies) {
      say(name + " " + model::ReasonOf(status), replies);
    };
    return waiter;
  }
  void Run(Replies* replies) { services::Run(std::exchange(*replies, {})); }

  Deadlines deadlines_;
  std::atomic<uint64_t> count_{0}, bytes_{0};
  absl::Mutex mu_;
  absl::Notification expired_;
  // A job alone, which may hold half: two requests, and 100 bytes.
  SharedBound requests_max_{4, &count_}, bytes_max_{200, &bytes_};
  Waiting waiting_{&deadlines_, {&requests_max_, &bytes_max_}, [this](uint64_t id) {
                     absl::MutexLock lock(&mu_);
                     Replies replies;
                     waiting_.Expire(id, &replies);
                     Run(&replies);
                     expired_.Notify();
                   }};
  Waiting::Queue queue_;
  std::vector<std::string> said_;
};

TEST_F(WaitingTest, AnswersInOrderOfArrivalOnceReady) {
  bool a = false, b = false;
  Replies replies;
  waiting_.Submit(Make("a", &a), &queue_, &replies);
  waiting_.Submit(Make("b", &b), &queue_, &replies);
  EXPECT_EQ(count_, 2u);
  EXPECT_FALSE(waiting_.Wake(&queue_, &replies));
  b = true;
  EXPECT_TRUE(waiting_.Wake(&queue_, &replies));
  a = true;
  EXPECT_TRUE(waiting_.Wake(&queue_, &replies));
  Run(&replies);
  EXPECT_EQ(said_, (std::vector<std::string>{"b", "a"}));
  EXPECT_EQ(count_, 0u);
  EXPECT_TRUE(queue_.empty());
}

TEST_F(WaitingTest, RefusesBeyondTheBound) {
  bool ready = false;
  Replies replies;
  for (const char* name : {"a", "b", "c"}) waiting_.Submit(Make(name, &ready), &queue_, &replies);
  Run(&replies);
  EXPECT_EQ(said_, (std::vector<std::string>{"c BUSY"}));
  waiting_.RefuseAll(model::Error(absl::StatusCode::kUnavailable, model::kServerDown, "stopping"), &replies);
  Run(&replies);
  EXPECT_EQ(said_.size(), 3u);
  EXPECT_EQ(count_, 0u);
}

TEST_F(WaitingTest, WakesInTurnUntilOneHasToWait) {
  bool a = false, b = false;
  int evaluated = 0;
  Replies replies;
  waiting_.Submit(Make("a", &a), &queue_, &replies);
  Waiter second = Make("b", &b);
  second.attempt = [&, attempt = second.attempt](Replies* out) {
    ++evaluated;
    return attempt(out);
  };
  waiting_.Submit(second, &queue_, &replies);
  b = true;
  waiting_.WakeInTurn(&queue_, &replies);
  EXPECT_EQ(evaluated, 1) << "behind one that has to wait, only its arrival counts";
  a = true;
  waiting_.WakeInTurn(&queue_, &replies);
  Run(&replies);
  EXPECT_EQ(said_, (std::vector<std::string>{"a", "b"}));
  EXPECT_TRUE(queue_.empty());
}

TEST(Replies, OfRepliesRunFromALoopInOrder) {
  std::vector<int> order;
  constexpr int kDeep = 1'000'000;
  int depth = 0, deepest = 0;
  std::function<void(int)> next = [&](int i) {
    deepest = std::max(deepest, ++depth);
    if (i % 250'000 == 0) order.push_back(i);
    if (i < kDeep) services::Run({[&next, i] { next(i + 1); }});
    --depth;
  };
  services::Run({[&] { next(1); }, [&] { order.push_back(-1); }});
  EXPECT_EQ(deepest, 1);
  EXPECT_EQ(order, (std::vector<int>{-1, 250'000, 500'000, 750'000, 1'000'000}));
}

TEST_F(WaitingTest, RefusesBeyondTheBoundOfBytes) {
  bool ready = false;
  Replies replies;
  Waiter first = Make("a", &ready);
  first.bytes = 80;
  waiting_.Submit(first, &queue_, &replies);
  Waiter second = Make("b", &ready);
  second.bytes = 41;
  waiting_.Submit(second, &queue_, &replies);
  Run(&replies);
  EXPECT_EQ(said_, (std::vector<std::string>{"b BUSY"}));
  EXPECT_EQ(bytes_, 80u);
  EXPECT_EQ(count_, 1u);
  second.bytes = 40;
  waiting_.Submit(second, &queue_, &replies);
  EXPECT_EQ(bytes_, 120u);
  ready = true;
  waiting_.Wake(&queue_, &replies);
  EXPECT_EQ(bytes_, 0u);
}

TEST_F(WaitingTest, AClientThatIsGoneGivesItsPlaceBackAndIsAnsweredOnce) {
  bool ready = false;
  const auto caller = std::make_shared<Caller>();
  {
    absl::MutexLock lock(&mu_);
    Replies replies;
    Waiter waiter = Make("a", &ready);
    waiter.limit.caller = caller;
    waiter.bytes = 10;
    waiting_.Submit(waiter, &queue_, &replies);
    EXPECT_EQ(bytes_, 10u);
  }
  caller->Leave();
  ASSERT_TRUE(expired_.HasBeenNotified());
  absl::MutexLock lock(&mu_);
  EXPECT_EQ(count_, 0u);
  EXPECT_EQ(bytes_, 0u);
  EXPECT_TRUE(queue_.empty());
  ready = true;
  Replies replies;
  waiting_.Wake(&queue_, &replies);
  // A request of the same call that comes to wait only now.
  ready = false;
  Waiter late = Make("late", &ready);
  late.limit.caller = caller;
  waiting_.Submit(late, &queue_, &replies);
  Run(&replies);
  EXPECT_EQ(said_, (std::vector<std::string>{"a ", "late "}));
  EXPECT_EQ(count_, 0u);
}

TEST_F(WaitingTest, AClientThatGoesAfterItsAnswerChangesNothing) {
  bool ready = false;
  const auto caller = std::make_shared<Caller>();
  {
    absl::MutexLock lock(&mu_);
    Replies replies;
    Waiter waiter = Make("a", &ready);
    waiter.limit.caller = caller;
    waiting_.Submit(waiter, &queue_, &replies);
    ready = true;
    waiting_.Wake(&queue_, &replies);
    Run(&replies);
  }
  caller->Leave();
  absl::MutexLock lock(&mu_);
  EXPECT_EQ(said_, (std::vector<std::string>{"a"}));
}

TEST_F(WaitingTest, ExpiresByItself) {
  const bool ready = false;
  {
    absl::MutexLock lock(&mu_);
    Replies replies;
    waiting_.Submit(Make("late", &ready, absl::Now() + absl::Milliseconds(20)), &queue_, &replies);
  }
  ASSERT_TRUE(expired_.WaitForNotificationWithTimeout(absl::Seconds(30)));
  absl::MutexLock lock(&mu_);
  EXPECT_EQ(said_, (std::vector<std::string>{"late expired"}));
  EXPECT_TRUE(queue_.empty());
}

}  // namespace
}  // namespace ballast::services
