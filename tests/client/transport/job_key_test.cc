// A job's key against an etcd of this test's own, which loses answers and has other writers.
#include "ballast/client/discovery/job_key.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ballast/proto/base/status.h"
#include "ballast/tests/client/transport/small_etcd.h"

namespace ballast::client {
namespace {

v1::Table TableOf(const std::vector<std::pair<std::string, uint64_t>>& servers) {
  v1::Table table;
  table.set_replicas(1);
  for (const auto& [id, disk] : servers) {
    v1::Member* const member = table.add_members();
    member->set_server_id(id);
    member->set_disk(disk);
    member->set_address(absl::StrCat(id, ":7070"));
  }
  return table;
}

v1::Epoch EpochOf(uint64_t counter, uint64_t nonce) {
  v1::Epoch epoch;
  epoch.set_counter(counter);
  epoch.set_nonce(nonce);
  return epoch;
}

absl::Time Soon() { return absl::Now() + absl::Seconds(30); }

TEST(JobKey, IsMadeOnceAndClaimedByLaterGroups) {
  SmallEtcd etcd;
  registry::Registry registry = etcd.Connect();
  JobKey first(&registry, "job");
  ASSERT_EQ(first.Read(Soon()), absl::OkStatus());
  EXPECT_FALSE(first.exists());
  const auto made = first.Claim(TableOf({{"a", 1}, {"b", 2}}), EpochOf(1, 11), Soon());
  ASSERT_TRUE(made.ok()) << made.status();
  EXPECT_EQ(made->counter(), 1u);
  // A group that saw lower promises, and finds the servers at other addresses.
  JobKey second(&registry, "job");
  ASSERT_EQ(second.Read(Soon()), absl::OkStatus());
  ASSERT_TRUE(second.exists());
  v1::Table members = TableOf({{"a", 1}, {"b", 2}});
  members.mutable_members(1)->set_address("b:8080");
  const auto claimed = second.Claim(members, EpochOf(1, 22), Soon());
  ASSERT_TRUE(claimed.ok()) << claimed.status();
  EXPECT_EQ(claimed->counter(), 2u) << "above the claim";
  ASSERT_EQ(first.Read(Soon()), absl::OkStatus());
  EXPECT_EQ(first.value().claimed().nonce(), 22u);
  EXPECT_EQ(first.value().table().members(1).address(), "b:8080");
  EXPECT_EQ(first.value().table().members(1).since().nonce(), 11u) << "a member since the job was made";
}

TEST(JobKey, KeepsWhereChunksAre) {
  SmallEtcd etcd;
  registry::Registry registry = etcd.Connect();
  JobKey first(&registry, "job");
  ASSERT_EQ(first.Read(Soon()), absl::OkStatus());
  v1::Table table = TableOf({{"a", 1}, {"b", 2}});
  table.set_replicas(2);
  for (int s = 0; s < 3; ++s) {
    table.add_shards()->add_holders(0);
    table.mutable_shards(s)->add_holders(1);
  }
  ASSERT_TRUE(first.Claim(table, EpochOf(1, 11), Soon()).ok());
  EXPECT_TRUE(first.has_places());
  EXPECT_EQ(first.value().table().members(0).since().counter(), 0u) << "founders may have nothing yet";
  EXPECT_EQ(first.value().table().life(), 11u);
  // A later group knows members alone, in another order: the key's table stays.
  JobKey second(&registry, "job");
  ASSERT_EQ(second.Read(Soon()), absl::OkStatus());
  ASSERT_TRUE(second.Claim(TableOf({{"b", 2}, {"a", 1}}), EpochOf(1, 22), Soon()).ok());
  ASSERT_EQ(first.Read(Soon()), absl::OkStatus());
  EXPECT_EQ(first.value().claimed().counter(), 2u);
  EXPECT_EQ(first.value().table().replicas(), 2u);
  ASSERT_EQ(first.value().table().shards_size(), 3);
  EXPECT_EQ(first.value().table().shards(2).holders(1), 1u);
  EXPECT_EQ(first.value().table().members(1).server_id(), "b");
}

// Shards of a ring: each on a server and the next one.
TEST(JobKey, NamesWhoseStartHelps) {
  SmallEtcd etcd;
  registry::Registry registry = etcd.Connect();
  JobKey key(&registry, "job");
  ASSERT_EQ(key.Read(Soon()), absl::OkStatus());
  v1::Table table = TableOf({{"a", 1}, {"b", 2}, {"c", 3}});
  table.set_replicas(2);
  for (uint32_t s = 0; s < 3; ++s) {
    table.add_shards()->add_holders(std::min(s, (s + 1) % 3));
    table.mutable_shards(static_cast<int>(s))->add_holders(std::max(s, (s + 1) % 3));
  }
  ASSERT_TRUE(key.Claim(table, EpochOf(1, 11), Soon()).ok());
  const std::vector<bool> none(3, false);
  EXPECT_EQ(key.CheckEnough({true, false, true}, none), absl::OkStatus());
  const auto said = [&](const std::vector<bool>& there, const std::vector<bool>& lost) {
    return std::string(key.CheckEnough(there, lost).message());
  };
  EXPECT_EQ(
      said({false, false, true}, none),
      "no server that answers holds 1 of 3 shards of job 'job', which 'a' (last seen at a:7070), 'b' (last seen at "
      "b:7070) have: start one of them with its data directory; one that runs is out of reach, or too slow");
  EXPECT_EQ(
      said(none, none),
      "no server that answers holds 3 of 3 shards of job 'job', which 'a' (last seen at a:7070), 'b' (last seen at "
      "b:7070), 'c' (last seen at c:7070) have: start them with their data directories; one that runs is out of "
      "reach, or too slow");
  // 'a' answers with another directory: 'b' still has the shard that only they had.
  EXPECT_EQ(
      said({false, false, true}, {true, false, false}),
      "no server that answers holds 1 of 3 shards of job 'job', which 'b' (last seen at b:7070) has: start it with "
      "its data directory; one that runs is out of reach, or too slow");
  const std::string lost = said({false, false, true}, {true, true, false});
  EXPECT_TRUE(
      absl::StartsWith(lost, "no server has 1 of 3 shards of job 'job' any more: 'a' (last seen at a:7070), 'b'"))
      << lost;
  EXPECT_TRUE(absl::StrContains(lost, "`ballastctl drop --job job`")) << lost;
}

// etcd came back from a backup: its table may be from before servers changed.
TEST(JobKey, OlderThanAPromiseIsRefusedIfItSaysWhereChunksAre) {
  SmallEtcd etcd;
  registry::Registry registry = etcd.Connect();
  std::vector<v1::GetJobResponse> answers(2);
  answers[0].set_server_id("a");
  answers[1].set_server_id("b");
  *answers[1].mutable_promised() = EpochOf(2, 7);
  for (const bool has_places : {false, true}) {
    JobKey key(&registry, has_places ? "placed" : "plain");
    ASSERT_EQ(key.Read(Soon()), absl::OkStatus());
    v1::Table table = TableOf({{"a", 1}, {"b", 2}});
    if (has_places) table.add_shards()->add_holders(0);
    ASSERT_TRUE(key.Claim(table, EpochOf(1, 11), Soon()).ok());
    const absl::Status claimed = key.CheckClaimed(answers, Soon());
    if (!has_places) {
      EXPECT_EQ(claimed, absl::OkStatus()) << "trainers with a list of servers fence without a key";
      continue;
    }
    EXPECT_EQ(model::ReasonOf(claimed), model::kKeyLost);
    EXPECT_TRUE(absl::StrContains(claimed.message(), "server 'b' promised epoch 2")) << claimed;
    EXPECT_TRUE(absl::StrContains(claimed.message(), "members --restore")) << claimed;
    // Another group claimed that epoch after this one had read the key.
    JobKey other(&registry, "placed");
    ASSERT_EQ(other.Read(Soon()), absl::OkStatus());
    ASSERT_TRUE(other.Claim(table, EpochOf(2, 7), Soon()).ok());
    EXPECT_EQ(key.CheckClaimed(answers, Soon()), absl::OkStatus());
  }
}

// The group that claimed may write its table, and open the job by it, after another has read the key.
TEST(JobKey, OlderThanAnOpenTableIsRefused) {
  SmallEtcd etcd;
  registry::Registry registry = etcd.Connect();
  JobKey opens(&registry, "job");
  v1::Table table = TableOf({{"a", 1}, {"b", 2}});
  table.add_shards()->add_holders(0);
  ASSERT_EQ(opens.Read(Soon()), absl::OkStatus());
  const v1::Epoch epoch = *opens.Claim(table, EpochOf(1, 11), Soon());
  JobKey key(&registry, "job");
  ASSERT_EQ(key.Read(Soon()), absl::OkStatus());
  table = opens.value().table();
  table.mutable_shards(0)->add_fillers(1);
  std::vector<v1::GetJobResponse> answers(1);
  answers[0].set_server_id("a");
  *answers[0].mutable_promised() = epoch;
  *answers[0].mutable_open()->mutable_epoch() = epoch;
  *answers[0].mutable_open()->mutable_table() = table;
  const absl::Status older = key.CheckClaimed(answers, Soon());
  EXPECT_EQ(model::ReasonOf(older), model::kKeyLost);
  EXPECT_TRUE(absl::StrContains(older.message(), "server 'a' opened job 'job' by another table than the key")) << older;
  ASSERT_EQ(opens.WriteTable(table, epoch, Soon()), absl::OkStatus());
  EXPECT_EQ(key.CheckClaimed(answers, Soon()), absl::OkStatus());
}

TEST(JobKey, AnAnswerThatIsLostIsReadBack) {
  SmallEtcd etcd;
  registry::Registry registry = etcd.Connect();
  JobKey key(&registry, "job");
  ASSERT_EQ(key.Read(Soon()), absl::OkStatus());
  etcd.LoseAnAnswer();
  const auto claimed = key.Claim(TableOf({{"a", 1}}), EpochOf(1, 11), Soon());
  ASSERT_TRUE(claimed.ok()) << claimed.status();
  EXPECT_EQ(claimed->counter(), 1u) << "claimed once";
}

// A group of this version would write the key without the part that it does not know.
TEST(JobKey, OfALaterVersionStaysAsItIs) {
  SmallEtcd etcd;
  registry::Registry registry = etcd.Connect();
  const std::string known = R"("claimed":{"counter":"1","nonce":"11"},)";
  const std::string member = R"({"serverId":"a","disk":"1"})";
  const auto table = [&](const std::string& more) {
    return absl::StrCat(R"("table":{"members":[)", member, "]", more, "}");
  };
  for (const std::string& later :
       {absl::StrCat("{", known, R"("group":"Zw==",)", table(""), "}"),
        absl::StrCat("{", known, table(R"(,"shards":[{"holders":[0],"keepers":[0]}])"), "}")}) {
    SCOPED_TRACE(later);
    etcd.Set(registry.JobKeyName("job"), later);
    JobKey key(&registry, "job");
    const absl::Status read = key.Read(Soon());
    EXPECT_EQ(read.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_EQ(model::ReasonOf(read), model::kLaterVersion);
    EXPECT_TRUE(absl::StrContains(read.message(), "/test/jobs/job")) << read;
  }
  etcd.Set(registry.JobKeyName("job"), absl::StrCat("{", known, table(R"(,"replicas":1)"), "}"));
  JobKey key(&registry, "job");
  ASSERT_EQ(key.Read(Soon()), absl::OkStatus());
  EXPECT_TRUE(key.exists());
  etcd.Set(registry.JobKeyName("job"),
           absl::StrCat("{", known, table(R"(,"replicas":1,"shards":[{"holders":[7]}])"), "}"));
  const absl::Status bad = key.Read(Soon());
  EXPECT_EQ(model::ReasonOf(bad), model::kBadConfig);
  EXPECT_TRUE(absl::StrContains(bad.message(), "shard 0 has 7")) << bad;
}

// `ballastctl drop` told of a trainer that opens the job, after it had dropped the job.
TEST(JobKey, IsErasedAlsoIfTheAnswerIsLost) {
  SmallEtcd etcd;
  registry::Registry registry = etcd.Connect();
  JobKey key(&registry, "job");
  ASSERT_EQ(key.Read(Soon()), absl::OkStatus());
  ASSERT_TRUE(key.Claim(TableOf({{"a", 1}}), EpochOf(1, 11), Soon()).ok());
  const auto found = registry.FindJob("job", Soon());
  ASSERT_TRUE(found.ok() && found->has_value()) << found.status();
  const auto refused = registry.EraseJob("job", (*found)->revision + 1, Soon());
  ASSERT_TRUE(refused.ok()) << refused.status();
  EXPECT_FALSE(*refused) << "it is another group's";
  etcd.LoseAnAnswer();
  const auto erased = registry.EraseJob("job", (*found)->revision, Soon());
  ASSERT_TRUE(erased.ok()) << erased.status();
  EXPECT_TRUE(*erased);
  EXPECT_FALSE(registry.FindJob("job", Soon())->has_value());
}

TEST(JobKey, AWishConcernsOneLifeOfTheJob) {
  SmallEtcd etcd;
  registry::Registry registry = etcd.Connect();
  JobKey key(&registry, "job");
  ASSERT_EQ(key.Read(Soon()), absl::OkStatus());
  v1::Table table = TableOf({{"a", 1}, {"b", 2}});
  table.add_shards()->add_holders(0);
  table.mutable_shards(0)->add_fillers(1);
  ASSERT_TRUE(key.Claim(table, EpochOf(1, 11), Soon()).ok());
  ASSERT_EQ(key.Read(Soon()), absl::OkStatus()) << "fillers are known";
  EXPECT_EQ(key.ReadWish(Soon())->ByteSizeLong(), 0u);
  v1::Wish wish;
  wish.add_servers("c");
  wish.add_not_("b");
  wish.set_count(2);
  wish.set_life(11);
  EXPECT_EQ(registry.WishKeyName("job"), "/test/jobs/job/want");
  ASSERT_TRUE(*registry.PutWish("job", wish, 0, Soon()));
  EXPECT_FALSE(*registry.PutWish("job", wish, 0, Soon())) << "another operator was there first";
  EXPECT_EQ(key.ReadWish(Soon())->SerializeAsString(), wish.SerializeAsString());
  const auto found = registry.FindWish("job", Soon());
  wish.set_life(12);
  ASSERT_TRUE(*registry.PutWish("job", wish, (*found)->revision, Soon()));
  EXPECT_EQ(key.ReadWish(Soon())->ByteSizeLong(), 0u) << "of another job under the name";
  etcd.Set(registry.WishKeyName("job"), "none");
  EXPECT_EQ(model::ReasonOf(key.ReadWish(Soon()).status()), model::kBadConfig);
}

TEST(JobKey, OfTwoGroupsAtOnceTheSecondGoesByTheFirstOrEnds) {
  for (const bool same : {true, false}) {
    SmallEtcd etcd;
    registry::Registry registry = etcd.Connect();
    JobKey slow(&registry, "job");
    ASSERT_EQ(slow.Read(Soon()), absl::OkStatus());
    etcd.BeforeTheNext([&] {
      JobKey quick(&registry, "job");
      EXPECT_EQ(quick.Read(Soon()), absl::OkStatus());
      EXPECT_TRUE(quick.Claim(TableOf({{"a", 1}, {"b", 2}}), EpochOf(1, 22), Soon()).ok());
    });
    const auto claimed = slow.Claim(same ? TableOf({{"b", 2}, {"a", 1}}) : TableOf({{"c", 3}}), EpochOf(1, 11), Soon());
    if (same) {
      ASSERT_TRUE(claimed.ok()) << claimed.status();
      EXPECT_EQ(claimed->counter(), 2u) << "fences after the other";
      continue;
    }
    EXPECT_EQ(model::ReasonOf(claimed.status()), model::kOtherServer);
    EXPECT_TRUE(absl::StrContains(claimed.status().message(), "'a' (last seen at a:7070), 'b'")) << claimed.status();
    EXPECT_TRUE(absl::StrContains(claimed.status().message(), "'c'")) << claimed.status();
    ASSERT_EQ(slow.Read(Soon()), absl::OkStatus());
    EXPECT_EQ(slow.value().table().members_size(), 2) << "the key is the first one's";
  }
}

}  // namespace
}  // namespace ballast::client
