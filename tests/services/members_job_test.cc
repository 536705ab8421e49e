// State servers of a job come and go: chunks are copied while steps go on, chunks that other servers have are given up,
// servers begin anew. Whoever holds the job in the end has the bits of an undisturbed run.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "ballast/proto/base/status.h"
#include "ballast/tests/services/members_fixture.h"

namespace ballast::services {
namespace {

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

INSTANTIATE_TEST_SUITE_P(Tiers, MembersJobTest, ::testing::ValuesIn(kMembersCases),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace ballast::services
