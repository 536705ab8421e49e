#include "ballast/proto/model/verdict.h"

#include <gtest/gtest.h>

#include <bit>
#include <limits>

#include "absl/strings/match.h"
#include "ballast/proto/base/status.h"

namespace ballast::model {
namespace {

v1::Epoch MakeEpoch(uint64_t counter, uint64_t nonce) {
  v1::Epoch epoch;
  epoch.set_counter(counter);
  epoch.set_nonce(nonce);
  return epoch;
}

v1::PreparedRecord Prepared(int64_t step, uint64_t chunk, double squared_norm) {
  v1::PreparedRecord record;
  record.set_step(step);
  *record.mutable_epoch() = MakeEpoch(3, 4);
  record.set_plan_hash("hash");
  record.mutable_header()->set_kind(v1::STEP_KIND_UPDATE);
  record.mutable_header()->set_gradient_scale(0.5);
  record.mutable_header()->set_max_norm(1);
  record.add_blobs("blob");
  v1::ChunkNorm* norm = record.add_norms();
  norm->set_chunk(chunk);
  norm->add_segments()->set_squared_norm(squared_norm);
  return record;
}

v1::GetJobResponse At(int64_t committed) {
  v1::GetJobResponse answer;
  answer.set_server_id("s");
  answer.set_exists(true);
  answer.set_committed(committed);
  if (committed >= 0) {
    answer.mutable_decision()->set_step(committed);
    answer.mutable_decision()->set_plan_hash("old");
  }
  return answer;
}

TEST(VerdictTest, ClipIsTorchs) {
  const auto decision = Decide(std::vector{Prepared(7, 1, 9), Prepared(7, 0, 16)});
  ASSERT_TRUE(decision.ok()) << decision.status();
  EXPECT_FALSE(decision->verdict().skip());
  EXPECT_EQ(decision->verdict().norm(), 2.5);
  EXPECT_EQ(std::bit_cast<float>(decision->verdict().factor_bits()), static_cast<float>(0.5 * (1.0 / (2.5 + 1e-6))));
  EXPECT_EQ(decision->blobs(0), "blob");
}

TEST(VerdictTest, NormIsSummedInChunkOrderWhateverTheServers) {
  // 1e16 + 1 + 1 differs from 1 + 1 + 1e16 in fp64.
  const auto a = Decide(std::vector{Prepared(0, 2, 1e16), Prepared(0, 0, 1), Prepared(0, 1, 1)});
  const auto b = Decide(std::vector{Prepared(0, 1, 1), Prepared(0, 2, 1e16), Prepared(0, 0, 1)});
  EXPECT_EQ(a->verdict().norm(), b->verdict().norm());
  EXPECT_EQ(a->verdict().norm(), 0.5 * std::sqrt(1e16 + 2));
}

TEST(VerdictTest, AChunkOnTwoServersCountsOnceAndTheirNormsAreTheSameBits) {
  const auto once = Decide(std::vector{Prepared(7, 0, 9), Prepared(7, 1, 16)});
  const auto twice = Decide(std::vector{Prepared(7, 1, 16), Prepared(7, 0, 9), Prepared(7, 1, 16), Prepared(7, 0, 9)});
  ASSERT_TRUE(twice.ok()) << twice.status();
  EXPECT_EQ(twice->verdict().norm(), once->verdict().norm());
  EXPECT_EQ(twice->verdict().norm(), 2.5);
  const absl::Status other =
      Decide(std::vector{Prepared(7, 0, 9), Prepared(7, 0, std::nextafter(9, 10)), Prepared(7, 1, 16)}).status();
  EXPECT_EQ(ReasonOf(other), kDiverged);
  EXPECT_TRUE(absl::StrContains(other.message(), "gradient of chunk 0")) << other;
  v1::PreparedRecord bad = Prepared(7, 0, std::nan(""));
  bad.mutable_norms(0)->set_overflow(true);
  EXPECT_TRUE(Decide(std::vector{bad, bad})->verdict().skip());
}

TEST(VerdictTest, OneOverflowSkipsTheWholeStep) {
  v1::PreparedRecord bad = Prepared(7, 1, 0);
  bad.mutable_norms(0)->set_overflow(true);
  EXPECT_TRUE(Decide(std::vector{Prepared(7, 0, 1), bad})->verdict().skip());
}

TEST(VerdictTest, DecideRefusesRecordsOfDifferentAttempts) {
  v1::PreparedRecord other = Prepared(7, 1, 0);
  other.set_attempt(1);
  EXPECT_EQ(ReasonOf(Decide(std::vector{Prepared(7, 0, 1), other}).status()), kPlanMismatch);
  other = Prepared(7, 1, 0);
  *other.mutable_epoch() = MakeEpoch(3, 5);
  EXPECT_EQ(ReasonOf(Decide(std::vector{Prepared(7, 0, 1), other}).status()), kPlanMismatch);
}

TEST(VerdictTest, DecideCountsEachServerOnce) {
  std::vector<v1::PreparedRecord> records = {Prepared(7, 0, 1), Prepared(7, 1, 1)};
  for (v1::PreparedRecord& record : records) record.clear_norms();  // which would tell
  EXPECT_EQ(Decide(records).status(), absl::OkStatus()) << "of logs that do not name authors";
  records[0].set_server_id("a");
  records[1].set_server_id("b");
  EXPECT_EQ(Decide(records).status(), absl::OkStatus());
  records[1].set_server_id("a");
  EXPECT_EQ(ReasonOf(Decide(records).status()), kOtherServer);
}

TEST(ResolveTest, SomeoneBehindMeansTheHighestIsFinal) {
  v1::GetJobResponse behind = At(4);
  *behind.mutable_prepared() = Prepared(5, 0, 1);
  const auto resolution = Resolve(std::vector{At(5), behind});
  ASSERT_TRUE(resolution.ok());
  EXPECT_EQ(resolution->base, 5);
  EXPECT_EQ(resolution->decision->plan_hash(), "old");
}

TEST(ResolveTest, AllPreparedMeansCommitted) {
  v1::GetJobResponse a = At(4);
  v1::GetJobResponse b = At(4);
  *a.mutable_prepared() = Prepared(5, 0, 1);
  *b.mutable_prepared() = Prepared(5, 1, 1);
  auto resolution = Resolve(std::vector{a, b});
  EXPECT_EQ(resolution->base, 5);
  EXPECT_EQ(resolution->decision->plan_hash(), "hash");
  b.mutable_prepared()->set_attempt(9);
  EXPECT_EQ(Resolve(std::vector{a, b})->base, 4);
  b.clear_prepared();
  EXPECT_EQ(Resolve(std::vector{a, b})->base, 4);
}

TEST(ResolveTest, NewJobHasNoDecision) {
  const auto resolution = Resolve(std::vector{At(-1), At(-1)});
  EXPECT_EQ(resolution->base, -1);
  EXPECT_FALSE(resolution->decision.has_value());
}

TEST(ResolveTest, LossAndDivergenceAreRefused) {
  v1::GetJobResponse lost = At(4);
  lost.set_state_lost(true);
  EXPECT_EQ(ReasonOf(Resolve(std::vector{At(4), lost}).status()), kStateLost);
  EXPECT_EQ(ReasonOf(Resolve(std::vector{At(4), At(2)}).status()), kDiverged);
  v1::GetJobResponse other = At(4);
  other.mutable_decision()->set_plan_hash("other");
  EXPECT_EQ(ReasonOf(Resolve(std::vector{At(4), other}).status()), kDiverged);
}

// Whoever names a server that is none of the job's: its directory is as it was.
TEST(ResolveTest, AServerWithoutTheJobIsAskedWhetherItIsMeant) {
  const absl::Status refused = Resolve(std::vector{At(7), At(-1)}).status();
  EXPECT_EQ(ReasonOf(refused), kDiverged);
  EXPECT_TRUE(absl::StrContains(refused.message(), "has nothing of this job, which is at step 7")) << refused;
  EXPECT_TRUE(absl::StrContains(refused.message(), "is it one of the job's servers? If another is meant")) << refused;
}

// Two servers of which one was replaced by an older copy may keep two states under one number.
TEST(ResolveTest, AVersionOfWhichServersKeepTwoHistoriesIsNotRestored) {
  const auto keeps = [](std::vector<std::pair<int64_t, uint64_t>> versions) {
    v1::GetJobResponse answer = At(9);
    answer.set_state_lost(true);
    answer.mutable_open()->mutable_spec()->set_durability(v1::DURABILITY_EVERY_K);
    for (const auto& [version, nonce] : versions) {
      answer.add_durable_versions(version);
      answer.add_automatic_versions(version);
      v1::Epoch* const epoch = answer.add_decided_by();
      epoch->set_counter(3);
      epoch->set_nonce(nonce);
    }
    return answer;
  };
  EXPECT_EQ(Resolve(std::vector{keeps({{4, 1}, {8, 2}}), keeps({{4, 1}, {8, 2}})})->restores, 8);
  EXPECT_EQ(Resolve(std::vector{keeps({{4, 1}, {8, 2}}), keeps({{4, 1}, {8, 5}})})->restores, 4);
  EXPECT_EQ(ReasonOf(Resolve(std::vector{keeps({{8, 2}}), keeps({{8, 5}})}).status()), kStateLost);
  v1::GetJobResponse silent = keeps({{8, 2}});  // an earlier version of the server
  silent.clear_decided_by();
  EXPECT_EQ(Resolve(std::vector{keeps({{8, 5}}), silent})->restores, 8);
  // A server that does not tell hides no difference between others, whatever their order.
  for (const std::vector<v1::GetJobResponse>& answers :
       {std::vector{silent, keeps({{8, 2}}), keeps({{8, 5}})}, std::vector{keeps({{8, 2}}), silent, keeps({{8, 5}})}}) {
    EXPECT_EQ(ReasonOf(Resolve(answers).status()), kStateLost);
  }
  EXPECT_EQ(Resolve(std::vector{silent, keeps({{8, 5}}), keeps({{8, 5}})})->restores, 8);
}

TEST(VerdictTest, ScaledGradientsBeyondFp32AreSkipped) {
  v1::StepHeader header;
  header.set_kind(v1::STEP_KIND_UPDATE);
  header.set_gradient_scale(1e20);
  EXPECT_FALSE(MakeVerdict(header, 1e30, false).skip());
  EXPECT_TRUE(MakeVerdict(header, 1e60, false).skip());
  header.set_max_norm(1);  // clipping keeps it inside
  EXPECT_FALSE(MakeVerdict(header, 1e60, false).skip());
}

}  // namespace
}  // namespace ballast::model
