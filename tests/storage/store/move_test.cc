// State that moves between memory and disk: reads, updates and pins go on as if it had not.
#include <atomic>
#include <thread>

#include "ballast/proto/base/status.h"
#include "ballast/storage/tier/nvme_tier.h"
#include "ballast/tests/storage/store/store_on_tiers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ballast::storage {
namespace {

using ::testing::HasSubstr;

constexpr TierBytes kPlenty = {.dram = 64 * kMiB, .nvme = 64 * kMiB};
constexpr TierBytes kPlentyWithGpu = {.hbm = 64 * kMiB, .dram = 64 * kMiB, .nvme = 64 * kMiB};

// With a GPU no two chunks share memory.
class MoveTest : public ::testing::TestWithParam<TierBytes> {
 protected:
  void Add(const std::vector<TierKind>& tiers) { ASSERT_TRUE(s_.store->Add(Sizes(), s_.PlanOf(tiers)).ok()); }
  void MoveAll(TierKind to) {
    for (size_t i = 0; i < Sizes().size(); ++i) ASSERT_EQ(s_.store->Move(i, to), absl::OkStatus()) << i;
  }
  void ExpectHolds() {
    for (size_t i = 0; i < Sizes().size(); ++i) EXPECT_TRUE(Holds(*s_.store, i, s_.reference[i])) << i;
  }
  static uint64_t AllState() {
    uint64_t bytes = 0;
    for (const uint64_t n : Sizes()) bytes += StateLayout().StateBytes(n);
    return bytes;
  }
  StoreOnTiers s_{GetParam(), 2};
};
INSTANTIATE_TEST_SUITE_P(Budgets, MoveTest, ::testing::Values(kPlenty, kPlentyWithGpu),
                         [](const auto& info) { return info.param.hbm > 0 ? "Gpu" : "NoGpu"; });

TEST_P(MoveTest, WithoutWorkingCopiesToo) {
  ASSERT_TRUE(s_.store->Add(Sizes(), s_.PlanWithoutCopies({TierKind::kNvme, TierKind::kDram})).ok());
  EXPECT_EQ(s_.store->residency().working.dram, 0u);
  EXPECT_EQ(s_.store->pull_memory_missing(65536, 9).bytes(), 0u);
  ASSERT_TRUE(s_.RunValues(1).ok());
  ExpectHolds();
  MoveAll(TierKind::kDram);
  ASSERT_TRUE(s_.RunSegments(1).ok());
  ExpectHolds();
  MoveAll(TierKind::kNvme);
  ExpectHolds();
  ASSERT_TRUE(s_.RunSegments(2).ok());
  ExpectHolds();
  EXPECT_EQ(s_.store->residency().working.dram, 0u);
  if (GetParam().hbm > 0) {
    EXPECT_EQ(s_.store->Move(0, TierKind::kHbm).code(), absl::StatusCode::kInvalidArgument);
  }
}

TEST_P(MoveTest, DroppedWorkingCopiesMakeRoom) {
  Add({TierKind::kNvme, TierKind::kDram});
  ASSERT_TRUE(s_.RunValues(1).ok());
  const uint64_t before = s_.tiers->used().dram, copies = s_.store->residency().working.dram;
  if (GetParam().hbm > 0) {
    EXPECT_THAT(s_.store->DropWorkingCopies(), ::testing::Property(&absl::StatusOr<bool>::value, false));
    return;
  }
  std::atomic<bool> end{false};
  std::thread reader([&] {
    while (!end) ExpectHolds();
  });
  int rounds = 0;
  for (uint64_t used = before;; used = s_.tiers->used().dram, ++rounds) {
    const absl::StatusOr<bool> dropped = s_.store->DropWorkingCopies();
    ASSERT_TRUE(dropped.ok()) << dropped.status();
    if (!*dropped) break;
    EXPECT_LT(s_.tiers->used().dram, used);
  }
  end = true;
  reader.join();
  EXPECT_GT(rounds, 1);
  EXPECT_EQ(s_.store->residency().working.dram, 0u);
  EXPECT_EQ(s_.tiers->used().dram, before - copies + StoreOnTiers::PullMemoryOf(Sizes().size()).bytes());
  ASSERT_TRUE(s_.RunSegments(1).ok());
  ExpectHolds();
  MoveAll(TierKind::kDram);
  ASSERT_TRUE(s_.RunSegments(2).ok());
  ExpectHolds();
}

TEST_P(MoveTest, DownAndUpBetweenStepsChangesNoBit) {
  Add({TierKind::kDram});
  ASSERT_TRUE(s_.RunValues(1).ok());
  const uint64_t dram_before = s_.tiers->used().dram;
  MoveAll(TierKind::kNvme);
  ExpectHolds();
  EXPECT_EQ(s_.store->residency().state.dram, 0u);
  EXPECT_EQ(s_.store->residency().state.nvme, AllState());
  EXPECT_EQ(s_.tiers->used().dram, dram_before - AllState() + StoreOnTiers::StagingBytes(2));
  EXPECT_EQ(s_.tiers->used().nvme, AllState());
  ASSERT_TRUE(s_.RunSegments(1).ok());
  ExpectHolds();
  for (size_t i = 0; i < Sizes().size(); i += 2) ASSERT_EQ(s_.store->Move(i, TierKind::kDram), absl::OkStatus());
  ExpectHolds();
  ASSERT_TRUE(s_.RunSegments(2).ok());
  ExpectHolds();
  MoveAll(TierKind::kDram);
  EXPECT_EQ(s_.tiers->used().nvme, 0u);
  EXPECT_EQ(s_.tiers->used().dram, dram_before + StoreOnTiers::StagingBytes(2));
  ASSERT_TRUE(s_.RunSegments(3).ok());
  MoveAll(TierKind::kNvme);
  ASSERT_TRUE(s_.RunSegments(4).ok());
  ExpectHolds();
}

TEST_P(MoveTest, StateThatWasNeverUpdatedIsZeroWhereverItMoves) {
  Add({TierKind::kDram, TierKind::kNvme});
  for (size_t i = 0; i < Sizes().size(); ++i) {
    ASSERT_EQ(s_.store->Move(i, i % 2 == 0 ? TierKind::kNvme : TierKind::kDram), absl::OkStatus());
  }
  ExpectHolds();
  ASSERT_TRUE(s_.RunValues(2).ok());
  ExpectHolds();
}

TEST_P(MoveTest, PinsKeepTheirVersions) {
  Add({TierKind::kDram, TierKind::kNvme});
  ASSERT_TRUE(s_.RunValues(1).ok());
  ASSERT_TRUE(s_.store->Pin(1).ok());
  const std::vector<ReferenceChunk> first = s_.reference;
  ASSERT_TRUE(s_.RunSegments(1, /*stride=*/2).ok());
  for (size_t i = 0; i < Sizes().size(); ++i) {
    ASSERT_EQ(s_.store->Move(i, i % 2 == 0 ? TierKind::kNvme : TierKind::kDram), absl::OkStatus());
  }
  for (size_t i = 0; i < Sizes().size(); ++i) EXPECT_TRUE(HoldsPinned(*s_.store, 1, i, first[i])) << i;
  ASSERT_TRUE(s_.RunSegments(2).ok());
  for (size_t i = 0; i < Sizes().size(); ++i) EXPECT_TRUE(HoldsPinned(*s_.store, 1, i, first[i])) << i;
  ExpectHolds();
}

TEST_P(MoveTest, ReadsGoOnBesideMoves) {
  Add({TierKind::kDram});
  ASSERT_TRUE(s_.RunValues(1).ok());
  std::atomic<bool> stop = false;
  std::atomic<uint64_t> reads = 0;
  std::thread reader([&] {
    while (!stop) {
      for (size_t i = 0; i < Sizes().size(); ++i) {
        EXPECT_TRUE(Holds(*s_.store, i, s_.reference[i])) << i;
        ++reads;
      }
    }
  });
  for (int round = 0; round < 10 || reads == 0; ++round) {
    MoveAll(TierKind::kNvme);
    MoveAll(TierKind::kDram);
  }
  stop = true;
  reader.join();
}

TEST_P(MoveTest, WithoutRoomNothingChanges) {
  Add({TierKind::kNvme});
  ASSERT_TRUE(s_.RunValues(1).ok());
  ASSERT_EQ(s_.tiers->SetBudget({.dram = s_.tiers->used().dram + 1000, .nvme = kPlenty.nvme}), absl::OkStatus());
  const absl::Status status = s_.store->Move(0, TierKind::kDram);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(model::ReasonOf(status), model::kBudget);
  EXPECT_EQ(s_.store->residency().state.nvme, AllState());
  ExpectHolds();
  ASSERT_TRUE(s_.RunSegments(1).ok());
}

TEST_P(MoveTest, DownWorksBeyondALoweredBudget) {
  Add({TierKind::kDram});
  ASSERT_TRUE(s_.RunValues(1).ok());
  // Below what is taken: nothing more is given out, but what moves down finds its staging.
  ASSERT_EQ(s_.tiers->SetBudget({.dram = 1, .nvme = kPlenty.nvme}), absl::OkStatus());
  EXPECT_EQ(s_.tiers->Take(TierKind::kDram, 1, "anything", TierPart::kSlices).code(),
            absl::StatusCode::kResourceExhausted);
  MoveAll(TierKind::kNvme);
  ASSERT_TRUE(s_.RunSegments(1).ok());
  ExpectHolds();
}

TEST_P(MoveTest, RottenStateStaysWhereItIs) {
  Add({TierKind::kNvme});
  ASSERT_TRUE(s_.RunValues(1).ok());
  alignas(kIoAlignment) std::byte block[kIoAlignment] = {};
  ASSERT_EQ(s_.tiers->nvme()->file().Write(0, block), absl::OkStatus());  // chunk 0's master
  const uint64_t used = s_.tiers->used().dram;
  const absl::Status status = s_.store->Move(0, TierKind::kDram);
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()), HasSubstr("chunk 0: master"));
  EXPECT_EQ(s_.tiers->used().dram, used);
  EXPECT_EQ(s_.store->residency().state.nvme, AllState());
}

// A store of durable chunks, and the chunks passed to `record`.
struct DurableStore {
  explicit DurableStore(std::vector<ExtentPlace> kept = {}) {
    tiers = *Tiers::Open({.budget = kPlenty,
                          .directory = directory.path(),
                          .staging_bytes = StoreOnTiers::StagingBytes(2),
                          .kept = std::move(kept)});
    Reset();
  }
  void Reset() {
    store = std::make_unique<ChunkStore>(
        tiers.get(), kernels::OptimizerSpec(), nullptr,
        DurableOptions{.job = "job", .record = [this](absl::Span<const DurableChunk> chunks) {
                         for (const DurableChunk& chunk : chunks) recorded[chunk.id] = chunk;
                         return absl::OkStatus();
                       }});
  }
  ScratchDirectory directory;
  std::unique_ptr<Tiers> tiers;
  std::map<uint64_t, DurableChunk> recorded;
  std::unique_ptr<ChunkStore> store;
};

// Also the extents whose successors are not recorded yet.
TEST(DurableStoreTest, WhatIsDiscardedGivesAllOfItsDiskBack) {
  constexpr uint64_t kElements = 65536;
  DurableStore d;
  Plan plan;
  plan.chunks = {{.state = TierKind::kDram}, {.state = TierKind::kDram}};
  ASSERT_EQ(d.store->Add({{.elements = kElements, .id = 0}, {.elements = kElements, .id = 1}}, plan), absl::OkStatus());
  for (int64_t version = 0; version < 2; ++version) {
    StepUpdates step(7);
    step.AddValues(0, kElements);
    std::vector<ChunkUpdate> updates(step.updates().begin(), step.updates().end());
    updates[0].version = version;
    updates[0].flush = true;
    ASSERT_EQ(d.store->Run(updates, [](size_t) {}), absl::OkStatus());
    if (version == 0) {
      ASSERT_EQ(d.store->Harden(), absl::OkStatus());
    }
  }
  ASSERT_EQ(d.recorded[0].version, 0);
  d.store->Discard();
  d.store.reset();
  EXPECT_EQ(d.tiers->used().nvme, 0u);
}

// No further than whoever asks for it wants.
TEST(DurableStoreTest, APinIsReadUntilSomebodyObjects) {
  constexpr uint64_t kElements = 65536, kChunks = 24;
  DurableStore d;
  Plan plan;
  plan.chunks.assign(kChunks, {.state = TierKind::kDram});
  std::vector<ChunkToAdd> added;
  StepUpdates step(7);
  for (uint64_t i = 0; i < kChunks; ++i) {
    added.push_back({.elements = kElements, .id = i});
    step.AddValues(i, kElements);
  }
  ASSERT_EQ(d.store->Add(added, plan), absl::OkStatus());
  std::vector<ChunkUpdate> updates(step.updates().begin(), step.updates().end());
  for (ChunkUpdate& update : updates) update.version = 0;
  ASSERT_EQ(d.store->Run(updates, [](size_t) {}), absl::OkStatus());
  const auto kept = d.store->PinDurably(0);
  ASSERT_TRUE(kept.ok()) << kept.status();
  uint64_t asked = 0;
  const auto go_on = [&] {
    ++asked;
    return absl::OkStatus();
  };
  EXPECT_EQ(d.store->VerifyPin(0, go_on), absl::OkStatus());
  EXPECT_EQ(asked, kChunks);
  const uint64_t read = d.tiers->traffic().read.nvme;
  asked = 0;
  const absl::Status stopped = absl::UnavailableError("stopping");
  EXPECT_EQ(d.store->VerifyPin(0, [&] { return ++asked > 5 ? stopped : absl::OkStatus(); }), stopped);
  EXPECT_EQ(asked, 6u);
  EXPECT_EQ(d.tiers->traffic().read.nvme - read, 5 * StateLayout().StateBytes(kElements));
}

TEST(DurableMoveTest, TheExtentIsTheDurableVersionAllTheTime) {
  constexpr uint64_t kElements = 65536;
  DurableStore d;
  Plan plan;
  plan.chunks = {{.state = TierKind::kDram}, {.state = TierKind::kDram}};
  const std::vector<ChunkToAdd> added = {{.elements = kElements, .id = 0}, {.elements = kElements, .id = 1}};
  ASSERT_EQ(d.store->Add(added, plan), absl::OkStatus());
  const uint64_t nvme = d.tiers->used().nvme;
  std::vector<ReferenceChunk> reference(2, ReferenceChunk(kElements));
  int64_t version = -1;
  const auto run = [&](bool flush) {
    ++version;
    StepUpdates step(static_cast<uint64_t>(version) + 7);
    for (uint64_t i = 0; i < 2; ++i) {
      version == 0 ? step.AddValues(i, kElements) : step.AddSegments(i, kElements, static_cast<uint64_t>(version));
    }
    std::vector<ChunkUpdate> updates(step.updates().begin(), step.updates().end());
    for (ChunkUpdate& update : updates) {
      update.version = version;
      update.flush = flush;
    }
    ASSERT_EQ(d.store->Run(updates, [](size_t) {}), absl::OkStatus());
    step.ApplyTo(reference);
  };
  // A chunk never updated gets its extent from its reserved room on NVMe.
  ASSERT_EQ(d.store->Move(1, TierKind::kNvme), absl::OkStatus());
  run(/*flush=*/false);
  EXPECT_EQ(d.store->Move(0, TierKind::kNvme).code(), absl::StatusCode::kFailedPrecondition) << "dirty";
  run(/*flush=*/true);
  EXPECT_EQ(d.recorded[0].version, 1);
  ASSERT_EQ(d.store->Move(0, TierKind::kNvme), absl::OkStatus());
  EXPECT_TRUE(Holds(*d.store, 0, reference[0]));
  run(/*flush=*/false);
  EXPECT_EQ(d.recorded[0].version, 2) << "on nvme every version is";
  ASSERT_EQ(d.store->Move(0, TierKind::kDram), absl::OkStatus());
  ASSERT_EQ(d.store->Move(1, TierKind::kDram), absl::OkStatus());
  EXPECT_FALSE(d.store->dirty(0));
  EXPECT_EQ(d.store->durable_version(0), 2);
  run(/*flush=*/false);
  EXPECT_TRUE(d.store->dirty(0));
  EXPECT_EQ(d.recorded[0].version, 2);
  EXPECT_EQ(d.tiers->used().nvme, nvme) << "moves of durable state take and free nothing there";
  run(/*flush=*/true);
  for (uint64_t i = 0; i < 2; ++i) EXPECT_TRUE(Holds(*d.store, i, reference[i])) << i;

  // A later process reads back the recorded versions.
  std::vector<ChunkToAdd> kept = added;
  std::vector<ExtentPlace> places;
  for (uint64_t i = 0; i < 2; ++i) {
    kept[i].durable = d.recorded[i];
    places.push_back({d.recorded[i].offset, d.recorded[i].bytes});
  }
  d.store.reset();
  d.tiers.reset();
  d.tiers = *Tiers::Open({.budget = kPlenty,
                          .directory = d.directory.path(),
                          .staging_bytes = StoreOnTiers::StagingBytes(2),
                          .kept = places});
  d.Reset();
  ASSERT_EQ(d.store->Add(kept, plan), absl::OkStatus());
  for (uint64_t i = 0; i < 2; ++i) EXPECT_TRUE(Holds(*d.store, i, reference[i])) << i;
}

}  // namespace
}  // namespace ballast::storage
