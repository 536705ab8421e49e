// Whatever the tiers, the bits are those of the kernels on plain memory.
#include "ballast/storage/store/chunk_store.h"

#include <atomic>
#include <fstream>
#include <thread>

#include "ballast/proto/base/status.h"
#include "ballast/tests/storage/store/store_on_tiers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ballast::storage {
namespace {

using ::testing::HasSubstr;

struct Shape {
  const char* name;
  std::vector<TierKind> tiers;  // of the chunks, in turn
  uint64_t slots;
  kernels::MasterFormat master = kernels::MasterFormat::kF32;
};

class ChunkStoreTest : public ::testing::TestWithParam<Shape> {
 protected:
  void SetUp() override {
    const absl::Status added = s_.store->Add(Sizes(), s_.PlanOf(GetParam().tiers));
    ASSERT_TRUE(added.ok()) << added;
  }

  void ExpectReference() {
    for (size_t i = 0; i < Sizes().size(); ++i) EXPECT_TRUE(Holds(*s_.store, i, s_.reference[i])) << "chunk " << i;
  }

  StoreOnTiers s_{
      {.hbm = kHbmScratchBytes + 16 * kMiB, .dram = 16 * kMiB, .nvme = 16 * kMiB}, GetParam().slots, GetParam().master};
};

TEST_P(ChunkStoreTest, StartsAtZero) { ExpectReference(); }

TEST_P(ChunkStoreTest, BitsOfDirectKernelCalls) {
  ASSERT_TRUE(s_.RunValues(1).ok());
  ExpectReference();
  for (uint64_t t = 1; t <= 4; ++t) {
    const absl::Status status = s_.RunSegments(t, /*stride=*/t == 3 ? 2 : 1);
    ASSERT_TRUE(status.ok()) << status;
    ExpectReference();
  }
}

TEST_P(ChunkStoreTest, ValuesAndSegmentsInOneUpdate) {
  ASSERT_TRUE(s_.RunSegments(1).ok());
  StepUpdates values(5), segments(6);
  values.AddValues(3, Sizes()[3]);
  segments.AddSegments(3, Sizes()[3], 2);
  ChunkUpdate both = segments.updates()[0];
  both.values = values.updates()[0].values;
  ASSERT_TRUE(s_.store->Run({&both, 1}, [](size_t) {}).ok());
  s_.reference[3].Apply(both);
  ExpectReference();
}

TEST_P(ChunkStoreTest, PartsOfAChunk) {
  ASSERT_TRUE(s_.RunValues(1).ok());
  ASSERT_TRUE(s_.RunSegments(1).ok());
  for (const uint64_t begin : {uint64_t{0}, uint64_t{1}, uint64_t{4099}, uint64_t{65535}}) {
    std::vector<float> state(65536 - begin < 777 ? 65536 - begin : 777);
    ASSERT_TRUE(s_.store->ReadState(1, StateArray::kMoment2, begin, absl::MakeSpan(state)).ok());
    const auto from = s_.reference[1].arrays[2].begin() + begin;
    EXPECT_TRUE(SameBits(state, {from, from + state.size()})) << begin;
    std::vector<kernels::bf16> working(state.size());
    ASSERT_TRUE(s_.store->ReadWorking(1, begin, Bytes(absl::MakeSpan(working))).ok());
    const auto working_from = s_.reference[1].working.begin() + begin;
    EXPECT_TRUE(SameBits(working, {working_from, working_from + working.size()})) << begin;
  }
}

// Done comes in order, and what it announces can be read at once, whether its state has reached the disk or not.
TEST_P(ChunkStoreTest, DoneMeansReadable) {
  ASSERT_TRUE(s_.RunValues(1).ok());
  StepUpdates step(2);
  for (size_t i = 0; i < Sizes().size(); ++i) step.AddSegments(i, Sizes()[i], 1);
  step.ApplyTo(s_.reference);
  size_t next = 0;
  ASSERT_TRUE(s_.store
                  ->Run(step.updates(),
                        [&](size_t i) {
                          EXPECT_EQ(i, next++);
                          EXPECT_TRUE(Holds(*s_.store, i, s_.reference[i])) << "chunk " << i;
                        })
                  .ok());
  EXPECT_EQ(next, Sizes().size());
}

TEST_P(ChunkStoreTest, RunsFromDifferentThreads) {
  for (uint64_t t = 1; t <= 3; ++t) {
    std::thread([&] { EXPECT_TRUE(s_.RunSegments(t).ok()); }).join();
  }
  ExpectReference();
}

TEST_P(ChunkStoreTest, ChunksAddedLater) {
  ASSERT_TRUE(s_.RunValues(1).ok());
  EXPECT_EQ(s_.store->staging_bytes_missing() == 0, s_.store->residency().state.nvme > 0);
  Plan plan;
  plan.chunks = {{.state = TierKind::kNvme}, {.state = TierKind::kDram}};
  const absl::Status added = s_.store->Add({1280, 65536}, plan);
  ASSERT_TRUE(added.ok()) << added;
  EXPECT_EQ(s_.store->chunk_count(), Sizes().size() + 2);
  s_.reference.emplace_back(1280);
  s_.reference.emplace_back(65536);
  StepUpdates step(9);
  step.AddValues(Sizes().size(), 1280);
  step.AddSegments(0, Sizes()[0], 1);
  step.AddValues(Sizes().size() + 1, 65536);
  ASSERT_TRUE(s_.Run(step).ok());
  for (size_t i = 0; i < s_.reference.size(); ++i) EXPECT_TRUE(Holds(*s_.store, i, s_.reference[i])) << "chunk " << i;
}

// Reads beside a run see a chunk before or after its update: all elements of a chunk move by the same value each step.
TEST_P(ChunkStoreTest, ReadsNeverSeeHalfAnUpdate) {
  constexpr uint64_t kRuns = 8;
  std::atomic<bool> stop = false;
  std::atomic<uint64_t> reads = 0;
  std::thread reader([&] {
    std::vector<float> state(65536);
    std::vector<kernels::bf16> working(65536);
    do {
      for (const uint64_t chunk : {uint64_t{0}, uint64_t{1}, uint64_t{7}}) {
        ASSERT_TRUE(s_.store->ReadState(chunk, StateArray::kMaster, 0, absl::MakeSpan(state)).ok());
        ASSERT_TRUE(s_.store->ReadWorking(chunk, 0, Bytes(absl::MakeSpan(working))).ok());
        ASSERT_EQ(std::count(state.begin(), state.end(), state[0]), 65536);
        ASSERT_EQ(std::count(working.begin(), working.end(), working[0]), 65536);
        reads.fetch_add(1);
      }
    } while (!stop.load());
  });
  for (uint64_t run = 1; run <= kRuns; ++run) {
    const std::vector<float> values(65536, static_cast<float>(run));
    std::vector<ChunkUpdate> updates(Sizes().size());
    for (size_t i = 0; i < updates.size(); ++i) {
      updates[i].chunk = i;
      updates[i].values = {{0, absl::MakeSpan(values).subspan(0, Sizes()[i])}};
    }
    const absl::Status status = s_.store->Run(updates, [](size_t) {});
    EXPECT_TRUE(status.ok()) << status;
  }
  stop.store(true);
  reader.join();
  EXPECT_GT(reads.load(), 0);
}

TEST_P(ChunkStoreTest, SpaceIsTakenAndReturned) {
  const ChunkStore::Residency residency = s_.store->residency();
  const TierBytes used = s_.tiers->used();
  uint64_t state = 0, working = 0;
  const StateLayout& layout = s_.store->layout();
  for (const uint64_t n : Sizes()) state += layout.StateBytes(n), working += layout.WorkingBytes(n);
  EXPECT_EQ(residency.state.hbm + residency.state.dram + residency.state.nvme, state);
  EXPECT_EQ(residency.working.dram, working);
  EXPECT_EQ(used.nvme, residency.state.nvme);
  EXPECT_EQ(used.hbm, residency.state.hbm + kHbmScratchBytes);
  const uint64_t staging = residency.state.nvme > 0 ? s_.tiers->staging_bytes() : 0;
  EXPECT_EQ(used.dram, residency.state.dram + working + staging);
  s_.store.reset();
  EXPECT_EQ(s_.tiers->used().dram, 0);
  EXPECT_EQ(s_.tiers->used().nvme, 0);
}

TEST_P(ChunkStoreTest, BadInputIsRefusedAndNothingChanges) {
  ASSERT_TRUE(s_.RunValues(1).ok());
  StepUpdates good(2);
  good.AddSegments(0, Sizes()[0], 1);
  const auto refused = [&](ChunkUpdate bad, const char* reason) {
    const absl::Status status = s_.store->Run({good.updates()[0], bad}, [](size_t) { ADD_FAILURE(); });
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_EQ(model::ReasonOf(status), reason) << status;
  };
  const std::vector<float> values(10);
  ChunkUpdate outside{.chunk = 5};
  outside.values = {{250, values}};
  refused(outside, model::kBadRange);
  ChunkUpdate short_gradient{.chunk = 1};
  short_gradient.segments = {{0, 256, {}}};
  refused(short_gradient, model::kBadLength);
  refused({.chunk = 99}, model::kBadRange);
  refused(good.updates()[0], model::kBadRequest);
  std::vector<float> to(257);
  EXPECT_EQ(s_.store->ReadState(5, StateArray::kMaster, 0, absl::MakeSpan(to)).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(s_.store->ReadState(99, StateArray::kMaster, 0, absl::MakeSpan(to)).code(),
            absl::StatusCode::kInvalidArgument);
  ExpectReference();
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, ChunkStoreTest,
    ::testing::Values(
        Shape{"AllDram", {TierKind::kDram}, 3}, Shape{"AllNvme", {TierKind::kNvme}, 3},
        Shape{"AllNvmeOneSlot", {TierKind::kNvme}, 1},
        Shape{"Mixed", {TierKind::kDram, TierKind::kNvme, TierKind::kNvme}, 2},
        Shape{"Remainders", {TierKind::kNvme, TierKind::kDram, TierKind::kNvme}, 2, kernels::MasterFormat::kRemainder},
        Shape{"AllHbm", {TierKind::kHbm}, 2}, Shape{"AllTiers", {TierKind::kHbm, TierKind::kNvme, TierKind::kDram}, 2}),
    [](const auto& info) { return info.param.name; });

TEST(ChunkStoreSpaceTest, AddBeyondTheBudgetAddsNothing) {
  StoreOnTiers s({.dram = 8 * kMiB, .nvme = 2 * kMiB}, 2);
  const absl::Status status = s.store->Add(Sizes(), s.PlanOf({TierKind::kNvme}));
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(model::ReasonOf(status), model::kBudget);
  EXPECT_THAT(status.ToString(), HasSubstr("nvme is short of"));
  EXPECT_EQ(s.store->chunk_count(), 0);
  EXPECT_EQ(s.tiers->used().nvme, 0);
  EXPECT_EQ(s.tiers->used().dram, 0);
}

TEST(ChunkStoreSpaceTest, StagingTooSmallForOneChunk) {
  StoreOnTiers s({.dram = 8 * kMiB, .nvme = 8 * kMiB}, 0);
  const absl::Status status = s.store->Add(Sizes(), s.PlanOf({TierKind::kNvme}));
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(model::ReasonOf(status), model::kBadConfig);
  EXPECT_EQ(s.tiers->used().dram, 0);
}

TEST(ChunkStoreSpaceTest, ARefusedAddOfADurableStoreGivesItsRoomBack) {
  StoreOnTiers s({.dram = 8 * kMiB, .nvme = 8 * kMiB}, 0);
  ChunkStore durable(s.tiers.get(), kernels::OptimizerSpec(), nullptr,
                     DurableOptions{.job = "job", .life = 1, .record = [](auto) { return absl::OkStatus(); }});
  EXPECT_FALSE(durable.Add(Sizes(), s.PlanOf({TierKind::kNvme})).ok());
  EXPECT_EQ(s.tiers->used().nvme, 0);
  durable.Discard();
}

TEST(ChunkStoreSpaceTest, PlanForATierThatIsNotThere) {
  StoreOnTiers s({.dram = 8 * kMiB}, 2);
  EXPECT_EQ(s.store->Add(Sizes(), s.PlanOf({TierKind::kNvme})).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(s.store->Add(Sizes(), s.PlanOf({TierKind::kHbm})).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(s.store->Add({1}, s.PlanOf({TierKind::kDram})).code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace ballast::storage
