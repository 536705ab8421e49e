// Every instruction set computes the release's bits; a processor that does not is found and named.
// self_test_test --print prints the table of kernels/self_test_digests.h.
#include "ballast/kernels/self_test.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <cstring>

#include "ballast/tests/instruction_sets.h"

namespace ballast::kernels {
namespace {

using testing::HasSubstr;

class SelfTest : public InstructionSetTest {};

TEST_P(SelfTest, GivesTheBitsOfTheRelease) { EXPECT_EQ(DigestMismatch(DigestsOf(CpuProcessor())), ""); }

INSTANTIATE_TEST_SUITE_P(Isa, SelfTest, testing::ValuesIn(InstructionSets()), InstructionSetName);

// A single wrong bit in an element is enough.
TEST(SelfTestOfABrokenProcessor, NamesTheFunction) {
  Processor broken = CpuProcessor();
  broken.update = [](const OptimizerSpec& spec, const Coefficients& c, const RandomKey& key, const UpdateSpan& span) {
    Update(spec, c, key, span);
    if (spec.kind == OptimizerKind::kLion && spec.moments == MomentFormat::kF8)
      span.moments[0].values[17] ^= std::byte{1};
  };
  broken.squared_norm = [](Dtype dtype, const std::byte* x, uint64_t n) {
    NormResult result = SquaredNorm(dtype, x, n);
    if (dtype == Dtype::kF16) result.squared_norm *= 1 + 0x1p-52;
    return result;
  };
  const std::string mismatch = DigestMismatch(DigestsOf(broken));
  EXPECT_THAT(mismatch, HasSubstr("lion/f8: "));
  EXPECT_THAT(mismatch, HasSubstr("; norm/f16: "));
  EXPECT_THAT(mismatch, Not(HasSubstr("adamw")));
}

}  // namespace
}  // namespace ballast::kernels

int main(int argc, char** argv) {
  if (argc == 2 && std::strcmp(argv[1], "--print") == 0) {
    using namespace ballast::kernels;
    for (const Digest& digest : DigestsOf(CpuProcessor())) {
      std::printf("    {\"%s\", 0x%08x},\n", digest.function.c_str(), digest.crc32c);
    }
    return 0;
  }
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
