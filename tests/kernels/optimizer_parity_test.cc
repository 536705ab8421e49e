// Update() on every instruction set that this processor runs gives the bits of the plain reference: every rule, every
// moment format, every gradient and working dtype.
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "ballast/kernels/optimizer.h"
#include "ballast/tests/instruction_sets.h"
#include "ballast/tests/kernels/optimizer_samples.h"
#include "ballast/tests/kernels/reference_optimizer.h"

namespace ballast::kernels {
namespace {

class OptimizerParityTest : public testing::Test {
 protected:
  // Runs two updates of the same state in a row, so that the second reads the first's result. Compares all instruction
  // sets with a single run of the reference, because the reference takes longer than all of the sets together.
  void Compare(const NamedSpec& named, uint64_t n) {
    const OptimizerSpec& spec = named.spec;
    UpdateArrays expected(spec, n, (rounds_++ % 2) * 4);
    expected.Fill(random_);
    std::vector<UpdateArrays> got(sets_.size(), expected);
    for (uint64_t t = 1; t <= 2; ++t) {
      const Coefficients c = MakeCoefficients(spec, AnyHyper(random_), t, t == 1 ? 1.0f : 0.37f);
      const RandomKey key{.seed = random_(),
                          .unit = static_cast<uint32_t>(random_() >> 34),
                          .step = random_(),
                          .first_element = (random_() >> 12) * kMomentBlock};
      ReferenceUpdate(spec, c, key, expected.span());
      for (size_t i = 0; i < sets_.size(); ++i) {
        const UseInstructionSet use(sets_[i]);
        Update(spec, c, key, got[i].span());
        ASSERT_NO_FATAL_FAILURE(
            ExpectSameBits(expected, got[i],
                           std::string(named.name) + " n=" + std::to_string(n) + " on " + hwy::TargetName(sets_[i])));
      }
    }
  }

  const std::vector<int64_t> sets_ = InstructionSets();
  std::mt19937_64 random_{20260101};
  uint64_t rounds_ = 0;
};

TEST_F(OptimizerParityTest, EveryRuleAndMomentFormat) {
  for (NamedSpec rule : Rules()) {
    for (const MomentFormat format : FormatsOf(rule.spec)) {
      rule.spec.moments = format;
      SCOPED_TRACE(testing::Message() << rule.name << " format " << static_cast<int>(format));
      constexpr uint64_t kEach = 250'007;
      for (uint64_t done = 0; done < kTuples; done += 2 * kEach) ASSERT_NO_FATAL_FAILURE(Compare(rule, kEach));
    }
  }
}

TEST_F(OptimizerParityTest, EveryGradientAndWorkingDtype) {
  for (NamedSpec rule : Rules()) {
    for (const Dtype gradient : {Dtype::kF32, Dtype::kBf16, Dtype::kF16}) {
      for (const Dtype working : {Dtype::kF32, Dtype::kBf16, Dtype::kF16, Dtype::kE4m3Blocks}) {
        for (const MomentFormat format : FormatsOf(rule.spec)) {
          rule.spec.gradient = gradient, rule.spec.working = working, rule.spec.moments = format;
          SCOPED_TRACE(testing::Message()
                       << static_cast<int>(gradient) << static_cast<int>(working) << static_cast<int>(format));
          ASSERT_NO_FATAL_FAILURE(Compare(rule, 5003));
        }
      }
    }
  }
}

TEST_F(OptimizerParityTest, EverySizeAroundABlock) {
  for (NamedSpec rule : Rules()) {
    for (const MomentFormat format : FormatsOf(rule.spec)) {
      rule.spec.moments = format;
      rule.spec.working = rounds_ % 2 == 0 ? Dtype::kBf16 : Dtype::kE4m3Blocks;
      for (const uint64_t n : {0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 63, 255, 256, 257, 511, 512, 513, 1023}) {
        for (int round = 0; round < 3; ++round) ASSERT_NO_FATAL_FAILURE(Compare(rule, n));
      }
    }
  }
}

class OptimizerSplitTest : public InstructionSetTest {
 protected:
  std::mt19937_64 random_{20260101};
};

// An update in pieces is the update of the whole: pieces begin at blocks.
TEST_P(OptimizerSplitTest, AnySplitGivesTheSameBits) {
  for (NamedSpec rule : Rules()) {
    for (const MomentFormat format : FormatsOf(rule.spec)) {
      rule.spec.moments = format;
      rule.spec.working = format == MomentFormat::kF32 ? Dtype::kE4m3Blocks : Dtype::kBf16;
      const OptimizerSpec& spec = rule.spec;
      constexpr uint64_t kElements = 4099;
      UpdateArrays whole(spec, kElements);
      whole.Fill(random_);
      UpdateArrays split = whole;
      const Coefficients c = MakeCoefficients(spec, AnyHyper(random_), 3, 0.5f);
      const RandomKey key{.seed = 7, .unit = 3, .step = 11, .first_element = 1 << 20};
      Update(spec, c, key, whole.span());
      const UpdateSpan all = split.span();
      for (uint64_t begin = 0; begin < kElements;) {
        const uint64_t end = std::min(kElements, begin + (1 + random_() % 5) * kMomentBlock);
        UpdateSpan piece{.n = end - begin,
                         .gradient = all.gradient + begin * ElementBytes(spec.gradient),
                         .master = all.master + begin,
                         .moments = {},
                         .working = all.working + BytesOf(spec.working, begin)};
        for (size_t k = 0; k < kMomentsMax; ++k) {
          piece.moments[k] = {all.moments[k].values + MomentBytes(format, begin),
                              all.moments[k].scales + begin / kMomentBlock};
        }
        RandomKey piece_key = key;
        piece_key.first_element += begin;
        Update(spec, c, piece_key, piece);
        begin = end;
      }
      ASSERT_NO_FATAL_FAILURE(ExpectSameBits(whole, split, rule.name));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Isa, OptimizerSplitTest, testing::ValuesIn(InstructionSets()), InstructionSetName);

}  // namespace
}  // namespace ballast::kernels
