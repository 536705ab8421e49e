// A pin reads what was there when it was made, whatever happens to the chunks later.
#include <atomic>
#include <thread>

#include "ballast/proto/base/status.h"
#include "ballast/tests/storage/store/store_on_tiers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ballast::storage {
namespace {

using ::testing::HasSubstr;

struct PinShape {
  const char* name;
  std::vector<TierKind> tiers;
  TierBytes budget;
  kernels::MasterFormat master = kernels::MasterFormat::kF32;
};

class PinTest : public ::testing::TestWithParam<PinShape> {
 protected:
  void SetUp() override { ASSERT_TRUE(s_.store->Add(Sizes(), s_.PlanOf(GetParam().tiers)).ok()); }

  void ExpectPinned(int64_t pin, const std::vector<ReferenceChunk>& expected) {
    for (size_t i = 0; i < Sizes().size(); ++i) {
      EXPECT_TRUE(HoldsPinned(*s_.store, pin, i, expected[i])) << "pin " << pin << " chunk " << i;
    }
  }

  StoreOnTiers s_{GetParam().budget, 2, GetParam().master};
};

TEST_P(PinTest, PinsKeepTheirVersions) {
  ASSERT_TRUE(s_.store->Pin(0).ok());
  const std::vector<ReferenceChunk> zero = s_.reference;
  ASSERT_TRUE(s_.RunValues(1).ok());
  ASSERT_TRUE(s_.store->Pin(1).ok());
  ASSERT_TRUE(s_.store->Pin(1).ok());  // a repeated request
  const std::vector<ReferenceChunk> first = s_.reference;
  ExpectPinned(1, first);
  // Some chunks are updated once, some twice, before the next pin.
  ASSERT_TRUE(s_.RunSegments(1, /*stride=*/2).ok());
  ASSERT_TRUE(s_.store->Pin(1).ok());  // moves nothing
  ASSERT_TRUE(s_.RunSegments(2, /*stride=*/3).ok());
  ASSERT_TRUE(s_.store->Pin(3).ok());
  const std::vector<ReferenceChunk> third = s_.reference;
  ASSERT_TRUE(s_.RunSegments(3).ok());
  ExpectPinned(0, zero);
  ExpectPinned(1, first);
  ExpectPinned(3, third);
  for (size_t i = 0; i < Sizes().size(); ++i) EXPECT_TRUE(Holds(*s_.store, i, s_.reference[i])) << i;
  s_.store->Unpin(1);
  ExpectPinned(0, zero);
  ExpectPinned(3, third);
  std::vector<float> to(1);
  EXPECT_EQ(model::ReasonOf(s_.store->ReadPinnedState(1, 0, StateArray::kMaster, 0, absl::MakeSpan(to))),
            model::kVersionGone);
}

TEST_P(PinTest, KnowsNoChunkThatWasAddedLater) {
  ASSERT_TRUE(s_.RunValues(1).ok());
  ASSERT_TRUE(s_.store->Pin(1).ok());
  Plan plan;
  plan.chunks = {{.state = TierKind::kDram}};
  ASSERT_TRUE(s_.store->Add({256}, plan).ok());
  const uint64_t added = Sizes().size();
  std::vector<float> to(1);
  EXPECT_EQ(model::ReasonOf(s_.store->ReadPinnedState(1, added, StateArray::kMaster, 0, absl::MakeSpan(to))),
            model::kVersionGone);
  ASSERT_TRUE(s_.store->Pin(2).ok());
  EXPECT_TRUE(s_.store->ReadPinnedState(2, added, StateArray::kMaster, 0, absl::MakeSpan(to)).ok());
  const TierBytes before = s_.tiers->used();
  s_.store->Unpin(2);
  StepUpdates step(9);
  step.AddValues(added, 256);
  s_.reference.emplace_back(256);
  ASSERT_TRUE(s_.Run(step).ok());
  EXPECT_EQ(s_.tiers->used().dram, before.dram) << "nobody needs a copy of it";
  EXPECT_EQ(model::ReasonOf(s_.store->ReadPinnedState(1, added, StateArray::kMaster, 0, absl::MakeSpan(to))),
            model::kVersionGone);
}

TEST_P(PinTest, UnpinReturnsAllSpace) {
  ASSERT_TRUE(s_.RunValues(1).ok());
  ASSERT_TRUE(s_.RunSegments(1).ok());
  ASSERT_TRUE(s_.store->Pin(1).ok());
  ASSERT_TRUE(s_.RunSegments(2).ok());
  const TierBytes pinned = s_.tiers->used();
  s_.store->Unpin(1);
  ASSERT_TRUE(s_.store->Pin(2).ok());
  s_.store->Unpin(2);
  const TierBytes free = s_.tiers->used();
  EXPECT_LT(free.dram + free.nvme, pinned.dram + pinned.nvme);
  ASSERT_TRUE(s_.RunSegments(3).ok());  // copies nothing: there is no pin
  EXPECT_EQ(s_.tiers->used().dram, free.dram);
  EXPECT_EQ(s_.tiers->used().nvme, free.nvme);
  EXPECT_EQ(free.nvme, s_.store->residency().state.nvme);
}

TEST_P(PinTest, ReadsOfAPinBesideRuns) {
  ASSERT_TRUE(s_.RunValues(1).ok());
  ASSERT_TRUE(s_.RunSegments(1).ok());
  ASSERT_TRUE(s_.store->Pin(7).ok());
  const std::vector<ReferenceChunk> expected = s_.reference;
  std::atomic<bool> stop = false;
  std::atomic<int> rounds = 0;
  std::thread reader([&] {
    do {
      for (size_t i = 0; i < Sizes().size(); ++i) ASSERT_TRUE(HoldsPinned(*s_.store, 7, i, expected[i])) << i;
      rounds.fetch_add(1);
    } while (!stop.load());
  });
  for (uint64_t t = 2; t < 6; ++t) EXPECT_TRUE(s_.RunSegments(t, t % 2 + 1).ok());
  stop.store(true);
  reader.join();
  EXPECT_GT(rounds.load(), 0);
  ExpectPinned(7, expected);
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, PinTest,
    ::testing::Values(
        PinShape{"DramCopiesOnDram", {TierKind::kDram}, {.dram = 32 * kMiB}},
        PinShape{"DramCopiesOnNvme", {TierKind::kDram}, {.dram = 9 * kMiB, .nvme = 32 * kMiB}},
        PinShape{"NvmeCopiesOnNvme", {TierKind::kNvme}, {.dram = 8 * kMiB, .nvme = 32 * kMiB}},
        PinShape{"NvmeCopiesOnDram", {TierKind::kNvme}, {.dram = 32 * kMiB, .nvme = 5414912}},
        PinShape{"HbmCopiesOnDram", {TierKind::kHbm}, {.hbm = kHbmScratchBytes + 16 * kMiB, .dram = 32 * kMiB}},
        PinShape{"HbmCopiesOnNvme",
                 {TierKind::kHbm},
                 {.hbm = kHbmScratchBytes + 16 * kMiB, .dram = 5 * kMiB, .nvme = 32 * kMiB}},
        PinShape{"RemaindersCopiedToNvme",
                 {TierKind::kNvme, TierKind::kDram},
                 {.dram = 9 * kMiB, .nvme = 32 * kMiB},
                 kernels::MasterFormat::kRemainder},
        PinShape{"RemaindersCopiedToDram",
                 {TierKind::kNvme, TierKind::kDram},
                 {.dram = 32 * kMiB, .nvme = 5 * kMiB},
                 kernels::MasterFormat::kRemainder},
        PinShape{"Mixed", {TierKind::kNvme, TierKind::kDram}, {.dram = 32 * kMiB, .nvme = 8 * kMiB}}),
    [](const auto& info) { return info.param.name; });

TEST(PinSpaceTest, NoRoomForACopyFailsBeforeTheChunkChanges) {
  uint64_t exact = 0;
  for (const uint64_t n : Sizes()) exact += StateLayout().StateBytes(n) + StateLayout().WorkingBytes(n);
  // Room for the copies of the first two chunks.
  StoreOnTiers s({.dram = exact + 2 * StateLayout().StateBytes(65536)}, 2);
  ASSERT_TRUE(s.store->Add(Sizes(), s.PlanOf({TierKind::kDram})).ok());
  ASSERT_TRUE(s.RunValues(1).ok());
  ASSERT_TRUE(s.store->Pin(1).ok());
  const std::vector<ReferenceChunk> before = s.reference;
  size_t done = 0;
  StepUpdates step(3);
  for (size_t i = 0; i < Sizes().size(); ++i) step.AddSegments(i, Sizes()[i], 1);
  const absl::Status status = s.store->Run(step.updates(), [&](size_t) { ++done; });
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(model::ReasonOf(status), model::kBudget);
  EXPECT_THAT(status.ToString(), HasSubstr("a pinned copy of a chunk's state needs"));
  EXPECT_EQ(done, 2);
  for (size_t i = 2; i < Sizes().size(); ++i) EXPECT_TRUE(Holds(*s.store, i, before[i])) << i;
  for (size_t i = 0; i < Sizes().size(); ++i) EXPECT_TRUE(HoldsPinned(*s.store, 1, i, before[i])) << i;
}

}  // namespace
}  // namespace ballast::storage
