// What an Open needs beside what the job has: a function, without a server.
#include "ballast/services/space/space_need.h"

#include <gtest/gtest.h>

#include <set>

#include "ballast/proto/base/status.h"
#include "ballast/services/journal/log_length.h"
#include "ballast/tests/services/job_state.h"

namespace ballast::services {
namespace {

class SpaceNeedTest : public testing::Test {
 protected:
  SpaceNeedTest() {
    state_.job = "job";
    state_.server_id = "s";
  }

  std::shared_ptr<storage::ChunkStore> StoreOf(const v1::JobSpec& spec) const {
    return std::make_shared<storage::ChunkStore>(job_.tiers.get(), storage::StateLayout(*model::OptimizerOf(spec)));
  }
  // The job took an Open of `plan`.
  void Adopt(const std::shared_ptr<const model::EpochPlan>& plan) {
    state_.plan = plan;
    state_.chunks = std::make_shared<const HeldChunks>(job_.ChunksOf(*plan));
    state_.store = StoreOf(plan->open().spec());
    state_.memory = job_.memory;
  }
  SpaceNeed NeedOf(const model::EpochPlan& plan) const {
    absl::StatusOr<SpaceNeed> need = Need(state_, plan);
    EXPECT_TRUE(need.ok()) << need.status();
    return need.ok() ? *std::move(need) : SpaceNeed();
  }
  v1::JobSpec Spec(v1::Durability durability = v1::DURABILITY_NONE) const {
    v1::JobSpec spec = MakeSpec("job", SmallModel());
    spec.set_durability(durability);
    if (durability == v1::DURABILITY_EVERY_K) spec.set_pin_interval(2);
    return spec;
  }

  const JobMemory job_;
  SpaceState state_;
};

TEST_F(SpaceNeedTest, TheFirstOpenNeedsAStoreAndAllChunks) {
  const auto plan = PlanOf(Spec());
  const SpaceNeed need = NeedOf(*plan);
  EXPECT_TRUE(need.makes_store);
  EXPECT_FALSE(need.replaces_store);
  EXPECT_FALSE(need.drops_journal);
  ASSERT_EQ(need.missing.size(), plan->layout().chunks().size());
  for (size_t i = 0; i < need.missing.size(); ++i) {
    EXPECT_EQ(need.missing[i].id, plan->layout().chunks()[i].index);
    EXPECT_EQ(need.missing[i].elements, plan->layout().chunks()[i].range.size());
    EXPECT_EQ(need.taken[i], nullptr);
  }
  EXPECT_FALSE(HasAll(state_, *plan));
}

TEST_F(SpaceNeedTest, AJobThatHasAllChunksNeedsNothing) {
  const auto plan = PlanOf(Spec());
  Adopt(plan);
  EXPECT_TRUE(HasAll(state_, *plan));
  EXPECT_TRUE(HasAll(state_, *PlanOf(Spec(), 2))) << "memory for slices does not depend on the ranks";
  const SpaceNeed need = NeedOf(*plan);
  EXPECT_TRUE(need.missing.empty());
  EXPECT_TRUE(need.taken.empty());
  EXPECT_FALSE(need.makes_store);
  state_.recovering = true;
  EXPECT_FALSE(HasAll(state_, *plan));
}

// An Open changes a chunk's layout under the job's lock, while a dry run asks without the lock.
TEST_F(SpaceNeedTest, TheOpenPlanSaysHowTheJobIsLaidOut) {
  const auto plan = PlanOf(Spec());
  Adopt(plan);
  for (const auto& chunk : *state_.chunks) chunk->Open({}, *plan);
  EXPECT_TRUE(NeedOf(*plan).missing.empty());
  EXPECT_TRUE(HasAll(state_, *plan));
}

TEST_F(SpaceNeedTest, AppendedTensorsNeedTheirChunksAlone) {
  Adopt(PlanOf(Spec()));
  v1::JobSpec longer = Spec();
  Append({{"more", "u2", 100, 0}}, 3, &longer);
  const auto plan = PlanOf(longer);
  EXPECT_FALSE(HasAll(state_, *plan));
  const SpaceNeed need = NeedOf(*plan);
  EXPECT_EQ(need.mine.size(), state_.chunks->size() + 1);
  ASSERT_EQ(need.missing.size(), 1u);
  EXPECT_EQ(need.missing[0].id, need.mine.back());
}

TEST_F(SpaceNeedTest, AnOpenThatLaysTheJobOutDifferentlyIsRefused) {
  Adopt(PlanOf(Spec()));
  const auto other = PlanOf(MakeSpec("job", {{"embed", "u0", 70000, 0}}));
  EXPECT_EQ(model::ReasonOf(Need(state_, *other).status()), model::kBadSpec);
  v1::JobSpec moments = Spec();
  moments.set_gradient_dtype(v1::DTYPE_F32);
  EXPECT_EQ(model::ReasonOf(Need(state_, *PlanOf(moments)).status()), model::kBadSpec);
}

// A table gives and takes single chunks.
TEST_F(SpaceNeedTest, ATableChangesTheChunksOfAServer) {
  const auto all = PlanOf(Spec());
  const size_t chunks = all->layout().chunks().size();
  ASSERT_GE(chunks, 4u);
  // Server "s" is on the shards of `mine`, and another one on all.
  const auto with = [&](const std::set<size_t>& mine, bool fills = false) {
    v1::OpenRequest open = OpenOf(Spec(), 1);
    const v1::Member member = open.members(0);
    open.clear_members();
    open.set_group("g");
    v1::Table* const table = open.mutable_table();
    table->set_replicas(2);
    for (const char* id : {"other", "s"}) {
      *table->add_members() = member;
      table->mutable_members(table->members_size() - 1)->set_server_id(id);
      table->mutable_members(table->members_size() - 1)->set_disk(1);
      table->mutable_members(table->members_size() - 1)->mutable_since()->set_counter(0);
    }
    for (size_t s = 0; s < chunks; ++s) {
      v1::Shard* const shard = table->add_shards();
      shard->add_holders(0);
      if (mine.contains(s)) fills ? shard->add_fillers(1) : shard->add_holders(1);
    }
    absl::StatusOr<model::EpochPlan> plan = model::EpochPlan::Make(open);
    EXPECT_TRUE(plan.ok()) << plan.status();
    return std::make_shared<const model::EpochPlan>(*std::move(plan));
  };
  const auto first = with({0, 1, 3});
  state_.plan = first;
  const HeldChunks held = job_.ChunksOf(*all);
  state_.chunks = std::make_shared<const HeldChunks>(HeldChunks{held[0], held[1], held[3]});
  state_.store = StoreOf(Spec());
  state_.memory = job_.memory;
  EXPECT_TRUE(HasAll(state_, *first));

  const auto next = with({1, 2, 3});
  EXPECT_FALSE(HasAll(state_, *next));
  const SpaceNeed need = NeedOf(*next);
  EXPECT_EQ(need.mine, (std::vector<uint64_t>{1, 2, 3}));
  EXPECT_EQ(need.held, (HeldChunks{held[1], nullptr, held[3]}));
  ASSERT_EQ(need.missing.size(), 1u);
  EXPECT_EQ(need.missing[0].id, 2u);
  EXPECT_FALSE(need.missing[0].imported);
  const SpaceNeed filled = NeedOf(*with({1, 2, 3}, /*fills=*/true));
  ASSERT_EQ(filled.missing.size(), 1u);
  EXPECT_TRUE(filled.missing[0].imported);
  SpaceNeed taken = need;
  taken.taken = {held[2]};
  EXPECT_EQ(ChunksUnder(taken), (HeldChunks{held[1], held[2], held[3]}));

  // A chunk whose bytes are still here has its place.
  state_.leaving = {held[2]};
  EXPECT_TRUE(NeedOf(*next).missing.empty());
  // Fewer chunks need nothing, but are not what the job has.
  EXPECT_FALSE(HasAll(state_, *with({1})));
  EXPECT_TRUE(NeedOf(*with({1})).missing.empty());
}

// The disk knows a durable chunk by its id.
TEST_F(SpaceNeedTest, SparesOfARefusedOpenAreTakenByTheOpenThatTheyFit) {
  for (const v1::Durability durability : {v1::DURABILITY_NONE, v1::DURABILITY_EVERY_K}) {
    const auto plan = PlanOf(Spec(durability));
    HeldChunks spares = job_.ChunksOf(*plan);
    spares.pop_back();
    state_ = {.job = "job", .server_id = "s", .spares = spares, .memory = job_.memory};
    state_.store = std::make_shared<storage::ChunkStore>(
        job_.tiers.get(), storage::StateLayout(*model::OptimizerOf(plan->open().spec())), nullptr,
        durability == v1::DURABILITY_NONE ? std::nullopt : std::optional(storage::DurableOptions{.job = "job"}));
    const SpaceNeed need = NeedOf(*plan);
    ASSERT_EQ(need.missing.size(), 1u);
    EXPECT_EQ(HeldChunks(need.taken.begin(), need.taken.end() - 1), spares);
    EXPECT_EQ(need.taken.back(), nullptr);
    EXPECT_TRUE(need.spares.empty());
    EXPECT_EQ(state_.spares, spares) << "the state is as before";
  }
}

TEST_F(SpaceNeedTest, AStoreThatARefusedOpenLeftGoesWithItsSparesAndItsLog) {
  const auto left = PlanOf(Spec());
  ASSERT_TRUE(job_.memory->Reserve(uint64_t{1} << 20).ok());
  state_.spares = job_.ChunksOf(*left);
  state_.store = StoreOf(Spec());
  state_.memory = job_.memory;
  state_.read_back_bytes = 4096;
  state_.journal = {.durable = true, .segment_bytes = uint64_t{4} << 20, .bytes = uint64_t{64} << 20};
  v1::JobSpec other = Spec();
  other.set_gradient_dtype(v1::DTYPE_F32);
  const SpaceNeed need = NeedOf(*PlanOf(other));
  EXPECT_TRUE(need.replaces_store);
  EXPECT_TRUE(need.makes_store);
  EXPECT_TRUE(need.drops_journal);
  EXPECT_EQ(need.missing.size(), left->layout().chunks().size());
  EXPECT_FALSE(need.has_read_back);
  EXPECT_EQ(need.freed.dram, uint64_t{1} << 20);
  EXPECT_EQ(need.freed.nvme, uint64_t{64} << 20);
  EXPECT_EQ(need.journal.segment_bytes, 0u);
}

TEST_F(SpaceNeedTest, ALogKeepsItsLengthAndBoundsWhatTheJobMayBecome) {
  const auto plan = PlanOf(Spec(v1::DURABILITY_STEP));
  EXPECT_EQ(NeedOf(*plan).wanted.log_steps, kLogStepsFirst);
  Adopt(plan);
  state_.store = std::make_shared<storage::ChunkStore>(
      job_.tiers.get(), storage::StateLayout(*model::OptimizerOf(plan->open().spec())), nullptr,
      storage::DurableOptions{.job = "job", .record = [](auto) { return absl::OkStatus(); }});
  state_.journal = {.durable = true, .path = "log", .segment_bytes = uint64_t{4} << 20, .bytes = uint64_t{64} << 20};
  state_.journal.record_bytes_max = uint64_t{4} << 20;
  state_.journal.steps_held = 12;
  EXPECT_EQ(NeedOf(*plan).wanted.log_steps, 12u);
  EXPECT_TRUE(HasAll(state_, *plan));
  state_.journal.record_bytes_max = 4096;
  EXPECT_EQ(model::ReasonOf(Need(state_, *plan).status()), model::kBudget);
  EXPECT_FALSE(HasAll(state_, *plan));
}

}  // namespace
}  // namespace ballast::services
