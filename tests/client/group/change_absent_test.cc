// Changes of a job's servers while one that may join does not answer.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <thread>

#include "absl/synchronization/notification.h"
#include "ballast/tests/client/group/change_fixture.h"

namespace ballast::client {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// Members may take as long as they like; who does not answer has a tenth of a second after them.
class AbsentTest : public ChangeTest {
 protected:
  AbsentTest() {
    options_.failover_after = absl::Seconds(60);
    grace_ = absl::Milliseconds(100);
  }
  ~AbsentTest() override {
    over_.Notify();
    if (later_.joinable()) later_.join();
  }
  // The server does not answer this call while the group goes on without it. It answers in the end, so that a group
  // that waits has it.
  void Hang(size_t server, const std::string& call) {
    servers_[server].Hang({call});
    later_ = std::thread([this, server] {
      if (!over_.WaitForNotificationWithTimeout(absl::Seconds(10))) servers_[server].GoOn();
    });
  }
  std::vector<std::string> Absent() const {
    std::vector<std::string> ids;
    for (const v1::Member& server : change_->absent()) ids.push_back(server.server_id());
    return ids;
  }

  absl::Notification over_;
  std::thread later_;
};

TEST_F(AbsentTest, WhoDoesNotSayWhoItIsDoesNotJoin) {
  LoseDisk(1);
  Hang(3, "Identify");
  EXPECT_THAT(Ids(Opened()), ElementsAre("s0", "s2", "s4"));
  EXPECT_THAT(members_.away(), ElementsAre("s3"));
}

TEST_F(AbsentTest, WhoDoesNotTellOfTheJobDoesNotJoin) {
  LoseDisk(1);
  Hang(3, "GetJob");
  EXPECT_THAT(Ids(Opened()), ElementsAre("s0", "s2", "s4"));
  EXPECT_THAT(Absent(), ElementsAre("s3"));
}

TEST_F(AbsentTest, WhoDoesNotPromiseDoesNotJoin) {
  LoseDisk(1);
  Hang(3, "Fence");
  EXPECT_THAT(Ids(Opened()), ElementsAre("s0", "s2")) << "s4 was not fenced: it joins at the next opening";
  EXPECT_THAT(Absent(), ElementsAre("s3"));
}

TEST_F(AbsentTest, WhoDoesNotSayWhetherItHasRoomDoesNotJoin) {
  LoseDisk(1);
  Hang(3, "Open");
  EXPECT_THAT(Ids(Opened()), ElementsAre("s0", "s2"));
  EXPECT_THAT(Absent(), ElementsAre("s3"));
  EXPECT_THAT(dropped_, IsEmpty()) << "nor is it waited for to drop anything";
  EXPECT_THAT(lines_, Contains(HasSubstr("server 's3' does not join yet: no answer within 100ms")));
}

TEST_F(AbsentTest, BeforeTheClaimAnotherServerTakesThePlace) {
  asks_ahead_ = true;
  LoseDisk(1);
  Hang(3, "Open");
  EXPECT_THAT(Ids(Opened()), ElementsAre("s0", "s2", "s4"));
  EXPECT_THAT(Absent(), ElementsAre("s3"));
}

TEST_F(AbsentTest, AChangeThatNeedsNoSpareGoesOn) {
  Hang(3, "Identify");
  EXPECT_TRUE(model::SameTable(Opened(), first_));
}

TEST_F(AbsentTest, AWishWaitsForTheServerThatItNames) {
  Wish(model::WishToAdd(first_, v1::Wish(), {"s4"}));
  Hang(4, "Identify");
  v1::Table next = Opened();
  EXPECT_THAT(Ids(next), ElementsAre("s0", "s1", "s2")) << "s3 does not take the place";
  EXPECT_EQ(next.wanted_servers(), 4u);
}

// Or the other two would copy what it has, and the new one would copy it once more.
TEST_F(AbsentTest, NobodyLeavesForAServerThatDoesNotAnswer) {
  Wish(model::WishToReplace(first_, v1::Wish(), "s1", "s4"));
  Hang(4, "Identify");
  EXPECT_TRUE(model::SameTable(Opened(), first_));
}

TEST_F(AbsentTest, ALostMemberIsReplacedThoughAWishWaits) {
  Wish(model::WishToAdd(first_, v1::Wish(), {"s4"}));
  LoseDisk(1);
  Hang(4, "Identify");
  EXPECT_THAT(Ids(Opened()), ElementsAre("s0", "s2", "s3"));
}

TEST_F(AbsentTest, AWishIsHeededThoughItsServerSaysNotWhetherItHasRoom) {
  Wish(model::WishToAdd(first_, v1::Wish(), {"s4"}));
  Hang(4, "Open");
  v1::Table next = Opened();
  EXPECT_THAT(Ids(next), ElementsAre("s0", "s1", "s2"));
  EXPECT_EQ(next.wanted_servers(), 4u);
}

TEST_F(AbsentTest, CopiesDoNotWaitForAWish) {
  const auto wish = model::WishForCopies(first_, *model::WishToAdd(first_, v1::Wish(), {"s4"}), 3);
  Wish(wish);
  LoseDisk(1);
  Hang(4, "Identify");
  EXPECT_THAT(Ids(Opened()), ElementsAre("s0", "s2", "s3"));
}

}  // namespace
}  // namespace ballast::client
