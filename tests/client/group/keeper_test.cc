// A group at work whose rank 0 changes its servers, while servers that are registered do not answer.
#include "ballast/client/group/keeper.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "ballast/client/group/absentees.h"
#include "ballast/client/group/agenda.h"
#include "ballast/client/transport/call_all.h"
#include "ballast/proto/model/protocol.h"
#include "ballast/proto/model/table.h"
#include "ballast/proto/model/verdict.h"
#include "ballast/proto/model/wish.h"
#include "ballast/tests/client/fake_server.h"
#include "ballast/tests/client/transport/small_etcd.h"

namespace ballast::client {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int kShards = 12;
constexpr uint64_t kLife = 77;

absl::Time Soon() { return absl::Now() + absl::Seconds(60); }

// Job "job" on s0, s1 and s2, with two copies, at step 4; s3 is registered too. Server i has disk 100 + i.
class KeeperTest : public testing::Test {
 protected:
  KeeperTest() : registry_(etcd_.Connect()) {
    options_.job = "job";
    options_.failover_after = absl::Milliseconds(300);
    options_.progress = [this](const std::string& line) {
      absl::MutexLock lock(&mu_);
      lines_.push_back(line);
    };
    v1::OpenRequest open = OpenOnFakes(0, 1);
    open.mutable_epoch()->set_counter(1);
    open.set_group("group");
    std::vector<v1::Member> founders;
    for (int i = 0; i < 4; ++i) {
      Register(i);
      if (i < 3) founders.push_back(MemberOf(i));
    }
    const std::vector<uint64_t> elements(kShards, 1);
    *open.mutable_table() =
        model::FirstTable({.servers = founders, .replicas = 2, .shard_elements = elements}, v1::Epoch());
    open.mutable_table()->set_life(kLife);
    for (int i = 0; i < 3; ++i) {
      servers_[i].open = open;
      servers_[i].promised = open.epoch();
    }
    v1::JobKey key;
    *key.mutable_claimed() = open.epoch();
    *key.mutable_table() = open.table();
    EXPECT_TRUE(*registry_.PutJob("job", key, 0, Soon()));
    std::vector<std::unique_ptr<Transport>> transports;
    for (int i = 0; i < 3; ++i) transports.push_back(Make(i));
    router_.emplace(std::move(transports), RouterOptions{});
    auto plan = model::EpochPlan::Make(open);
    EXPECT_TRUE(plan.ok()) << plan.status();
    router_->SetRoutes(std::make_shared<const model::EpochPlan>(*std::move(plan)), options_.failover_after);
  }
  ~KeeperTest() override {
    keeper_.reset();
    router_.reset();
    for (std::thread& thread : threads_) thread.join();
  }

  struct Server {
    v1::OpenRequest open;  // the newest; empty: it has no job
    v1::Epoch promised;
    bool dead = false;
    bool dies_at_open = false;
    bool busy = false;            // opens nothing
    uint64_t busy_in = 0;         // as busy, in the epoch with this number
    absl::Duration slow;          // to say who it is
    std::set<std::string> hangs;  // calls on connections that are made from now on
  };
  static v1::Member MemberOf(int i) {
    v1::Member member;
    member.set_server_id(absl::StrCat("s", i));
    member.set_disk(100 + static_cast<uint64_t>(i));
    member.set_address(absl::StrCat("s", i, ":7070"));
    member.set_weight(1);
    return member;
  }
  // Again: its server has been started again.
  void Register(int i, v1::ServerState state = v1::SERVER_STATE_SERVING) {
    v1::ServerEntry entry;
    entry.set_server_id(MemberOf(i).server_id());
    entry.set_disk(MemberOf(i).disk());
    entry.set_address(MemberOf(i).address());
    entry.set_state(state);
    const auto before = registry_.Find(entry.server_id(), Soon());
    ASSERT_TRUE(before.ok()) << before.status();
    ASSERT_TRUE(*registry_.Put(entry, 0, before->has_value() ? (*before)->revision : 0, Soon()));
  }
  void Wish(const absl::StatusOr<v1::Wish>& wish) {
    ASSERT_TRUE(wish.ok()) << wish.status();
    v1::Wish of_job = *wish;
    of_job.set_life(kLife);
    ASSERT_TRUE(*registry_.PutWish("job", of_job, 0, Soon()));
  }

  std::unique_ptr<Transport> Make(int i) {
    auto server = std::make_unique<FakeServer>(absl::StrCat("s", i));
    server->disk = MemberOf(i).disk();
    server->known_by = &registry_;
    server->transports = [this](const v1::Member& member) { return Make(member.server_id()[1] - '0'); };
    server->on_get_job = [this, i](const v1::GetJobRequest&) { return JobOf(i); };
    server->on_fence = [this, i](const v1::FenceRequest& fence) -> absl::StatusOr<v1::FenceResponse> {
      {
        absl::MutexLock lock(&mu_);
        if (!servers_[i].dead) servers_[i].promised = fence.epoch();
      }
      v1::FenceResponse response;
      BALLAST_ASSIGN_OR_RETURN(*response.mutable_job(), JobOf(i));
      return response;
    };
    server->on_open = [this, i](const v1::OpenRequest& open) -> absl::StatusOr<v1::OpenResponse> {
      absl::MutexLock lock(&mu_);
      Server& self = servers_[i];
      self.dead = self.dead || (self.dies_at_open && !open.dry_run());
      if (self.dead) return Dead();
      if (open.dry_run()) return v1::OpenResponse();
      if (self.busy || open.epoch().counter() == self.busy_in) {
        return model::Error(absl::StatusCode::kUnavailable, model::kBusy, "is busy");
      }
      self.open = open;
      if (i == 0) opened_.push_back(Ids(open.table()));
      return v1::OpenResponse();
    };
    absl::MutexLock lock(&mu_);
    std::set<std::string> hangs = servers_[i].hangs;
    if (servers_[i].dead) hangs.insert("Identify");
    server->Hang(hangs);
    if (servers_[i].slow > absl::ZeroDuration()) {
      server->later = [this, slow = servers_[i].slow](std::function<void()> says) {
        absl::MutexLock lock(&mu_);
        threads_.emplace_back([slow, says = std::move(says)] {
          absl::SleepFor(slow);
          says();
        });
      };
    }
    return server;
  }
  static absl::Status Dead() { return model::Error(absl::StatusCode::kUnavailable, model::kServerDown, "is dead"); }
  absl::StatusOr<v1::GetJobResponse> JobOf(int i) {
    absl::MutexLock lock(&mu_);
    const Server& self = servers_[i];
    if (self.dead) return Dead();
    v1::GetJobResponse job;
    job.set_server_id(absl::StrCat("s", i));
    job.set_disk(MemberOf(i).disk());
    job.set_committed(-1);
    *job.mutable_promised() = self.promised;
    if (!self.open.has_table()) return job;
    job.set_exists(true);
    job.set_committed(4);
    job.mutable_decision()->set_step(4);
    *job.mutable_opened() = self.open.epoch();
    *job.mutable_open() = self.open;
    job.set_life(kLife);
    for (int t = 0; t < 3; ++t) job.add_tensor_steps(4);
    std::vector<uint32_t> filled;
    for (uint32_t s = 0; s < kShards; ++s) {
      for (const uint32_t m : self.open.table().shards(static_cast<int>(s)).holders()) {
        if (self.open.table().members(static_cast<int>(m)).server_id() == job.server_id()) filled.push_back(s);
      }
    }
    job.set_filled_shards(model::MakeBitmap(kShards, filled));
    return job;
  }

  // The server dies, and is silent.
  void Kill(int i) {
    {
      absl::MutexLock lock(&mu_);
      servers_[i].dead = true;
    }
    v1::GetJobRequest ask;
    ask.set_job("job");
    (void)AskAll<v1::GetJobRequest, v1::GetJobResponse>(&*router_, &Transport::GetJob, "GetJob", ask, Soon());
    while (router_->Silent().empty()) absl::SleepFor(absl::Milliseconds(10));
  }
  void Set(int i, const std::function<void(Server*)>& what) {
    absl::MutexLock lock(&mu_);
    what(&servers_[i]);
  }
  void Start() {
    keeper_ = std::make_unique<Keeper>(options_, &*router_);
    ASSERT_EQ(keeper_->made(), absl::OkStatus());
  }
  static std::vector<std::string> Ids(const v1::Table& table) {
    std::vector<std::string> ids;
    for (const v1::Member& member : table.members()) ids.push_back(member.server_id());
    return ids;
  }
  // Waits until the group goes on with these servers.
  void AwaitServers(const std::vector<std::string>& ids) {
    const absl::Time end = absl::Now() + absl::Seconds(20);
    while (Ids(router_->routes()->open().table()) != ids && absl::Now() < end) absl::SleepFor(absl::Milliseconds(10));
    ASSERT_EQ(Ids(router_->routes()->open().table()), ids) << Lines();
  }
  void AwaitLine(const std::string& line) {
    const absl::Time end = absl::Now() + absl::Seconds(20);
    while (!absl::StrContains(Lines(), line) && absl::Now() < end) absl::SleepFor(absl::Milliseconds(10));
    ASSERT_THAT(Lines(), HasSubstr(line));
  }
  std::string Lines() {
    absl::MutexLock lock(&mu_);
    std::string lines;
    for (const std::string& line : lines_) absl::StrAppend(&lines, line, "\n");
    return lines;
  }
  std::vector<std::vector<std::string>> Opened() {
    absl::MutexLock lock(&mu_);
    return opened_;
  }

  SmallEtcd etcd_;
  registry::Registry registry_;
  SessionOptions options_;
  absl::Mutex mu_;
  std::map<int, Server> servers_;
  std::vector<std::string> lines_;
  std::vector<std::vector<std::string>> opened_;  // the members that s0 was told
  std::vector<std::thread> threads_;
  std::optional<Router> router_;
  std::unique_ptr<Keeper> keeper_;
};

TEST_F(KeeperTest, AFailoverDoesNotWaitForASpareWhichJoinsLater) {
  Set(3, [](Server* spare) { spare->slow = absl::Milliseconds(600); });
  Kill(1);
  Start();
  AwaitServers({"s0", "s2", "s3"});
  EXPECT_THAT(Opened(), ElementsAre(ElementsAre("s0", "s2"), ElementsAre("s0", "s2", "s3")));
  EXPECT_THAT(
      Lines(),
      HasSubstr("server 's3' is registered at s3:7070 and does not answer, or is not ready; the job does without it"));
}

TEST_F(KeeperTest, AWishSaysForWhomItWaits) {
  Set(3, [](Server* spare) { spare->hangs = {"Identify"}; });
  Wish(model::WishToAdd(servers_[0].open.table(), v1::Wish(), {"s3"}));
  Start();
  AwaitLine(
      "job 'job': server 's3' is registered at s3:7070 and does not answer, or is not ready; the wish for it waits "
      "until it does");
  Set(3, [](Server* spare) { spare->hangs.clear(); });
  AwaitServers({"s0", "s1", "s2", "s3"});
}

// The table has it as a member, and no server opens the epoch.
TEST_F(KeeperTest, WhoDiesAsItJoinsIsDoneWithout) {
  Set(3, [](Server* spare) { spare->dies_at_open = true; });
  for (const int member : {0, 2}) Set(member, [](Server* server) { server->busy_in = 2; });
  Kill(1);
  Start();
  AwaitServers({"s0", "s2"});
  EXPECT_THAT(Opened(), ElementsAre(ElementsAre("s0", "s2")));
  EXPECT_EQ(router_->routes()->epoch().counter(), 3u);
}

// Who left does not answer the call to drop the job. The keeper must not wait for it while a member is silent.
TEST_F(KeeperTest, WhoLeftHoldsUpNoFailover) {
  Set(2, [](Server* left) { left->hangs = {"DropJob"}; });
  Wish(model::WishToRemove(servers_[0].open.table(), v1::Wish(), {"s2"}));
  Start();
  AwaitServers({"s0", "s1", "s3"});
  Kill(3);
  const auto has_s3 = [this] { return Ids(router_->routes()->open().table()).back() == "s3"; };
  const absl::Time end = absl::Now() + absl::Seconds(20);
  while (has_s3() && absl::Now() < end) absl::SleepFor(absl::Milliseconds(10));
  EXPECT_FALSE(has_s3()) << Lines();
  keeper_.reset();
  EXPECT_THAT(Lines(), HasSubstr("server 's2' is no member any more and keeps what it had of the job. `ballastctl drop "
                                 "--job job --servers s2` frees it. (It was not awaited, "));
}

// Servers have promised the next epoch, and refuse calls of this one.
TEST_F(KeeperTest, AChangeThatIsBegunAndNotMadeIsToldAsWhatTrainingWaitsFor) {
  for (int i = 0; i < 4; ++i) Set(i, [](Server* server) { server->busy = true; });
  Wish(model::WishToAdd(servers_[0].open.table(), v1::Wish(), {"s3"}));
  Start();
  AwaitLine("job 'job' cannot go on until a change of its servers is made: ");
  EXPECT_THAT(Lines(), testing::Not(HasSubstr("cannot change its servers yet")));
  for (int i = 0; i < 4; ++i) Set(i, [](Server* server) { server->busy = false; });
  AwaitServers({"s0", "s1", "s2", "s3"});
}

TEST(AbsenteesTest, EachRestIsLongerUntilTheServerAnswers) {
  v1::Member server;
  server.set_server_id("d");
  server.set_disk(7);
  server.set_address("d:7070");
  Absentees absentees;
  model::SteadyTime now = model::SteadyTime::Now();
  EXPECT_EQ(absentees.next(), model::SteadyTime::Never());
  EXPECT_FALSE(absentees.Rests(server, now));
  for (const int seconds : {3, 6, 12, 24, 48, 48}) {
    (void)absentees.Failed(server, /*wished=*/false, now);
    EXPECT_EQ(absentees.RestOf(server), absl::Seconds(seconds));
    EXPECT_EQ(absentees.next(), now + absl::Seconds(seconds));
    EXPECT_TRUE(absentees.Rests(server, absentees.next() - absl::Nanoseconds(1)));
    now = absentees.next();
    EXPECT_FALSE(absentees.Rests(server, now));
  }
  // At another address, or with another disk, it is another server.
  v1::Member moved = server, wiped = server;
  moved.set_address("e:7070");
  wiped.set_disk(8);
  (void)absentees.Failed(server, /*wished=*/false, now);
  EXPECT_TRUE(absentees.Rests(server, now));
  EXPECT_FALSE(absentees.Rests(moved, now));
  EXPECT_FALSE(absentees.Rests(wiped, now));
  absentees.EndRests();
  EXPECT_FALSE(absentees.Rests(server, now));
  EXPECT_EQ(absentees.RestOf(server), absl::Seconds(48)) << "the next is as long all the same";
  absentees.Answered(server);
  EXPECT_EQ(absentees.next(), model::SteadyTime::Never());
  for (int i = 0; i < 3; ++i) {
    (void)absentees.Failed(server, /*wished=*/true, now);
    EXPECT_EQ(absentees.RestOf(server), Absentees::kRestMin);
  }
  absentees.KeepOnly({moved});
  EXPECT_EQ(absentees.RestOf(server), absl::ZeroDuration());
}

TEST(AbsenteesTest, ALineIsDueOnceAMinute) {
  v1::Member server;
  server.set_server_id("d");
  Absentees absentees;
  const model::SteadyTime now = model::SteadyTime::Now();
  EXPECT_TRUE(absentees.Failed(server, false, now));
  EXPECT_FALSE(absentees.Failed(server, false, now + absl::Seconds(59)));
  EXPECT_TRUE(absentees.Failed(server, false, now + absl::Seconds(60)));
}

// There was no room for what the wish wants, and perhaps there is now.
TEST(AgendaTest, ARefusedWishIsTriedAgainEachMinute) {
  const Agenda::Signs wish{.asked = "wish"};
  const model::SteadyTime begin = model::SteadyTime::Now();
  Agenda agenda;
  for (int minute = 0; minute < 3; ++minute) {
    const model::SteadyTime now = begin + minute * Agenda::kReconsiderInterval;
    EXPECT_TRUE(agenda.IsDue(wish, now)) << minute;
    agenda.Begin(now);
    agenda.End({.refused = true}, "wish", model::SteadyTime::Never(), now);
    EXPECT_FALSE(agenda.IsDue(wish, now + Agenda::kReconsiderInterval - absl::Seconds(1)));
    EXPECT_TRUE(agenda.IsDue({.asked = "another wish"}, now + Agenda::kRetryInterval));
  }
  const model::SteadyTime now = begin + absl::Hours(1);
  agenda.Begin(now);
  agenda.End({}, "wish", model::SteadyTime::Never(), now);
  EXPECT_FALSE(agenda.IsDue(wish, now + absl::Hours(1))) << "it is heeded";
  EXPECT_TRUE(agenda.IsDue({.lacks_servers = true, .asked = "wish"}, now + Agenda::kReconsiderInterval));
}

TEST(AgendaTest, AChangeIsFollowedByAnotherLookAtTheWish) {
  const Agenda::Signs wish{.asked = "wish"};
  const model::SteadyTime now = model::SteadyTime::Now();
  Agenda agenda;
  agenda.Begin(now);
  agenda.End({.changed = true}, "wish", model::SteadyTime::Never(), now);
  EXPECT_FALSE(agenda.IsDue(wish, now)) << "a moment later";
  EXPECT_TRUE(agenda.IsDue(wish, now + Agenda::kRetryInterval));
}

TEST(AgendaTest, WhatFailsIsTriedAgainWithMorePatience) {
  const Agenda::Signs acute{.acute = true};
  model::SteadyTime now = model::SteadyTime::Now();
  Agenda agenda;
  for (const int seconds : {1, 2, 4, 8, 16, 16}) {
    EXPECT_TRUE(agenda.IsDue(acute, now));
    EXPECT_EQ(agenda.patience(), absl::Seconds(seconds));
    agenda.Begin(now);
    agenda.Fail(now);
    EXPECT_FALSE(agenda.IsDue(acute, now));
    now = now + Agenda::kRetryInterval;
  }
  agenda.Begin(now);
  agenda.TryAtOnce();
  EXPECT_TRUE(agenda.IsDue(acute, now)) << "another server is silent";
  agenda.End({}, "", model::SteadyTime::Never(), now);
  EXPECT_EQ(agenda.patience(), Agenda::kPatience);
}

// etcd had an older state than the job, and each two seconds a line said so.
absl::Status Down(const std::string& message) {
  return model::Error(absl::StatusCode::kUnavailable, model::kServerDown, message);
}

TEST(FailureLinesTest, ACauseIsToldOnceUnlessTrainingWaits) {
  const model::SteadyTime now = model::SteadyTime::Now();
  const absl::Status lost = model::Error(absl::StatusCode::kFailedPrecondition, model::kKeyLost, "no key");
  const absl::Status down = Down("'a' did not answer");
  FailureLines lines;
  EXPECT_TRUE(lines.IsDue(lost, false, now));
  EXPECT_FALSE(lines.IsDue(lost, false, now + absl::Minutes(9)));
  EXPECT_TRUE(lines.IsDue(lost, false, now + absl::Minutes(10)));
  EXPECT_FALSE(lines.IsDue(down, false, now + absl::Minutes(10) + absl::Seconds(1)));
  EXPECT_TRUE(lines.IsDue(down, false, now + absl::Minutes(10) + absl::Seconds(2)));
  EXPECT_TRUE(lines.IsDue(down, true, now + absl::Minutes(10) + absl::Seconds(4)));
}

TEST(FailureLinesTest, EachCauseIsToldOnceAndAgainAfterASuccess) {
  model::SteadyTime now = model::SteadyTime::Now();
  FailureLines lines;
  const auto is_due = [&](const std::string& message) {
    now = now + FailureLines::kWaitingInterval;
    return lines.IsDue(Down(message), false, now);
  };
  EXPECT_TRUE(is_due("'a-1' did not answer within 1s, and is waited for"));
  EXPECT_FALSE(is_due("'a-1' did not answer within 16s, and is waited for")) << "with more patience";
  EXPECT_TRUE(is_due("'a-2' did not answer within 16s, and is waited for"));
  EXPECT_TRUE(is_due("etcd: no answer within 999ms and 3 tries."));
  EXPECT_FALSE(is_due("etcd: no answer within 1.5s and 4 tries."));
  EXPECT_FALSE(is_due("'a-1' did not answer within 2s, and is waited for")) << "causes that alternate";
  lines.Succeed();
  EXPECT_TRUE(is_due("'a-1' did not answer within 1s, and is waited for"));
}

}  // namespace
}  // namespace ballast::client
