// State servers of a job come and go: chunks are copied while steps go on, chunks that other servers have are given up,
// servers begin anew. Whoever holds the job in the end has the bits of an undisturbed run.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "ballast/proto/base/status.h"
#include "ballast/tests/services/members_fixture.h"

namespace ballast::services {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class MembersJobTest : public MembersFixture {};

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
  End("a");
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
  for (const char* name : {"a", "b"}) Restart(name);
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
    Restart(name);
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
  Restart("b");  // all that it has is on its disk
  ASSERT_EQ(Reconfigure({"a"}, 2, {"b"}), absl::OkStatus());
  Steps(1);
  source_.opens = false;
  ASSERT_EQ(Reconfigure({"a", "b"}, 2), absl::OkStatus());
  Steps(40);
  Restart("b");
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
  Restart("b");
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
    Restart("b");
    EXPECT_EQ(StatusOf("b").unfilled_chunks(), copied ? 0 : StatusOf("b").chunks());
  }
  Restart("a");
  ASSERT_EQ(Reconfigure({"b"}, 1), absl::OkStatus());
  EXPECT_EQ(table_.members_size(), 1);
  End("a");
  Steps(2);
  ExpectSameBits();
  Restart("b");
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

// Versions that are kept go with the chunks: to a server that begins, and to one that keeps some of them already.
class KeptVersionsTest : public MembersFixture {
 protected:
  // Two kept versions, 1 and 3; tensors are registered after the first one.
  void Begin(const std::vector<std::string>& servers, uint32_t replicas) {
    EXPECT_EQ(at_1_.Start(), absl::OkStatus());
    EXPECT_EQ(at_1_.Initialise(Initial), absl::OkStatus());
    MembersFixture::Begin(servers, replicas);
    Steps(1);
    ASSERT_EQ(at_1_.PushAll(v1::SLICE_KIND_GRADIENT, AllTensors(Tensors()), GradientOf(1)), absl::OkStatus());
    ASSERT_EQ(at_1_.Finish(UpdateHeader(Tensors())).status(), absl::OkStatus());
    for (const std::string& name : servers) Pin(name);
    Steps(2);
    for (const std::string& name : servers) Pin(name);
    Steps(2);
  }
  void Pin(const std::string& name) {
    ASSERT_EQ(PinDurably(servers_[name]->get(), "job", group_->epoch(), step_), absl::OkStatus());
  }
  std::vector<int64_t> KeptBy(const std::string& name) {
    const v1::JobStatus status = StatusOf(name);
    return {status.durable_versions().begin(), status.durable_versions().end()};
  }
  // A change until its copies are made and the others have given up what they do not hold any more.
  void Settle(const std::vector<std::string>& servers, uint32_t replicas, const std::vector<std::string>& down = {}) {
    ASSERT_EQ(Reconfigure(servers, replicas, down), absl::OkStatus());
    Steps(1);
    for (const std::string& name : servers) AwaitFilled(name);
    Steps(1);
    ASSERT_EQ(Reconfigure(servers, replicas, down), absl::OkStatus());
    Steps(1);
  }
  static v1::StepHeader RestoreOfVersion1() {
    v1::StepHeader header;
    header.set_kind(v1::STEP_KIND_RESTORE);
    header.set_restored_version(1);
    header.set_gradient_presence(std::string(1, 0));
    header.set_value_presence(std::string(1, 0));
    return header;
  }
  // The next group goes back to version 1.
  void ExpectVersion1(const std::vector<std::string>& servers, uint32_t replicas = 1,
                      const std::vector<std::string>& down = {}) {
    ASSERT_EQ(Reconfigure(servers, replicas, down), absl::OkStatus());
    const auto restored = group_->Finish(RestoreOfVersion1());
    ASSERT_TRUE(restored.ok()) << restored.status();
    for (uint32_t tensor = 0; tensor < Tensors(); ++tensor) {
      for (const v1::Content content : {v1::CONTENT_MASTER, v1::CONTENT_MOMENT1, v1::CONTENT_MOMENT2}) {
        const auto mine = group_->Read(tensor, content, step_ + 1), theirs = at_1_.Read(tensor, content, 1);
        ASSERT_TRUE(mine.ok() && theirs.ok()) << mine.status() << theirs.status();
        ASSERT_EQ(*mine, *theirs) << "tensor " << tensor << ", content " << content;
      }
    }
  }

  TestServer server_at_1_{"at_1"};
  TrainerGroup at_1_{{server_at_1_.get()}, Spec(v1::DURABILITY_NONE), 1};
};

TEST_P(KeptVersionsTest, AServerThatBeginsHasThem) {
  Begin({"a"}, 1);
  Settle({"b"}, 1);
  EXPECT_THAT(KeptBy("b"), ElementsAre(1, 3));
  EXPECT_EQ(table_.members_size(), 1);
  End("a");
  ExpectSameBits();
  Restart("b");
  EXPECT_THAT(KeptBy("b"), ElementsAre(1, 3));
  ASSERT_EQ(Reconfigure({"b"}, 1), absl::OkStatus());
  ExpectSameBits();
  ExpectVersion1({"b"});
}

TEST_P(KeptVersionsTest, AServerThatKeepsSomeOfThemGetsTheRest) {
  Begin({"a", "b"}, 1);
  Settle({"b"}, 1);
  End("a");
  ExpectSameBits();
  ExpectVersion1({"b"});
}

// Two servers that begin at once, or that restart before they have anything: what one of them says is no answer.
TEST_P(KeptVersionsTest, OnlyAHolderTellsThem) {
  Begin({"a"}, 1);
  source_.opens = false;
  ASSERT_EQ(Reconfigure({"a", "b"}, 2), absl::OkStatus());
  const auto ask = [&](const std::string& name) {
    v1::ExportRequest request;
    request.set_job("job");
    request.set_life(table_.life());
    request.set_spec_digest(group_->plan().open().spec_digest());
    request.set_tell_kept(true);
    Answer<ExportedChunk> answer;
    (*servers_[name])->Export(request, absl::InfiniteFuture(), answer.reply());
    return answer.Wait();
  };
  const absl::StatusOr<ExportedChunk> told = ask("a");
  ASSERT_TRUE(told.ok()) << told.status();
  ASSERT_EQ(told->head.kept_size(), 2);
  EXPECT_EQ(told->head.kept(0).decision().step(), 1);
  EXPECT_EQ(model::ReasonOf(ask("b").status()), model::kBusy);
  source_.opens = true;
  AwaitFilled("b");
  EXPECT_THAT(KeptBy("b"), ElementsAre(1, 3));
}

// What was given up is free, on the disk too; and comes back with the chunks.
TEST_P(KeptVersionsTest, TheyLeaveWithTheChunksAndComeBack) {
  Begin({"a"}, 1);
  const auto pins = [&](const std::string& name) {
    uint64_t bytes = 0;
    const v1::JobStatus status = StatusOf(name);
    for (const v1::TierStatus& tier : status.tiers()) {
      for (const v1::TierPart& part : tier.parts()) bytes += part.part() == "pins" ? part.bytes() : 0;
    }
    return bytes;
  };
  const uint64_t before = pins("a");
  Settle({"a", "b"}, 1);
  AwaitIdle(servers_["a"]->get(), "job");
  EXPECT_LT(pins("a"), before);
  for (const char* name : {"a", "b"}) {
    Restart(name);
    EXPECT_THAT(KeptBy(name), ElementsAre(1, 3)) << name;
  }
  EXPECT_EQ(pins("a") + pins("b"), before);
  Settle({"a"}, 1);
  End("b");
  Restart("a");
  ASSERT_EQ(Reconfigure({"a"}, 1), absl::OkStatus());
  ExpectSameBits();
  ExpectVersion1({"a"});
}

// A lost machine: the copies that others make have the kept versions too.
TEST_P(KeptVersionsTest, TheySurviveAServer) {
  Begin({"a", "b"}, 2);
  Settle({"a", "c"}, 2, {"b"});
  EXPECT_THAT(KeptBy("c"), ElementsAre(1, 3));
  Settle({"c"}, 1, {"a"});
  ExpectSameBits();
  ExpectVersion1({"c"});
}

TEST_P(KeptVersionsTest, ARestoreWaitsForTheCopies) {
  Begin({"a"}, 1);
  source_.opens = false;
  ASSERT_EQ(Reconfigure({"a", "b"}, 2), absl::OkStatus());
  EXPECT_EQ(model::ReasonOf(group_->Finish(RestoreOfVersion1()).status()), model::kBusy);
  source_.opens = true;
  AwaitFilled("b");
  ExpectVersion1({"a", "b"}, 2);
}

TEST_P(KeptVersionsTest, AVersionThatIsGivenUpMeanwhileIsNotCopied) {
  Begin({"a"}, 1);
  source_.opens = false;
  ASSERT_EQ(Reconfigure({"a", "b"}, 2), absl::OkStatus());
  for (const char* name : {"a", "b"}) {
    ASSERT_EQ(UnpinDurably(servers_[name]->get(), "job", group_->epoch(), 3), absl::OkStatus());
  }
  source_.opens = true;
  AwaitFilled("b");
  EXPECT_THAT(KeptBy("b"), ElementsAre(1));
}

// A version that the holder lacks can be restored no more: the copies go on without it.
TEST_P(KeptVersionsTest, AVersionThatNobodyElseKeepsIsGivenUp) {
  Begin({"a", "b"}, 1);
  ASSERT_EQ(UnpinDurably(servers_["a"]->get(), "job", group_->epoch(), 3), absl::OkStatus());
  Settle({"b"}, 1);
  EXPECT_THAT(KeptBy("b"), ElementsAre(1));
  ExpectSameBits();
  ExpectVersion1({"b"});
}

TEST_P(KeptVersionsTest, ARestartAmidTheCopyingBeginsThemAgain) {
  Begin({"a"}, 1);
  ASSERT_EQ(Reconfigure({"a", "b"}, 2), absl::OkStatus());
  source_.fetches = 5;  // some states of kept versions come, and the server ends
  for (const absl::Time end = absl::Now() + absl::Minutes(1); source_.fetches > 0 && absl::Now() < end;) {
    absl::SleepFor(absl::Milliseconds(1));
  }
  Restart("b");
  source_.fetches = -1;
  Settle({"b"}, 1);
  EXPECT_THAT(KeptBy("b"), ElementsAre(1, 3));
  ExpectSameBits();
  ExpectVersion1({"b"});
}

INSTANTIATE_TEST_SUITE_P(Tiers, KeptVersionsTest, ::testing::Values(kMembersCases[0], kMembersCases[1]),
                         [](const auto& info) { return info.param.name; });
INSTANTIATE_TEST_SUITE_P(Tiers, MembersJobTest, ::testing::ValuesIn(kMembersCases),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace ballast::services
