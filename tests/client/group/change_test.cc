// A group that opens a job with a table changes its servers: against servers that say what the test wants, and an etcd
// of the test's own.
#include "ballast/client/group/change.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ballast/proto/model/brief_open.h"
#include "ballast/proto/model/next_table.h"
#include "ballast/proto/model/protocol.h"
#include "ballast/proto/model/verdict.h"
#include "ballast/proto/model/wish.h"
#include "ballast/tests/client/fake_server.h"
#include "ballast/tests/client/transport/small_etcd.h"

namespace ballast::client {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::UnorderedElementsAre;

constexpr int kShards = 12;

v1::Epoch At(uint64_t counter) {
  v1::Epoch epoch;
  epoch.set_counter(counter);
  return epoch;
}

absl::Time Soon() { return absl::Now() + absl::Seconds(60); }

absl::Status NoRoom(const std::string& why = "1000 bytes are short in dram") {
  return model::Error(absl::StatusCode::kResourceExhausted, model::kBudget, why);
}

// Job "job" on s0, s1 and s2, with two copies, at step 4; s3 and s4 are registered too. Server i has disk 100 + i.
class ChangeTest : public testing::Test {
 protected:
  ChangeTest() : servers_(5), registry_(etcd_.Connect()), key_(&registry_, "job"), members_(servers_.router.get()) {
    options_.job = "job";
    options_.failover_after = absl::Seconds(2);
    options_.progress = [this](const std::string& line) { lines_.push_back(line); };
    open_ = OpenOnFakes(0, 1);
    open_.mutable_epoch()->set_counter(1);
    std::vector<v1::Member> founders;
    for (int i = 0; i < 5; ++i) {
      FakeServer& server = servers_[static_cast<size_t>(i)];
      server.disk = 100 + static_cast<uint64_t>(i);
      v1::Member member;
      member.set_server_id(server.name());
      member.set_disk(server.disk);
      member.set_weight(1);
      if (i < 3) founders.push_back(member);
      server.on_get_job = [this, i](const v1::GetJobRequest&) { return JobOf(i); };
      server.on_fence = [this, i](const v1::FenceRequest& fence) -> absl::StatusOr<v1::FenceResponse> {
        BALLAST_ASSIGN_OR_RETURN(v1::GetJobResponse job, JobOf(i));
        fenced_.insert(i);
        *job.mutable_promised() = fence.epoch();
        v1::FenceResponse response;
        *response.mutable_job() = job;
        return response;
      };
      server.on_open = [this, i](const v1::OpenRequest& open) -> absl::StatusOr<v1::OpenResponse> {
        EXPECT_TRUE(open.dry_run());
        asked_.push_back(absl::StrCat("s", i, model::IsBrief(open) ? " briefly" : "", fenced_.empty() ? " ahead" : ""));
        const auto refusal = refusals_.find(i);
        if (refusal != refusals_.end()) return refusal->second;
        return v1::OpenResponse();
      };
      server.on_drop = [this, i](const v1::DropJobRequest& drop) -> absl::StatusOr<v1::DropJobResponse> {
        EXPECT_EQ(drop.epoch().counter(), key_.value().claimed().counter());
        dropped_.insert(i);
        if (i == 4) return model::Error(absl::StatusCode::kPermissionDenied, model::kNoRight, "no right to drop");
        return v1::DropJobResponse();
      };
    }
    const std::vector<uint64_t> elements(kShards, 1);
    first_ = model::FirstTable({.servers = founders, .replicas = 2, .shard_elements = elements}, v1::Epoch());
    first_.set_life(77);
    *open_.mutable_table() = first_;
    for (int i = 0; i < 3; ++i) has_job_.insert(i);
    for (int i = 0; i < 5; ++i) reached_.insert(model::TargetOf(absl::StrCat("s", i), 100 + static_cast<uint64_t>(i)));
    Put(first_);
  }

  void Put(const v1::Table& table) {
    const auto found = registry_.FindJob("job", Soon());
    v1::JobKey key;
    *key.mutable_claimed() = At(1);
    *key.mutable_table() = table;
    EXPECT_TRUE(*registry_.PutJob("job", key, found->has_value() ? (*found)->revision : 0, Soon()));
  }
  void Wish(const absl::StatusOr<v1::Wish>& wish) {
    ASSERT_TRUE(wish.ok()) << wish.status();
    v1::Wish of_job = *wish;
    of_job.set_life(77);
    ASSERT_TRUE(*registry_.PutWish("job", of_job, 0, Soon()));
  }

  // Another server answers under the name.
  void LoseDisk(int i) {
    servers_[static_cast<size_t>(i)].disk = 999;
    has_job_.erase(i);
  }
  // What server i answers of the job.
  absl::StatusOr<v1::GetJobResponse> JobOf(int i) const {
    const auto error = errors_.find(i);
    if (error != errors_.end()) return error->second;
    v1::GetJobResponse job;
    job.set_server_id(absl::StrCat("s", i));
    job.set_disk(servers_.servers[static_cast<size_t>(i)]->disk);
    job.set_exists(has_job_.contains(i));
    job.set_committed(-1);
    if (!has_job_.contains(i)) return job;
    job.set_committed(4);
    job.set_state_lost(lost_.contains(i));
    job.mutable_decision()->set_step(4);
    *job.mutable_promised() = At(1);
    *job.mutable_opened() = At(1);
    *job.mutable_open() = open_;
    job.set_life(77);
    for (int t = 0; t < 3; ++t) job.add_tensor_steps(4);
    std::vector<uint32_t> filled;
    for (uint32_t s = 0; s < kShards; ++s) {
      const bool fills = fills_.contains(i);
      for (const uint32_t m : open_.table().shards(static_cast<int>(s)).holders()) {
        if (open_.table().members(static_cast<int>(m)).server_id() == job.server_id()) filled.push_back(s);
      }
      for (const uint32_t m : open_.table().shards(static_cast<int>(s)).fillers()) {
        if (fills && open_.table().members(static_cast<int>(m)).server_id() == job.server_id()) filled.push_back(s);
      }
    }
    job.set_filled_shards(model::MakeBitmap(kShards, filled));
    return job;
  }

  // From the look to the table.
  absl::StatusOr<v1::Table> Open() {
    BALLAST_RETURN_IF_ERROR(key_.Read(Soon()));
    BALLAST_RETURN_IF_ERROR(members_.Identify(key_, Spares::kConnect, absl::Seconds(2), Soon()));
    change_.emplace(servers_.router.get(), &members_, &key_, options_, reached_);
    BALLAST_ASSIGN_OR_RETURN(const Sight sight, change_->Look(open_.spec(), absl::Now() + patience_));
    EXPECT_EQ(sight.version, 4);
    if (asks_ahead_) change_->AskAhead(open_, Soon());
    BALLAST_ASSIGN_OR_RETURN(const v1::Epoch epoch, key_.Claim(v1::Table(), At(2), Soon()));
    claimed_ = epoch.counter();
    BALLAST_RETURN_IF_ERROR(change_->Claimed(epoch, Soon()));
    BALLAST_RETURN_IF_ERROR(change_->Fence("group", /*expect_empty=*/false, Soon()));
    EXPECT_EQ(change_->found().base, 4);
    v1::OpenRequest open = open_;
    *open.mutable_epoch() = epoch;
    open.set_base(4);
    *open.mutable_base_decision() = *change_->found().decision;
    if (tiling_.has_value()) *open.mutable_tiling() = *tiling_;
    BALLAST_ASSIGN_OR_RETURN(const v1::Table next, change_->Next(open, Soon()));
    BALLAST_RETURN_IF_ERROR(model::CheckTable(next));
    members_.PutFirst(next);
    BALLAST_RETURN_IF_ERROR(key_.WriteTable(next, epoch, Soon()));
    change_->Tell(next);
    change_->DropLeft(next);
    return next;
  }
  v1::Table Opened() {
    const auto next = Open();
    EXPECT_TRUE(next.ok()) << next.status();
    return next.ok() ? *next : v1::Table();
  }
  static std::vector<std::string> Ids(const v1::Table& table) {
    std::vector<std::string> ids;
    for (const v1::Member& member : table.members()) ids.push_back(member.server_id());
    return ids;
  }
  static int Fillers(const v1::Table& table) {
    int fillers = 0;
    for (const v1::Shard& shard : table.shards()) fillers += shard.fillers_size();
    return fillers;
  }

  FakeServers servers_;
  SmallEtcd etcd_;
  registry::Registry registry_;
  JobKey key_;
  Members members_;
  SessionOptions options_;
  std::set<std::string> reached_;
  std::optional<Change> change_;
  std::vector<std::string> lines_;
  v1::Table first_;
  v1::OpenRequest open_;  // of epoch 1
  std::set<int> has_job_, lost_, fills_, fenced_, dropped_;
  std::vector<std::string> asked_;  // for room
  bool asks_ahead_ = false;
  std::optional<v1::Tiling> tiling_;  // of the next Open; none: as before
  std::map<int, absl::Status> errors_, refusals_;
  absl::Duration patience_ = absl::Seconds(60);
  uint64_t claimed_ = 0;
};

TEST_F(ChangeTest, NothingIsWrittenWhereNothingChanges) {
  const v1::Table next = Opened();
  EXPECT_EQ(next.SerializeAsString(), first_.SerializeAsString());
  EXPECT_THAT(lines_, IsEmpty());
  EXPECT_THAT(fenced_, ElementsAre(0, 1, 2)) << "spares are none of its business";
  EXPECT_THAT(dropped_, IsEmpty());
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

TEST_F(ChangeTest, WhoHasNoRoomDoesNotJoin) {
  LoseDisk(1);
  refusals_[3] = NoRoom();
  EXPECT_THAT(Ids(Opened()), ElementsAre("s0", "s2")) << "s4 was not fenced: it joins at the next opening";
  EXPECT_THAT(lines_, Contains(HasSubstr("job 'job': server 's3' does not join: ")));
  EXPECT_THAT(lines_, Contains(HasSubstr("1000 bytes are short in dram")));
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

TEST_F(ChangeTest, AMemberThatFailsEndsTheOpening) {
  errors_[1] = model::Error(absl::StatusCode::kPermissionDenied, model::kNoRight, "not your job");
  EXPECT_THAT(std::string(Open().status().message()), HasSubstr("not your job"));
  // Unless an operator drains it.
  Wish(model::WishToReplace(first_, v1::Wish(), "s1", "s4"));
  EXPECT_THAT(Ids(Opened()), ElementsAre("s0", "s2", "s4"));
}

// Whose state cannot be read has no copy, and the others go on without it, as without a lost disk.
TEST_F(ChangeTest, AMemberWithoutItsStateIsLeftOut) {
  errors_[1] = model::Error(absl::StatusCode::kDataLoss, model::kChecksum, "its log is damaged");
  EXPECT_THAT(Ids(Opened()), ElementsAre("s0", "s2", "s3"));
  EXPECT_THAT(lines_, Contains(HasSubstr("server 's1' is left out: ")));
  EXPECT_THAT(lines_, Contains(HasSubstr("its log is damaged")));
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

TEST_F(ChangeTest, AWishThatCannotBeIsNotHeededAndNothingChanges) {
  Wish(model::WishToReplace(first_, v1::Wish(), "s1", "s4"));
  refusals_[4] = NoRoom();
  EXPECT_TRUE(model::SameTable(Opened(), first_));
  EXPECT_THAT(lines_, Contains(HasSubstr("the wish for 3 server(s), 's4' before others, without 's1', 2 copies of each "
                                         "chunk is not heeded, and its servers stay: ")));
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
