// A router that follows a group from epoch to epoch while calls are under way.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "ballast/client/transport/call_all.h"
#include "ballast/client/transport/tally.h"
#include "ballast/proto/base/status.h"
#include "ballast/tests/client/fake_server.h"

namespace ballast::client {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr char kGroup[] = "group 1";

absl::Time Soon() { return absl::Now() + absl::Seconds(20); }

// The epoch is over: `group` has promised a later one.
absl::Status Stale(const std::string& group) {
  absl::Status status = model::Error(absl::StatusCode::kFailedPrecondition, model::kStaleEpoch, "the epoch is over");
  std::string hex;
  for (const char c : group) hex += {"0123456789abcdef"[c >> 4 & 15], "0123456789abcdef"[c & 15]};
  model::SetDetail(model::kGroup, hex, &status);
  return status;
}

// Chunk c of the job lies on the servers of shards[c]: first holders, then fillers.
struct Places {
  std::vector<uint32_t> holders, fillers;
};

class RouterRoutesTest : public ::testing::Test {
 protected:
  RouterRoutesTest() {
    servers_[0].transports = [this](const v1::Member& member) { return Make(member.server_id()); };
    for (const size_t i : {0, 1}) {
      servers_[i].on_get_job = [](const v1::GetJobRequest&) { return absl::StatusOr<v1::GetJobResponse>(Opened()); };
    }
    Continue(3, {"s0", "s1"}, {{{0, 1}, {}}, {{0, 1}, {}}}, /*first=*/true);
  }

  v1::OpenRequest Open(uint64_t epoch, const std::vector<std::string>& members, const std::vector<Places>& shards) {
    v1::OpenRequest open = OpenOnFakes(0, 1);
    open.mutable_epoch()->set_counter(epoch);
    open.set_base(0);
    open.set_group(kGroup);
    v1::Table* const table = open.mutable_table();
    table->set_replicas(2);
    for (const std::string& id : members) {
      v1::Member* const member = table->add_members();
      member->set_server_id(id);
      member->set_disk(1);
      member->set_weight(1);
    }
    for (const Places& places : shards) {
      v1::Shard* const shard = table->add_shards();
      for (const uint32_t holder : places.holders) shard->add_holders(holder);
      for (const uint32_t filler : places.fillers) shard->add_fillers(filler);
    }
    return open;
  }
  void Continue(uint64_t epoch, const std::vector<std::string>& members, const std::vector<Places>& shards,
                bool first = false) {
    const v1::OpenRequest open = Open(epoch, members, shards);
    if (!first) {
      ASSERT_EQ(router().Continue(open), absl::OkStatus());
      return;
    }
    auto plan = model::EpochPlan::Make(open);
    ASSERT_TRUE(plan.ok()) << plan.status();
    router().SetRoutes(std::make_shared<const model::EpochPlan>(*std::move(plan)), absl::Seconds(1));
  }
  std::unique_ptr<Transport> Make(const std::string& id) {
    auto server = std::make_unique<FakeServer>(id);
    server->disk = 1;
    made_[id] = server.get();
    return server;
  }
  // Of a server that has the first epoch.
  static v1::GetJobResponse Opened() {
    v1::GetJobResponse job;
    job.set_exists(true);
    job.mutable_opened()->set_counter(3);
    job.mutable_promised()->set_counter(3);
    return job;
  }
  // Looks until so many servers are silent, and names them.
  std::vector<std::string> AwaitSilent(size_t count) {
    for (;;) {
      router().LookForSilent();
      const auto silent = router().Silent();
      std::vector<std::string> names;
      for (const Router::SilentServer& server : silent) names.push_back(server.member.server_id());
      if (names.size() == count) return names;
      absl::SleepFor(absl::Milliseconds(10));
    }
  }
  Router& router() { return *servers_.router; }
  std::shared_ptr<Tally> Push(uint64_t chunk) {
    v1::PushRequest header;
    header.set_job("job");
    header.mutable_epoch()->set_counter(3);
    header.set_step(1);
    auto tally = std::make_shared<Tally>();
    tally->Start();
    router().PushSlice(
        chunk, header, payload_, Soon(), [tally](const absl::Status& s) { tally->Finish(s); }, nullptr);
    return tally;
  }
  // Of a reader, of chunk 0, with all the time in the world.
  absl::Status PullPatiently() {
    const auto tally = std::make_shared<Tally>();
    tally->Start();
    router().Pull(Router::Source{0, 0}, v1::PullRequest(), absl::MakeSpan(to_), absl::Now() + absl::Hours(1),
                  [tally](const absl::Status& s) { tally->Finish(s); });
    return tally->WaitUntil(Soon()) ? tally->Wait() : absl::DeadlineExceededError("it waits for ever");
  }
  void FollowAnyGroup(absl::Duration failover_after) {
    router().SetRoutes(router().routes()->plan, failover_after, Router::Follows::kAnyGroup);
  }
  static absl::Status Down() {
    return model::Error(absl::StatusCode::kUnavailable, model::kServerDown, "connection refused");
  }
  static absl::Status Gone(const v1::PullRequest&, absl::Span<std::byte>) {
    return model::Error(absl::StatusCode::kFailedPrecondition, model::kVersionGone, "past");
  }
  absl::Status Pull(uint64_t chunk) {
    v1::PullRequest request;
    request.set_job("job");
    const auto tally = std::make_shared<Tally>();
    tally->Start();
    router().Pull(Router::Source{chunk, 0}, request, absl::MakeSpan(to_), Soon(),
                  [tally](const absl::Status& s) { tally->Finish(s); });
    return tally->Wait();
  }
  static std::vector<uint64_t> Epochs(const FakeServer& server) {
    std::vector<uint64_t> epochs;
    for (const FakeServer::Pushed& push : server.pushed()) epochs.push_back(push.header.epoch().counter());
    return epochs;
  }
  // Refuses epochs below `least`.
  static void Refuse(FakeServer* server, uint64_t least, const std::string& group = kGroup) {
    server->on_push = [=](const v1::PushRequest& header) -> absl::StatusOr<v1::PushResponse> {
      if (header.epoch().counter() < least) return Stale(group);
      return v1::PushResponse();
    };
  }

  std::vector<std::byte> payload_{16}, to_{16};
  std::map<std::string, FakeServer*> made_;
  FakeServers servers_{2, /*disk=*/1};
};

TEST_F(RouterRoutesTest, ARefusedPushGoesOnInTheNextEpochAndOneToWhoLeftIsNeedless) {
  Refuse(&servers_[0], 4);
  servers_[1].HoldPushes();  // it hangs
  const auto pushed = Push(0);
  EXPECT_FALSE(pushed->WaitUntil(absl::Now() + absl::Milliseconds(50)));
  FakeServer& left = servers_[1];
  Continue(4, {"s0", "s2"}, {{{0}, {1}}, {{0}, {1}}});
  left.AnswerPushes(absl::CancelledError("cancelled"));
  EXPECT_EQ(pushed->Wait(), absl::OkStatus());
  EXPECT_THAT(Epochs(servers_[0]), ElementsAre(3, 4));
  EXPECT_THAT(Epochs(*made_.at("s2")), IsEmpty()) << "who begins to copy a chunk needs no slices that went before";
  EXPECT_EQ(Push(0)->Wait(), absl::OkStatus());
  EXPECT_THAT(Epochs(*made_.at("s2")), ElementsAre(4));
}

TEST_F(RouterRoutesTest, ARouterFindsTheNextEpochAtAnyServer) {
  Refuse(&servers_[0], 5);
  Refuse(&servers_[1], 5);
  const v1::OpenRequest open = Open(5, {"s1", "s0"}, {{{0, 1}, {}}, {{1}, {0}}});
  servers_[1].on_get_job = [&](const v1::GetJobRequest& request) {
    v1::GetJobResponse job;
    *job.mutable_opened() = *job.mutable_promised() = open.epoch();
    if (!request.without_open()) *job.mutable_open() = open;
    return absl::StatusOr<v1::GetJobResponse>(job);
  };
  EXPECT_EQ(Push(1)->Wait(), absl::OkStatus());
  EXPECT_EQ(router().routes()->epoch().counter(), 5);
  EXPECT_EQ(router().name(0), "s1");
  EXPECT_THAT(Epochs(servers_[0]), ElementsAre(3, 5));
}

TEST_F(RouterRoutesTest, WhoExpectsRoutesAsksNobodyForThem) {
  Refuse(&servers_[0], 5);
  Refuse(&servers_[1], 5);
  const v1::OpenRequest open = Open(6, {"s0", "s1"}, {{{0, 1}, {}}, {{0, 1}, {}}});
  std::atomic<int> asked = 0;
  for (FakeServer* const server : {&servers_[0], &servers_[1]}) {
    server->on_get_job = [&](const v1::GetJobRequest& request) {
      ++asked;
      v1::GetJobResponse job;
      *job.mutable_opened() = *job.mutable_promised() = open.epoch();
      if (!request.without_open()) *job.mutable_open() = open;
      return absl::StatusOr<v1::GetJobResponse>(job);
    };
  }
  router().ExpectRoutes(absl::InfiniteFuture());
  const auto pushed = Push(1);
  EXPECT_FALSE(pushed->WaitUntil(absl::Now() + absl::Milliseconds(100)));
  EXPECT_EQ(asked, 0);
  Continue(5, {"s0", "s1"}, {{{0, 1}, {}}, {{0, 1}, {}}});
  EXPECT_EQ(pushed->Wait(), absl::OkStatus());
  EXPECT_EQ(asked, 0);
  // Who was expected has failed.
  Refuse(&servers_[0], 6);
  const auto later = Push(1);
  EXPECT_FALSE(later->WaitUntil(absl::Now() + absl::Milliseconds(50)));
  EXPECT_EQ(asked, 0);
  router().ExpectRoutes(absl::InfinitePast());
  EXPECT_EQ(later->Wait(), absl::OkStatus());
  EXPECT_GT(asked, 0);
}

TEST_F(RouterRoutesTest, AnotherGroupsEpochEndsCalls) {
  Refuse(&servers_[0], 4, "group 2");
  EXPECT_EQ(model::ReasonOf(Push(0)->Wait()), model::kStaleEpoch);
  // It had forgotten whose epoch it was, and another server tells.
  Refuse(&servers_[0], 4, "");
  servers_[1].on_get_job = [](const v1::GetJobRequest&) {
    v1::GetJobResponse job;
    job.mutable_promised()->set_counter(4);
    job.set_promised_group("group 2");
    return absl::StatusOr<v1::GetJobResponse>(job);
  };
  EXPECT_EQ(model::ReasonOf(Push(0)->Wait()), model::kStaleEpoch);
}

TEST_F(RouterRoutesTest, APullGoesToAnotherHolder) {
  FakeServer* const source = &servers_[router().routes()->plan->SourceFor(0, 0)];
  FakeServer* const other = source == &servers_[0] ? &servers_[1] : &servers_[0];
  const v1::OpenRequest open = Open(4, {other->name()}, {{{0}, {}}, {{0}, {}}});
  // It has given the chunk up in an epoch that the router does not know yet.
  source->on_pull = [](const v1::PullRequest&, absl::Span<std::byte>) {
    return model::Error(absl::StatusCode::kInvalidArgument, model::kBadRequest, "the chunk lies elsewhere");
  };
  other->on_get_job = [&](const v1::GetJobRequest& request) {
    v1::GetJobResponse job;
    *job.mutable_opened() = *job.mutable_promised() = open.epoch();
    if (!request.without_open()) *job.mutable_open() = open;
    return absl::StatusOr<v1::GetJobResponse>(job);
  };
  EXPECT_EQ(Pull(0), absl::OkStatus());
  EXPECT_EQ(source->pulled().size(), 1);
  EXPECT_EQ(other->pulled().size(), 1);
}

// A holder that copies the chunk anew sends its readers to the other one, and its routes stay.
TEST_F(RouterRoutesTest, APullGoesToTheNextHolderAndBack) {
  FakeServer* const source = &servers_[router().routes()->plan->SourceFor(0, 0)];
  FakeServer* const other = source == &servers_[0] ? &servers_[1] : &servers_[0];
  const auto refused = [](const v1::PullRequest&, absl::Span<std::byte>) {
    return model::Error(absl::StatusCode::kFailedPrecondition, model::kNotFilled, "the server copies the chunk");
  };
  source->on_pull = refused;
  EXPECT_EQ(Pull(0), absl::OkStatus());
  EXPECT_EQ(source->pulled().size(), 1);
  EXPECT_EQ(other->pulled().size(), 1);
  // Neither has it, and then the first one has it again.
  other->on_pull = refused;
  source->on_pull = [&, calls = 0](const v1::PullRequest& request, absl::Span<std::byte> to) mutable {
    return ++calls == 1 ? refused(request, to) : absl::OkStatus();
  };
  EXPECT_EQ(Pull(0), absl::OkStatus());
  EXPECT_EQ(source->pulled().size(), 3);
  EXPECT_EQ(other->pulled().size(), 2);
  EXPECT_EQ(router().routes()->epoch().counter(), 3);
}

// A pin for reading outlives no copy, but where the chunk was not copied.
TEST_F(RouterRoutesTest, AVersionThatIsGoneAtOneHolderMayBeAtAnother) {
  FakeServer* const source = &servers_[router().routes()->plan->SourceFor(0, 0)];
  FakeServer* const other = source == &servers_[0] ? &servers_[1] : &servers_[0];
  source->on_pull = [](const v1::PullRequest&, absl::Span<std::byte>) {
    return model::Error(absl::StatusCode::kFailedPrecondition, model::kVersionGone, "version 1 is gone");
  };
  EXPECT_EQ(Pull(0), absl::OkStatus());
  EXPECT_EQ(source->pulled().size(), 1);
  EXPECT_EQ(other->pulled().size(), 1);
}

TEST_F(RouterRoutesTest, WhileAHolderIsDownPullsGoToAnother) {
  FakeServer* const source = &servers_[router().routes()->plan->SourceFor(0, 0)];
  FakeServer* const other = source == &servers_[0] ? &servers_[1] : &servers_[0];
  std::atomic<bool> down{true};
  source->on_pull = [&](const v1::PullRequest&, absl::Span<std::byte>) {
    if (!down) return absl::OkStatus();
    return model::Error(absl::StatusCode::kUnavailable, model::kServerDown, "connection refused");
  };
  source->on_push = [&](const v1::PushRequest&) -> absl::StatusOr<v1::PushResponse> {
    if (!down) return v1::PushResponse();
    return model::Error(absl::StatusCode::kUnavailable, model::kServerDown, "connection refused");
  };
  EXPECT_EQ(Pull(0), absl::OkStatus());
  EXPECT_EQ(Pull(0), absl::OkStatus());
  EXPECT_EQ(source->pulled().size(), 1) << "it has been asked";
  EXPECT_EQ(other->pulled().size(), 2);
  // A push goes to all holders, and tells that it is back.
  const auto pushed = Push(0);
  down = false;
  EXPECT_EQ(pushed->Wait(), absl::OkStatus());
  EXPECT_EQ(Pull(0), absl::OkStatus());
  EXPECT_EQ(source->pulled().size(), 2);
  // With nobody else the pull waits for it.
  down = true;
  other->on_pull = [](const v1::PullRequest&, absl::Span<std::byte>) {
    return model::Error(absl::StatusCode::kUnavailable, model::kServerDown, "connection refused");
  };
  const absl::Time began = absl::Now();
  v1::PullRequest request;
  const auto tally = std::make_shared<Tally>();
  tally->Start();
  router().Pull(Router::Source{0, 0}, request, absl::MakeSpan(to_), began + absl::Milliseconds(200),
                [tally](const absl::Status& s) { tally->Finish(s); });
  EXPECT_TRUE(absl::IsUnavailable(tally->Wait()));
  EXPECT_LT(source->pulled().size(), 100) << "with pauses";
}

TEST_F(RouterRoutesTest, ARefusalIsFinalIfNobodyHasALaterEpoch) {
  for (const size_t i : {0, 1}) {
    servers_[i].on_pull = [](const v1::PullRequest&, absl::Span<std::byte>) {
      return model::Error(absl::StatusCode::kFailedPrecondition, model::kVersionGone, "version 1 is gone");
    };
    servers_[i].on_get_job = [](const v1::GetJobRequest&) { return absl::StatusOr<v1::GetJobResponse>(Opened()); };
  }
  const absl::Status refused = Pull(0);
  EXPECT_EQ(model::ReasonOf(refused), model::kVersionGone);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("version 1 is gone"));
}

// As where the routes never change.
TEST_F(RouterRoutesTest, AServerThatIsBehindOrNotOpenIsRepaired) {
  int commits = 0, opens = 0;
  for (const std::string& reason : {std::string(model::kBehind), std::string(model::kNotOpen)}) {
    bool repaired = false;
    servers_[0].on_commit = [&](const v1::CommitRequest&) {
      repaired = ++commits > 0;
      return absl::StatusOr<v1::CommitResponse>(v1::CommitResponse());
    };
    servers_[0].on_open = [&](const v1::OpenRequest&) {
      repaired = ++opens > 0;
      return absl::StatusOr<v1::OpenResponse>(v1::OpenResponse());
    };
    servers_[0].on_push = [&](const v1::PushRequest&) -> absl::StatusOr<v1::PushResponse> {
      if (!repaired) return model::Error(absl::StatusCode::kFailedPrecondition, reason, "not yet");
      return v1::PushResponse();
    };
    router().SetOpen(std::make_shared<v1::OpenRequest>());
    router().SetCommit(std::make_shared<v1::CommitRequest>());
    EXPECT_EQ(Push(0)->Wait(), absl::OkStatus()) << reason;
  }
  EXPECT_EQ(commits, 1);
  EXPECT_EQ(opens, 1);
}

TEST_F(RouterRoutesTest, CallsToAllServersStartOverWithTheNewOnes) {
  absl::Notification asked;
  bool first = true;
  servers_[0].on_norm = [&](const v1::NormRequest& request) -> absl::StatusOr<v1::NormResponse> {
    if (request.epoch().counter() < 4) {
      if (std::exchange(first, false)) asked.Notify();
      return Stale(kGroup);
    }
    return v1::NormResponse();
  };
  v1::NormRequest request;
  request.set_job("job");
  request.mutable_epoch()->set_counter(3);
  std::thread change([&] {
    asked.WaitForNotification();
    Continue(4, {"s0", "s2", "s3"}, {{{0}, {1}}, {{0}, {2}}});
  });
  const auto answers = CallAll<v1::NormRequest, v1::NormResponse>(&router(), &Transport::Norm, "Norm", request, Soon());
  change.join();
  ASSERT_TRUE(answers.ok()) << answers.status();
  EXPECT_EQ(answers->size(), 3);
}

TEST_F(RouterRoutesTest, ACallForAnOlderEpochsServersIsNotSent) {
  const std::shared_ptr<const Routes> before = router().routes();
  Continue(4, {"s0", "s1"}, {{{0, 1}, {}}, {{0, 1}, {}}});
  const auto tally = std::make_shared<Tally>();
  tally->Start();
  bool sealed = false;
  servers_[0].on_seal = [&](const v1::SealRequest&) {
    sealed = true;
    return absl::StatusOr<v1::SealResponse>(v1::SealResponse());
  };
  router().Call<v1::SealRequest, v1::SealResponse>(
      &Transport::Seal, before->servers[0], "Seal", std::make_shared<v1::SealRequest>(), Soon(),
      [tally](const absl::StatusOr<v1::SealResponse>& answer) { tally->Finish(answer.status()); }, before);
  EXPECT_TRUE(AreRoutesChanged(tally->Wait()));
  EXPECT_FALSE(sealed);
}

// Another group has opened the job on s2. A pull of a rank is refused at once; one of a reader goes there.
TEST_F(RouterRoutesTest, AReaderFollowsWhicheverGroupHasTheJob) {
  for (const size_t i : {0, 1}) {
    servers_[i].on_pull = Gone;
    servers_[i].on_get_job = [this](const v1::GetJobRequest& request) -> absl::StatusOr<v1::GetJobResponse> {
      v1::GetJobResponse job = Opened();
      job.mutable_opened()->set_counter(4);
      job.mutable_promised()->set_counter(4);
      job.set_promised_group("group 2");
      if (request.without_open()) return job;
      *job.mutable_open() = Open(4, {"s2"}, {{{0}, {}}, {{0}, {}}});
      job.mutable_open()->set_group("group 2");
      return job;
    };
  }
  EXPECT_EQ(model::ReasonOf(PullPatiently()), model::kVersionGone);
  EXPECT_EQ(made_.size(), 0u);
  FollowAnyGroup(absl::Seconds(1));
  EXPECT_EQ(PullPatiently(), absl::OkStatus());
  EXPECT_EQ(made_.at("s2")->pulled().size(), 1u);
}

// Somebody dropped the job and made it again, with one copy and no table, or with another life.
TEST_F(RouterRoutesTest, AReaderDoesNotFollowAnotherJobOfTheName) {
  v1::OpenRequest without_table = Open(4, {"s0", "s1"}, {}), other_life = Open(4, {"s0"}, {{{0}, {}}, {{0}, {}}});
  without_table.clear_table();
  other_life.mutable_table()->set_life(78);
  for (const v1::OpenRequest& open : {without_table, other_life}) {
    for (const size_t i : {0, 1}) {
      servers_[i].on_pull = Gone;
      servers_[i].on_get_job = [open](const v1::GetJobRequest& request) {
        v1::GetJobResponse job = Opened();
        *job.mutable_opened() = *job.mutable_promised() = open.epoch();
        if (!request.without_open()) *job.mutable_open() = open;
        return absl::StatusOr<v1::GetJobResponse>(job);
      };
    }
    FollowAnyGroup(absl::Seconds(1));
    EXPECT_EQ(model::ReasonOf(PullPatiently()), model::kVersionGone);
    EXPECT_EQ(router().routes()->epoch().counter(), 3);
    EXPECT_EQ(router().server_count(), 2);
  }
}

TEST_F(RouterRoutesTest, AVersionThatIsGoneIsNotAwaitedWhileAnotherGroupOpensTheJob) {
  FollowAnyGroup(absl::Seconds(1));
  for (const size_t i : {0, 1}) {
    servers_[i].on_pull = Gone;
    servers_[i].on_get_job = [](const v1::GetJobRequest&) {
      v1::GetJobResponse job = Opened();
      job.mutable_promised()->set_counter(4);
      job.set_promised_group("group 2");
      return absl::StatusOr<v1::GetJobResponse>(job);
    };
  }
  EXPECT_EQ(model::ReasonOf(PullPatiently()), model::kVersionGone);
}

TEST_F(RouterRoutesTest, AReaderOpensNoJob) {
  FollowAnyGroup(absl::Seconds(1));
  Continue(4, {"s0", "s1"}, {{{0, 1}, {}}, {{0, 1}, {}}});
  std::atomic<int> opens = 0;
  for (const size_t i : {0, 1}) {
    servers_[i].on_open = [&](const v1::OpenRequest&) {
      ++opens;
      return absl::StatusOr<v1::OpenResponse>(v1::OpenResponse());
    };
    servers_[i].on_pull = [&](const v1::PullRequest&, absl::Span<std::byte>) {
      if (opens > 0) return absl::OkStatus();
      return model::Error(absl::StatusCode::kFailedPrecondition, model::kNotOpen, "not open");
    };
  }
  EXPECT_EQ(model::ReasonOf(PullPatiently()), model::kNotOpen);
  EXPECT_EQ(opens, 0);
}

// No look may find it, since it is back before one is due.
TEST_F(RouterRoutesTest, AReaderTriesHoldersInTurnWhileAllFail) {
  FollowAnyGroup(absl::Milliseconds(300));
  FakeServer* const source = &servers_[router().routes()->plan->SourceFor(0, 0)];
  FakeServer* const other = source == &servers_[0] ? &servers_[1] : &servers_[0];
  for (FakeServer* const server : {source, other}) {
    server->on_get_job = [](const v1::GetJobRequest&) -> absl::StatusOr<v1::GetJobResponse> { return Down(); };
  }
  source->on_pull = [](const v1::PullRequest&, absl::Span<std::byte>) { return Down(); };
  other->on_pull = [calls = 0](const v1::PullRequest&, absl::Span<std::byte>) mutable {
    return ++calls == 1 ? Down() : absl::OkStatus();
  };
  EXPECT_EQ(PullPatiently(), absl::OkStatus());
  // Both have been silent for long, and one is back.
  other->on_pull = [](const v1::PullRequest&, absl::Span<std::byte>) { return Down(); };
  EXPECT_TRUE(absl::IsAborted(PullPatiently()));
  other->on_pull = nullptr;
  EXPECT_EQ(PullPatiently(), absl::OkStatus());
}

TEST_F(RouterRoutesTest, AReadersLooksFindThatAServerIsBack) {
  FollowAnyGroup(absl::Milliseconds(300));
  FakeServer* const source = &servers_[router().routes()->plan->SourceFor(0, 0)];
  source->on_pull = [](const v1::PullRequest&, absl::Span<std::byte>) { return Down(); };
  source->on_get_job = [](const v1::GetJobRequest&) -> absl::StatusOr<v1::GetJobResponse> { return Down(); };
  EXPECT_EQ(PullPatiently(), absl::OkStatus());
  const absl::Time end = Soon();
  while (router().Silent().empty() && absl::Now() < end) absl::SleepFor(absl::Milliseconds(10));
  ASSERT_THAT(router().Silent(), testing::Not(IsEmpty()));
  source->on_get_job = [](const v1::GetJobRequest&) { return absl::StatusOr<v1::GetJobResponse>(Opened()); };
  while (!router().Silent().empty() && absl::Now() < end) absl::SleepFor(absl::Milliseconds(10));
  EXPECT_THAT(router().Silent(), IsEmpty());
}

// Its other holder was lost before.
TEST_F(RouterRoutesTest, AReadersPullEndsWhenNoHolderIsLeft) {
  auto plan = model::EpochPlan::Make(Open(3, {"s0", "s1"}, {{{0}, {}}, {{0, 1}, {}}}));
  ASSERT_TRUE(plan.ok()) << plan.status();
  router().SetRoutes(std::make_shared<const model::EpochPlan>(*std::move(plan)), absl::Milliseconds(300),
                     Router::Follows::kAnyGroup);
  servers_[0].on_pull = [](const v1::PullRequest&, absl::Span<std::byte>) {
    return model::Error(absl::StatusCode::kUnavailable, model::kServerDown, "connection refused");
  };
  servers_[0].on_get_job = [](const v1::GetJobRequest&) -> absl::StatusOr<v1::GetJobResponse> {
    return model::Error(absl::StatusCode::kUnavailable, model::kServerDown, "connection refused");
  };
  const auto ended = Pull(0);
  EXPECT_TRUE(absl::IsAborted(ended)) << ended;
  EXPECT_THAT(std::string(ended.message()), HasSubstr("no answer for 300ms from 's0', which alone had the chunk"));
  EXPECT_EQ(Pull(1), absl::OkStatus()) << "it comes from s1";
}

TEST_F(RouterRoutesTest, ASilentServerIsNamedAndWaitedFor) {
  servers_[1].on_push = [](const v1::PushRequest&) -> absl::StatusOr<v1::PushResponse> {
    return model::Error(absl::StatusCode::kUnavailable, model::kServerDown, "connection refused");
  };
  servers_[1].on_get_job = [](const v1::GetJobRequest&) -> absl::StatusOr<v1::GetJobResponse> {
    return model::Error(absl::StatusCode::kUnavailable, model::kServerDown, "connection refused");
  };
  const auto pushed = Push(0);
  EXPECT_THAT(AwaitSilent(1), ElementsAre("s1"));
  EXPECT_FALSE(pushed->WaitUntil(absl::Now() + absl::Milliseconds(100))) << "a group that may change its servers waits";
  Continue(4, {"s0"}, {{{0}, {}}, {{0}, {}}});
  EXPECT_EQ(pushed->Wait(), absl::OkStatus());
  EXPECT_THAT(AwaitSilent(0), IsEmpty());
}

// Its disk failed, or somebody dropped the job there.
TEST_F(RouterRoutesTest, AServerThatIsWithoutTheJobIsNamedAndWaitedFor) {
  absl::Status stopped = model::Error(absl::StatusCode::kInternal, model::kIo, "job 'job' stopped on server 's1'");
  model::SetDetail(model::kStopped, "1", &stopped);
  const absl::Status dropped = model::Error(absl::StatusCode::kNotFound, model::kUnknownJob, "no job 'job'");
  std::atomic<uint64_t> epoch = 3;  // the router's thread reads it
  for (const absl::Status& status : {stopped, dropped}) {
    servers_[0].on_get_job = [&](const v1::GetJobRequest&) {
      v1::GetJobResponse job = Opened();
      job.mutable_opened()->set_counter(epoch);
      return absl::StatusOr<v1::GetJobResponse>(job);
    };
    FakeServer* const lacks = epoch == 3 ? &servers_[1] : made_["s2"];
    lacks->on_push = [&](const v1::PushRequest&) -> absl::StatusOr<v1::PushResponse> { return status; };
    lacks->on_get_job = [&](const v1::GetJobRequest&) -> absl::StatusOr<v1::GetJobResponse> {
      if (status.code() == absl::StatusCode::kNotFound) return v1::GetJobResponse();
      return status;
    };
    const auto pushed = Push(0);
    EXPECT_THAT(AwaitSilent(1), ElementsAre(epoch == 3 ? "s1" : "s2"));
    EXPECT_FALSE(pushed->WaitUntil(absl::Now() + absl::Milliseconds(100))) << status;
    Continue(++epoch, {"s0", "s2"}, {{{0, 1}, {}}, {{0, 1}, {}}});
    if (epoch == 5) Continue(++epoch, {"s0"}, {{{0}, {}}, {{0}, {}}});
    EXPECT_EQ(pushed->Wait(), absl::OkStatus());
  }
}

TEST_F(RouterRoutesTest, ASilentServerIsNamedThoughNoCallGoesThere) {
  const absl::Status down = model::Error(absl::StatusCode::kUnavailable, model::kServerDown, "connection refused");
  servers_[0].on_get_job = [&](const v1::GetJobRequest&) -> absl::StatusOr<v1::GetJobResponse> { return down; };
  servers_[1].on_get_job = servers_[0].on_get_job;
  router().LookForSilent();
  EXPECT_THAT(router().Silent(), IsEmpty());
  servers_[1].on_seal = [&](const v1::SealRequest&) -> absl::StatusOr<v1::SealResponse> { return down; };
  const auto tally = std::make_shared<Tally>();
  tally->Start();
  router().Call<v1::SealRequest, v1::SealResponse>(
      &Transport::Seal, 1, "Seal", std::make_shared<v1::SealRequest>(), Soon(),
      [tally](const absl::StatusOr<v1::SealResponse>& answer) { tally->Finish(answer.status()); });
  EXPECT_THAT(AwaitSilent(2), ElementsAre("s0", "s1"));
  // Both are waited for, and are back.
  servers_[0].on_get_job = [](const v1::GetJobRequest&) { return absl::StatusOr<v1::GetJobResponse>(Opened()); };
  servers_[1].on_get_job = servers_[0].on_get_job;
  EXPECT_THAT(AwaitSilent(0), IsEmpty());
  servers_[1].on_seal = nullptr;
  EXPECT_EQ(tally->Wait(), absl::OkStatus());
}

TEST_F(RouterRoutesTest, AServerThatHangsIsFoundByALook) {
  servers_[1].HoldPushes();
  servers_[1].on_get_job = [](const v1::GetJobRequest&) -> absl::StatusOr<v1::GetJobResponse> {
    return absl::DeadlineExceededError("no answer");
  };
  const auto pushed = Push(0);
  EXPECT_THAT(AwaitSilent(1), ElementsAre("s1"));
  EXPECT_EQ(servers_[1].pushed().size(), 1) << "the push is still under way";
  servers_[1].on_get_job = [](const v1::GetJobRequest&) { return absl::StatusOr<v1::GetJobResponse>(Opened()); };
  EXPECT_THAT(AwaitSilent(0), IsEmpty());
  servers_[1].AnswerPushes();
  EXPECT_EQ(pushed->Wait(), absl::OkStatus());
}

// A rank that waits for a server that hangs learns of the next epoch from another one.
TEST_F(RouterRoutesTest, ACallThatWaitsLongLooksForTheNextEpoch) {
  FakeServer& hangs = servers_[1];
  hangs.HoldPushes();
  const v1::OpenRequest open = Open(4, {"s0"}, {{{0}, {}}, {{0}, {}}});
  servers_[0].on_get_job = [&](const v1::GetJobRequest& request) {
    v1::GetJobResponse job;
    *job.mutable_opened() = *job.mutable_promised() = open.epoch();
    if (!request.without_open()) *job.mutable_open() = open;
    return absl::StatusOr<v1::GetJobResponse>(job);
  };
  const auto pushed = Push(0);
  while (router().routes()->epoch().counter() < 4) absl::SleepFor(absl::Milliseconds(5));
  hangs.AnswerPushes(absl::CancelledError("cancelled"));
  EXPECT_EQ(pushed->Wait(), absl::OkStatus());
}

// As a seal does, whose calls are short.
TEST_F(RouterRoutesTest, WhoAsksAgainAndAgainLooksForTheNextEpoch) {
  const v1::OpenRequest open = Open(4, {"s0"}, {{{0}, {}}, {{0}, {}}});
  servers_[0].on_get_job = [&](const v1::GetJobRequest& request) {
    v1::GetJobResponse job;
    *job.mutable_opened() = *job.mutable_promised() = open.epoch();
    if (!request.without_open()) *job.mutable_open() = open;
    return absl::StatusOr<v1::GetJobResponse>(job);
  };
  router().WaitsSince(model::SteadyTime::Now() - absl::Hours(1));
  while (router().routes()->epoch().counter() < 4) absl::SleepFor(absl::Milliseconds(5));
  router().WaitsSince(model::SteadyTime::Never());
}

TEST_F(RouterRoutesTest, ALookFindsThatAHolderIsBack) {
  FakeServer* const source = &servers_[router().routes()->plan->SourceFor(0, 0)];
  std::atomic<bool> down{true};
  source->on_pull = [&](const v1::PullRequest&, absl::Span<std::byte>) {
    if (!down) return absl::OkStatus();
    return model::Error(absl::StatusCode::kUnavailable, model::kServerDown, "connection refused");
  };
  source->on_get_job = [&](const v1::GetJobRequest&) -> absl::StatusOr<v1::GetJobResponse> {
    if (!down) return Opened();
    return model::Error(absl::StatusCode::kUnavailable, model::kServerDown, "connection refused");
  };
  EXPECT_EQ(Pull(0), absl::OkStatus());
  EXPECT_EQ(source->pulled().size(), 1) << "another holder answered";
  down = false;
  while (source->pulled().size() < 2) {
    router().LookForSilent();
    EXPECT_EQ(Pull(0), absl::OkStatus());
  }
}

}  // namespace
}  // namespace ballast::client
