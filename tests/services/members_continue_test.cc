// Slices over the group's own next epoch (rule 26 of services/step/README.md): what was pushed counts, whatever happens
// to servers and table in between, and nothing of another group does.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "ballast/proto/base/status.h"
#include "ballast/services/tools/verify/verify.h"
#include "ballast/tests/services/logged_slices.h"
#include "ballast/tests/services/members_fixture.h"

namespace ballast::services {
namespace {

using ::testing::IsEmpty;

constexpr v1::SliceKind kGradient = v1::SLICE_KIND_GRADIENT;

// Two ranks, whose slices share chunks and have chunks alone: 7 slices in 5 chunks.
class MembersContinueTest : public MembersFixture {
 protected:
  MembersContinueTest() { world_size_ = 2; }

  bool durable() const { return GetParam().durability == v1::DURABILITY_STEP; }
  uint32_t slices() const { return static_cast<uint32_t>(group_->plan().slices().size()); }
  // Every other slice of the next step, from `first` on.
  void PushHalf(uint32_t first) {
    for (uint32_t i = first; i < slices(); i += 2) {
      ASSERT_EQ(group_->PushSlice(i, kGradient, GradientOf(step_ + 1)), absl::OkStatus()) << i;
    }
  }
  // How many slices the server lacks of the next step.
  uint64_t Missing(const std::string& name) {
    v1::SealResponse answer;
    for (uint32_t rank = 0; rank < world_size_; ++rank) {
      Answer<v1::SealResponse> sealed;
      (*servers_.at(name))
          ->Seal(group_->SealOf(rank, UpdateHeader(Tensors()), 0), absl::Now() + absl::Seconds(50), sealed.reply());
      const auto response = sealed.Wait();
      EXPECT_TRUE(response.ok()) << response.status();
      if (response.ok()) answer = *response;
    }
    EXPECT_TRUE(answer.has_pending());
    return answer.pending().missing_count();
  }
  // The slices of the server's chunks among every other one from `first` on.
  uint64_t HalfOf(const std::string& name, uint32_t first) {
    const uint32_t member = *group_->plan().FindMember(name);
    uint64_t count = 0;
    for (uint32_t i = first; i < slices(); i += 2) {
      if (group_->plan().Has(member, group_->plan().slices()[i].chunk)) ++count;
    }
    return count;
  }
  void ReferenceStep() {
    ++step_;
    ASSERT_EQ(reference_.PushAll(kGradient, AllTensors(Tensors()), GradientOf(step_)), absl::OkStatus());
    const auto finished = reference_.Finish(UpdateHeader(Tensors()));
    ASSERT_TRUE(finished.ok()) << finished.status();
  }
  void FinishStep() {
    const auto finished = group_->Finish(UpdateHeader(Tensors()));
    ASSERT_TRUE(finished.ok()) << finished.status();
    ReferenceStep();
  }
  // The next step, all of it pushed, is prepared on all members.
  void Prepare(v1::Decision* decision) {
    const auto records = group_->SealAll(UpdateHeader(Tensors()));
    ASSERT_TRUE(records.ok()) << records.status();
    const auto decided = model::Decide(*records);
    ASSERT_TRUE(decided.ok()) << decided.status();
    *decision = *decided;
  }
  // Servers end and come back; the group goes on with them.
  void RestartAll() {
    std::vector<StateServer*> members;
    for (const v1::Member& member : table_.members()) {
      Restart(member.server_id());
      EXPECT_FALSE(StatusOf(member.server_id()).state_lost()) << member.server_id();
      members.push_back(servers_.at(member.server_id())->get());
    }
    group_->set_servers(members);
  }
  // The log has so many slices of the next step: a restart finds them.
  void AwaitLogged(const std::string& name, size_t count) {
    const std::string path = servers_.at(name)->directory() + "/log-job";
    for (const absl::Time end = absl::Now() + absl::Minutes(1); LoggedSlices(step_ + 1, path).size() < count;) {
      ASSERT_LT(absl::Now(), end) << name;
      absl::SleepFor(absl::Milliseconds(2));
    }
  }
};

TEST_P(MembersContinueTest, WhatWasPushedCounts) {
  Begin({"a", "b"}, 2);
  Steps(1);
  PushHalf(0);
  ASSERT_EQ(Continue({"a", "b"}, 2), absl::OkStatus());
  for (const char* name : {"a", "b"}) EXPECT_EQ(Missing(name), 3u) << name;
  const auto again = [&] { return (*servers_["a"])->Figures().jobs.at("job")->duplicate_pushes.load(); };
  const uint64_t before = again();
  PushHalf(0);  // a rank that got no answer
  EXPECT_EQ(again(), before + 4);
  EXPECT_EQ(model::ReasonOf(group_->PushSlice(0, kGradient, GradientOf(77))), model::kDigestConflict);
  ASSERT_EQ(Continue({"a", "b"}, 2), absl::OkStatus());
  PushHalf(1);
  FinishStep();
  ExpectSameBits();
  Steps(2);
  ExpectSameBits();
}

TEST_P(MembersContinueTest, AnotherMemberIsLeftOutAndOneJoins) {
  Begin({"a", "b"}, 2);
  Steps(2);
  PushHalf(0);
  End("b");
  ASSERT_EQ(Continue({"a"}, 2, {"b"}), absl::OkStatus());
  EXPECT_EQ(Missing("a"), 3u);
  source_.opens = false;
  ASSERT_EQ(Continue({"a", "c"}, 2), absl::OkStatus());
  EXPECT_EQ(Missing("a"), 3u);
  PushHalf(1);
  FinishStep();
  ExpectSameBits();
  PushHalf(1);  // also to chunks that are being filled: these are kept too
  ASSERT_EQ(Continue({"a", "c"}, 2), absl::OkStatus());
  EXPECT_EQ(StatusOf("c").unfilled_chunks(), StatusOf("c").chunks());
  source_.opens = true;
  AwaitFilled("c");
  for (const char* name : {"a", "c"}) EXPECT_EQ(Missing(name), 4u) << name;
  PushHalf(0);
  FinishStep();
  ASSERT_EQ(Reconfigure({"c"}, 2), absl::OkStatus());
  ASSERT_EQ(Reconfigure({"c"}, 2, {"a"}), absl::OkStatus());
  ExpectSameBits();
}

// Slices of chunks that went are no longer this server's, also in a log; when the chunk comes back it has none.
TEST_P(MembersContinueTest, ChunksComeAndGo) {
  Begin({"a"}, 1);
  Steps(1);
  ASSERT_EQ(Reconfigure({"a", "b"}, 1), absl::OkStatus());
  AwaitFilled("b");
  PushHalf(0);
  ASSERT_EQ(Continue({"a", "b"}, 1), absl::OkStatus());
  for (const char* name : {"a", "b"}) {
    EXPECT_GT(HalfOf(name, 0), 0u) << name;
    EXPECT_EQ(Missing(name), HalfOf(name, 1)) << name;
  }
  source_.opens = false;
  ASSERT_EQ(Continue({"a"}, 1), absl::OkStatus());
  const uint64_t lacked = StatusOf("a").unfilled_chunks();
  EXPECT_GT(lacked, 0u);
  PushHalf(1);
  v1::Decision decision;
  ASSERT_NO_FATAL_FAILURE(Prepare(&decision));
  if (durable()) RestartAll();
  EXPECT_EQ(StatusOf("a").unfilled_chunks(), lacked);
  ASSERT_EQ(group_->Commit(decision), absl::OkStatus());
  ReferenceStep();
  source_.opens = true;
  ASSERT_EQ(Reconfigure({"a"}, 1), absl::OkStatus());
  AwaitFilled("a");
  Steps(1);
  ASSERT_EQ(Reconfigure({"a"}, 1), absl::OkStatus());
  End("b");
  ExpectSameBits();
}

TEST_P(MembersContinueTest, AnotherGroupsOpenVoidsThem) {
  Begin({"a", "b"}, 2);
  Steps(1);
  for (uint32_t i = 0; i < slices(); i += 2) {
    ASSERT_EQ(group_->PushSlice(i, kGradient, GradientOf(77)), absl::OkStatus());
  }
  ASSERT_EQ(Reconfigure({"a", "b"}, 2), absl::OkStatus());
  for (const char* name : {"a", "b"}) EXPECT_EQ(Missing(name), slices()) << name;
  PushHalf(0);
  ASSERT_EQ(Continue({"a", "b"}, 2), absl::OkStatus());
  PushHalf(1);
  v1::Decision decision;
  ASSERT_NO_FATAL_FAILURE(Prepare(&decision));
  if (durable()) RestartAll();
  ASSERT_EQ(group_->Commit(decision), absl::OkStatus());
  ReferenceStep();
  ExpectSameBits();
}

// The commit comes after the fence, and the seal after the Open: both are of the older epoch.
TEST_P(MembersContinueTest, AStepOfTheOlderEpochIsCommittedAndTold) {
  Begin({"a", "b"}, 2);
  Steps(1);
  PushHalf(0);
  PushHalf(1);
  v1::Decision decision;
  ASSERT_NO_FATAL_FAILURE(Prepare(&decision));
  const v1::SealRequest seal = group_->SealOf(1, UpdateHeader(Tensors()), 50'000);
  group_->BeginEpoch(++epochs_);
  std::vector<v1::GetJobResponse> answers;
  ASSERT_EQ(group_->Fence(&answers), absl::OkStatus());
  ASSERT_EQ(group_->Commit(decision), absl::OkStatus());
  ASSERT_EQ(Continue({"a", "b"}, 2), absl::OkStatus());
  for (const char* name : {"a", "b"}) {
    Answer<v1::SealResponse> sealed;
    (*servers_[name])->Seal(seal, absl::Now() + absl::Seconds(50), sealed.reply());
    const auto told = sealed.Wait();
    ASSERT_TRUE(told.ok()) << told.status();
    EXPECT_EQ(told->decided().step(), step_ + 1);
  }
  v1::SealRequest next = seal;
  next.set_step(step_ + 2);
  Answer<v1::SealResponse> late;
  (*servers_["a"])->Seal(next, absl::Now() + absl::Seconds(50), late.reply());
  const absl::Status stale = late.Wait().status();
  EXPECT_EQ(model::ReasonOf(stale), model::kStaleEpoch) << stale;
  const model::Details details = model::DetailsOf(stale);
  EXPECT_EQ(details.at(model::kPromised), absl::StrCat(epochs_, ".7"));
  EXPECT_EQ(details.at(model::kGroup), absl::BytesToHexString("group 1"));
  ReferenceStep();
  Steps(1);
  ExpectSameBits();
}

// Some slices lie before the Open in the log, some after it.
TEST_P(MembersContinueTest, ARestartFindsThePreparedStep) {
  if (!durable()) return;
  Begin({"a", "b"}, 2);
  for (const bool committed : {false, true}) {
    Steps(2);
    PushHalf(0);
    ASSERT_EQ(Continue({"a", "b"}, 2), absl::OkStatus());
    PushHalf(1);
    v1::Decision decision;
    ASSERT_NO_FATAL_FAILURE(Prepare(&decision));
    if (committed) {
      ASSERT_EQ(group_->Commit(decision), absl::OkStatus());
    }
    RestartAll();
    ASSERT_EQ(Reconfigure({"a", "b"}, 2), absl::OkStatus());
    ReferenceStep();
    ExpectSameBits();
  }
  for (const char* name : {"a", "b"}) {
    End(name);
    const auto report = Verify(servers_[name]->directory(), nullptr);
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_THAT(report->findings, IsEmpty()) << report->findings[0].what << ": " << report->findings[0].found;
  }
}

// What the server says that it has is there, or is asked for again.
TEST_P(MembersContinueTest, ARestartBetweenPushes) {
  if (!durable()) return;
  Begin({"a", "b"}, 2);
  Steps(1);
  PushHalf(0);
  for (const char* name : {"a", "b"}) AwaitLogged(name, 4);
  RestartAll();
  ASSERT_EQ(Continue({"a", "b"}, 2), absl::OkStatus());
  for (const char* name : {"a", "b"}) EXPECT_EQ(Missing(name), 3u) << name;
  ASSERT_EQ(group_->PushSlice(1, kGradient, GradientOf(step_ + 1)), absl::OkStatus());
  for (const char* name : {"a", "b"}) AwaitLogged(name, 5);
  RestartAll();
  // Another table is synced before its Open is answered, so a restart brings the epoch back.
  End("b");
  ASSERT_EQ(Continue({"a"}, 2, {"b"}), absl::OkStatus());
  EXPECT_EQ(Missing("a"), 2u);
  RestartAll();
  EXPECT_EQ(Missing("a"), 2u);
  PushHalf(1);
  FinishStep();
  ExpectSameBits();
  RestartAll();
  ASSERT_EQ(Reconfigure({"a"}, 2), absl::OkStatus());
  ExpectSameBits();
}

// Neither the server that runs nor one that comes back cuts the segments that slices of an older epoch lie in.
TEST_P(MembersContinueTest, TheLogIsNotCutOfThem) {
  if (!durable()) return;
  Begin({"a", "b"}, 2);
  Steps(2);
  for (const bool comes_back : {false, true}) {
    PushHalf(0);
    for (const char* name : {"a", "b"}) AwaitLogged(name, 4);
    RestartAll();  // a segment begins
    ASSERT_EQ(Continue({"a", "b"}, 2), absl::OkStatus());
    if (comes_back) {
      ASSERT_EQ(group_->PushSlice(1, kGradient, GradientOf(step_ + 1)), absl::OkStatus());
      for (const char* name : {"a", "b"}) AwaitLogged(name, 5);
      RestartAll();
    }
    for (const char* name : {"a", "b"}) {
      ASSERT_EQ(PinDurably(servers_[name]->get(), "job", group_->epoch(), step_), absl::OkStatus());
    }
    PushHalf(1);
    v1::Decision decision;
    ASSERT_NO_FATAL_FAILURE(Prepare(&decision));
    RestartAll();
    ASSERT_EQ(group_->Commit(decision), absl::OkStatus());
    ReferenceStep();
    ExpectSameBits();
  }
}

// The log is cut again and again while it holds slices of older epochs, and begins with a snapshot of one.
TEST_P(MembersContinueTest, ALongLogOfManyEpochs) {
  if (!durable()) return;
  Begin({"a", "b"}, 2);
  for (int i = 0; i < 24; ++i) {
    PushHalf(0);
    ASSERT_EQ(Continue({"a", "b"}, 2), absl::OkStatus());
    PushHalf(1);
    FinishStep();
  }
  PushHalf(1);
  ASSERT_EQ(Continue({"a", "b"}, 2), absl::OkStatus());
  PushHalf(0);
  v1::Decision decision;
  ASSERT_NO_FATAL_FAILURE(Prepare(&decision));
  RestartAll();
  ASSERT_EQ(group_->Commit(decision), absl::OkStatus());
  ReferenceStep();
  ExpectSameBits();
}

INSTANTIATE_TEST_SUITE_P(Tiers, MembersContinueTest, ::testing::Values(kMembersCases[0], kMembersCases[2]),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace ballast::services
