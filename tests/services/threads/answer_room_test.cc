#include "ballast/services/threads/answer_room.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

namespace ballast::services {
namespace {

// Runs what was posted when it is told to.
class LaterExecutor : public Executor {
 public:
  void Join() override {}
  void Post(std::function<void()> work) override { posted_.push_back(std::move(work)); }
  void RunAll() {
    for (auto& work : std::exchange(posted_, {})) work();
  }

 private:
  std::vector<std::function<void()>> posted_;
};

class AnswerRoomTest : public ::testing::Test {
 protected:
  AnswerRoom::Ticket Await(AnswerRoom::ForJob* job, const std::string& name, uint64_t bytes) {
    return job->Await(bytes, [this, name](AnswerRoom::Lease room) {
      EXPECT_NE(room, nullptr);
      granted_.push_back(name);
      held_.push_back(std::move(room));
    });
  }
  using Names = std::vector<std::string>;
  // Names granted since the last call.
  Names Granted() {
    executor_.RunAll();
    return std::exchange(granted_, {});
  }

  AnswerRoom room_{100};
  LaterExecutor executor_;
  Names granted_;
  std::vector<AnswerRoom::Lease> held_;
  AnswerRoom::ForJob a_{&room_, &executor_}, b_{&room_, &executor_};
};

TEST_F(AnswerRoomTest, GivesRoomInOrderOfArrival) {
  AnswerRoom::Lease first = a_.Take(40);
  ASSERT_NE(first, nullptr);
  EXPECT_EQ(a_.Take(40), nullptr) << "more than the job's share";
  const auto second = Await(&a_, "second", 40), third = Await(&a_, "third", 5);
  EXPECT_EQ(a_.Take(5), nullptr) << "others of the job wait";
  EXPECT_EQ(Granted(), Names());
  first.reset();
  EXPECT_EQ(Granted(), (Names{"second", "third"}));
  held_.clear();
  EXPECT_NE(a_.Take(50), nullptr);
}

TEST_F(AnswerRoomTest, AJobThatHoldsItsShareHoldsUpNoOther) {
  const AnswerRoom::Lease flood = a_.Take(50);
  const auto more = Await(&a_, "more", 50);
  EXPECT_NE(b_.Take(25), nullptr);
  const AnswerRoom::Lease own = b_.Take(25);
  const auto its = Await(&b_, "its", 25);
  EXPECT_EQ(Granted(), Names());
}

TEST_F(AnswerRoomTest, BytesThatBecomeFreeAreForTheOldest) {
  AnswerRoom::Lease most = a_.Take(90);
  AnswerRoom::ForJob c(&room_, &executor_);
  const auto large = Await(&b_, "large", 20);
  EXPECT_EQ(c.Take(5), nullptr) << "or small answers would keep the large one out for ever";
  const auto small = Await(&c, "small", 5);
  EXPECT_EQ(Granted(), Names());
  most.reset();
  EXPECT_EQ(Granted(), (Names{"large", "small"}));
}

TEST_F(AnswerRoomTest, ATicketThatIsGivenUpLetsTheNextGo) {
  const AnswerRoom::Lease most = a_.Take(90);
  AnswerRoom::Ticket large = Await(&b_, "large", 20);
  const auto small = Await(&b_, "small", 5);
  EXPECT_EQ(Granted(), Names());
  large.reset();
  EXPECT_EQ(Granted(), (Names{"small"}));
}

TEST_F(AnswerRoomTest, RoomGrantedToNobodyGoesToTheNext) {
  AnswerRoom::Lease most = a_.Take(100);
  const auto dead = b_.Await(60, [](const AnswerRoom::Lease&) {});
  const auto alive = Await(&b_, "alive", 60);
  most.reset();
  executor_.RunAll();
  EXPECT_EQ(Granted(), (Names{"alive"}));
}

TEST_F(AnswerRoomTest, AnAnswerLargerThanAllRoomGoesAlone) {
  AnswerRoom::Lease small = b_.Take(1);
  const auto large = Await(&a_, "large", 1000);
  EXPECT_EQ(Granted(), Names());
  small.reset();
  EXPECT_EQ(Granted(), (Names{"large"}));
  EXPECT_EQ(b_.Take(1), nullptr);
  held_.clear();
  EXPECT_NE(b_.Take(1), nullptr);
}

TEST_F(AnswerRoomTest, LeasesMayOutliveTheirJob) {
  AnswerRoom::Lease lease;
  {
    AnswerRoom::ForJob gone(&room_, &executor_);
    lease = gone.Take(100);
  }
  const auto next = Await(&a_, "next", 1);
  EXPECT_EQ(Granted(), Names());
  lease.reset();
  EXPECT_EQ(Granted(), (Names{"next"}));
}

}  // namespace
}  // namespace ballast::services
