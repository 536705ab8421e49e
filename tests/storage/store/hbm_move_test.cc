// State that moves between GPU memory, CPU memory and disk, with its working copy or without.
#include <algorithm>
#include <map>
#include <random>
#include <thread>

#include "ballast/proto/base/status.h"
#include "ballast/tests/storage/store/store_on_tiers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ballast::storage {
namespace {

constexpr TierKind kKinds[] = {TierKind::kHbm, TierKind::kDram, TierKind::kNvme};
constexpr TierBytes kRoom = {.hbm = 64 * kMiB, .dram = 64 * kMiB, .nvme = 64 * kMiB};

class HbmMoveTest : public ::testing::TestWithParam<TierKind> {
 protected:
  HbmMoveTest() {
    Plan plan = s_.PlanOf({TierKind::kHbm});
    for (ChunkPlacement& chunk : plan.chunks) chunk.working = GetParam();
    EXPECT_EQ(s_.store->Add(Sizes(), plan), absl::OkStatus());
  }
  void ExpectHolds() {
    for (size_t i = 0; i < Sizes().size(); ++i) EXPECT_TRUE(Holds(*s_.store, i, s_.reference[i])) << i;
  }
  void MoveAll(TierKind to) {
    for (size_t i = 0; i < Sizes().size(); ++i) ASSERT_EQ(s_.store->Move(i, to), absl::OkStatus()) << i;
  }
  static uint64_t AllState() {
    uint64_t bytes = 0;
    for (const uint64_t n : Sizes()) bytes += StateLayout().StateBytes(n);
    return bytes;
  }
  static uint64_t AllWorking() {
    uint64_t bytes = 0;
    for (const uint64_t n : Sizes()) bytes += StateLayout().WorkingBytes(n);
    return bytes;
  }
  StoreOnTiers s_{kRoom, 2};
};
INSTANTIATE_TEST_SUITE_P(WorkingCopies, HbmMoveTest, ::testing::Values(TierKind::kHbm, TierKind::kDram),
                         [](const auto& info) { return std::string(TierName(info.param)); });

TEST_P(HbmMoveTest, BudgetsGoWithWhatMoves) {
  ASSERT_TRUE(s_.RunValues(1).ok());
  const uint64_t in_hbm = GetParam() == TierKind::kHbm ? AllWorking() : 0;
  EXPECT_EQ(s_.tiers->used().hbm, kHbmScratchBytes + AllState() + in_hbm);
  MoveAll(TierKind::kDram);
  EXPECT_EQ(s_.tiers->used().hbm, kHbmScratchBytes);
  EXPECT_EQ(s_.tiers->used().dram, AllState() + AllWorking());
  EXPECT_EQ(s_.store->residency().working.dram, AllWorking());
  EXPECT_EQ(s_.store->residency().working.hbm, 0u);
  ExpectHolds();
  MoveAll(TierKind::kHbm);
  EXPECT_EQ(s_.tiers->used().hbm, kHbmScratchBytes + AllState());
  EXPECT_EQ(s_.tiers->used().dram, AllWorking());
  ExpectHolds();
  MoveAll(TierKind::kNvme);
  EXPECT_EQ(s_.tiers->used().hbm, kHbmScratchBytes);
  EXPECT_EQ(s_.tiers->used().nvme, AllState());
  ExpectHolds();
  MoveAll(TierKind::kHbm);
  EXPECT_EQ(s_.tiers->used().nvme, 0u);
  EXPECT_EQ(s_.store->residency().state.hbm, AllState());
  ASSERT_TRUE(s_.RunSegments(1).ok());
  ExpectHolds();
}

TEST_P(HbmMoveTest, AnyWayThroughTheTiersChangesNoBit) {
  const uint32_t seed = 20261124;
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  ASSERT_TRUE(s_.store->Pin(0).ok());
  const std::vector<ReferenceChunk> zero = s_.reference;
  std::vector<ReferenceChunk> pinned;
  for (uint64_t step = 1; step <= 12; ++step) {
    for (int moves = 0; moves < 6; ++moves) {
      ASSERT_EQ(s_.store->Move(random() % Sizes().size(), kKinds[random() % 3]), absl::OkStatus());
    }
    ExpectHolds();
    ASSERT_TRUE((step == 1 ? s_.RunValues(1) : s_.RunSegments(step, random() % 3 + 1)).ok());
    if (step == 5) {
      ASSERT_TRUE(s_.store->Pin(5).ok());
      pinned = s_.reference;
    }
    for (size_t i = 0; i < Sizes().size(); ++i) {
      EXPECT_TRUE(HoldsPinned(*s_.store, 0, i, zero[i])) << i;
      if (step >= 5) {
        EXPECT_TRUE(HoldsPinned(*s_.store, 5, i, pinned[i])) << i;
      }
    }
  }
  ExpectHolds();
}

TEST_P(HbmMoveTest, WithoutRoomNothingChanges) {
  ASSERT_TRUE(s_.RunValues(1).ok());
  const TierBytes used = s_.tiers->used();
  // There is room for the state, but not for its working copy.
  const uint64_t room = StateLayout().StateBytes(Sizes()[0]) + (GetParam() == TierKind::kHbm ? 4096 : 0);
  ASSERT_EQ(s_.tiers->SetBudget({used.hbm, used.dram + room - 4096, kRoom.nvme}), absl::OkStatus());
  const absl::Status status = s_.store->Move(0, TierKind::kDram);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(model::ReasonOf(status), model::kBudget);
  EXPECT_EQ(s_.tiers->used().dram, used.dram);
  EXPECT_EQ(s_.tiers->used().hbm, used.hbm);
  EXPECT_EQ(s_.store->residency().state.hbm, AllState());
  ASSERT_TRUE(s_.RunSegments(1).ok());
  ExpectHolds();
}

TEST_P(HbmMoveTest, ReadsGoOnBesideMoves) {
  ASSERT_TRUE(s_.RunValues(1).ok());
  std::atomic<bool> stop = false;
  std::atomic<uint64_t> reads = 0;
  std::thread reader([&] {
    while (!stop) {
      ExpectHolds();
      ++reads;
    }
  });
  for (int round = 0; round < 4 || reads == 0; ++round) {
    for (const TierKind to : kKinds) MoveAll(to);
  }
  stop = true;
  reader.join();
}

// A durable store whose chunks move and step at random is destroyed, and comes back from its records.
TEST(DurableHbmMoveTest, WhatWasRecordedComesBackIntoAnyTier) {
  constexpr uint64_t kElements = 65536, kChunks = 3;
  const uint32_t seed = 20261125;
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  ScratchDirectory directory;
  std::map<uint64_t, DurableChunk> recorded;
  std::vector<ReferenceChunk> reference(kChunks, ReferenceChunk(kElements));
  int64_t version = -1;
  for (int life = 0; life < 6; ++life) {
    std::vector<ChunkToAdd> added;
    std::vector<ExtentPlace> places;
    Plan plan;
    for (uint64_t i = 0; i < kChunks; ++i) {
      added.push_back({.elements = kElements, .id = i});
      if (const auto kept = recorded.find(i); kept != recorded.end()) {
        added.back().durable = kept->second;
        places.push_back({kept->second.offset, kept->second.bytes});
      }
      const TierKind state = kKinds[random() % 3];
      const bool with_working = state == TierKind::kHbm && random() % 2 == 0;
      plan.chunks.push_back({.state = state, .working = with_working ? TierKind::kHbm : TierKind::kDram});
    }
    auto tiers = *Tiers::Open({.budget = kRoom,
                               .directory = directory.path(),
                               .staging_bytes = StoreOnTiers::StagingBytes(2),
                               .open_hbm = TestHbm(),
                               .kept = places});
    ChunkStore store(tiers.get(), kernels::OptimizerSpec(), nullptr,
                     DurableOptions{.job = "job", .record = [&](absl::Span<const DurableChunk> chunks) {
                                      for (const DurableChunk& chunk : chunks) recorded[chunk.id] = chunk;
                                      return absl::OkStatus();
                                    }});
    ASSERT_EQ(store.Add(added, plan), absl::OkStatus());
    for (uint64_t i = 0; i < kChunks; ++i) ASSERT_TRUE(Holds(store, i, reference[i])) << "life " << life << " " << i;
    const uint64_t nvme = tiers->used().nvme;
    for (int step = 0; step < 6; ++step) {
      const bool flush = step == 5 || random() % 2 == 0;
      ++version;
      StepUpdates updates(static_cast<uint64_t>(version) + 7);
      for (uint64_t i = 0; i < kChunks; ++i) {
        version == 0 ? updates.AddValues(i, kElements)
                     : updates.AddSegments(i, kElements, static_cast<uint64_t>(version));
      }
      std::vector<ChunkUpdate> run(updates.updates().begin(), updates.updates().end());
      for (ChunkUpdate& update : run) {
        update.version = version;
        update.flush = flush;
      }
      ASSERT_EQ(store.Run(run, [](size_t) {}), absl::OkStatus());
      updates.ApplyTo(reference);
      const uint64_t chunk = random() % kChunks;
      const TierKind to = kKinds[random() % 3];
      const bool refused = to == TierKind::kNvme && store.dirty(chunk);
      EXPECT_EQ(store.Move(chunk, to).code(), refused ? absl::StatusCode::kFailedPrecondition : absl::StatusCode::kOk);
      for (uint64_t i = 0; i < kChunks; ++i) ASSERT_TRUE(Holds(store, i, reference[i])) << "life " << life << " " << i;
    }
    EXPECT_EQ(tiers->used().nvme, nvme) << "moves of durable state take and free nothing there";
    ASSERT_EQ(store.Harden(), absl::OkStatus());
  }
}

}  // namespace
}  // namespace ballast::storage
