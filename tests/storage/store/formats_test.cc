// The store with optimizers, moment formats and dtypes other than the default: the same bits as direct kernel calls on
// plain arrays, in every tier, under a pin, and in parts.
#include <gtest/gtest.h>

#include <cstring>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "ballast/storage/store/chunk_store.h"
#include "ballast/tests/scratch_directory.h"
#include "ballast/tests/storage/tier/test_hbm.h"
#include "gmock/gmock.h"

namespace ballast::storage {
namespace {

using kernels::Dtype;
using kernels::MasterFormat;
using kernels::MomentFormat;
using kernels::OptimizerKind;
using kernels::OptimizerSpec;

// Several pieces for several threads.
constexpr uint64_t kElements = 4 * 65536 - 3 * 256;

constexpr TierBytes kBudget = {.hbm = uint64_t{128} << 20, .dram = uint64_t{128} << 20, .nvme = uint64_t{64} << 20};
constexpr ChunkPlacement kPlacements[] = {{TierKind::kNvme},
                                          {TierKind::kDram},
                                          {TierKind::kHbm, TierKind::kHbm},
                                          {TierKind::kHbm, TierKind::kDram},
                                          {.state = TierKind::kNvme, .working = std::nullopt},
                                          {.state = TierKind::kDram, .working = std::nullopt}};
constexpr uint64_t kChunks = std::size(kPlacements);

// A remainder is not in HBM.
ChunkPlacement PlacementOf(uint64_t chunk, const OptimizerSpec& spec) {
  const bool moves = spec.master == kernels::MasterFormat::kRemainder && kPlacements[chunk].state == TierKind::kHbm;
  return moves ? kPlacements[chunk % 2] : kPlacements[chunk];
}

// Elements of the first segment that is updated, which ends amid a block.
constexpr uint64_t kFirstSegment = 4 * 256 + 100;

// Segments whose moments are written. The parts meet in the middle of a block, and are not in order.
constexpr std::pair<uint64_t, uint64_t> kWritten[] = {{256, 3 * 256 + 7}, {4 * 256, 200000}, {200192, kElements - 9}};
constexpr std::pair<uint64_t, uint64_t> kWrittenParts[] = {
    {70001, 200000}, {256, 3 * 256 + 7}, {4 * 256, 2001}, {200192, kElements - 9}, {2001, 70001}};

// One chunk on plain arrays.
struct Plain {
  explicit Plain(const OptimizerSpec& s) : spec(s), master(kElements), working(kernels::BytesOf(s.working, kElements)) {
    for (int k = 0; k < MomentCount(spec); ++k) {
      values.emplace_back(MomentBytes(spec.moments, kElements));
      scales.emplace_back(MomentScaleBytes(spec.moments, kElements) / sizeof(float));
    }
  }

  void Apply(const ChunkUpdate& update) {
    if (update.values_of != StateArray::kMaster) return WriteMoment(update);
    for (const auto& part : update.values)
      std::copy(part.values.begin(), part.values.end(), master.begin() + part.begin);
    for (const ChunkUpdate::SegmentUpdate& segment : update.segments) {
      const uint64_t at = segment.begin, block = at / kernels::kMomentBlock;
      kernels::UpdateSpan span{.n = segment.end - at,
                               .gradient = update.gradient.data() + at * ElementBytes(spec.gradient),
                               .master = master.data() + at,
                               .moments = {},
                               .working = working.data() + kernels::BytesOf(spec.working, at)};
      for (size_t k = 0; k < values.size(); ++k) {
        span.moments[k] = {values[k].data() + MomentBytes(spec.moments, at), scales[k].data() + block};
      }
      kernels::RandomKey key = update.random;
      key.first_element += at;
      Update(spec, segment.coefficients, key, span);
    }
    kernels::FromF32(master, spec.working, working.data());
  }

  // Segment by segment, each from its parts.
  void WriteMoment(const ChunkUpdate& update) {
    const auto k = static_cast<size_t>(update.values_of) - 1;
    std::vector<float> all(kElements);
    for (const auto& part : update.values) std::copy(part.values.begin(), part.values.end(), all.begin() + part.begin);
    for (const auto& [begin, end] : kWritten) {
      kernels::RandomKey key = update.random;
      key.first_element += begin;
      kernels::WriteMoment(
          spec, static_cast<int>(k), key, absl::MakeConstSpan(all).subspan(begin, end - begin),
          {values[k].data() + MomentBytes(spec.moments, begin), scales[k].data() + begin / kernels::kMomentBlock});
    }
  }

  std::vector<float> Array(StateArray array) const {
    if (array == StateArray::kMaster) return master;
    const auto k = static_cast<size_t>(array) - 1;
    Plain copy = *this;
    std::vector<float> out(kElements);
    kernels::ReadMoment(spec, static_cast<int>(k), {copy.values[k].data(), copy.scales[k].data()}, absl::MakeSpan(out));
    return out;
  }

  OptimizerSpec spec;
  std::vector<float> master;
  std::vector<std::vector<std::byte>> values;
  std::vector<std::vector<float>> scales;
  std::vector<std::byte> working;
};

class FormatsTest : public ::testing::TestWithParam<OptimizerSpec> {
 protected:
  FormatsTest() : layout_(GetParam()), plain_(kChunks, Plain(GetParam())) {
    const uint64_t staging = (uint64_t{1} << 20) + 2 * layout_.StateBytes(kElements);
    tiers_ = *Tiers::Open(
        {.budget = kBudget, .directory = directory_.path(), .staging_bytes = staging, .open_hbm = TestHbm()});
    store_ = std::make_unique<ChunkStore>(tiers_.get(), GetParam(), &compute_);
    Plan plan;
    for (uint64_t i = 0; i < kChunks; ++i) plan.chunks.push_back(PlacementOf(i, GetParam()));
    EXPECT_TRUE(store_->Add(std::vector<uint64_t>(kChunks, kElements), plan).ok());
  }

  // Values, or gradients for two segments with a gap, of every chunk.
  void Run(uint64_t step) {
    std::vector<std::vector<float>> floats(kChunks, std::vector<float>(kElements));
    std::vector<std::vector<std::byte>> gradients(kChunks);
    std::vector<ChunkUpdate> updates(kChunks);
    for (uint64_t i = 0; i < kChunks; ++i) {
      for (float& x : floats[i]) x = static_cast<float>(static_cast<int32_t>(random_())) * 0x1p-31f;
      updates[i].chunk = i;
      updates[i].random = {.seed = 7, .unit = 3, .step = step, .first_element = i * (uint64_t{1} << 18)};
      if (step == 0) {
        std::fill_n(floats[i].begin() + kFirstSegment, 5 * 256 - kFirstSegment, 0.0f);  // zeros follow a tensor
        updates[i].values = {{0, floats[i]}};
        continue;
      }
      gradients[i].resize(kElements * layout_.gradient_element_bytes());
      kernels::FromF32(floats[i], GetParam().gradient, gradients[i].data());
      updates[i].gradient = gradients[i];
      const kernels::Hyper hyper{.learning_rate = 1e-2,
                                 .beta1 = 0.9,
                                 .beta2 = 0.99,
                                 .epsilon = 1e-8,
                                 .weight_decay = 0.1,
                                 .initial_accumulator = 0.25,
                                 .beta3 = 0.999,
                                 .alpha = 5,
                                 .average = 0.3};
      const auto coefficients = MakeCoefficients(GetParam(), hyper, step, 0.5f);
      updates[i].segments = {{0, kFirstSegment, coefficients}, {8 * 256, kElements, coefficients}};
    }
    ASSERT_TRUE(store_->Run(updates, [](size_t) {}).ok());
    for (const ChunkUpdate& update : updates) plain_[update.chunk].Apply(update);
  }

  // Writes a moment of every chunk, except for some segments.
  void RunMoments(StateArray moment, uint64_t step) {
    const bool second = IsSecondMoment(GetParam(), static_cast<int>(moment) - 1);
    std::vector<std::vector<float>> floats(kChunks, std::vector<float>(kElements));
    std::vector<ChunkUpdate> updates(kChunks);
    for (uint64_t i = 0; i < kChunks; ++i) {
      for (float& x : floats[i]) {
        x = static_cast<float>(static_cast<int32_t>(random_())) * 0x1p-31f;
        if (second) x *= x;
      }
      updates[i].chunk = i;
      updates[i].random = {.seed = 7, .unit = 3, .step = step, .first_element = i * (uint64_t{1} << 18)};
      updates[i].values_of = moment;
      for (const auto& [begin, end] : kWrittenParts) {
        updates[i].values.push_back({begin, absl::MakeConstSpan(floats[i]).subspan(begin, end - begin)});
      }
    }
    const absl::Status run = store_->Run(updates, [](size_t) {});
    ASSERT_TRUE(run.ok()) << run;
    for (const ChunkUpdate& update : updates) plain_[update.chunk].Apply(update);
  }

  void ExpectHolds(const std::vector<Plain>& expected, bool pinned) {
    for (uint64_t chunk = 0; chunk < kChunks; ++chunk) {
      std::vector<std::byte> working(expected[chunk].working.size());
      const auto to = absl::MakeSpan(working);
      uint32_t crc32c = 0;
      ASSERT_TRUE(
          (pinned ? store_->ReadPinnedWorking(9, chunk, 0, to) : store_->ReadWorking(chunk, 0, to, &crc32c)).ok());
      ASSERT_EQ(crc32c, pinned ? 0 : kernels::Crc32c(to)) << chunk;
      ASSERT_EQ(working, expected[chunk].working) << chunk;
      // A part, from a block on.
      const auto at = kernels::BytesOf(GetParam().working, 3 * 256),
                 size = kernels::BytesOf(GetParam().working, 2 * 256);
      const auto part = to.first(size);
      ASSERT_TRUE(
          (pinned ? store_->ReadPinnedWorking(9, chunk, 3 * 256, part) : store_->ReadWorking(chunk, 3 * 256, part))
              .ok());
      ASSERT_EQ(absl::MakeConstSpan(part), absl::MakeConstSpan(expected[chunk].working).subspan(at, size)) << chunk;
      for (int i = 0; i < layout_.array_count(); ++i) {
        const auto array = static_cast<StateArray>(i);
        const std::vector<float> all = expected[chunk].Array(array);
        for (const auto& [begin, count] : {std::pair<uint64_t, uint64_t>{0, kElements},
                                           {1, 1},
                                           {255, 600},
                                           {4097, 1024},
                                           {kElements - 3, 3},
                                           {5, 0}}) {
          std::vector<float> part(count);
          const auto span = absl::MakeSpan(part);
          const absl::Status read = pinned ? store_->ReadPinnedState(9, chunk, array, begin, span)
                                           : store_->ReadState(chunk, array, begin, span);
          ASSERT_TRUE(read.ok()) << read;
          const auto from = all.begin() + static_cast<ptrdiff_t>(begin);
          ASSERT_EQ(part, std::vector<float>(from, from + static_cast<ptrdiff_t>(count))) << chunk << " " << i;
        }
      }
    }
  }

  ScratchDirectory directory_;
  const StateLayout layout_;
  std::unique_ptr<Tiers> tiers_;
  kernels::ThreadPool compute_{3};
  std::unique_ptr<ChunkStore> store_;
  std::vector<Plain> plain_;
  std::mt19937 random_{17};
};

TEST_P(FormatsTest, EqualsDirectKernelCalls) {
  ExpectHolds(plain_, false);
  for (uint64_t step = 0; step < 3; ++step) Run(step);
  ExpectHolds(plain_, false);
  ASSERT_TRUE(store_->Pin(9).ok());
  const std::vector<Plain> pinned = plain_;
  for (uint64_t step = 3; step < 5; ++step) Run(step);
  ExpectHolds(plain_, false);
  ExpectHolds(pinned, true);
}

TEST_P(FormatsTest, MomentsAreWrittenAndGoOn) {
  for (uint64_t step = 0; step < 3; ++step) Run(step);
  ASSERT_TRUE(store_->Pin(9).ok());
  const std::vector<Plain> pinned = plain_;
  for (int i = 1; i < layout_.array_count(); ++i) {
    RunMoments(static_cast<StateArray>(i), 2 + static_cast<uint64_t>(i));
    ExpectHolds(plain_, false);  // working copies and all
  }
  Run(6);
  ExpectHolds(plain_, false);
  ExpectHolds(pinned, true);
}

TEST_P(FormatsTest, MomentsThatDoNotFitAreRefused) {
  const std::vector<float> values(600);
  ChunkUpdate update;
  update.values_of = static_cast<StateArray>(layout_.array_count());
  update.values = {{0, values}};
  const auto refused = [&](absl::string_view words) {
    const absl::Status status = store_->Run({update}, [](size_t) {});
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr(words));
  };
  refused("keeps");
  if (layout_.array_count() == 1) return;
  update.values_of = StateArray::kMoment1;
  update.values = {{0, values}, {700, values}};
  refused("from element 700");
  update.values = {{512, values}, {256, values}};  // they overlap
  refused("from element 512");
  update.values = {{0, values}};
  update.segments = {{0, 256, {}}};
  refused("in one update");
  update.segments.clear();
  std::vector<std::byte> parameters(600 * sizeof(float));
  update.values[0].working = parameters.data();
  refused("no parameters");
}

TEST_P(FormatsTest, AMomentThatIsNotThereIsRefused) {
  std::vector<float> to(4);
  const auto beyond = static_cast<StateArray>(layout_.array_count());
  const absl::Status status = store_->ReadState(0, beyond, 0, absl::MakeSpan(to));
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_THAT(status.message(), ::testing::HasSubstr("keeps"));
}

INSTANTIATE_TEST_SUITE_P(
    Optimizers, FormatsTest,
    ::testing::Values(OptimizerSpec{.moments = MomentFormat::kBf16}, OptimizerSpec{.moments = MomentFormat::kI8},
                      OptimizerSpec{.moments = MomentFormat::kF8},
                      OptimizerSpec{.kind = OptimizerKind::kAdam, .amsgrad = true, .moments = MomentFormat::kF8},
                      OptimizerSpec{.kind = OptimizerKind::kSgd}, OptimizerSpec{.master = MasterFormat::kRemainder},
                      OptimizerSpec{.moments = MomentFormat::kI8, .master = MasterFormat::kRemainder},
                      OptimizerSpec{
                          .amsgrad = true, .moments = MomentFormat::kBf16, .master = MasterFormat::kRemainder},
                      OptimizerSpec{.kind = OptimizerKind::kSgd, .master = MasterFormat::kRemainder},
                      OptimizerSpec{.kind = OptimizerKind::kAdagrad, .moments = MomentFormat::kI8},
                      OptimizerSpec{.kind = OptimizerKind::kLion, .gradient = Dtype::kF32, .working = Dtype::kF32},
                      OptimizerSpec{.kind = OptimizerKind::kAdemamix},
                      OptimizerSpec{.kind = OptimizerKind::kAdamwScheduleFree},
                      OptimizerSpec{.kind = OptimizerKind::kAdemamix, .moments = MomentFormat::kBf16},
                      OptimizerSpec{.amsgrad = true, .gradient = Dtype::kF16, .working = Dtype::kF16},
                      OptimizerSpec{.working = Dtype::kE4m3Blocks},
                      OptimizerSpec{.moments = MomentFormat::kF8, .working = Dtype::kE4m3Blocks}));

// The two moments of a full chunk, scales and padding included.
TEST(StateLayoutTest, EightBitMomentsTakeTwoBytesAParameter) {
  for (const MomentFormat format : {MomentFormat::kI8, MomentFormat::kF8}) {
    const StateLayout layout(OptimizerSpec{.moments = format});
    for (const uint64_t n : {uint64_t{1} << 18, uint64_t{1} << 20}) {
      EXPECT_LE(static_cast<double>(layout.LabelAt(n) - 4 * n), 2.04 * static_cast<double>(n));
    }
  }
}

}  // namespace
}  // namespace ballast::storage
