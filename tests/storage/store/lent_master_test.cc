// A store whose masters are the trainer's parameters: the bits of a store with fp32 masters that writes these
// parameters, with the masters' bytes less.
#include <algorithm>

#include "ballast/proto/base/status.h"
#include "ballast/tests/storage/store/store_on_tiers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ballast::storage {
namespace {

using kernels::MasterFormat;
using kernels::MomentFormat;
using kernels::OptimizerKind;
using kernels::OptimizerSpec;
using ::testing::HasSubstr;

struct OwnMasterShape {
  const char* name;
  std::vector<TierKind> tiers;  // of the chunks, in turn
  OptimizerSpec optimizer;
};

// A store without working copies, and a trainer's parameters.
struct OwnMasterSide {
  OwnMasterSide(const OwnMasterShape& shape, MasterFormat master) {
    OptimizerSpec optimizer = shape.optimizer;
    optimizer.working = kernels::Dtype::kF32;
    optimizer.master = master;
    s.store = std::make_unique<ChunkStore>(s.tiers.get(), StateLayout(optimizer, /*working_copies=*/false), &s.compute);
    EXPECT_EQ(s.store->Add(Sizes(), s.PlanOf(shape.tiers)), absl::OkStatus());
    for (const uint64_t n : Sizes()) parameters.emplace_back(n);
  }

  absl::Status Run(const StepUpdates& step) {
    std::vector<ChunkUpdate> updates(step.updates().begin(), step.updates().end());
    for (ChunkUpdate& update : updates) {
      const auto at = [&](uint64_t begin) {
        return reinterpret_cast<std::byte*>(parameters[update.chunk].data() + begin);
      };
      for (auto& segment : update.segments) segment.working = at(segment.begin);
      for (auto& values : update.values) values.working = at(values.begin);
    }
    return s.store->Run(updates, [](size_t) {});
  }

  // As a trainer that writes to its parameter, without a word to a store whose master the parameter is.
  void Edit(size_t chunk) {
    std::vector<float>& parameter = parameters[chunk];
    for (float& value : parameter) value = -1.25f * value;
    if (s.store->layout().lends_master()) return;
    ChunkUpdate update{.chunk = chunk};
    update.values = {{0, parameter}};
    ASSERT_EQ(s.store->Run({&update, 1}, [](size_t) {}), absl::OkStatus());
  }

  std::vector<float> Moment(size_t chunk, int index) {
    std::vector<float> values(Sizes()[chunk]);
    EXPECT_EQ(s.store->ReadState(chunk, static_cast<StateArray>(index + 1), 0, absl::MakeSpan(values)),
              absl::OkStatus());
    return values;
  }

  StoreOnTiers s{{.dram = 16 * kMiB, .nvme = 16 * kMiB}, 3};
  std::vector<std::vector<float>> parameters;
};

class LentMasterTest : public ::testing::TestWithParam<OwnMasterShape> {
 protected:
  void Both(const std::function<absl::Status(OwnMasterSide&)>& work) {
    ASSERT_EQ(work(lent_), absl::OkStatus());
    ASSERT_EQ(work(kept_), absl::OkStatus());
  }
  void ExpectSame(const char* when) {
    for (size_t i = 0; i < Sizes().size(); ++i) {
      EXPECT_TRUE(SameBits(lent_.parameters[i], kept_.parameters[i])) << "chunk " << i << " " << when;
      for (int k = 0; k < kernels::MomentCount(GetParam().optimizer); ++k) {
        EXPECT_TRUE(SameBits(lent_.Moment(i, k), kept_.Moment(i, k))) << "moment " << k << " of " << i << " " << when;
      }
    }
  }

  OwnMasterSide lent_{GetParam(), MasterFormat::kLent}, kept_{GetParam(), MasterFormat::kF32};
};

INSTANTIATE_TEST_SUITE_P(
    Shapes, LentMasterTest,
    ::testing::Values(OwnMasterShape{"Dram", {TierKind::kDram}, {}}, OwnMasterShape{"Nvme", {TierKind::kNvme}, {}},
                      OwnMasterShape{"Both", {TierKind::kDram, TierKind::kNvme}, {}},
                      OwnMasterShape{"Bf16", {TierKind::kDram, TierKind::kNvme}, {.moments = MomentFormat::kBf16}},
                      OwnMasterShape{"EightBits", {TierKind::kNvme, TierKind::kDram}, {.moments = MomentFormat::kI8}},
                      OwnMasterShape{"Amsgrad", {TierKind::kDram}, {.kind = OptimizerKind::kAdam, .amsgrad = true}},
                      OwnMasterShape{"Stateless", {TierKind::kDram, TierKind::kNvme}, {.kind = OptimizerKind::kSgd}},
                      OwnMasterShape{"Lion", {TierKind::kDram}, {.kind = OptimizerKind::kLion}},
                      OwnMasterShape{
                          "Ademamix", {TierKind::kDram, TierKind::kNvme}, {.kind = OptimizerKind::kAdemamix}}),
    [](const auto& info) { return info.param.name; });

TEST_P(LentMasterTest, BitsOfAnFp32Master) {
  StepUpdates values(1);
  for (size_t i = 0; i < Sizes().size(); ++i) values.AddValues(i, Sizes()[i]);
  Both([&](OwnMasterSide& side) { return side.Run(values); });
  ExpectSame("with their values");
  for (uint64_t t = 1; t <= 4; ++t) {
    StepUpdates step(1000 + t);
    for (size_t i = 0; i < Sizes().size(); i += t == 2 ? 2 : 1) step.AddSegments(i, Sizes()[i], t);
    Both([&](OwnMasterSide& side) { return side.Run(step); });
    ExpectSame("after a step");
    for (OwnMasterSide* side : {&lent_, &kept_}) side->Edit(t);
  }
}

TEST_P(LentMasterTest, TakesNoBytesForTheMaster) {
  const auto bytes = [](OwnMasterSide& side) {
    const ChunkStore::Residency residency = side.s.store->residency();
    return residency.state.dram + residency.state.nvme;
  };
  uint64_t masters = 0;
  for (const uint64_t n : Sizes()) masters += (n * sizeof(float) + 4095) / 4096 * 4096;
  EXPECT_EQ(bytes(lent_) + masters, bytes(kept_));
}

TEST_P(LentMasterTest, ReadsAndUpdatesWithoutItAreRefused) {
  StepUpdates values(1), step(2);
  values.AddValues(0, Sizes()[0]);
  step.AddSegments(0, Sizes()[0], 1);
  ASSERT_EQ(lent_.Run(values), absl::OkStatus());
  ASSERT_EQ(lent_.s.store->Pin(0), absl::OkStatus());
  std::vector<float> to(Sizes()[0]);
  ChunkStore& store = *lent_.s.store;
  for (const absl::Status& read : {store.ReadState(0, StateArray::kMaster, 0, absl::MakeSpan(to)),
                                   store.ReadWorking(0, 0, Bytes(absl::MakeSpan(to))),
                                   store.ReadPinnedState(0, 0, StateArray::kMaster, 0, absl::MakeSpan(to)),
                                   store.ReadPinnedWorking(0, 0, 0, Bytes(absl::MakeSpan(to)))}) {
    EXPECT_EQ(model::ReasonOf(read), model::kUnsupported) << read;
  }
  const std::vector<std::vector<float>> before = lent_.parameters;
  EXPECT_THAT(store.Run(step.updates(), [](size_t) {}).ToString(), HasSubstr("in the trainer's memory"));
  EXPECT_TRUE(lent_.parameters == before);
}

TEST(LentMaster, RefusedWhereNobodyLends) {
  const OptimizerSpec lent{.master = MasterFormat::kLent, .working = kernels::Dtype::kF32};
  StoreOnTiers s({.dram = 16 * kMiB, .nvme = 16 * kMiB}, 3);
  ChunkStore copies(s.tiers.get(), lent);
  EXPECT_THAT(copies.Add(Sizes(), s.PlanOf({TierKind::kDram})).ToString(), HasSubstr("keeps working copies"));
  ChunkStore durable(s.tiers.get(), StateLayout(lent, /*working_copies=*/false), nullptr, DurableOptions{.job = "job"});
  EXPECT_THAT(durable.Add(Sizes(), s.PlanOf({TierKind::kDram})).ToString(), HasSubstr("is durable"));
  EXPECT_THAT(kernels::Unsupported({.master = MasterFormat::kLent}), HasSubstr("in fp32 alone"));
}

}  // namespace
}  // namespace ballast::storage
