// Who shall hold a job by its next table: a function of what is known, without a server.
#include "ballast/client/group/choice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

#include "ballast/proto/model/protocol.h"

namespace ballast::client {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr uint64_t kLife = 7;

v1::Member ServerOf(const std::string& id) {
  v1::Member server;
  server.set_server_id(id);
  server.set_disk(static_cast<uint64_t>(id[0]));
  server.set_weight(1);
  return server;
}

// The job is on "a" and "b"; "c" and "d" are registered, and all ranks reach them.
class ChoiceTest : public testing::Test {
 protected:
  ChoiceTest() : choice_({model::TargetOf("c", 'c'), model::TargetOf("d", 'd')}) {
    v1::Table table;
    table.set_replicas(2);
    table.set_wanted_servers(2);
    table.set_life(kLife);
    for (const char* id : {"a", "b"}) *table.add_members() = ServerOf(id);
    choice_.SetTable(table);
    found_.counted = {0, 1};
    for (const char* id : {"a", "b", "c"}) Answers(id);
  }
  void Answers(const std::string& id) {
    servers_.push_back(ServerOf(id));
    v1::GetJobResponse& answer = answers_.emplace_back();
    answer.set_server_id(id);
    answer.set_disk(static_cast<uint64_t>(id[0]));
  }
  KnownServers Known() const { return {servers_, answers_, away_, found_}; }
  std::vector<std::string> Chosen() const {
    std::vector<std::string> ids;
    for (const v1::Member& server : choice_.Servers(Known())) ids.push_back(server.server_id());
    return ids;
  }
  void WishFor(const std::string& server, const std::string& without) {
    v1::Wish wish;
    wish.add_servers(server);
    if (!without.empty()) wish.add_not_(without);
    choice_.SetWish(wish);
  }

  Choice choice_;
  std::vector<v1::Member> servers_;
  std::vector<v1::GetJobResponse> answers_;
  std::set<std::string> away_;
  model::Found found_;
};

TEST_F(ChoiceTest, AServerIsKnownByItsNameAndDisk) {
  EXPECT_TRUE(choice_.IsMember(ServerOf("a")));
  EXPECT_FALSE(choice_.IsMember(ServerOf("c")));
  v1::Member wiped = ServerOf("a");
  wiped.set_disk(99);
  EXPECT_FALSE(choice_.IsMember(wiped));
  v1::GetJobResponse left = answers_[2];
  EXPECT_FALSE(choice_.IsLeftOver(left));
  left.set_exists(true);
  left.set_life(kLife);
  EXPECT_TRUE(choice_.IsLeftOver(left));
  left.set_life(kLife + 1);
  EXPECT_FALSE(choice_.IsLeftOver(left)) << "another job of the name";
}

TEST_F(ChoiceTest, ASpareTakesTheLostMembersPlace) {
  EXPECT_THAT(Chosen(), ElementsAre("a", "b")) << "nobody is lost";
  found_.counted = {1};
  answers_.erase(answers_.begin());
  EXPECT_THAT(Chosen(), ElementsAre("b", "c"));
  EXPECT_TRUE(choice_.Exclude("c"));
  EXPECT_FALSE(choice_.Exclude("c"));
  EXPECT_THAT(Chosen(), ElementsAre("b"));
}

TEST_F(ChoiceTest, AServerThatSomeRankDoesNotReachDoesNotJoin) {
  found_.counted = {1};
  answers_.clear();
  for (const char* id : {"b", "e"}) Answers(id);
  EXPECT_THAT(Chosen(), ElementsAre("b"));
}

TEST_F(ChoiceTest, NobodyLeavesForAServerThatDoesNotAnswer) {
  WishFor("c", /*without=*/"b");
  EXPECT_THAT(Chosen(), ElementsAre("a", "c"));
  answers_.pop_back();
  away_ = {"c"};
  EXPECT_THAT(Chosen(), ElementsAre("a", "b"));
  Answers("d");
  EXPECT_THAT(Chosen(), ElementsAre("a", "b")) << "nor does another one come in its place";
  found_.counted = {0};
  answers_.erase(answers_.begin() + 1);
  EXPECT_THAT(Chosen(), ElementsAre("a", "d")) << "but a lost member is replaced";
}

TEST_F(ChoiceTest, AWishGivesWayBeforeTheServerDoes) {
  WishFor("c", "b");
  const auto line = choice_.GiveWay("c", found_, "it is full");
  ASSERT_TRUE(line.has_value());
  EXPECT_THAT(*line, StartsWith("the wish for "));
  EXPECT_THAT(*line, HasSubstr("is not heeded, and its servers stay: it is full"));
  EXPECT_FALSE(choice_.heeds_wish());
  EXPECT_FALSE(choice_.Exclude("c")) << "it is left out, too";
  EXPECT_THAT(Chosen(), ElementsAre("a", "b"));
}

TEST_F(ChoiceTest, ASpareWithoutRoomDoesNotJoin) {
  found_.counted = {1};
  EXPECT_EQ(choice_.GiveWay("c", found_, "it is full"), "server 'c' does not join: it is full");
  answers_.erase(answers_.begin());
  EXPECT_THAT(Chosen(), ElementsAre("b"));
}

TEST_F(ChoiceTest, FurtherCopiesAreTheLastToGiveWay) {
  EXPECT_EQ(choice_.GiveWay("a", found_, "it is full"), "no further copies are made: it is full");
  EXPECT_EQ(choice_.GiveWay("a", found_, "it is full"), std::nullopt);
}

}  // namespace
}  // namespace ballast::client
