#include "ballast/services/job_state/job_state.h"

#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/tests/services/job_state.h"

namespace ballast::services {
namespace {

TEST(JobState, AnOpenBringsItsChunksAndEndsWhatCameBefore) {
  const JobMemory job;
  JobState state;
  uint32_t slice = 0;
  v1::PushRequest header;
  header.set_end(1);
  EXPECT_EQ(state.FindSlice(header, &slice), nullptr) << "before the first Open";
  const auto plan = PlanOf(MakeSpec("job", SmallModel()));
  const HeldChunks chunks = job.ChunksOf(*plan);
  // The server has all chunks but the first.
  const HeldChunks mine(chunks.begin() + 1, chunks.end());
  std::vector<uint64_t> indices;
  for (const auto& chunk : mine) indices.push_back(chunk->id);
  state.Open(plan, mine, indices);
  EXPECT_EQ(state.chunks(), mine);
  EXPECT_EQ(state.Find(chunks[0]->id), nullptr);
  EXPECT_EQ(state.Find(mine[0]->id), mine[0]);
  EXPECT_EQ(*state.Held(mine[0]->id), mine[0]);
  const absl::Status missing = state.Held(chunks[0]->id).status();
  EXPECT_EQ(model::ReasonOf(missing), model::kDiverged);
  EXPECT_NE(missing.message().find(absl::StrCat("chunk ", chunks[0]->id, " ")), std::string::npos) << missing;
  for (uint32_t index = 0; index < plan->slices().size(); ++index) {
    const model::Slice& cut = plan->slices()[index];
    header.set_unit(cut.unit);
    header.set_begin(cut.range.begin);
    header.set_end(cut.range.end);
    EXPECT_EQ(state.FindSlice(header, &slice), state.Find(cut.chunk));
    if (state.Find(cut.chunk) != nullptr) {
      EXPECT_EQ(slice, index);
    }
  }
  // The next epoch: slices are void, and nothing is lent.
  const uint32_t first = plan->slices_of_chunk(mine[0]->id)[0];
  absl::StatusOr<Intake::Receipt> receipt = mine[0]->intake.BeginReceive(first, v1::SLICE_KIND_VALUE, 1);
  ASSERT_TRUE(receipt.ok()) << receipt.status();
  (void)mine[0]->intake.EndReceive(*receipt, true);
  const uint64_t generation = mine[0]->intake.generation();
  const auto next = PlanOf(MakeSpec("job", SmallModel()), 2);
  state.Open(next, mine, indices);
  EXPECT_EQ(state.plan(), next);
  EXPECT_NE(mine[0]->intake.generation(), generation);
  EXPECT_EQ(state.lent(), nullptr);
}

TEST(JobState, ChunksThatAPlanDoesNotGiveLeave) {
  const JobMemory job;
  JobState state;
  const auto plan = PlanOf(MakeSpec("job", SmallModel()));
  const HeldChunks chunks = job.ChunksOf(*plan);
  const auto open = [&](const HeldChunks& mine) {
    std::vector<uint64_t> indices;
    for (const auto& chunk : mine) indices.push_back(chunk->id);
    state.Open(plan, mine, indices);
  };
  open(chunks);
  EXPECT_TRUE(state.leaving().empty());
  open({chunks[1]});
  EXPECT_EQ(state.leaving().size(), chunks.size() - 1);
  EXPECT_FALSE(chunks[0]->filled()) << "nobody reads it";
  EXPECT_TRUE(chunks[1]->filled());
  open({chunks[0], chunks[1]});  // it comes again before its bytes have gone
  EXPECT_EQ(state.leaving(), HeldChunks(chunks.begin() + 2, chunks.end()));
  EXPECT_FALSE(chunks[0]->filled());
  EXPECT_EQ(state.TakeLeaving().size(), chunks.size() - 2);
  EXPECT_TRUE(state.leaving().empty());
  // A replay may bring a chunk back by a later Open, with the state that the disk has of it.
  state.SetRecovering(true);
  open({chunks[0]});
  EXPECT_EQ(state.leaving(), HeldChunks{chunks[1]});
  EXPECT_TRUE(chunks[1]->filled());
}

// By the table's shards; a chunk that comes back before its bytes have gone still has what was kept of it.
TEST(JobState, TellsWhatKeptVersionsTakeOfEachShard) {
  const JobMemory job;
  JobState state;
  v1::OpenRequest request = OpenOf(MakeSpec("job", SmallModel()), 1);
  const auto without = PlanOf(request.spec());
  const HeldChunks chunks = job.ChunksOf(*without);
  ASSERT_GE(chunks.size(), 4u);
  EXPECT_TRUE(state.KeptByShard().empty());
  const auto open = [&](const std::shared_ptr<const model::EpochPlan>& plan, const HeldChunks& mine) {
    std::vector<uint64_t> indices;
    for (const auto& chunk : mine) indices.push_back(chunk->id);
    state.Open(plan, mine, indices);
  };
  open(without, chunks);
  state.SetKept({{1, 20, 300, 4000}});
  EXPECT_TRUE(state.KeptByShard().empty()) << "there is no table";
  request.set_group("g");
  v1::Table* const table = request.mutable_table();
  table->set_replicas(1);
  *table->add_members() = request.members(0);
  table->mutable_members(0)->set_disk(1);
  table->mutable_members(0)->mutable_since()->set_counter(0);
  request.clear_members();
  for (int s = 0; s < 3; ++s) table->add_shards()->add_holders(0);
  const auto plan = std::make_shared<const model::EpochPlan>(*model::EpochPlan::Make(request));
  open(plan, chunks);
  EXPECT_EQ(state.KeptByShard(), (std::vector<uint64_t>{4001, 20, 300}));
  open(plan, {chunks[1]});
  EXPECT_EQ(state.KeptByShard(), (std::vector<uint64_t>{0, 20, 0}));
  open(plan, {chunks[0], chunks[1]});
  EXPECT_EQ(state.KeptByShard(), (std::vector<uint64_t>{1, 20, 0}));
  state.SetKept({});
  EXPECT_TRUE(state.KeptByShard().empty()) << "nothing is kept";
}

TEST(JobState, ChunksThatStayKeepTheirSlices) {
  const JobMemory job;
  JobState state;
  const auto plan = PlanOf(MakeSpec("job", SmallModel()));
  const HeldChunks chunks = job.ChunksOf(*plan);
  const auto open = [&](const HeldChunks& mine) {
    std::vector<uint64_t> indices;
    for (const auto& chunk : mine) indices.push_back(chunk->id);
    state.Open(plan, mine, indices, /*keeps_slices=*/true);
  };
  open({chunks[0], chunks[1]});
  v1::StepHeader header = ValuesHeader(static_cast<uint32_t>(SmallModel().size()));
  const auto receive = [&](const std::shared_ptr<HeldChunk>& chunk) {
    for (const uint32_t slice : plan->slices_of_chunk(chunk->id)) {
      absl::StatusOr<Intake::Receipt> receipt = chunk->intake.BeginReceive(slice, v1::SLICE_KIND_VALUE, 1);
      ASSERT_TRUE(receipt.ok()) << receipt.status();
      (void)chunk->intake.EndReceive(*receipt, true);
      chunk->intake.Unlogged(*receipt, /*taken=*/true);
    }
  };
  receive(chunks[0]);
  receive(chunks[1]);
  open({chunks[1], chunks[2]});
  EXPECT_FALSE(chunks[0]->intake.Holds(header, 1));
  EXPECT_TRUE(chunks[1]->intake.Holds(header, 1));
  EXPECT_FALSE(chunks[2]->intake.Holds(header, 1));
  open({chunks[0], chunks[1]});
  EXPECT_FALSE(chunks[0]->intake.Holds(header, 1)) << "it went and came back";
  EXPECT_TRUE(chunks[1]->intake.Holds(header, 1));
}

TEST(JobState, AStoreIsReplacedWhole) {
  const JobMemory job;
  JobState state;
  const auto store = std::make_shared<storage::ChunkStore>(job.tiers.get(), storage::StateLayout());
  EXPECT_EQ(state.Replace(store), nullptr);
  EXPECT_EQ(state.store(), store);
  EXPECT_EQ(state.Replace(nullptr), store);
}

}  // namespace
}  // namespace ballast::services
