// A change of servers of a job that keeps versions: the client's parts, and servers that are objects of the test. What
// the change is refused for is what the copies take.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ballast/client/group/change.h"
#include "ballast/client/group/opens.h"
#include "ballast/proto/model/optimizer.h"
#include "ballast/proto/model/wish.h"
#include "ballast/tests/client/fake_server.h"
#include "ballast/tests/client/transport/small_etcd.h"
#include "ballast/tests/services/members_fixture.h"

namespace ballast::client {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

absl::Time Soon() { return absl::Now() + absl::Seconds(60); }

// Job "job" on server a; an operator wants it on b too, with two copies.
class KeptChangeTest : public services::MembersFixture {
 protected:
  KeptChangeTest() : registry_(etcd_.Connect()) {
    options_.job = "job";
    options_.failover_after = absl::Seconds(20);
    options_.progress = [this](const std::string& line) { lines_.push_back(line); };
  }

  // Versions 1 and 3 are kept, between which all chunks changed.
  void BeginWithVersions() {
    Begin({"a"}, 1);
    for (const int64_t version : {1, 3}) {
      Steps(static_cast<int>(version - step_));
      ASSERT_EQ(services::PinDurably(servers_["a"]->get(), "job", group_->epoch(), version), absl::OkStatus());
    }
    Steps(1);
    v1::JobKey key;
    key.mutable_claimed()->set_counter(epochs_);
    *key.mutable_table() = table_;
    ASSERT_TRUE(*registry_.PutJob("job", key, 0, Soon()));
    auto wish = model::WishToAdd(table_, v1::Wish(), {{"b"}});
    ASSERT_TRUE(wish.ok()) << wish.status();
    wish = model::WishForCopies(table_, *wish, 2);
    ASSERT_TRUE(wish.ok()) << wish.status();
    wish->set_life(table_.life());
    ASSERT_TRUE(*registry_.PutWish("job", *wish, 0, Soon()));
  }
  // Of all chunks, as one version has it.
  uint64_t StateBytes() const {
    const storage::StateLayout layout(*model::OptimizerOf(Spec(GetParam().durability)));
    uint64_t bytes = 0;
    for (const model::Chunk& chunk : layout_.chunks()) bytes += layout.StateBytes(chunk.range.size());
    return bytes;
  }
  void GiveNvme(const std::string& name, uint64_t bytes) {
    servers_[name]->options().budget.nvme = bytes;
    Restart(name);
  }
  static uint64_t NvmeOf(const v1::JobStatus& status, const std::string& part) {
    for (const v1::TierStatus& tier : status.tiers()) {
      for (const v1::TierPart& one : tier.parts()) {
        if (tier.tier() == "nvme" && one.part() == part) return one.bytes();
      }
    }
    return 0;
  }
  std::vector<int64_t> KeptBy(const std::string& name) {
    const v1::JobStatus status = StatusOf(name);
    return {status.durable_versions().begin(), status.durable_versions().end()};
  }

  static v1::GetJobRequest JobRequest() {
    v1::GetJobRequest request;
    request.set_job("job");
    return request;
  }
  // A fake that asks the server.
  std::unique_ptr<FakeServer> TransportTo(const std::string& name) {
    auto fake = std::make_unique<FakeServer>(name);
    services::StateServer* const server = servers_.at(name)->get();
    fake->disk = server->disk();
    fake->on_get_job = [server](const v1::GetJobRequest& request) {
      services::Answer<v1::GetJobResponse> answer;
      server->GetJob(request, answer.reply());
      return answer.Wait();
    };
    fake->on_fence = [server](const v1::FenceRequest& request) {
      services::Answer<v1::FenceResponse> answer;
      server->Fence(request, Soon(), answer.reply());
      return answer.Wait();
    };
    fake->on_open = [server](const v1::OpenRequest& request) {
      services::Answer<v1::OpenResponse> answer;
      server->Open(request, Soon(), answer.reply());
      return answer.Wait();
    };
    return fake;
  }

  // Another group opens the job.
  absl::Status OpenAnew() {
    lines_.clear();
    std::vector<std::unique_ptr<Transport>> transports;
    std::set<std::string> reached;
    for (const char* name : {"a", "b"}) {
      transports.push_back(TransportTo(name));
      reached.insert(transports.back()->registered_as());
    }
    Router router(std::move(transports), RouterOptions{});
    Members members(&router, Members::Uses::kCalls);
    JobKey key(&registry_, "job");
    BALLAST_RETURN_IF_ERROR(key.Read(Soon()));
    BALLAST_RETURN_IF_ERROR(members.Identify(key, Spares::kConnect, {absl::Seconds(20), absl::Seconds(20)}, Soon()));
    client::Change change(&router, &members, &key, options_, reached, absl::Seconds(20));
    BALLAST_RETURN_IF_ERROR(change.Look(Spec(GetParam().durability), Soon()).status());
    v1::Epoch least;
    least.set_counter(++epochs_);
    BALLAST_ASSIGN_OR_RETURN(const v1::Epoch epoch, key.Claim(v1::Table(), least, Soon()));
    epochs_ = epoch.counter();
    BALLAST_RETURN_IF_ERROR(change.Claimed(epoch, Soon()));
    BALLAST_RETURN_IF_ERROR(change.Fence("another group", /*expect_empty=*/false, Soon()));
    v1::OpenRequest open = group_->open_request(step_, std::nullopt);
    *open.mutable_epoch() = epoch;
    open.set_group("another group");
    BALLAST_RETURN_IF_ERROR(OpenNext(&router, &members, &key, &change, options_, Soon(), &open));
    table_ = open.table();
    return absl::OkStatus();
  }
  // The group that the test's steps belong to goes on from there.
  void TrainOn(const std::vector<std::string>& servers) {
    ASSERT_EQ(Reconfigure(servers, static_cast<uint32_t>(servers.size())), absl::OkStatus());
    Steps(1);
    for (const std::string& name : servers) AwaitFilled(name);
    Steps(1);
    ExpectSameBits();
  }
  // NVMe that server b takes for the job's chunks, as it says itself.
  uint64_t NeededForChunks() {
    v1::OpenRequest open = group_->open_request(step_, std::nullopt);
    open.set_dry_run(true);
    *open.mutable_table()->add_members() = MemberOf("b");
    open.mutable_table()->set_replicas(2);
    for (v1::Shard& shard : *open.mutable_table()->mutable_shards()) shard.add_fillers(1);
    const auto answer = TransportTo("b")->on_open(open);
    EXPECT_TRUE(answer.ok()) << answer.status();
    if (!answer.ok()) return 0;
    const v1::PlannedTier& nvme = answer->tiers(static_cast<int>(storage::TierKind::kNvme));
    EXPECT_EQ(nvme.tier(), "nvme");
    EXPECT_EQ(nvme.free_bytes(), GetParam().budget.nvme);
    return nvme.state_bytes() + nvme.working_bytes() + nvme.other_bytes();
  }

  SmallEtcd etcd_;
  registry::Registry registry_;
  SessionOptions options_;
  std::vector<std::string> lines_;
};

TEST_P(KeptChangeTest, WithoutRoomForTheVersionsNothingChangesUntilOneIsGivenUp) {
  BeginWithVersions();
  const uint64_t kept = 2 * StateBytes(), chunks = NeededForChunks();
  ASSERT_GT(chunks, StateBytes());
  GiveNvme("b", chunks + kept - 1);
  const v1::Table before = table_;
  ASSERT_EQ(OpenAnew(), absl::OkStatus());
  EXPECT_TRUE(model::SameTable(table_, before));
  EXPECT_THAT(lines_,
              ElementsAre(AllOf(HasSubstr("the wish for 2 server(s), 'b' before others, 2 copies of each chunk is not "
                                          "heeded, and its servers stay: server 'b' has no room for copies of the "
                                          "kept versions (1, 3): nvme is short of 1 bytes, "),
                                HasSubstr(absl::StrCat(kept, " are needed for them and ", chunks, " for its chunks, ",
                                                       chunks + kept - 1, " are free; ")),
                                HasSubstr("give a version up (`ballastctl unpin`)"))));
  EXPECT_EQ(StatusOf("b").chunks(), 0u);
  EXPECT_EQ(NvmeOf(StatusOf("b"), "pins"), 0u);
  TrainOn({"a"});
  EXPECT_THAT(KeptBy("a"), ElementsAre(1, 3));

  ASSERT_EQ(services::UnpinDurably(servers_["a"]->get(), "job", group_->epoch(), 1), absl::OkStatus());
  ASSERT_EQ(OpenAnew(), absl::OkStatus());
  EXPECT_THAT(lines_, ElementsAre(HasSubstr("server 'b' joins and copies 4 of 4 shards")));
  EXPECT_EQ(table_.members_size(), 2);
  TrainOn({"a", "b"});
  EXPECT_THAT(KeptBy("b"), ElementsAre(3));
  EXPECT_EQ(NvmeOf(StatusOf("b"), "pins"), kept / 2);
}

// The number is exact: with these bytes the copies end.
TEST_P(KeptChangeTest, ThatMuchRoomIsEnough) {
  BeginWithVersions();
  const uint64_t kept = 2 * StateBytes();
  GiveNvme("b", NeededForChunks() + kept);
  ASSERT_EQ(OpenAnew(), absl::OkStatus());
  EXPECT_THAT(lines_, ElementsAre(HasSubstr("server 'b' joins and copies 4 of 4 shards")));
  TrainOn({"a", "b"});
  EXPECT_THAT(KeptBy("b"), ElementsAre(1, 3));
  EXPECT_EQ(NvmeOf(StatusOf("b"), "pins"), kept);
  // Both tell the same, also after a restart.
  Restart("b");
  for (const char* name : {"a", "b"}) {
    const auto job = TransportTo(name)->on_get_job(JobRequest());
    ASSERT_TRUE(job.ok()) << job.status();
    EXPECT_EQ(std::accumulate(job->kept_bytes().begin(), job->kept_bytes().end(), uint64_t{0}), kept) << name;
  }
}

INSTANTIATE_TEST_SUITE_P(Tiers, KeptChangeTest, ::testing::Values(services::kMembersCases[0]),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace ballast::client
