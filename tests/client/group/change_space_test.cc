// Servers are asked for room before a change, and what they have no room for gives way.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ballast/proto/base/status.h"
#include "ballast/proto/model/protocol.h"
#include "ballast/proto/model/wish.h"
#include "ballast/tests/client/group/change_fixture.h"

namespace ballast::client {
namespace {

using ::testing::Contains;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::IsSupersetOf;
using ::testing::UnorderedElementsAre;

TEST_F(ChangeTest, WhoHasNoRoomDoesNotJoin) {
  LoseDisk(1);
  refusals_[3] = NoRoom();
  EXPECT_THAT(Ids(Opened()), ElementsAre("s0", "s2")) << "s4 was not fenced: it joins at the next opening";
  EXPECT_THAT(lines_, Contains(HasSubstr("job 'job': server 's3' does not join: ")));
  EXPECT_THAT(lines_, Contains(HasSubstr("1000 bytes are short in dram")));
}

// Server s3 would copy 8 shards.
TEST_F(ChangeTest, WhoHasNoRoomForKeptVersionsDoesNotJoin) {
  LoseDisk(1);
  kept_of_shard_ = 100;
  free_nvme_[3] = 849;
  EXPECT_THAT(Ids(Opened()), ElementsAre("s0", "s2"));
  EXPECT_THAT(lines_, Contains(HasSubstr("job 'job': server 's3' does not join: server 's3' has no room for copies of "
                                         "the kept versions (2): nvme is short of 1 bytes, 800 are needed for them and "
                                         "50 for its chunks, 849 are free; ")));
  Put(first_);
  free_nvme_[3] = 850;
  EXPECT_THAT(Ids(Opened()), ElementsAre("s0", "s2", "s3"));
}

// Server s0 makes up for s1 as far as it has room. What an operator asks for has room or is not begun.
TEST_F(ChangeTest, AfterALossCopiesBeginWithoutRoomForAllKeptVersions) {
  kept_of_shard_ = 100;
  free_nvme_[0] = 60;
  Wish(model::WishToDrain(first_, v1::Wish(), {"s1"}));
  EXPECT_TRUE(model::SameTable(Opened(), first_));
  EXPECT_THAT(lines_,
              Contains(HasSubstr("is not heeded, and its servers stay: server 's0' has no room for copies of")));
  Put(first_);
  Wish(v1::Wish());
  LoseDisk(1);
  reached_.clear();
  const v1::Table next = Opened();
  EXPECT_THAT(Ids(next), ElementsAre("s0", "s2"));
  EXPECT_GT(Fillers(next), 0);
}

TEST_F(ChangeTest, AVersionThatWasKeptSinceTheServersWereAskedCounts) {
  asks_ahead_ = true;
  LoseDisk(1);
  kept_of_shard_ = 10;
  free_nvme_[3] = 130;
  EXPECT_THAT(Ids(Opened()), ElementsAre("s0", "s2", "s3"));
  EXPECT_THAT(asked_, UnorderedElementsAre("s0 ahead", "s2 ahead", "s3 ahead"));
  Put(first_);
  asked_.clear();
  fenced_.clear();
  servers_[0].on_fence = [this, fence = servers_[0].on_fence](const v1::FenceRequest& request) {
    kept_of_shard_ = 20;
    return fence(request);
  };
  EXPECT_THAT(Ids(Opened()), ElementsAre("s0", "s2"));
  EXPECT_THAT(asked_, IsSupersetOf({"s0 ahead", "s3 ahead", "s3"}));
  EXPECT_THAT(lines_, Contains(HasSubstr("nvme is short of 80 bytes, 160 are needed for them")));
}

TEST_F(ChangeTest, WhoHasTheSpecIsAskedBriefly) {
  open_.set_group("group");
  open_.set_spec_digest(model::SpecDigest(open_.spec()));
  LoseDisk(1);
  EXPECT_THAT(Ids(Opened()), ElementsAre("s0", "s2", "s3"));
  EXPECT_THAT(asked_, UnorderedElementsAre("s0 briefly", "s2 briefly", "s3"));
}

// A server takes a brief Open for slices that it knows alone.
TEST_F(ChangeTest, OtherRanksSendTheSpecAgain) {
  open_.set_group("group");
  open_.set_spec_digest(model::SpecDigest(open_.spec()));
  tiling_ = model::EvenTiling(3);
  EXPECT_THAT(Ids(Opened()), ElementsAre("s0", "s1", "s2"));
  EXPECT_THAT(asked_, UnorderedElementsAre("s0", "s1", "s2"));
}

TEST_F(ChangeTest, RoomThatWasThereBeforeTheClaimIsNotAskedForAgain) {
  asks_ahead_ = true;
  LoseDisk(1);
  const v1::Table next = Opened();
  EXPECT_THAT(Ids(next), ElementsAre("s0", "s2", "s3"));
  EXPECT_EQ(next.members(2).since().counter(), claimed_);
  EXPECT_THAT(asked_, UnorderedElementsAre("s0 ahead", "s2 ahead", "s3 ahead"));
}

TEST_F(ChangeTest, RoomThatWasNotThereBeforeTheClaimIsAskedForAgain) {
  asks_ahead_ = true;
  LoseDisk(1);
  refusals_[3] = NoRoom();
  EXPECT_THAT(Ids(Opened()), ElementsAre("s0", "s2"));
  EXPECT_THAT(asked_, UnorderedElementsAre("s0 ahead", "s2 ahead", "s3 ahead", "s0", "s2", "s3", "s0", "s2"));
}

TEST_F(ChangeTest, WithoutRoomForFurtherCopiesTheJobGoesOnWithThoseThatItHas) {
  LoseDisk(1);
  reached_.clear();
  servers_[0].on_open = [&](const v1::OpenRequest& open) -> absl::StatusOr<v1::OpenResponse> {
    for (const v1::Shard& shard : open.table().shards()) {
      if (shard.fillers_size() > 0 && shard.fillers(0) == 0) return NoRoom();
    }
    return v1::OpenResponse();
  };
  const v1::Table next = Opened();
  EXPECT_THAT(Ids(next), ElementsAre("s0", "s2"));
  EXPECT_EQ(Fillers(next), 0);
  EXPECT_EQ(next.wanted_servers(), 3u) << "the next opening tries again";
  EXPECT_THAT(lines_, Contains(HasSubstr("no further copies are made: ")));
}

TEST_F(ChangeTest, AWishThatCannotBeIsNotHeededAndNothingChanges) {
  Wish(model::WishToReplace(first_, v1::Wish(), "s1", "s4"));
  refusals_[4] = NoRoom();
  EXPECT_TRUE(model::SameTable(Opened(), first_));
  EXPECT_THAT(lines_, Contains(HasSubstr("the wish for 3 server(s), 's4' before others, without 's1', 2 copies of each "
                                         "chunk is not heeded, and its servers stay: ")));
}

// So it may be tried again and again.
TEST_F(ChangeTest, AWishWithoutRoomIsGivenUpBeforeTheClaim) {
  asks_ahead_ = true;
  Wish(model::WishToReplace(first_, v1::Wish(), "s1", "s4"));
  refusals_[4] = NoRoom();
  EXPECT_TRUE(model::SameTable(Opened(), first_));
  EXPECT_THAT(asked_, Each(EndsWith(" ahead")));
  EXPECT_FALSE(change_->heeds_wish());
  EXPECT_FALSE(change_->IsNeeded());
}

}  // namespace
}  // namespace ballast::client
