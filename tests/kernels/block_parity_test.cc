// Blocks of e4m3: every instruction set that this processor runs gives the bits of the plainest code, within the stated
// error.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "ballast/kernels/kernels.h"
#include "ballast/tests/instruction_sets.h"
#include "ballast/tests/kernels/block_reference.h"
#include "ballast/tests/kernels/optimizer_samples.h"
#include "ballast/tests/kernels/samples.h"

namespace ballast::kernels {
namespace {

// Half of bf16's bytes, and 4 for each 256.
static_assert(BytesOf(Dtype::kE4m3Blocks, 1 << 20) * 100 <= BytesOf(Dtype::kBf16, 1 << 20) * 52);

class BlockParityTest : public InstructionSetTest {
 protected:
  // Blocks as in training, of any finite value, of any value, and of tiny ones.
  std::vector<float> Input(size_t n) {
    std::vector<float> x(n);
    uint64_t kind = 0;
    for (size_t i = 0; i < n; ++i) {
      if (i % kE4m3Block == 0) kind = random_() % 4;
      x[i] = AnyFloat(random_, kind != 0) * (kind == 2 ? 0x1p-120f : 1.0f);
      if (kind == 3) x[i] = static_cast<float>(random_() % 65536) / 32768 - 1;
    }
    return x;
  }
  std::mt19937_64 random_{20260101};
};

void ExpectWithinError(absl::Span<const float> block, absl::Span<const float> values) {
  float largest = 0;
  bool finite = true;
  for (const float x : block) largest = std::max(largest, std::fabs(x)), finite = finite && std::isfinite(x);
  const float scale = largest * (1 / kE4m3Largest);
  for (size_t i = 0; i < block.size(); ++i) {
    ASSERT_EQ(std::isnan(values[i]), !finite) << i;
    if (!finite) continue;
    const double x = block[i], most = std::max(std::fabs(x) / 16, static_cast<double>(scale) / 1024);
    const bool zeros = scale < std::numeric_limits<float>::min();
    ASSERT_LE(std::fabs(x - values[i]), zeros ? kE4m3Largest * 0x1p-126 : most * (1 + 0x1p-13)) << i;
  }
}

TEST_P(BlockParityTest, GivesTheBitsOfTheReference) {
  for (const size_t n : {size_t{0}, size_t{1}, size_t{2}, size_t{255}, size_t{256}, size_t{257}, size_t{511},
                         size_t{1024}, kTuples / 3 | 1}) {
    const std::vector<float> x = Input(n);
    std::vector<std::byte> expected = ReferenceBlocks(x);
    const std::vector<float> values = ReferenceValues(expected, n);
    for (size_t at = 0; at < n; at += kE4m3Block) {
      ASSERT_NO_FATAL_FAILURE(ExpectWithinError(absl::MakeConstSpan(x).subspan(at, kE4m3Block),
                                                absl::MakeConstSpan(values).subspan(at, kE4m3Block)));
    }
    expected.resize(expected.size() + 8, std::byte{0xa5});  // nothing behind the last block is touched
    std::vector<std::byte> coded(expected.size(), std::byte{0xa5});
    FromF32(x, Dtype::kE4m3Blocks, coded.data());
    ASSERT_EQ(coded, expected) << n;
    std::vector<float> back(n + 1, -1.5f);
    ToF32(Dtype::kE4m3Blocks, coded.data(), absl::MakeSpan(back).first(n));
    EXPECT_EQ(back[n], -1.5f);
    back.pop_back();
    ASSERT_EQ(Bits(back), Bits(values)) << n;
  }
}

INSTANTIATE_TEST_SUITE_P(Isa, BlockParityTest, testing::ValuesIn(InstructionSets()), InstructionSetName);

}  // namespace
}  // namespace ballast::kernels
