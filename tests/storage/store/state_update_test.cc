// Where kernels write the parameters of an update. The bits are checked by the tests of the store.
#include "ballast/storage/store/state_update.h"

#include <algorithm>
#include <array>
#include <memory>
#include <vector>

#include "ballast/storage/memory/arena.h"
#include "gtest/gtest.h"

namespace ballast::storage {
namespace {

// `working` of each call of kernels::Update since the test began, and behind it the end of what the kernel wrote.
std::vector<std::pair<const std::byte*, const std::byte*>>& Written() {
  static std::vector<std::pair<const std::byte*, const std::byte*>> written;
  return written;
}

}  // namespace
}  // namespace ballast::storage

#define BALLAST_UPDATE \
  "_ZN7ballast7kernels6UpdateERKNS0_13OptimizerSpecERKNS0_12CoefficientsERKNS0_9RandomKeyERKNS0_10UpdateSpanE"

namespace ballast::kernels {

void RealUpdate(const OptimizerSpec& spec, const Coefficients& c, const RandomKey& key,
                const UpdateSpan& span) __asm__("__real_" BALLAST_UPDATE);
void SeenUpdate(const OptimizerSpec& spec, const Coefficients& c, const RandomKey& key,
                const UpdateSpan& span) __asm__("__wrap_" BALLAST_UPDATE);

void SeenUpdate(const OptimizerSpec& spec, const Coefficients& c, const RandomKey& key, const UpdateSpan& span) {
  storage::Written().emplace_back(span.working, span.working + span.n * ElementBytes(spec.working));
  RealUpdate(spec, c, key, span);
}

}  // namespace ballast::kernels

namespace ballast::storage {
namespace {

// Two pieces and a part of a block.
constexpr uint64_t kElements = (uint64_t{1} << 17) + 1003;
// Kernels store past the caches from such a multiple on.
constexpr uint64_t kStreamed = 64;

class StateUpdateTest : public ::testing::TestWithParam<kernels::Dtype> {
 protected:
  StateUpdateTest() { Written().clear(); }

  // `lent`: parameters of the update's only segment; `working`: the chunk's own.
  void Update(std::byte* lent, std::byte* working) {
    const kernels::OptimizerSpec& optimizer = layout_.optimizer();
    ChunkUpdate update;
    update.gradient = gradient_;
    update.segments.push_back({.begin = 0,
                               .end = kElements,
                               .coefficients = kernels::MakeCoefficients(
                                   optimizer, {.learning_rate = 1e-3, .beta1 = 0.9, .beta2 = 0.99}, 1, 1),
                               .working = lent});
    UpdateDigests digests;
    UpdateState(update, {&layout_, memory_.bytes().data(), kElements}, working, {nullptr, [] {}}, &digests);
    ASSERT_FALSE(Written().empty());
  }

  // All that kernels wrote since the test began.
  static std::pair<const std::byte*, const std::byte*> Whole() {
    auto whole = Written().front();
    for (const auto& [begin, end] : Written()) {
      whole = {std::min(whole.first, begin), std::max(whole.second, end)};
    }
    return whole;
  }

  const StateLayout layout_{kernels::OptimizerSpec{.working = GetParam()}};
  Arena memory_ = *Arena::Map(layout_.StateBytes(kElements));
  Arena parameters_ = *Arena::Map(layout_.WorkingBytes(kElements));
  std::vector<std::byte> gradient_ = std::vector<std::byte>(kElements * layout_.gradient_element_bytes());
};
INSTANTIATE_TEST_SUITE_P(Working, StateUpdateTest, ::testing::Values(kernels::Dtype::kBf16, kernels::Dtype::kF32),
                         [](const auto& info) { return info.param == kernels::Dtype::kBf16 ? "bf16" : "f32"; });

TEST_P(StateUpdateTest, ParametersThatNobodyWantsStayInTheCache) {
  Update(nullptr, nullptr);
  for (const auto& [begin, end] : Written()) {
    EXPECT_NE(reinterpret_cast<uintptr_t>(begin) % kStreamed, 0) << "the kernel stores past the caches";
  }
  // Any second-level cache holds so much.
  EXPECT_LE(Whole().second - Whole().first, 64 << 10);
}

TEST_P(StateUpdateTest, OtherParametersGoWhereTheyAreWanted) {
  std::byte* const wanted = parameters_.bytes().data();
  Update(wanted, nullptr);
  EXPECT_EQ(Whole(), std::pair(static_cast<const std::byte*>(wanted),
                               static_cast<const std::byte*>(wanted + kElements * layout_.working_element_bytes())));
  const auto lent = Whole();
  Written().clear();
  Update(nullptr, wanted);
  EXPECT_EQ(Whole(), lent);
}

}  // namespace
}  // namespace ballast::storage
