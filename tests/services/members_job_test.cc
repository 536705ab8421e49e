// State servers of a job come and go: chunks are copied while steps go on, chunks that other servers have are given up,
// servers begin anew. Whoever holds the job in the end has the bits of an undisturbed run.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/members.h"
#include "ballast/proto/model/table.h"
#include "ballast/services/threads/chunk_source.h"
#include "ballast/services/threads/exported_chunk.h"
#include "ballast/tests/services/trainer_group.h"
#include "ballast/tests/services/training_bits.h"

namespace ballast::services {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr int kShards = 4;

uint32_t Tensors() { return static_cast<uint32_t>(SmallModel().size()); }

v1::JobSpec Spec(v1::Durability durability) {
  v1::JobSpec spec = MakeSpec("job", SmallModel());
  spec.set_durability(durability);
  return spec;
}

struct Case {
  const char* name;
  storage::TierBytes budget;
  v1::Durability durability;
};

class MembersJobTest : public ::testing::TestWithParam<Case> {
 protected:
  MembersJobTest() : layout_(*model::Layout::Make(Spec(GetParam().durability))) {
    for (const char* name : {"a", "b", "c"}) {
      servers_[name] = std::make_unique<TestServer>(name, GetParam().budget);
      servers_[name]->options().chunk_source = &source_;
      servers_[name]->Restart();
      source_.servers[name] = servers_[name].get();
    }
    EXPECT_EQ(reference_.Start(), absl::OkStatus());
    EXPECT_EQ(reference_.Initialise(Initial), absl::OkStatus());
  }

  // Servers fetch chunks from each other by a direct call.
  struct Source : ChunkSource {
    void Fetch(const v1::ExportRequest& request, const v1::Member& from, absl::Time deadline,
               Reply<v1::ExportResponse> reply) override {
      if (!opens) return reply(absl::UnavailableError("the test keeps copies back"));
      (*servers.at(from.server_id()))->Export(request, deadline, [reply](absl::StatusOr<ExportedChunk> chunk) {
        if (!chunk.ok()) return reply(chunk.status());
        v1::ExportResponse response;
        response.set_version(chunk->version);
        response.set_changed(chunk->changed);
        response.set_elements(chunk->elements);
        for (const storage::WholeState::Array& array : chunk->state.arrays) {
          v1::ExportResponse::Array* const sent = response.add_arrays();
          sent->set_payload(std::string(reinterpret_cast<const char*>(array.bytes.data()), array.bytes.size()));
          sent->set_crc32c(array.crc32c);
        }
        reply(std::move(response));
      });
    }
    std::map<std::string, TestServer*> servers;
    std::atomic<bool> opens{true};
  };

  v1::Member MemberOf(const std::string& name) {
    v1::Member member;
    member.set_server_id(name);
    member.set_weight(1);
    member.set_disk((*servers_.at(name))->disk());
    member.set_address(name);
    return member;
  }

  // The next group fences `wanted` and the present members but for those that are `down`, and opens the job with as
  // many copies on `wanted`.
  absl::Status Reconfigure(const std::vector<std::string>& wanted, uint32_t replicas,
                           const std::vector<std::string>& down = {}) {
    const auto is_down = [&](const std::string& name) {
      return std::find(down.begin(), down.end(), name) != down.end();
    };
    std::vector<std::string> asked;
    for (const v1::Member& member : table_.members()) asked.push_back(member.server_id());
    asked.insert(asked.end(), wanted.begin(), wanted.end());
    std::sort(asked.begin(), asked.end());
    asked.erase(std::unique(asked.begin(), asked.end()), asked.end());
    std::erase_if(asked, is_down);
    std::vector<StateServer*> servers;
    for (const std::string& name : asked) servers.push_back(servers_.at(name)->get());
    group_ = std::make_unique<TrainerGroup>(servers, Spec(GetParam().durability), 1, ++epochs_);
    std::vector<v1::GetJobResponse> answers;
    BALLAST_RETURN_IF_ERROR(group_->Fence(&answers));
    std::vector<v1::Member> members;
    for (const std::string& name : wanted) members.push_back(MemberOf(name));
    const std::vector<uint64_t> elements = model::ShardElements(layout_, kShards);
    const model::Wanted want{.servers = members, .replicas = replicas, .shard_elements = elements, .level = true};
    model::Found found;
    if (table_.shards().empty()) {
      table_ = model::FirstTable(want, v1::Epoch());
      table_.set_life(5);
    } else {
      BALLAST_ASSIGN_OR_RETURN(found, model::FindBase(table_, layout_, answers));
      EXPECT_TRUE(found.enough()) << model::ShowWait(table_, found);
      // Who does not count is no member any more: if it is wanted, it begins anew.
      std::vector<bool> there(static_cast<size_t>(table_.members_size()), false);
      for (const uint32_t member : found.counted) there[member] = true;
      table_ = model::LeaveOut(table_, there);
      BALLAST_ASSIGN_OR_RETURN(found, model::FindBase(table_, layout_, answers));
      table_ = model::NextTable(table_, found.filled, want, group_->epoch());
    }
    servers.clear();
    for (const v1::Member& member : table_.members()) servers.push_back(servers_.at(member.server_id())->get());
    return group_->OpenWith(table_, servers, found);
  }

  void Begin(const std::vector<std::string>& servers, uint32_t replicas) {
    ASSERT_EQ(Reconfigure(servers, replicas), absl::OkStatus());
    ASSERT_EQ(group_->Initialise(Initial), absl::OkStatus());
  }

  void Steps(int count) {
    for (int i = 0; i < count; ++i) {
      ++step_;
      for (TrainerGroup* group : {group_.get(), &reference_}) {
        ASSERT_EQ(group->PushAll(v1::SLICE_KIND_GRADIENT, AllTensors(Tensors()), GradientOf(step_)), absl::OkStatus());
        const auto finished = group->Finish(UpdateHeader(Tensors()));
        ASSERT_TRUE(finished.ok()) << finished.status();
      }
    }
  }

  v1::JobStatus StatusOf(const std::string& name) {
    const v1::GetServerStatusResponse status = (*servers_.at(name))->Status();
    return status.jobs().empty() ? v1::JobStatus() : status.jobs(0);
  }
  void AwaitFilled(const std::string& name) {
    for (const absl::Time end = absl::Now() + absl::Minutes(1); StatusOf(name).unfilled_chunks() > 0;) {
      ASSERT_LT(absl::Now(), end) << StatusOf(name).unfilled_chunks() << " chunks are not filled";
      absl::SleepFor(absl::Milliseconds(2));
    }
  }
  void ExpectSameBits() { ExpectSame(*group_, reference_, step_); }

  const model::Layout layout_;
  Source source_;
  std::map<std::string, std::unique_ptr<TestServer>> servers_;
  TestServer reference_server_{"reference"};
  TrainerGroup reference_{{reference_server_.get()}, Spec(v1::DURABILITY_NONE), 1};
  std::unique_ptr<TrainerGroup> group_;
  v1::Table table_;
  uint64_t epochs_ = 0;
  int64_t step_ = 0;
};

TEST_P(MembersJobTest, AJobMovesToAnotherServer) {
  Begin({"a"}, 1);
  Steps(3);
  ASSERT_EQ(Reconfigure({"b"}, 1), absl::OkStatus());
  Steps(2);
  AwaitFilled("b");
  Steps(2);
  ASSERT_EQ(Reconfigure({"b"}, 1), absl::OkStatus());
  ASSERT_EQ(table_.members_size(), 1);
  EXPECT_EQ(table_.members(0).server_id(), "b");
  ExpectSameBits();
  servers_["a"]->End();
  Steps(3);
  ExpectSameBits();
}

// Some chunks stay, others go: their bytes come back, and a restart finds what is left.
TEST_P(MembersJobTest, AServerSharesItsChunksWithAnother) {
  Begin({"a"}, 1);
  Steps(3);
  const uint64_t chunks = StatusOf("a").chunks();
  ASSERT_EQ(Reconfigure({"a", "b"}, 1), absl::OkStatus());
  Steps(1);
  AwaitFilled("b");
  Steps(1);
  ASSERT_EQ(Reconfigure({"a", "b"}, 1), absl::OkStatus());
  Steps(1);
  EXPECT_EQ(StatusOf("a").chunks() + StatusOf("b").chunks(), chunks);
  EXPECT_GT(StatusOf("a").chunks(), 0u);
  EXPECT_GT(StatusOf("b").chunks(), 0u);
  ExpectSameBits();
  if (GetParam().durability == v1::DURABILITY_NONE) return;
  for (const char* name : {"a", "b"}) servers_[name]->Restart();
  ASSERT_EQ(Reconfigure({"a", "b"}, 1), absl::OkStatus());
  Steps(2);
  ExpectSameBits();
  // And back again, to where a part has been before.
  ASSERT_EQ(Reconfigure({"a"}, 1), absl::OkStatus());
  AwaitFilled("a");
  ASSERT_EQ(Reconfigure({"a"}, 1), absl::OkStatus());
  Steps(1);
  EXPECT_EQ(StatusOf("a").chunks(), chunks);
  ExpectSameBits();
}

// The log begins with a snapshot of the table before: a restart finds it, and the chunks that were given up since gone.
TEST_P(MembersJobTest, ARestartBehindALongLog) {
  if (GetParam().durability == v1::DURABILITY_NONE) return;
  Begin({"a"}, 1);
  Steps(40);
  ASSERT_EQ(Reconfigure({"a", "b"}, 1), absl::OkStatus());
  AwaitFilled("b");
  ASSERT_EQ(Reconfigure({"a", "b"}, 1), absl::OkStatus());
  AwaitIdle(servers_["a"]->get(), "job");
  for (const char* name : {"a", "b"}) {
    servers_[name]->Restart();
    EXPECT_FALSE(StatusOf(name).state_lost()) << name;
  }
  ASSERT_EQ(Reconfigure({"a", "b"}, 1), absl::OkStatus());
  Steps(1);
  ExpectSameBits();
}

// What the disk has of a chunk that is still to be copied is no copy, however far steps and log have gone on since.
TEST_P(MembersJobTest, ARestartTakesNoOldStateForACopy) {
  if (GetParam().durability == v1::DURABILITY_NONE) return;
  Begin({"a", "b"}, 2);
  Steps(30);
  servers_["b"]->Restart();  // all that it has is on its disk
  ASSERT_EQ(Reconfigure({"a"}, 2, {"b"}), absl::OkStatus());
  Steps(1);
  source_.opens = false;
  ASSERT_EQ(Reconfigure({"a", "b"}, 2), absl::OkStatus());
  Steps(40);
  servers_["b"]->Restart();
  EXPECT_EQ(StatusOf("b").unfilled_chunks(), StatusOf("b").chunks());
  source_.opens = true;
  ASSERT_EQ(Reconfigure({"a", "b"}, 2), absl::OkStatus());
  AwaitFilled("b");
  ASSERT_EQ(Reconfigure({"b"}, 2), absl::OkStatus());
  ASSERT_EQ(Reconfigure({"b"}, 2, {"a"}), absl::OkStatus());
  ExpectSameBits();
}

// Versions that it kept go with the state that it had; those that it keeps since stay.
TEST_P(MembersJobTest, AServerThatBeginsAnewGivesItsKeptVersionsUp) {
  if (GetParam().durability == v1::DURABILITY_NONE) return;
  Begin({"a", "b"}, 2);
  Steps(1);
  ASSERT_EQ(PinDurably(servers_["b"]->get(), "job", group_->epoch(), step_), absl::OkStatus());
  ASSERT_EQ(Reconfigure({"a"}, 2, {"b"}), absl::OkStatus());
  Steps(2);
  ASSERT_EQ(Reconfigure({"a", "b"}, 2), absl::OkStatus());
  AwaitFilled("b");
  Steps(1);
  ASSERT_EQ(Reconfigure({"a", "b"}, 2), absl::OkStatus());
  ASSERT_EQ(PinDurably(servers_["b"]->get(), "job", group_->epoch(), step_), absl::OkStatus());
  Steps(1);
  servers_["b"]->Restart();
  const v1::JobStatus status = StatusOf("b");
  ASSERT_EQ(status.durable_versions_size(), 1);
  EXPECT_EQ(status.durable_versions(0), step_ - 1);
  ASSERT_EQ(Reconfigure({"b"}, 2, {"a"}), absl::OkStatus());
  ExpectSameBits();
}

// A name that was dropped elsewhere and made again: the earlier job's state is refused, not taken over.
TEST_P(MembersJobTest, AnEarlierJobOfTheNameIsRefused) {
  Begin({"a", "b"}, 2);
  Steps(2);
  ASSERT_EQ(Reconfigure({"a"}, 2, {"b"}), absl::OkStatus());
  Steps(1);
  table_.set_life(6);
  const absl::Status refused = Reconfigure({"a", "b"}, 2);
  EXPECT_EQ(model::ReasonOf(refused), model::kOtherServer) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("drop it here too"));
}

// A server that was left out has an older state, which counts no more.
TEST_P(MembersJobTest, AServerThatWasLeftOutBeginsAnew) {
  Begin({"a", "b"}, 2);
  Steps(3);
  ASSERT_EQ(Reconfigure({"a"}, 2, {"b"}), absl::OkStatus());
  Steps(3);
  source_.opens = false;
  ASSERT_EQ(Reconfigure({"a", "b"}, 2), absl::OkStatus());
  Steps(1);
  EXPECT_EQ(StatusOf("b").unfilled_chunks(), StatusOf("b").chunks());
  source_.opens = true;
  AwaitFilled("b");
  Steps(1);
  ASSERT_EQ(Reconfigure({"a", "b"}, 2), absl::OkStatus());
  Steps(1);
  ASSERT_EQ(Reconfigure({"b"}, 2, {"a"}), absl::OkStatus());
  ExpectSameBits();
  Steps(2);
  ExpectSameBits();
}

// A restart amid the copying: what was copied counts, the rest is copied then.
TEST_P(MembersJobTest, ARestartAmidTheCopying) {
  if (GetParam().durability == v1::DURABILITY_NONE) return;
  Begin({"a"}, 1);
  Steps(3);
  for (const bool copied : {false, true}) {
    source_.opens = false;
    ASSERT_EQ(Reconfigure({"b"}, 1), absl::OkStatus());
    Steps(2);
    source_.opens = copied;
    if (copied) AwaitFilled("b");
    Steps(2);
    servers_["b"]->Restart();
    EXPECT_EQ(StatusOf("b").unfilled_chunks(), copied ? 0 : StatusOf("b").chunks());
  }
  servers_["a"]->Restart();
  ASSERT_EQ(Reconfigure({"b"}, 1), absl::OkStatus());
  EXPECT_EQ(table_.members_size(), 1);
  servers_["a"]->End();
  Steps(2);
  ExpectSameBits();
  servers_["b"]->Restart();
  ASSERT_EQ(Reconfigure({"b"}, 1), absl::OkStatus());
  ExpectSameBits();
}

TEST_P(MembersJobTest, NobodyReadsWhatIsBeingCopied) {
  Begin({"a"}, 1);
  Steps(1);
  source_.opens = false;
  ASSERT_EQ(Reconfigure({"b"}, 1), absl::OkStatus());
  v1::PullRequest request;
  request.set_job("job");
  request.set_version(step_);
  request.set_content(v1::CONTENT_WORKING);
  request.set_end(100);
  std::string bytes;
  const auto pulled =
      group_->Pull(servers_["b"]->get(), request, absl::Now() + absl::Seconds(50), &bytes).Wait().status();
  EXPECT_EQ(pulled.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(pulled.message()), HasSubstr("does not have chunk 0"));
}

// A server copies no kept versions, so one that has some keeps its chunks.
TEST_P(MembersJobTest, KeptVersionsHoldTheChunks) {
  if (GetParam().durability == v1::DURABILITY_NONE) return;
  Begin({"a"}, 1);
  Steps(1);
  ASSERT_EQ(PinDurably(servers_["a"]->get(), "job", group_->epoch(), step_), absl::OkStatus());
  ASSERT_EQ(Reconfigure({"a", "b"}, 1), absl::OkStatus());
  AwaitFilled("b");
  Steps(1);
  const absl::Status refused = Reconfigure({"a", "b"}, 1);
  EXPECT_EQ(refused.code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("keeps 1 version(s) of job 'job', the first is version 1"));
  ASSERT_EQ(UnpinDurably(servers_["a"]->get(), "job", group_->epoch(), 1), absl::OkStatus());
  ASSERT_EQ(Reconfigure({"a", "b"}, 1), absl::OkStatus());
  Steps(1);
  ExpectSameBits();
}

INSTANTIATE_TEST_SUITE_P(Tiers, MembersJobTest,
                         ::testing::Values(Case{"dram", {0, 64 * kMiB, 64 * kMiB}, v1::DURABILITY_STEP},
                                           Case{"nvme", {0, 5 * kMiB, 64 * kMiB}, v1::DURABILITY_STEP},
                                           Case{"none", {0, 64 * kMiB, 0}, v1::DURABILITY_NONE}),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace ballast::services
