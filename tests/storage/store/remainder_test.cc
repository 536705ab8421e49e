// Chunks whose master is a working copy and a remainder. Their bits are checked by the other tests of the store.
#include "ballast/storage/store/remainder.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "ballast/proto/base/status.h"
#include "ballast/tests/storage/store/store_on_tiers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ballast::storage {
namespace {

using kernels::MasterFormat;
using kernels::OptimizerSpec;
using ::testing::HasSubstr;

constexpr TierBytes kPlenty = {.dram = 64 * kMiB, .nvme = 64 * kMiB};

class RemainderTest : public ::testing::Test {
 protected:
  void ExpectHolds() {
    for (size_t i = 0; i < Sizes().size(); ++i) EXPECT_TRUE(Holds(*s_.store, i, s_.reference[i])) << i;
  }
  void ExpectRefused(const absl::Status& status, const char* reason, const char* words) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_EQ(model::ReasonOf(status), reason) << status;
    EXPECT_THAT(status.ToString(), HasSubstr(words));
  }
  StoreOnTiers s_{kPlenty, 2, MasterFormat::kRemainder};
};

// A chunk of no whole number of bytes of carries, in plain memory.
class RemainderOfAChunk : public ::testing::Test {
 protected:
  static constexpr uint64_t kElements = 1003;

  RemainderOfAChunk() {
    std::mt19937 random(5);
    for (float& value : master_) {
      do {
        const auto bits = static_cast<uint32_t>(random());
        std::memcpy(&value, &bits, sizeof(value));
      } while (std::isnan(value));
    }
    const float inf = std::numeric_limits<float>::infinity(), max = std::numeric_limits<float>::max();
    const float specials[] = {0.0F, -0.0F, inf, -inf, max, -max, 1.0F, std::numeric_limits<float>::denorm_min()};
    std::copy(std::begin(specials), std::end(specials), master_.begin() + 11);
    Round();
    SetRemainder(master_, 0, view());
  }
  void Round() { kernels::Bf16FromF32(master_, absl::MakeSpan(working_)); }
  StateView view() { return {&layout_, state_.data(), kElements}; }
  void ExpectJoins(uint64_t at, uint64_t count) {
    std::vector<float> joined(count);
    JoinMaster(view(), reinterpret_cast<const std::byte*>(working_.data()), at, absl::MakeSpan(joined));
    if (count == 0) return;
    EXPECT_EQ(std::memcmp(joined.data(), master_.data() + at, count * sizeof(float)), 0) << at << ", " << count;
  }

  const StateLayout layout_{OptimizerSpec{.master = MasterFormat::kRemainder}};
  std::vector<float> master_ = std::vector<float>(kElements);
  std::vector<kernels::bf16> working_ = std::vector<kernels::bf16>(kElements);
  std::vector<std::byte> state_ = std::vector<std::byte>(layout_.StateBytes(kElements));
};

TEST_F(RemainderOfAChunk, JoinsAnyElementsToTheMastersBits) {
  ExpectJoins(0, kElements);
  for (const uint64_t at : {0, 1, 7, 8, 9, 500, 1000, 1002}) {
    for (const uint64_t count : {0, 1, 2, 6, 7, 8, 9, 17, 400}) {
      if (at + count <= kElements) ExpectJoins(at, count);
    }
    ExpectJoins(at, kElements - at);
  }
}

TEST_F(RemainderOfAChunk, APartIsSetWithoutItsNeighbours) {
  for (uint64_t i = 40; i < 72; ++i) master_[i] = 1.0F / static_cast<float>(i);
  for (uint64_t i = 1000; i < kElements; ++i) master_[i] = static_cast<float>(i) / 7;
  Round();
  SetRemainder(absl::MakeConstSpan(master_).subspan(40, 32), 40, view());
  SetRemainder(absl::MakeConstSpan(master_).subspan(1000), 1000, view());
  ExpectJoins(0, kElements);
}

TEST_F(RemainderTest, TakesTwoBytesLess) {
  constexpr uint64_t kElements = uint64_t{1} << 20;
  for (const auto moments : {kernels::MomentFormat::kF32, kernels::MomentFormat::kI8}) {
    const StateLayout whole(OptimizerSpec{.moments = moments});
    const StateLayout layout(OptimizerSpec{.moments = moments, .master = MasterFormat::kRemainder});
    EXPECT_TRUE(layout.keeps_remainder());
    // A bit of each two bytes stays: the carry.
    EXPECT_EQ(whole.StateBytes(kElements) - layout.StateBytes(kElements), kElements * 15 / 8);
    EXPECT_EQ(layout.WorkingBytes(kElements), whole.WorkingBytes(kElements));
    EXPECT_EQ(layout.Whole().StateBytes(kElements), whole.StateBytes(kElements));
    EXPECT_EQ(layout.WithoutWorkingCopy().StateBytes(kElements), whole.StateBytes(kElements));
    EXPECT_EQ(layout.Of(StateForm::kQ8).StateBytes(kElements), whole.Of(StateForm::kQ8).StateBytes(kElements));
    EXPECT_NE(LayoutBits(layout), LayoutBits(whole));
  }
}

TEST_F(RemainderTest, MovesWithoutItsWorkingCopy) {
  ASSERT_TRUE(s_.store->Add(Sizes(), s_.PlanOf({TierKind::kDram, TierKind::kNvme})).ok());
  ASSERT_TRUE(s_.RunValues(1).ok());
  for (uint64_t t = 1; t <= 3; ++t) {
    for (size_t i = 0; i < Sizes().size(); ++i) {
      ASSERT_EQ(s_.store->Move(i, (i + t) % 2 == 0 ? TierKind::kDram : TierKind::kNvme), absl::OkStatus());
    }
    ExpectHolds();
    ASSERT_TRUE(s_.RunSegments(t).ok());
    ExpectHolds();
  }
}

// Chunks without a working copy have an fp32 master beside others that have none.
TEST_F(RemainderTest, IsForChunksWithAWorkingCopy) {
  Plan plan = s_.PlanOf({TierKind::kNvme, TierKind::kDram});
  for (size_t i = 0; i < Sizes().size(); i += 3) plan.chunks[i].working = std::nullopt;
  plan.pull = s_.store->pull_memory_missing(65536, Sizes().size());
  ASSERT_TRUE(s_.store->Add(Sizes(), plan).ok());
  uint64_t state = 0;
  for (size_t i = 0; i < Sizes().size(); ++i) {
    state += s_.store->layout().Of(StateForm::kFull, plan.chunks[i]).StateBytes(Sizes()[i]);
  }
  const ChunkStore::Residency residency = s_.store->residency();
  EXPECT_EQ(residency.state.dram + residency.state.nvme, state);
  EXPECT_EQ(s_.tiers->used().nvme, residency.state.nvme);
  ASSERT_TRUE(s_.RunValues(1).ok());
  for (uint64_t t = 1; t <= 3; ++t) ASSERT_TRUE(s_.RunSegments(t, t % 2 + 1).ok());
  ExpectHolds();
  // No copy is dropped: its remainder alone is no master.
  EXPECT_THAT(s_.store->DropWorkingCopies(), ::testing::Property(&absl::StatusOr<bool>::value, false));
  EXPECT_TRUE(s_.store->has_working_copy(1));
  ExpectHolds();
}

TEST_F(RemainderTest, IsNeitherInHbmNorDurable) {
  StoreOnTiers gpu({.hbm = 64 * kMiB, .dram = 64 * kMiB, .nvme = 64 * kMiB}, 2, MasterFormat::kRemainder);
  ExpectRefused(gpu.store->Add(Sizes(), gpu.PlanOf({TierKind::kHbm})), model::kBadRequest, "as remainder");
  ASSERT_TRUE(gpu.store->Add(Sizes(), gpu.PlanOf({TierKind::kDram})).ok());
  ExpectRefused(gpu.store->Move(0, TierKind::kHbm), model::kBadRequest, "as remainder");

  ChunkStore durable(s_.tiers.get(), OptimizerSpec{.master = MasterFormat::kRemainder}, nullptr,
                     DurableOptions{.job = "job", .life = 1, .record = [](auto) { return absl::OkStatus(); }});
  ExpectRefused(durable.Add(Sizes(), s_.PlanOf({TierKind::kNvme})), model::kBadConfig, "as remainder");
  EXPECT_EQ(s_.tiers->used().nvme, 0u);
  durable.Discard();
}

// Ties, infinities, NaNs of either kind, and what rounds up to infinity.
TEST_F(RemainderTest, KeepsEveryBitOfAnyValue) {
  ASSERT_TRUE(s_.store->Add(Sizes(), s_.PlanOf({TierKind::kNvme, TierKind::kDram})).ok());
  ASSERT_TRUE(s_.RunValues(1).ok());
  constexpr uint32_t kBits[] = {0x3f808000, 0x3f818000, 0x7f7fffff, 0xff7f8000, 0x7f800000, 0xff800001,
                                0x7fbfffff, 0x7fc01234, 0xffffffff, 0x80000000, 0x00008000};
  std::vector<float> values(std::size(kBits));
  std::memcpy(values.data(), kBits, sizeof(kBits));
  for (const uint64_t chunk : {0, 1}) {
    for (const uint64_t begin : {uint64_t{0}, uint64_t{4093}, uint64_t{16381}, 65536 - values.size()}) {
      ChunkUpdate update{.chunk = chunk};
      update.values = {{begin, values}};
      ASSERT_TRUE(s_.store->Run({&update, 1}, [](size_t) {}).ok());
      s_.reference[chunk].Apply(update);
      std::vector<float> read(values.size() - 3);
      ASSERT_TRUE(s_.store->ReadState(chunk, StateArray::kMaster, begin + 1, absl::MakeSpan(read)).ok());
      EXPECT_TRUE(SameBits(read, std::vector<float>(values.begin() + 1, values.end() - 2))) << begin;
    }
  }
  ExpectHolds();
}

}  // namespace
}  // namespace ballast::storage
