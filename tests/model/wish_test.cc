// What an operator wants of a job's servers, and which servers follow from it.
#include "ballast/proto/model/wish.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/match.h"
#include "ballast/proto/base/status.h"

namespace ballast::model {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

v1::Table TableOf(const std::vector<std::string>& members, uint32_t wanted, uint32_t replicas = 2) {
  v1::Table table;
  table.set_replicas(replicas);
  table.set_wanted_servers(wanted);
  for (const std::string& member : members) table.add_members()->set_server_id(member);
  return table;
}

v1::Wish Take(const absl::StatusOr<v1::Wish>& wish) {
  EXPECT_TRUE(wish.ok()) << wish.status();
  return wish.ok() ? *wish : v1::Wish();
}

TEST(Wish, WithoutOneAJobWantsAsManyServersAsItWasFoundedWith) {
  const v1::Table table = TableOf({"a", "b", "c"}, 3);
  const v1::Wish none;
  // All are there: nobody joins, whoever is registered.
  EXPECT_THAT(ChooseServers(table, none, {"a", "b", "c"}, {"d"}), ElementsAre("a", "b", "c"));
  // b is lost: the first by name takes its place, be it b itself with another directory.
  EXPECT_THAT(ChooseServers(table, none, {"a", "c"}, {"e", "d"}), ElementsAre("a", "c", "d"));
  EXPECT_THAT(ChooseServers(table, none, {"a", "c"}, {"b", "d"}), ElementsAre("a", "c", "b"));
  EXPECT_THAT(ChooseServers(table, none, {"a", "c"}, {}), ElementsAre("a", "c"));
  // A job that has gone on without b, and has forgotten it.
  EXPECT_THAT(ChooseServers(TableOf({"a", "c"}, 3), none, {"a", "c"}, {"d", "e"}), ElementsAre("a", "c", "d"));
  // A table of a version that kept no number.
  EXPECT_THAT(ChooseServers(TableOf({"a", "c"}, 0), none, {"a", "c"}, {"d"}), ElementsAre("a", "c"));
}

TEST(Wish, AddsAServerBeforeOthers) {
  const v1::Table table = TableOf({"a", "b"}, 2);
  const v1::Wish wish = Take(WishToAdd(table, v1::Wish(), {"e"}));
  EXPECT_EQ(WantedServers(table, wish), 3u);
  EXPECT_THAT(ChooseServers(table, wish, {"a", "b"}, {"d", "e"}), ElementsAre("a", "b", "e"));
  // It is away: another one serves as well, and stays when it is back.
  EXPECT_THAT(ChooseServers(table, wish, {"a", "b"}, {"d"}), ElementsAre("a", "b", "d"));
  EXPECT_THAT(ChooseServers(TableOf({"a", "b", "d"}, 3), wish, {"a", "b", "d"}, {"e"}), ElementsAre("a", "b", "d"));
  // On top of a wish: both.
  const v1::Wish both = Take(WishToAdd(table, wish, {"f"}));
  EXPECT_THAT(ChooseServers(table, both, {"a", "b"}, {"c", "e", "f"}), ElementsAre("a", "b", "e", "f"));
  EXPECT_THAT(std::string(WishToAdd(table, wish, {"e"}).status().message()), HasSubstr("has server 'e' already"));
  EXPECT_THAT(std::string(WishToAdd(table, v1::Wish(), {"a"}).status().message()), HasSubstr("has server 'a' already"));
}

TEST(Wish, ADrainedServerIsNotChosenAgain) {
  const v1::Table table = TableOf({"a", "b", "c"}, 3);
  const v1::Wish wish = Take(WishToDrain(table, v1::Wish(), {"b"}));
  EXPECT_THAT(ChooseServers(table, wish, {"a", "b", "c"}, {"d"}), ElementsAre("a", "c"));
  // c is lost later: b is the first by name, and excluded.
  EXPECT_THAT(ChooseServers(TableOf({"a"}, 2), wish, {"a"}, {"b", "d"}), ElementsAre("a", "d"));
  EXPECT_EQ(ReasonOf(WishToDrain(table, wish, {"b"}).status()), kBadConfig) << "it is drained already";
  EXPECT_THAT(std::string(WishToDrain(table, wish, {"a"}).status().message()),
              HasSubstr("2 copies of each chunk on 2 server(s)"));
  EXPECT_THAT(std::string(WishToDrain(table, v1::Wish(), {"x"}).status().message()),
              HasSubstr("does not have server 'x'; it has, or shall have, 'a', 'b', 'c'"));
  // And back.
  const v1::Wish back = Take(WishToAdd(table, wish, {"b"}));
  EXPECT_THAT(back.not_(), IsEmpty());
  EXPECT_THAT(ChooseServers(TableOf({"a", "c"}, 2), back, {"a", "c"}, {"b"}), ElementsAre("a", "c", "b"));
}

// c was lost, and the group goes on without it.
TEST(Wish, ALostServerIsTakenAway) {
  const v1::Table table = TableOf({"a", "b"}, 3);
  for (const absl::Status& refused :
       {WishToDrain(table, v1::Wish(), {"typo"}).status(), WishToReplace(table, v1::Wish(), "typo", "e").status()}) {
    EXPECT_EQ(ReasonOf(refused), kBadConfig);
    EXPECT_THAT(std::string(refused.message()),
                AllOf(HasSubstr("does not have server 'typo'; it has, or shall have, 'a', 'b'; nothing was changed"),
                      HasSubstr("if 'typo' is one, and lost for good, add --lost")));
  }
  const v1::Wish drained = Take(WishToDrain(table, v1::Wish(), {"c"}, Lost::kSome));
  EXPECT_EQ(ShowWish(table, drained), "2 server(s), without 'c', 2 copies of each chunk");
  EXPECT_THAT(ChooseServers(table, drained, {"a", "b"}, {"c", "d"}), ElementsAre("a", "b"));
  const v1::Wish replaced = Take(WishToReplace(table, v1::Wish(), "c", "e", Lost::kSome));
  EXPECT_THAT(ChooseServers(table, replaced, {"a", "b"}, {"c", "d", "e"}), ElementsAre("a", "b", "e"));
  // Nobody else was lost.
  const v1::Table larger = TableOf({"a", "b", "d"}, 4);
  EXPECT_EQ(ReasonOf(WishToDrain(larger, v1::Wish(), {"c", "x"}, Lost::kSome).status()), kBadConfig);
  const v1::Wish once = Take(WishToDrain(larger, v1::Wish(), {"c"}, Lost::kSome));
  EXPECT_EQ(ReasonOf(WishToDrain(larger, once, {"c"}, Lost::kSome).status()), kBadConfig);
  EXPECT_EQ(ReasonOf(WishToDrain(larger, once, {"x"}, Lost::kSome).status()), kBadConfig);
  const v1::Wish more = Take(WishToAdd(TableOf({"a", "b", "c"}, 3), v1::Wish(), {"e"}));
  EXPECT_EQ(ReasonOf(WishToDrain(TableOf({"a", "b", "c"}, 3), more, {"x"}, Lost::kSome).status()), kBadConfig)
      << "e is to come";
}

TEST(Wish, ReplacesAServerThatMayBeLost) {
  const v1::Table table = TableOf({"a", "b"}, 2);
  const v1::Wish wish = Take(WishToReplace(table, v1::Wish(), "b", "e"));
  EXPECT_THAT(ChooseServers(table, wish, {"a", "b"}, {"d", "e"}), ElementsAre("a", "e"));
  EXPECT_THAT(ChooseServers(table, wish, {"a"}, {"d", "e"}), ElementsAre("a", "e"));
  EXPECT_EQ(ReasonOf(WishToReplace(table, v1::Wish(), "x", "e").status()), kBadConfig);
  EXPECT_EQ(ReasonOf(WishToReplace(table, v1::Wish(), "b", "a").status()), kBadConfig);
  EXPECT_EQ(ReasonOf(WishToReplace(table, wish, "b", "e").status()), kBadConfig) << "it is replaced already";
}

// A machine is lost while another one is to leave: the job keeps its copies.
TEST(Wish, NobodyLeavesWithoutAServerForEachCopy) {
  const v1::Wish replace = Take(WishToReplace(TableOf({"a", "b"}, 2), v1::Wish(), "a", "e"));
  EXPECT_THAT(ChooseServers(TableOf({"a", "b", "e"}, 2), replace, {"a", "b"}, {}), ElementsAre("b", "a"))
      << "e is lost";
  EXPECT_THAT(ChooseServers(TableOf({"a", "b"}, 2), replace, {"a", "b"}, {"d"}), ElementsAre("b", "d"));
  const v1::Wish drain = Take(WishToDrain(TableOf({"a", "b", "c"}, 3), v1::Wish(), {"c"}));
  EXPECT_THAT(ChooseServers(TableOf({"a", "b", "c"}, 2), drain, {"a", "c"}, {}), ElementsAre("a", "c")) << "b is lost";
  EXPECT_THAT(ChooseServers(TableOf({"a"}, 2), drain, {"a"}, {"c"}), ElementsAre("a")) << "it has left";
  const v1::Wish one = Take(WishForCopies(TableOf({"a", "b", "c"}, 2), drain, 1));
  EXPECT_THAT(ChooseServers(TableOf({"a", "b", "c"}, 2), one, {"a", "c"}, {}), ElementsAre("a"));
}

TEST(Wish, CopiesNeedServers) {
  const v1::Table table = TableOf({"a", "b", "c"}, 3);
  EXPECT_EQ(WantedCopies(table, v1::Wish()), 2u);
  EXPECT_EQ(WantedCopies(table, Take(WishForCopies(table, v1::Wish(), 3))), 3u);
  EXPECT_EQ(WantedCopies(table, Take(WishForCopies(table, v1::Wish(), 1))), 1u);
  for (const uint32_t copies : {0u, 4u, 5u}) {
    EXPECT_EQ(ReasonOf(WishForCopies(table, v1::Wish(), copies).status()), kBadConfig) << copies;
  }
  const v1::Wish more = Take(WishToAdd(table, v1::Wish(), {"d"}));
  EXPECT_TRUE(WishForCopies(table, more, 4).ok());
}

TEST(Wish, RemovesAMembershipAtOnceIfOthersHaveAll) {
  v1::Table table = TableOf({"a", "b", "c"}, 3);
  for (const auto& [one, other] : {std::pair(0u, 1u), std::pair(1u, 2u)}) {
    v1::Shard* const shard = table.add_shards();
    shard->add_holders(one);
    shard->add_holders(other);
  }
  table.mutable_members(0)->mutable_since()->set_counter(4);
  const v1::Wish wish = Take(WishToRemove(table, Take(WishToDrain(table, v1::Wish(), {"c"})), {"a"}));
  EXPECT_EQ(ShowWish(table, wish), "2 server(s), without 'c', 'a' removed at once, 2 copies of each chunk");
  EXPECT_TRUE(IsRemoved(wish, table.members(0)));
  EXPECT_FALSE(IsRemoved(wish, table.members(1)));
  EXPECT_THAT(std::string(WishToRemove(table, wish, {"b"}).status().message()),
              HasSubstr("1 of 2 shards would be lost"))
      << "a is to go already";
  EXPECT_THAT(std::string(WishToRemove(table, wish, {"x"}).status().message()),
              HasSubstr("server 'x' has nothing of the job; its members are 'a', 'b', 'c'"));
  // It has joined anew: the wish is about what it was.
  table.mutable_members(0)->mutable_since()->set_counter(7);
  EXPECT_FALSE(IsRemoved(wish, table.members(0)));
  const v1::Wish next = Take(WishToRemove(table, wish, {"c"}));
  ASSERT_EQ(next.now_size(), 1);
  EXPECT_EQ(next.now(0).server_id(), "c");
  EXPECT_THAT(next.not_(), ElementsAre("c"));
}

TEST(Wish, IsShownInWords) {
  const v1::Table table = TableOf({"a", "b", "c"}, 3);
  EXPECT_EQ(ShowWish(table, v1::Wish()), "3 server(s), 2 copies of each chunk");
  EXPECT_EQ(ShowWish(table, Take(WishToReplace(table, v1::Wish(), "b", "e"))),
            "3 server(s), 'e' before others, without 'b', 2 copies of each chunk");
}

}  // namespace
}  // namespace ballast::model
