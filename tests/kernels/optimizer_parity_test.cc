// Update() on every instruction set that this processor runs gives the bits of the plain reference: every rule, every
// moment format, every gradient and working dtype.
#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "ballast/kernels/optimizer.h"
#include "ballast/tests/kernels/instruction_sets.h"
#include "ballast/tests/kernels/reference_optimizer.h"
#include "ballast/tests/kernels/samples.h"

namespace ballast::kernels {
namespace {

#ifndef BALLAST_PARITY_TUPLES
#define BALLAST_PARITY_TUPLES 10'000'000
#endif
// Per rule and moment format.
constexpr uint64_t kTuples = BALLAST_PARITY_TUPLES;

// Memory of one update, with guard bytes behind every array.
class State {
 public:
  static constexpr size_t kGuard = 64;

  State(const OptimizerSpec& spec, uint64_t n) : spec_(spec), n_(n) {
    gradient_.resize(n * ElementBytes(spec.gradient) + kGuard, std::byte{0xa5});
    master_.resize(n + kGuard, -1.5f);
    working_.resize(n * ElementBytes(spec.working) + kGuard, std::byte{0xa5});
    for (auto& values : values_) values.resize(MomentBytes(spec.moments, n) + kGuard, std::byte{0xa5});
    for (auto& scales : scales_) scales.resize(MomentScaleBytes(spec.moments, n) / sizeof(float) + kGuard, -1.5f);
  }

  // Any bits; blocks of three kinds: as in training, of any finite value, of any value at all.
  void Fill(std::mt19937_64& random) {
    std::vector<float> x(n_);
    for (uint64_t begin = 0; begin < n_; begin += kMomentBlock) {
      const uint64_t end = std::min(n_, begin + kMomentBlock);
      const uint64_t kind = random() % 4;
      const float size = std::ldexp(1.0f, -static_cast<int>(random() % 40));
      const auto draw = [&] {
        return kind == 0   ? AnyFloat(random)
               : kind == 1 ? AnyFloat(random, true)
                           : size * (static_cast<float>(random() % 65536) / 32768 - 1);
      };
      for (uint64_t i = begin; i < end; ++i) x[i] = draw(), master_[i] = draw();
      for (int k = 0; k < kMomentsMax; ++k) FillMoment(random, draw, begin, end, k);
    }
    std::vector<std::byte>& g = gradient_;
    for (uint64_t i = 0; i < n_; ++i) {
      const uint16_t half = spec_.gradient == Dtype::kBf16 ? ToBf16(x[i]) : ToF16(x[i]);
      if (spec_.gradient == Dtype::kF32)
        std::memcpy(g.data() + 4 * i, &x[i], 4);
      else
        std::memcpy(g.data() + 2 * i, &half, 2);
    }
  }

  UpdateSpan span() {
    UpdateSpan s{
        .n = n_, .gradient = gradient_.data(), .master = master_.data(), .moments = {}, .working = working_.data()};
    for (size_t k = 0; k < kMomentsMax; ++k) s.moments[k] = {values_[k].data(), scales_[k].data()};
    return s;
  }

  // Every array, guards included.
  friend void ExpectSameBits(const State& a, const State& b, const std::string& what) {
    ASSERT_EQ(std::memcmp(a.master_.data(), b.master_.data(), a.master_.size() * sizeof(float)), 0)
        << what << " master";
    ASSERT_EQ(a.working_, b.working_) << what;
    for (int k = 0; k < kMomentsMax; ++k) {
      ASSERT_EQ(std::memcmp(a.values_[k].data(), b.values_[k].data(), a.values_[k].size()), 0)
          << what << " moment " << k;
      ASSERT_EQ(std::memcmp(a.scales_[k].data(), b.scales_[k].data(), a.scales_[k].size() * sizeof(float)), 0)
          << what << " scales " << k;
    }
  }

 private:
  template <typename Draw>
  void FillMoment(std::mt19937_64& random, const Draw& draw, uint64_t begin, uint64_t end, int k) {
    if (MomentScaleBytes(spec_.moments, 1) != 0) scales_[k][begin / kMomentBlock] = std::fabs(draw());
    for (uint64_t i = begin; i < end; ++i) {
      // A second moment is mostly not negative.
      float x = draw();
      if (k > 0 || spec_.kind == OptimizerKind::kAdagrad) x = random() % 64 == 0 ? x : std::fabs(x);
      const uint16_t half = ToBf16(x);
      if (spec_.moments == MomentFormat::kF32)
        std::memcpy(values_[k].data() + 4 * i, &x, 4);
      else if (spec_.moments == MomentFormat::kBf16)
        std::memcpy(values_[k].data() + 2 * i, &half, 2);
      else
        values_[k][i] = static_cast<std::byte>(random());
    }
  }

  OptimizerSpec spec_;
  uint64_t n_;
  std::vector<std::byte> gradient_, working_;
  std::vector<float> master_;
  std::vector<std::byte> values_[kMomentsMax];
  std::vector<float> scales_[kMomentsMax];
};

struct NamedSpec {
  const char* name;
  OptimizerSpec spec;
};

std::vector<NamedSpec> Rules() {
  std::vector<NamedSpec> rules;
  const auto add = [&rules](const char* name, OptimizerKind kind, bool amsgrad, bool momentum, bool nesterov) {
    rules.push_back({name, {.kind = kind, .amsgrad = amsgrad, .momentum = momentum, .nesterov = nesterov}});
  };
  add("adamw", OptimizerKind::kAdamw, false, false, false);
  add("adamw amsgrad", OptimizerKind::kAdamw, true, false, false);
  add("adam", OptimizerKind::kAdam, false, false, false);
  add("adam amsgrad", OptimizerKind::kAdam, true, false, false);
  add("sgd", OptimizerKind::kSgd, false, false, false);
  add("sgd momentum", OptimizerKind::kSgd, false, true, false);
  add("sgd nesterov", OptimizerKind::kSgd, false, true, true);
  add("adagrad", OptimizerKind::kAdagrad, false, false, false);
  add("lion", OptimizerKind::kLion, false, false, false);
  return rules;
}

constexpr MomentFormat kFormats[] = {MomentFormat::kF32, MomentFormat::kBf16, MomentFormat::kI8, MomentFormat::kF8};

Hyper AnyHyper(std::mt19937_64& random) {
  const auto one_of = [&random](std::initializer_list<double> values) {
    return values.begin()[random() % values.size()];
  };
  return {.learning_rate = one_of({1e-3, 3e-5, 0.1}),
          .beta1 = one_of({0.9, 0.0, 0.95}),
          .beta2 = one_of({0.999, 0.95, 0.99}),
          .epsilon = one_of({1e-8, 1e-15, 1e-3}),
          .weight_decay = one_of({0, 0.1, 1e-4}),
          .dampening = one_of({0, 0.5}),
          .learning_rate_decay = one_of({0, 1e-3}),
          .maximize = random() % 4 == 0};
}

class OptimizerParityTest : public InstructionSetTest {
 protected:
  // Two updates of the same state, one after the other, so that what the first wrote is read.
  void Compare(const NamedSpec& named, uint64_t n) {
    const OptimizerSpec& spec = named.spec;
    State expected(spec, n);
    expected.Fill(random_);
    State got = expected;
    for (uint64_t t = 1; t <= 2; ++t) {
      const Coefficients c = MakeCoefficients(spec, AnyHyper(random_), t, t == 1 ? 1.0f : 0.37f);
      const RandomKey key{.seed = random_(),
                          .unit = static_cast<uint32_t>(random_() >> 34),
                          .step = random_(),
                          .first_element = (random_() >> 12) * kMomentBlock};
      ReferenceUpdate(spec, c, key, expected.span());
      Update(spec, c, key, got.span());
      ASSERT_NO_FATAL_FAILURE(ExpectSameBits(expected, got, std::string(named.name) + " n=" + std::to_string(n)));
    }
  }

  std::mt19937_64 random_{20260101};
};

TEST_P(OptimizerParityTest, EveryRuleAndMomentFormat) {
  for (NamedSpec rule : Rules()) {
    for (const MomentFormat format : kFormats) {
      rule.spec.moments = format;
      SCOPED_TRACE(testing::Message() << rule.name << " format " << static_cast<int>(format));
      constexpr uint64_t kEach = 250'007;
      for (uint64_t done = 0; done < kTuples; done += 2 * kEach) ASSERT_NO_FATAL_FAILURE(Compare(rule, kEach));
    }
  }
}

TEST_P(OptimizerParityTest, EveryGradientAndWorkingDtype) {
  for (NamedSpec rule : Rules()) {
    for (const Dtype gradient : {Dtype::kF32, Dtype::kBf16, Dtype::kF16}) {
      for (const Dtype working : {Dtype::kF32, Dtype::kBf16, Dtype::kF16}) {
        for (const MomentFormat format : kFormats) {
          rule.spec.gradient = gradient, rule.spec.working = working, rule.spec.moments = format;
          SCOPED_TRACE(testing::Message()
                       << static_cast<int>(gradient) << static_cast<int>(working) << static_cast<int>(format));
          ASSERT_NO_FATAL_FAILURE(Compare(rule, 5003));
        }
      }
    }
  }
}

TEST_P(OptimizerParityTest, EverySizeAroundABlock) {
  for (NamedSpec rule : Rules()) {
    for (const MomentFormat format : kFormats) {
      rule.spec.moments = format;
      for (const uint64_t n : {0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 63, 255, 256, 257, 511, 512, 513, 1023}) {
        for (int round = 0; round < 3; ++round) ASSERT_NO_FATAL_FAILURE(Compare(rule, n));
      }
    }
  }
}

// An update in pieces is the update of the whole: pieces begin at blocks.
TEST_P(OptimizerParityTest, AnySplitGivesTheSameBits) {
  for (NamedSpec rule : Rules()) {
    for (const MomentFormat format : kFormats) {
      rule.spec.moments = format;
      const OptimizerSpec& spec = rule.spec;
      constexpr uint64_t kElements = 4099;
      State whole(spec, kElements);
      whole.Fill(random_);
      State split = whole;
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
                         .working = all.working + begin * ElementBytes(spec.working)};
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

INSTANTIATE_TEST_SUITE_P(Isa, OptimizerParityTest, testing::ValuesIn(InstructionSets()), InstructionSetName);

}  // namespace
}  // namespace ballast::kernels
