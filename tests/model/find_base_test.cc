// Which answers to a fence count, whether they are enough, and what they say.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/members.h"
#include "ballast/proto/model/next_table.h"
#include "ballast/proto/model/table.h"

namespace ballast::model {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

v1::Epoch At(uint64_t counter) {
  v1::Epoch epoch;
  epoch.set_counter(counter);
  return epoch;
}

class FindBaseTest : public testing::Test {
 protected:
  FindBaseTest() : layout_(*Layout::Make(Spec())) {
    for (int i = 0; i < 3; ++i) {
      v1::Member* const member = table_.add_members();
      member->set_server_id(absl::StrCat("s", i));
      member->set_disk(100 + static_cast<uint64_t>(i));
      member->set_weight(1);
      *member->mutable_since() = v1::Epoch();
    }
    // Chunk s lies on shard s: s0 s1, s1 s2, s0 s2.
    table_.set_replicas(2);
    for (const auto& [a, b] : {std::pair(0, 1), std::pair(1, 2), std::pair(0, 2)}) {
      v1::Shard* const shard = table_.add_shards();
      shard->add_holders(static_cast<uint32_t>(a));
      shard->add_holders(static_cast<uint32_t>(b));
    }
  }
  static v1::JobSpec Spec() {
    v1::JobSpec spec;
    spec.set_name("job");
    spec.set_chunk_elements(65536);
    spec.set_group_count(1);
    v1::Registration* const batch = spec.add_registrations();
    for (const char* name : {"a", "b", "c"}) {
      v1::TensorSpec* const tensor = batch->add_tensors();
      tensor->set_name(name);
      tensor->set_unit(name);
      tensor->add_shape(256);
    }
    return spec;
  }
  v1::Decision DecisionOf(int64_t step, uint64_t epoch = 1) const { return *Decide({Record(0, step, epoch)}); }
  // Server i's record of an update of all three tensors.
  v1::PreparedRecord Record(int i, int64_t step, uint64_t epoch = 1) const {
    v1::PreparedRecord record;
    record.set_step(step);
    *record.mutable_epoch() = At(epoch);
    record.set_plan_hash("hash");
    record.set_server_id(absl::StrCat("s", i));
    record.mutable_header()->set_kind(v1::STEP_KIND_UPDATE);
    record.mutable_header()->set_gradient_scale(1);
    record.mutable_header()->set_gradient_presence("\x07");
    for (int s = 0; s < 3; ++s) {
      const v1::Shard& shard = table_.shards(s);
      if (std::find(shard.holders().begin(), shard.holders().end(), static_cast<uint32_t>(i)) ==
          shard.holders().end()) {
        continue;
      }
      v1::ChunkNorm* const norm = record.add_norms();
      norm->set_chunk(static_cast<uint64_t>(s));
      norm->add_segments()->set_squared_norm(4);
    }
    return record;
  }
  v1::GetJobResponse Answer(int i, int64_t committed, bool prepared = false) const {
    v1::GetJobResponse answer;
    answer.set_server_id(absl::StrCat("s", i));
    answer.set_disk(100 + static_cast<uint64_t>(i));
    answer.set_committed(committed);
    *answer.mutable_opened() = At(1);
    // s0: shards 0 and 2, s1: 0 and 1, s2: 1 and 2.
    answer.set_filled_shards(std::string(1, "\x05\x03\x06"[i]));
    if (committed >= 0) *answer.mutable_decision() = DecisionOf(committed);
    if (prepared) *answer.mutable_prepared() = Record(i, committed + 1);
    for (int t = 0; t < 3; ++t) answer.add_tensor_steps(static_cast<uint64_t>(committed));
    return answer;
  }
  Found Find(const std::vector<v1::GetJobResponse>& answers) const {
    absl::StatusOr<Found> found = FindBase(table_, layout_, answers);
    EXPECT_TRUE(found.ok()) << found.status();
    return *std::move(found);
  }

  const Layout layout_;
  v1::Table table_;
};

TEST_F(FindBaseTest, AllAnswer) {
  const Found found = Find({Answer(0, 4), Answer(1, 4), Answer(2, 4)});
  EXPECT_TRUE(found.enough());
  EXPECT_EQ(found.base, 4);
  EXPECT_FALSE(found.adopted);
  EXPECT_THAT(found.counted, ElementsAre(0, 1, 2));
  EXPECT_THAT(found.filled[2], ElementsAre(0, 2));
  EXPECT_THAT(found.tensor_steps, ElementsAre(4, 4, 4));
  EXPECT_EQ(ShowWait(table_, found), "");
}

TEST_F(FindBaseTest, WithACopyOfEachShardTheOthersAreNotNeeded) {
  const Found found = Find({Answer(0, 4), Answer(1, 4)});
  EXPECT_TRUE(found.enough());
  EXPECT_THAT(found.silent, ElementsAre(2));
  const Found one = Find({Answer(0, 4)});
  EXPECT_FALSE(one.enough());
  EXPECT_THAT(one.uncovered, ElementsAre(1));
  EXPECT_THAT(ShowWait(table_, one), HasSubstr("1 of 3 shards have no copy on the servers that answered (the first is "
                                               "shard 1); needed is 's1' or 's2'"));
  EXPECT_FALSE(Find({}).enough());
}

TEST_F(FindBaseTest, BeforeAFenceStepsAreNotCompared) {
  v1::GetJobResponse lost = Answer(1, 5);
  lost.set_state_lost(true);
  for (const v1::GetJobResponse& second : {Answer(1, 5), lost}) {
    const std::vector answers{Answer(0, 7, true), second, Answer(2, 3)};
    const Found at_work = FindFilled(table_, answers);
    EXPECT_TRUE(at_work.enough());
    EXPECT_EQ(at_work.filled[1].size(), second.state_lost() ? 1u : 2u);
    EXPECT_THAT(at_work.filled[2], ElementsAre(0, 2));
    EXPECT_FALSE(Find(answers).enough()) << "a fence holds them all";
  }
  EXPECT_THAT(FindFilled(table_, std::vector{Answer(0, 7)}).uncovered, ElementsAre(1));
  EXPECT_FALSE(FindFilled(table_, {}).enough());
}

TEST_F(FindBaseTest, AStepThatAllWhoCountPreparedIsAdopted) {
  // s2 may have prepared it too, and the step may be acknowledged.
  const Found found = Find({Answer(0, 4, true), Answer(1, 4, true)});
  EXPECT_EQ(found.base, 5);
  EXPECT_TRUE(found.adopted);
  EXPECT_TRUE(SameDecision(*found.decision, DecisionOf(5)) || found.decision->verdict().norm() > 0);
  EXPECT_THAT(found.tensor_steps, ElementsAre(5, 5, 5)) << "counted as servers will count";
  // Somebody who counts has not prepared it: nobody has decided it.
  EXPECT_EQ(Find({Answer(0, 4, true), Answer(1, 4, true), Answer(2, 4)}).base, 4);
  // Somebody decided it.
  const Found decided = Find({Answer(0, 4, true), Answer(1, 5)});
  EXPECT_EQ(decided.base, 5);
  EXPECT_FALSE(decided.adopted);
  EXPECT_TRUE(decided.enough());
}

TEST_F(FindBaseTest, WhoIsNotTheMemberDoesNotCount) {
  v1::GetJobResponse other = Answer(2, 4);
  other.set_disk(7);
  const Found wiped = Find({Answer(0, 4), other});
  EXPECT_THAT(wiped.gone, ElementsAre(2));
  EXPECT_FALSE(wiped.enough());
  EXPECT_THAT(ShowWait(table_, wiped), HasSubstr("'s2' with the data directory that it had"));
  v1::GetJobResponse lost = Answer(2, 4);
  lost.set_state_lost(true);
  EXPECT_THAT(Find({Answer(0, 4), lost}).gone, ElementsAre(2));
  // Asked back, and never opened since: knows nothing of what was decided meanwhile.
  *table_.mutable_members(2)->mutable_since() = At(3);
  const Found stale = Find({Answer(0, 4), Answer(1, 4), Answer(2, 7)});
  EXPECT_THAT(stale.counted, ElementsAre(0, 1));
  EXPECT_EQ(stale.base, 4);
  EXPECT_THAT(stale.filled[1], ElementsAre(1));
}

TEST_F(FindBaseTest, AnUnfilledCopyIsNone) {
  v1::GetJobResponse fills = Answer(2, 4);
  fills.set_filled_shards("\x04");
  const Found found = Find({Answer(0, 4), fills});
  EXPECT_THAT(found.uncovered, ElementsAre(1));
  EXPECT_THAT(found.filled[2], ElementsAre(0, 2));
}

TEST_F(FindBaseTest, WhoHasNotOpenedTheTableLacksWhatItAdds) {
  // The table lets s2 fill shard 0, and s2 has opened only the one before.
  table_.mutable_shards(0)->add_fillers(2);
  const Found found = Find({Answer(0, 4), Answer(1, 4), Answer(2, 4)});
  EXPECT_THAT(found.filled[0], ElementsAre(0, 1));
}

TEST_F(FindBaseTest, WhoIsBehindIsNotAtTheBase) {
  const Found found = Find({Answer(0, 4), Answer(1, 4), Answer(2, 3)});
  EXPECT_EQ(found.base, 4);
  EXPECT_THAT(found.filled[1], ElementsAre(1)) << "s2 has not prepared step 4";
}

TEST_F(FindBaseTest, AMissingNormIsNamed) {
  v1::GetJobResponse a = Answer(0, 4, true), b = Answer(1, 4, true);
  a.mutable_prepared()->mutable_norms()->DeleteSubrange(0, 1);
  b.mutable_prepared()->mutable_norms()->DeleteSubrange(0, 1);
  const absl::Status status = FindBase(table_, layout_, std::vector{a, b}).status();
  EXPECT_EQ(ReasonOf(status), kDiverged);
  EXPECT_THAT(std::string(status.message()), HasSubstr("norm of chunk 0"));
}

TEST_F(FindBaseTest, TwoHistoriesAreNotJoined) {
  v1::GetJobResponse other = Answer(1, 4);
  *other.mutable_decision() = DecisionOf(4, 2);
  const absl::Status status = FindBase(table_, layout_, std::vector{Answer(0, 4), other}).status();
  EXPECT_EQ(ReasonOf(status), kDiverged);
}

TEST_F(FindBaseTest, AJobThatNobodyOpenedBeginsEmpty) {
  std::vector<v1::GetJobResponse> answers = {Answer(0, -1), Answer(1, -1), Answer(2, -1)};
  for (v1::GetJobResponse& answer : answers) {
    answer.clear_opened();
    answer.clear_filled_shards();
  }
  const Found found = Find(answers);
  EXPECT_TRUE(found.enough()) << "founders are members since epoch 0";
  EXPECT_EQ(found.base, -1);
  EXPECT_FALSE(found.decision.has_value());
}

class NextOfFoundTest : public FindBaseTest {
 protected:
  // By what `answers` say, with the three servers wanted, s2 with `disk`.
  v1::Table Next(const std::vector<v1::GetJobResponse>& answers, uint64_t disk = 102) const {
    std::vector<v1::Member> servers(table_.members().begin(), table_.members().end());
    servers[2].set_disk(disk);
    servers[2].clear_since();
    const std::vector<uint64_t> elements(3, 256);
    const Wanted wanted{.servers = servers, .replicas = 2, .shard_elements = elements, .level = true};
    return NextTable(table_, Find(answers), wanted, At(9));
  }
  // The shards that the member fills.
  static std::vector<int> FilledBy(const v1::Table& table, uint32_t member) {
    std::vector<int> shards;
    for (int s = 0; s < table.shards_size(); ++s) {
      for (const uint32_t filler : table.shards(s).fillers()) {
        if (filler == member) shards.push_back(s);
      }
    }
    return shards;
  }
};

TEST_F(NextOfFoundTest, NothingChangesWhileAllCount) {
  EXPECT_TRUE(SameTable(Next({Answer(0, 4), Answer(1, 4), Answer(2, 4)}), table_));
}

TEST_F(NextOfFoundTest, AWipedServerJoinsUnderItsName) {
  v1::GetJobResponse wiped = Answer(2, -1);
  wiped.set_disk(7);
  wiped.clear_opened();
  const v1::Table next = Next({Answer(0, 4), Answer(1, 4), wiped}, 7);
  ASSERT_EQ(CheckTable(next), absl::OkStatus());
  ASSERT_EQ(next.members_size(), 3);
  EXPECT_EQ(next.members(2).server_id(), "s2");
  EXPECT_EQ(next.members(2).disk(), 7u);
  EXPECT_EQ(next.members(2).since().counter(), 9u);
  EXPECT_EQ(next.members(0).since().counter(), 0u);
  EXPECT_THAT(FilledBy(next, 2), ElementsAre(1, 2));
  EXPECT_THAT(next.shards(1).holders(), ElementsAre(1)) << "s1 has what both had";
}

// It was asked back, and never opened since; or it has its directory, and lost the state.
TEST_F(NextOfFoundTest, WhoDoesNotCountIsANewMember) {
  v1::GetJobResponse lost = Answer(2, 4);
  lost.set_state_lost(true);
  const v1::Table next = Next({Answer(0, 4), Answer(1, 4), lost});
  EXPECT_EQ(next.members(2).since().counter(), 9u);
  EXPECT_THAT(FilledBy(next, 2), ElementsAre(1, 2));
  *table_.mutable_members(2)->mutable_since() = At(3);
  const v1::Table stale = Next({Answer(0, 4), Answer(1, 4), Answer(2, 7)});
  EXPECT_EQ(stale.members(2).since().counter(), 9u);
  EXPECT_THAT(FilledBy(stale, 2), ElementsAre(1, 2));
}

// It counts, and is a step behind without a record of it: it stays a member, and copies what it had.
TEST_F(NextOfFoundTest, WhoIsBehindFillsWhatItHad) {
  const v1::Table next = Next({Answer(0, 4), Answer(1, 4), Answer(2, 3)});
  EXPECT_EQ(next.members(2).since().counter(), 0u);
  EXPECT_THAT(FilledBy(next, 2), ElementsAre(1, 2));
}

TEST_F(NextOfFoundTest, WhoStaysKeepsItsCopiesWhenIndicesMove) {
  v1::GetJobResponse wiped = Answer(0, -1);
  wiped.set_disk(8);
  std::vector<v1::Member> servers(table_.members().begin(), table_.members().end());
  servers.erase(servers.begin());
  const std::vector<uint64_t> elements(3, 256);
  const Wanted wanted{.servers = servers, .replicas = 2, .shard_elements = elements, .level = true};
  const v1::Table next = NextTable(table_, Find({wiped, Answer(1, 4), Answer(2, 4)}), wanted, At(9));
  ASSERT_EQ(next.members_size(), 2);
  EXPECT_EQ(next.members(0).server_id(), "s1");
  EXPECT_THAT(next.shards(0).holders(), ElementsAre(0));
  EXPECT_THAT(next.shards(0).fillers(), ElementsAre(1));
  EXPECT_THAT(next.shards(1).holders(), ElementsAre(0, 1));
  EXPECT_THAT(next.shards(2).holders(), ElementsAre(1));
  EXPECT_THAT(next.shards(2).fillers(), ElementsAre(0));
  EXPECT_EQ(next.last_fill().counter(), 9u);
}

}  // namespace
}  // namespace ballast::model
