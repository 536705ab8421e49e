// Values of frozen chunks, as they are kept and as they are read.
#include "ballast/storage/store/coded_values.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "ballast/kernels/kernels.h"
#include "ballast/storage/memory/arena.h"
#include "ballast/storage/store/state_update.h"

namespace ballast::storage {
namespace {

using kernels::Dtype;

// Several pieces of an update, and a part of a block.
constexpr uint64_t kElements = (uint64_t{1} << 16) + 5003;

struct Way {
  StateForm form;
  Dtype working;
};

class CodedValuesTest : public ::testing::TestWithParam<Way> {
 protected:
  CodedValuesTest() {
    for (uint64_t i = 0; i < kElements; ++i) {
      values_[i] = std::ldexp(std::sin(static_cast<float>(i)), static_cast<int>(i / 256 % 11) - 5);
    }
  }
  StateView View() { return {&layout_, memory_.bytes().data(), kElements}; }
  absl::Span<const float> Part(uint64_t begin, uint64_t end) const {
    return absl::MakeConstSpan(values_).subspan(begin, end - begin);
  }
  ArrayDigests Write(const ChunkUpdate& update) {
    UpdateDigests digests{.of_old = true, .of_new = true};
    const ArrayDigests before = DigestState(View(), {nullptr, [] {}});
    UpdateState(update, View(), nullptr, {nullptr, [] {}}, &digests);
    EXPECT_EQ(digests.old_state, before);
    EXPECT_EQ(digests.new_state, DigestState(View(), {nullptr, [] {}}));
    return digests.new_state;
  }
  std::vector<float> Read(uint64_t begin, uint64_t count) {
    std::vector<float> read(count);
    ReadFrozen(View(), begin, count, Dtype::kF32, reinterpret_cast<std::byte*>(read.data()));
    return read;
  }
  // The values as they must be kept.
  std::vector<float> Kept() const {
    std::vector<float> kept(kElements);
    std::vector<std::byte> coded(4 * kElements);
    if (GetParam().form == StateForm::kWorking) {
      kernels::FromF32(values_, GetParam().working, coded.data());
      kernels::ToF32(GetParam().working, coded.data(), absl::MakeSpan(kept));
      return kept;
    }
    std::vector<float> scales(kernels::QuantScales(kElements));
    kernels::Quantize(kernels::QuantFormat::kInt8, Dtype::kF32, reinterpret_cast<const std::byte*>(values_.data()),
                      kElements, coded.data(), scales.data());
    kernels::Dequantize(kernels::QuantFormat::kInt8, coded.data(), scales.data(), kElements, Dtype::kF32,
                        reinterpret_cast<std::byte*>(kept.data()));
    return kept;
  }

  const StateLayout layout_ = StateLayout(kernels::OptimizerSpec{.working = GetParam().working}).Of(GetParam().form);
  Arena memory_ = *Arena::Map(layout_.StateBytes(kElements));
  std::vector<float> values_ = std::vector<float>(kElements);
};

// Parts may come in any order and meet amid a block.
TEST_P(CodedValuesTest, PartsMakeTheSameState) {
  ChunkUpdate whole;
  whole.values.push_back({.begin = 0, .values = values_});
  const ArrayDigests expected = Write(whole);
  EXPECT_EQ(Read(0, kElements), Kept());
  std::memset(memory_.bytes().data(), 0x55, layout_.LabelAt(kElements));
  std::memset(memory_.bytes().data() + layout_.UsedBytes(StateArray::kMaster, kElements), 0,
              layout_.LabelAt(kElements) - layout_.UsedBytes(StateArray::kMaster, kElements));
  if (GetParam().form == StateForm::kQ8) {  // between values and scales
    const uint64_t end = layout_.ValueBytes(StateArray::kMaster, kElements);
    std::memset(memory_.bytes().data() + end, 0, layout_.ScalesAt(StateArray::kMaster, kElements) - end);
  }
  ChunkUpdate parts;
  for (const auto& [begin, end] : {std::pair<uint64_t, uint64_t>{4097, kElements}, {0, 700}, {700, 701}, {701, 4097}}) {
    parts.values.push_back({.begin = begin, .values = Part(begin, end)});
  }
  EXPECT_EQ(Write(parts), expected);
}

TEST_P(CodedValuesTest, ReadsBeginAnywhere) {
  ChunkUpdate update;
  update.values.push_back({.begin = 0, .values = values_});
  Write(update);
  const std::vector<float> kept = Kept();
  const uint64_t width = kernels::ElementBytes(GetParam().working);
  for (const auto& [begin, count] : {std::pair<uint64_t, uint64_t>{0, 1},
                                     {255, 2},
                                     {256, 256},
                                     {300, 100},
                                     {511, 4000},
                                     {kElements - 5, 5},
                                     {77, 0}}) {
    const std::vector<float> expected(kept.begin() + static_cast<std::ptrdiff_t>(begin),
                                      kept.begin() + static_cast<std::ptrdiff_t>(begin + count));
    EXPECT_EQ(Read(begin, count), expected) << begin;
    std::vector<std::byte> working(count * width), rounded(count * width);
    ReadFrozen(View(), begin, count, GetParam().working, working.data());
    kernels::FromF32(expected, GetParam().working, rounded.data());
    EXPECT_EQ(working, rounded) << begin;
  }
}

// A trainer that lends its parameters finds there what the state says.
TEST_P(CodedValuesTest, LentMemoryGetsWhatIsKept) {
  const uint64_t width = kernels::ElementBytes(GetParam().working);
  std::vector<std::byte> parameters(kElements * width);
  kernels::FromF32(values_, GetParam().working, parameters.data());
  ChunkUpdate update;
  update.values.push_back({.begin = 0, .values = {}, .working = parameters.data(), .narrow = parameters});
  Write(update);
  std::vector<std::byte> kept(parameters.size());
  ReadFrozen(View(), 0, kElements, GetParam().working, kept.data());
  EXPECT_EQ(parameters, kept);
}

INSTANTIATE_TEST_SUITE_P(Ways, CodedValuesTest,
                         ::testing::Values(Way{StateForm::kWorking, Dtype::kBf16},
                                           Way{StateForm::kWorking, Dtype::kF16}, Way{StateForm::kWorking, Dtype::kF32},
                                           Way{StateForm::kQ8, Dtype::kBf16}, Way{StateForm::kQ8, Dtype::kF32}),
                         [](const auto& info) {
                           return std::string(info.param.form == StateForm::kQ8 ? "Q8" : "Working") +
                                  std::to_string(static_cast<int>(info.param.working));
                         });

}  // namespace
}  // namespace ballast::storage
