// A store without working copies reads gradients from the trainer's memory and writes working parameters there. The
// bits must equal a store with copies of both.
#include <deque>

#include "ballast/proto/base/status.h"
#include "ballast/tests/storage/store/store_on_tiers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ballast::storage {
namespace {

using ::testing::HasSubstr;

struct LentShape {
  const char* name;
  std::vector<TierKind> tiers;  // of the chunks, in turn
};

// A trainer's memory for each chunk.
struct Trainer {
  Trainer() {
    for (const uint64_t n : Sizes()) parameters.emplace_back(n);
  }

  // The same update with each segment's gradient in separate memory, and `parameters` as the place to write. Also
  // for values.
  ChunkUpdate Lend(const ChunkUpdate& update) {
    ChunkUpdate lent = update;
    lent.gradient = {};
    auto* const to = parameters[update.chunk].data();
    for (ChunkUpdate::SegmentUpdate& segment : lent.segments) {
      const auto* from = reinterpret_cast<const kernels::bf16*>(update.gradient.data());
      const auto& own = gradients.emplace_back(from + segment.begin, from + segment.end);
      segment.gradient = reinterpret_cast<const std::byte*>(own.data());
      segment.working = reinterpret_cast<std::byte*>(to + segment.begin);
    }
    for (ChunkUpdate::Values& values : lent.values) values.working = reinterpret_cast<std::byte*>(to + values.begin);
    return lent;
  }

  std::deque<std::vector<kernels::bf16>> gradients;
  std::vector<std::vector<kernels::bf16>> parameters;
};

class LentMemoryTest : public ::testing::TestWithParam<LentShape> {
 protected:
  void SetUp() override {
    s_.store = std::make_unique<ChunkStore>(s_.tiers.get(), StateLayout({}, /*working_copies=*/false));
    const absl::Status added = s_.store->Add(Sizes(), s_.PlanOf(GetParam().tiers));
    ASSERT_TRUE(added.ok()) << added;
  }

  // Applies `step` to the reference, and lent to the store; `half`: only the even chunks lend.
  absl::Status Run(const StepUpdates& step, bool half = false) {
    std::vector<ChunkUpdate> updates;
    for (const ChunkUpdate& update : step.updates()) {
      updates.push_back(half && update.chunk % 2 == 1 ? update : trainer_.Lend(update));
    }
    BALLAST_RETURN_IF_ERROR(s_.store->Run(updates, [&](size_t i) {
      // As soon as an update is done the trainer may free the memory.
      for (auto& segment : updates[i].segments) segment.gradient = nullptr;
    }));
    step.ApplyTo(s_.reference);
    return absl::OkStatus();
  }

  StoreOnTiers s_{{.dram = 16 * kMiB, .nvme = 16 * kMiB}, 3};
  Trainer trainer_;
};

TEST_P(LentMemoryTest, BitsOfTheCopyingStore) {
  EXPECT_EQ(s_.store->residency().working.dram, 0u);
  StepUpdates values(1);
  for (size_t i = 0; i < Sizes().size(); ++i) values.AddValues(i, Sizes()[i]);
  ASSERT_TRUE(Run(values).ok());
  for (uint64_t t = 1; t <= 3; ++t) {
    StepUpdates step(1000 + t);
    for (size_t i = 0; i < Sizes().size(); i += t == 2 ? 2 : 1) step.AddSegments(i, Sizes()[i], t);
    const absl::Status status = Run(step);
    ASSERT_TRUE(status.ok()) << status;
    for (size_t i = 0; i < Sizes().size(); ++i) {
      EXPECT_TRUE(Holds(*s_.store, i, s_.reference[i])) << "chunk " << i;  // reads round the master
      EXPECT_TRUE(SameBits(trainer_.parameters[i], s_.reference[i].working)) << "chunk " << i << " after step " << t;
    }
  }
}

// Chunks that are not lent only have to be read: same state, and the trainer's memory unchanged.
TEST_P(LentMemoryTest, SomeIsNotLent) {
  StepUpdates values(1), step(2);
  for (size_t i = 0; i < Sizes().size(); ++i) {
    values.AddValues(i, Sizes()[i]);
    step.AddSegments(i, Sizes()[i], 1);
  }
  ASSERT_TRUE(Run(values).ok());
  const auto before = trainer_.parameters;
  ASSERT_TRUE(Run(step, /*half=*/true).ok());
  for (size_t i = 0; i < Sizes().size(); ++i) {
    EXPECT_TRUE(Holds(*s_.store, i, s_.reference[i])) << "chunk " << i;
    EXPECT_TRUE(SameBits(trainer_.parameters[i], i % 2 == 1 ? before[i] : s_.reference[i].working)) << "chunk " << i;
  }
}

TEST_P(LentMemoryTest, PartsAndPinsAreRoundedMasters) {
  StepUpdates values(1), step(2);
  for (size_t i = 0; i < Sizes().size(); ++i) {
    values.AddValues(i, Sizes()[i]);
    step.AddSegments(i, Sizes()[i], 1);
  }
  ASSERT_TRUE(Run(values).ok());
  ASSERT_TRUE(s_.store->Pin(0).ok());
  const std::vector<ReferenceChunk> pinned = s_.reference;
  ASSERT_TRUE(Run(step).ok());
  for (size_t i = 0; i < Sizes().size(); ++i) EXPECT_TRUE(HoldsPinned(*s_.store, 0, i, pinned[i])) << "chunk " << i;
  for (const uint64_t begin : {uint64_t{1}, uint64_t{4099}, uint64_t{65535}}) {
    std::vector<kernels::bf16> part(std::min<uint64_t>(65536 - begin, 777));
    ASSERT_TRUE(s_.store->ReadWorking(1, begin, Bytes(absl::MakeSpan(part))).ok());
    const auto from = s_.reference[1].working.begin() + begin;
    EXPECT_TRUE(SameBits(part, {from, from + part.size()})) << begin;
  }
}

INSTANTIATE_TEST_SUITE_P(Tiers, LentMemoryTest,
                         ::testing::Values(LentShape{"Dram", {TierKind::kDram}}, LentShape{"Nvme", {TierKind::kNvme}},
                                           LentShape{"Both", {TierKind::kDram, TierKind::kNvme}}),
                         [](const auto& info) { return info.param.name; });

TEST(LentMemory, AChunkWithAWorkingCopyTakesNoOther) {
  StoreOnTiers s({.dram = 16 * kMiB, .nvme = 0}, 1);
  ASSERT_TRUE(s.store->Add(Sizes(), s.PlanOf({TierKind::kDram})).ok());
  Trainer trainer;
  StepUpdates step(1);
  step.AddSegments(0, Sizes()[0], 1);
  const ChunkUpdate lent = trainer.Lend(step.updates()[0]);
  const absl::Status status = s.store->Run({&lent, 1}, [](size_t) {});
  EXPECT_THAT(std::string(status.message()), HasSubstr("working copy of its own"));
}

}  // namespace
}  // namespace ballast::storage
