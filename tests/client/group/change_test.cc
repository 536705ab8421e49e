// A group that opens a job with a table changes its servers.
#include "ballast/client/group/change.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ballast/tests/client/group/change_fixture.h"

namespace ballast::client {
namespace {

using ::testing::Contains;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST_F(ChangeTest, NothingIsWrittenWhereNothingChanges) {
  const v1::Table next = Opened();
  EXPECT_EQ(next.SerializeAsString(), first_.SerializeAsString());
  EXPECT_THAT(lines_, IsEmpty());
  EXPECT_THAT(fenced_, ElementsAre(0, 1, 2)) << "spares are none of its business";
  EXPECT_THAT(dropped_, IsEmpty());
}

// Before the fence servers train, and tell of different moments: nobody lacks a copy for that.
TEST_F(ChangeTest, ServersAtWorkAnswerAtDifferentSteps) {
  behind_ = {{1, 3}, {2, 2}};
  asks_ahead_ = true;
  Wish(model::WishToAdd(first_, v1::Wish(), {"s4"}));
  const v1::Table next = Opened();
  EXPECT_THAT(Ids(next), ElementsAre("s0", "s1", "s2", "s4"));
  EXPECT_THAT(asked_, Each(HasSubstr(" ahead"))) << "what was planned ahead holds after the fence";
}

TEST_F(ChangeTest, ServersAtWorkNeedNoChange) {
  behind_ = {{1, 3}, {2, 2}};
  EXPECT_TRUE(model::SameTable(Opened(), first_));
  ASSERT_EQ(key_.Read(Soon()), absl::OkStatus());
  Change change(servers_.router.get(), &members_, &key_, options_, reached_, grace_);
  ASSERT_TRUE(change.Look(open_.spec(), Soon()).ok());
  EXPECT_FALSE(change.IsNeeded());
}

TEST_F(ChangeTest, ASpareTakesThePlaceOfALostServer) {
  LoseDisk(1);
  const v1::Table next = Opened();
  EXPECT_THAT(Ids(next), ElementsAre("s0", "s2", "s3"));
  EXPECT_EQ(next.members(2).since().counter(), claimed_);
  EXPECT_EQ(next.wanted_servers(), 3u);
  EXPECT_EQ(next.life(), 77u);
  EXPECT_GT(Fillers(next), 0);
  EXPECT_THAT(fenced_, ElementsAre(0, 2, 3)) << "who shall join is fenced";
  EXPECT_THAT(lines_, Contains(HasSubstr("job 'job' goes on without 's1'")));
  EXPECT_THAT(lines_, Contains(HasSubstr("server 's3' joins and copies")));
  ASSERT_EQ(key_.Read(Soon()), absl::OkStatus());
  EXPECT_TRUE(model::SameTable(key_.value().table(), next));
}

TEST_F(ChangeTest, AServerThatARankDoesNotReachDoesNotJoin) {
  LoseDisk(1);
  reached_.erase(model::TargetOf("s3", 103));
  EXPECT_THAT(Ids(Opened()), ElementsAre("s0", "s2", "s4"));
}

TEST_F(ChangeTest, AWipedServerJoinsUnderItsNameAndCountsOnceItHasCopied) {
  LoseDisk(1);
  reached_.insert(model::TargetOf("s1", 999));
  const v1::Table filling = Opened();
  EXPECT_THAT(Ids(filling), ElementsAre("s0", "s2", "s1"));
  EXPECT_EQ(filling.members(2).disk(), 999u);
  EXPECT_EQ(filling.members(2).since().counter(), claimed_);
  const int copies = Fillers(filling);
  EXPECT_EQ(copies, 8);
  // It has opened that table, and copies still.
  has_job_.insert(1);
  *open_.mutable_table() = filling;
  *open_.mutable_epoch() = At(claimed_);
  lines_.clear();
  // Its Open is as new as its membership.
  for (int i = 0; i < 3; ++i) {
    servers_[static_cast<size_t>(i)].on_get_job = [this, i](const v1::GetJobRequest&) {
      auto job = JobOf(i);
      *job->mutable_opened() = open_.epoch();
      return job;
    };
    servers_[static_cast<size_t>(i)].on_fence = [this, i](const v1::FenceRequest& fence) {
      v1::FenceResponse response;
      *response.mutable_job() = *JobOf(i);
      *response.mutable_job()->mutable_opened() = open_.epoch();
      *response.mutable_job()->mutable_promised() = fence.epoch();
      return response;
    };
  }
  EXPECT_TRUE(model::SameTable(Opened(), filling));
  EXPECT_THAT(lines_, IsEmpty());
  fills_.insert(1);
  const v1::Table settled = Opened();
  EXPECT_EQ(Fillers(settled), 0);
  EXPECT_EQ(model::ShortShards(settled), 0);
  EXPECT_THAT(lines_, ElementsAre("job 'job': server 's1' has copied 8 of 12 shards and holds them now"));
}

TEST_F(ChangeTest, AMemberThatFailsEndsTheOpening) {
  errors_[1] = model::Error(absl::StatusCode::kPermissionDenied, model::kNoRight, "not your job");
  EXPECT_THAT(std::string(Open().status().message()), HasSubstr("not your job"));
  // Unless an operator drains it.
  Wish(model::WishToReplace(first_, v1::Wish(), "s1", "s4"));
  EXPECT_THAT(Ids(Opened()), ElementsAre("s0", "s2", "s4"));
}

// Whom an operator drains or removes has to stay as long as no other server has what it has.
TEST_F(ChangeTest, AMemberThatFailsAndAloneHasAShardIsWaitedFor) {
  errors_[1] = model::Error(absl::StatusCode::kInternal, model::kIo, "the disk is broken");
  LoseDisk(2);
  const v1::Wish drain = *model::WishToReplace(first_, v1::Wish(), "s1", "s4");
  const v1::Wish remove = *model::WishToRemove(first_, v1::Wish(), {"s1"});
  for (const v1::Wish& wish : {drain, remove}) {
    Wish(wish);
    const auto next = Open();
    EXPECT_EQ(model::ReasonOf(next.status()), model::kServerDown);
    const std::string message(next.status().message());
    EXPECT_THAT(message, HasSubstr("4 of 12 shards have no copy on the servers that answered (the first is shard 2); "
                                   "needed is 's1' or 's2' with the data directory that it had. Server 's1' says: "));
    EXPECT_THAT(message, HasSubstr("the disk is broken"));
    EXPECT_EQ(claimed_, 0u) << "nothing was claimed";
  }
  // Nobody joins in its place.
  errors_.erase(1);
  EXPECT_THAT(Ids(Opened()), Contains("s1"));
}

// Whose state cannot be read has no copy, and the others go on without it, as without a lost disk.
TEST_F(ChangeTest, AMemberWithoutItsStateIsLeftOut) {
  errors_[1] = model::Error(absl::StatusCode::kDataLoss, model::kChecksum, "its log is damaged");
  EXPECT_THAT(Ids(Opened()), ElementsAre("s0", "s2", "s3"));
  EXPECT_THAT(lines_, Contains(HasSubstr("server 's1' is left out: ")));
  EXPECT_THAT(lines_, Contains(HasSubstr("its log is damaged")));
}

// A disk that breaks takes a server's copies away, though the server answers.
TEST_F(ChangeTest, AMemberWhoseDiskIsBrokenIsLeftOut) {
  errors_[1] = model::Error(absl::StatusCode::kInternal, model::kIo, "job 'job' stopped on server 's1'");
  EXPECT_THAT(Ids(Opened()), ElementsAre("s0", "s2", "s3"));
  EXPECT_THAT(lines_,
              Contains(HasSubstr("server 's1' is left out: server s1: GetJob of job 'job': job 'job' stopped")));
}

// Alone it would have a shard: then its error tells what to do.
TEST_F(ChangeTest, AMemberWhoseDiskIsFullIsWaitedForIfItIsNeeded) {
  errors_[1] = model::Error(absl::StatusCode::kInternal, model::kDiskFull, "the disk is full");
  LoseDisk(2);
  const auto next = Open();
  EXPECT_EQ(model::ReasonOf(next.status()), model::kServerDown);
  EXPECT_THAT(std::string(next.status().message()),
              HasSubstr("Server 's1' says: server s1: GetJob of job 'job': the disk is full"));
  EXPECT_EQ(claimed_, 0u) << "nothing was claimed";
}

TEST_F(ChangeTest, AWishAddsAndDrains) {
  Wish(model::WishToReplace(first_, v1::Wish(), "s1", "s4"));
  const v1::Table next = Opened();
  EXPECT_THAT(Ids(next), ElementsAre("s0", "s1", "s2", "s4")) << "s1 stays until others have what it has";
  EXPECT_THAT(lines_, Contains(HasSubstr("server 's4' joins and copies 8 of 12 shards")));
  EXPECT_THAT(lines_, Contains(HasSubstr("server 's1' leaves once others have copied 8 of 12 shards")));
  EXPECT_THAT(dropped_, IsEmpty());
  EXPECT_EQ(next.wanted_servers(), 3u);
}

TEST_F(ChangeTest, AWishForMoreServersIsRememberedByTheTable) {
  Wish(model::WishToAdd(first_, v1::Wish(), {"s4"}));
  const v1::Table next = Opened();
  EXPECT_THAT(Ids(next), ElementsAre("s0", "s1", "s2", "s4"));
  EXPECT_EQ(next.wanted_servers(), 4u);
}

TEST_F(ChangeTest, AWishForAnEarlierJobOfTheNameIsNone) {
  auto wish = model::WishToAdd(first_, v1::Wish(), {"s4"});
  wish->set_life(76);
  ASSERT_TRUE(*registry_.PutWish("job", *wish, 0, Soon()));
  EXPECT_TRUE(model::SameTable(Opened(), first_));
}

TEST_F(ChangeTest, AServerThatIsAwayIsWaitedForByTheWish) {
  Wish(model::WishToAdd(first_, v1::Wish(), {"s9"}));
  reached_.clear();
  v1::Table next = Opened();
  EXPECT_THAT(Ids(next), ElementsAre("s0", "s1", "s2"));
  EXPECT_EQ(next.wanted_servers(), 4u);
}

TEST_F(ChangeTest, WhoWasLeftOutIsToldToDropTheJob) {
  // s3 and s4 were members once, and have the job still.
  has_job_.insert(3);
  has_job_.insert(4);
  EXPECT_TRUE(model::SameTable(Opened(), first_));
  EXPECT_THAT(dropped_, ElementsAre(3, 4));
  EXPECT_THAT(lines_, ElementsAre(HasSubstr("server 's4' is no member any more and keeps what it had of the job. "
                                            "`ballastctl drop --job job --servers s4` frees it.")));
}

TEST_F(ChangeTest, AServerIsRemovedAtOnceAndJoinsAnewLater) {
  Wish(model::WishToRemove(first_, v1::Wish(), {"s1"}));
  reached_ = {};
  const v1::Table next = Opened();
  EXPECT_THAT(Ids(next), ElementsAre("s0", "s2"));
  EXPECT_THAT(lines_,
              Contains(HasSubstr("goes on without 's1', removed by an operator (`ballastctl remove --now`); ")));
  EXPECT_THAT(fenced_, Contains(1));
  EXPECT_THAT(dropped_, Contains(1)) << "what it has is of no use";
  reached_ = {model::TargetOf("s1", 101)};
  *open_.mutable_table() = next;
  EXPECT_THAT(Ids(Opened()), ElementsAre("s0", "s2")) << "it would count as filled";
  EXPECT_THAT(lines_,
              Contains(HasSubstr("server 's1' was removed and has not dropped what it had, so it cannot join")));
  has_job_.erase(1);
  const v1::Table again = Opened();
  EXPECT_THAT(Ids(again), ElementsAre("s0", "s2", "s1"));
  EXPECT_EQ(again.members(2).since().counter(), claimed_);
}

TEST_F(ChangeTest, WhoIsNeededIsNotRemoved) {
  Wish(model::WishToRemove(first_, v1::Wish(), {"s1"}));
  LoseDisk(2);  // after the operator asked
  const v1::Table next = Opened();
  EXPECT_THAT(Ids(next), Contains("s1"));
  EXPECT_THAT(lines_,
              Contains(HasSubstr("the wish to remove 's1' at once is not heeded, since the others are not enough: ")));
}

TEST_F(ChangeTest, WhoIsRemovedNeedsNotAnswer) {
  Wish(model::WishToRemove(first_, v1::Wish(), {"s1"}));
  errors_[1] = model::Error(absl::StatusCode::kInternal, model::kIo, "the disk is broken");
  EXPECT_THAT(Ids(Opened()), ElementsAre("s0", "s2", "s3"));
}

TEST_F(ChangeTest, WhoDoesNotAnswerIsDoneWithout) {
  errors_[1] = model::Error(absl::StatusCode::kUnavailable, model::kServerDown, "is dead");
  patience_ = absl::Seconds(4);
  EXPECT_THAT(Ids(Opened()), ElementsAre("s0", "s2", "s3"));
}

TEST_F(ChangeTest, ChunksThatAreNowhereElseAreWaitedFor) {
  for (const int i : {0, 1}) errors_[i] = model::Error(absl::StatusCode::kUnavailable, model::kServerDown, "gone");
  patience_ = absl::Seconds(4);
  const auto next = Open();
  EXPECT_EQ(model::ReasonOf(next.status()), model::kServerDown);
  EXPECT_THAT(std::string(next.status().message()), HasSubstr("have no copy on the servers that answered"));
  EXPECT_EQ(claimed_, 0u) << "nothing was claimed";
}

TEST_F(ChangeTest, ServersThatLostTheirMemoryJoinAnewWhileOthersHaveTheCopies) {
  lost_.insert(2);
  const v1::Table next = Opened();
  EXPECT_THAT(Ids(next), ElementsAre("s0", "s1", "s2"));
  EXPECT_EQ(next.members(2).since().counter(), claimed_);
  EXPECT_THAT(lines_, Contains(HasSubstr("goes on without 's2'")));
  EXPECT_THAT(lines_, Contains(HasSubstr("server 's2' joins and copies 8 of 12 shards")));
  lost_.insert(1);
  Put(first_);
  EXPECT_EQ(model::ReasonOf(Open().status()), model::kStateLost);
}

}  // namespace
}  // namespace ballast::client
