// Compares the coding of moments with its sources: Philox's known answers, the paper's dynamic map, the error of codes.
#include "ballast/kernels/moment_formats.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>
#include <random>
#include <vector>

#include "ballast/kernels/dynamic_map.h"
#include "ballast/kernels/optimizer.h"
#include "ballast/kernels/philox.h"
#include "ballast/tests/instruction_sets.h"

namespace ballast::kernels {
namespace {

// From Random123's kat_vectors, philox 4x32, 10 rounds.
TEST(Philox, KnownAnswers) {
  const PhiloxBits zero = Philox({{0, 0, 0, 0}}, 0, 0);
  EXPECT_EQ(std::vector<uint32_t>(zero.word, zero.word + 4),
            (std::vector<uint32_t>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  const PhiloxBits pi = Philox({{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}}, 0xa4093822, 0x299f31d0);
  EXPECT_EQ(std::vector<uint32_t>(pi.word, pi.word + 4),
            (std::vector<uint32_t>{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

// Stores a first moment g (Lion with take2 = 1: m = g) or a second moment g x g (Adagrad: v = g x g), and reads the
// moment back. For kF8 and kBf16.
std::vector<float> ThroughFormat(MomentFormat format, OptimizerKind kind, std::vector<float> g, uint64_t step) {
  const uint64_t n = g.size();
  const OptimizerSpec spec{.kind = kind, .moments = format, .gradient = Dtype::kF32, .working = Dtype::kF32};
  std::vector<float> master(n), working(n), scales((n + kMomentBlock - 1) / kMomentBlock), back(n);
  std::vector<uint8_t> codes(MomentBytes(format, n));
  UpdateSpan span{.n = n,
                  .gradient = reinterpret_cast<const std::byte*>(g.data()),
                  .master = master.data(),
                  .moments = {},
                  .working = reinterpret_cast<std::byte*>(working.data())};
  span.moments[0] = {reinterpret_cast<std::byte*>(codes.data()), scales.data()};
  Coefficients take;
  take.take2 = 1, take.eps = 1;
  Update(spec, take, {.step = step}, span);
  const bool first = kind == OptimizerKind::kLion;
  for (uint64_t i = 0; i < n; ++i) {
    if (format == MomentFormat::kBf16) {
      back[i] = FromBf16(static_cast<bf16>(codes[2 * i] | codes[2 * i + 1] << 8));
      continue;
    }
    const float sign = first && codes[i] >= 128 ? -1.0f : 1.0f;
    back[i] = sign * (first ? F8First::Value(codes[i] & 127) : F8Root::Value(codes[i])) * scales[i / kMomentBlock];
    if (!first) back[i] *= back[i];
  }
  return back;
}

// The paper's map, in double: the middles of equal parts of each decade, 0 and 1.
std::vector<double> PaperMap(bool is_signed) {
  std::vector<double> values = {0, 1};
  for (int i = 0; i < 7; ++i) {
    const int parts = is_signed ? 1 << i : 2 << i;
    for (int k = 0; k < parts; ++k) {
      const double low = 0.1 + 0.9 * k / parts, high = 0.1 + 0.9 * (k + 1) / parts;
      values.push_back(std::pow(10.0, i - 6) * (low + high) / 2);
    }
  }
  std::sort(values.begin(), values.end());
  return values;
}

template <bool kSigned>
void MapIsThePapers(const DynamicMap<kSigned>& map) {
  const std::vector<double> paper = PaperMap(kSigned);
  ASSERT_EQ(paper.size(), size_t{kSigned ? 129u : 256u});
  for (size_t k = 0; k < paper.size(); ++k) {
    const double h = kSigned ? 2.0 * static_cast<double>(k) + 1 : static_cast<double>(k) + 1;
    const int decade = std::min(std::ilogb(h), 7);
    const double value = std::min(1.0, h * map.value_factor[decade] + map.value_offset[decade]);
    EXPECT_NEAR(value, paper[k], 1e-6 * paper[k]) << k;
  }
}

TEST(DynamicMap, ValuesAreThePapers) {
  MapIsThePapers(kSignedMap);
  MapIsThePapers(kUnsignedMap);
}

// The code of a magnitude by the linear pieces.
template <bool kSigned>
uint32_t CodeOf(const DynamicMap<kSigned>& map, float x) {
  if (x > map.top_threshold) return DynamicMap<kSigned>::kTop;
  int decade = 0;
  while (decade < map.kDecades && x > map.threshold[decade]) ++decade;
  const float linear = std::fma(x, map.code_factor[decade], map.code_offset[decade]);
  return static_cast<uint32_t>(std::nearbyint(std::min(linear, map.code_max[decade])));
}

// That code is the nearest of all values'.
template <bool kSigned>
void CodesAreNearest(const DynamicMap<kSigned>& map) {
  const std::vector<double> paper = PaperMap(kSigned);
  std::mt19937_64 random(9);
  for (int i = 0; i < 1'000'000; ++i) {
    const auto x = static_cast<float>(std::pow(10.0, -8.0 * static_cast<double>(random() >> 11) * 0x1p-53));
    const size_t code = CodeOf(map, x);
    double nearest = 2;
    const auto above = std::lower_bound(paper.begin(), paper.end(), static_cast<double>(x));
    if (above != paper.end()) nearest = *above - x;
    if (above != paper.begin()) nearest = std::min(nearest, x - *(above - 1));
    ASSERT_LE(std::fabs(paper[code] - x), nearest * (1 + 1e-4) + 1e-12) << x;
  }
}

TEST(DynamicMap, CodesAreTheNearest) {
  CodesAreNearest(kSignedMap);
  CodesAreNearest(kUnsignedMap);
}

// An optimizer whose only moment is a first (signed), or a second.
template <bool kSigned>
OptimizerSpec OneI8Moment() {
  return {.kind = kSigned ? OptimizerKind::kLion : OptimizerKind::kAdagrad, .moments = MomentFormat::kI8};
}

template <bool kSigned>
void EveryCodeIsRead(const DynamicMap<kSigned>& map) {
  std::vector<uint8_t> codes(256);
  std::iota(codes.begin(), codes.end(), uint8_t{0});
  float scale = 1;
  std::vector<float> values(codes.size());
  ReadMoment(OneI8Moment<kSigned>(), 0, {reinterpret_cast<std::byte*>(codes.data()), &scale}, absl::MakeSpan(values));
  for (uint32_t code = 0; code < 256; ++code) {
    const bool negative = kSigned && code > map.kTop;
    const uint32_t k = negative ? code - 128 : code, h = kSigned ? 2 * k + 1 : k + 1;
    const int decade = std::min(std::ilogb(h), 7);
    const float line = std::fma(static_cast<float>(h), map.value_factor[decade], map.value_offset[decade]);
    const float value = code == map.kTop ? 1 : line;
    ASSERT_EQ(std::bit_cast<uint32_t>(values[code]), std::bit_cast<uint32_t>(negative ? -value : value)) << code;
  }
}

// 0, and magnitudes below 1 close to each threshold and each power of two.
template <bool kSigned>
std::vector<float> EdgesOf(const DynamicMap<kSigned>& map) {
  std::vector<float> middles(std::begin(map.threshold), std::end(map.threshold));
  middles.push_back(map.top_threshold);
  for (int exponent = -149; exponent < 0; ++exponent) middles.push_back(std::ldexp(1.0f, exponent));
  std::vector<float> edges;
  for (const float middle : middles) {
    for (uint32_t i = 0; i < 9; ++i) edges.push_back(std::bit_cast<float>(std::bit_cast<uint32_t>(middle) + i - 4));
  }
  edges.push_back(0);
  std::erase_if(edges, [](float x) { return !(x >= 0 && x < 1); });
  return edges;
}

template <bool kSigned>
void EveryEdgeIsCoded(const DynamicMap<kSigned>& map) {
  std::vector<float> x;
  for (const float edge : EdgesOf(map)) {
    for (const float value : {edge, kSigned ? -edge : edge}) {
      if (x.size() % kMomentBlock == 0) x.push_back(1);  // of each block the largest, so that its scale is 1
      x.push_back(value);
    }
  }
  std::vector<uint8_t> codes(x.size() + kMomentBlock);
  std::vector<float> scales(x.size() / kMomentBlock + 1);
  WriteMoment(OneI8Moment<kSigned>(), 0, {}, x, {reinterpret_cast<std::byte*>(codes.data()), scales.data()});
  for (size_t i = 0; i < x.size(); ++i) {
    const uint32_t code = std::signbit(x[i]) ? std::min(CodeOf(map, -x[i]), 127u) : CodeOf(map, x[i]);
    ASSERT_EQ(codes[i], std::signbit(x[i]) && code != 0 ? code | 0x80 : code) << x[i];
  }
}

class DynamicMapCodes : public InstructionSetTest {};

TEST_P(DynamicMapCodes, AreReadAsTheirValues) {
  EveryCodeIsRead(kSignedMap);
  EveryCodeIsRead(kUnsignedMap);
}

TEST_P(DynamicMapCodes, ChangeAtTheThresholds) {
  EveryEdgeIsCoded(kSignedMap);
  EveryEdgeIsCoded(kUnsignedMap);
}

INSTANTIATE_TEST_SUITE_P(Isa, DynamicMapCodes, testing::ValuesIn(InstructionSets()), InstructionSetName);

// Relative error at most half a mantissa step for values above the lowest binade, absolute below it.
TEST(F8, ErrorIsHalfAStep) {
  std::mt19937_64 random(10);
  std::vector<float> m(1 << 20);
  for (float& x : m)
    x = std::ldexp(static_cast<float>(static_cast<int32_t>(random())), -31 - static_cast<int>(random() % 16));
  for (const OptimizerKind kind : {OptimizerKind::kLion, OptimizerKind::kAdagrad}) {
    const std::vector<float> back = ThroughFormat(MomentFormat::kF8, kind, m, 1);
    const bool first = kind == OptimizerKind::kLion;
    for (size_t begin = 0; begin < m.size(); begin += 256) {
      float largest = 0;
      for (size_t i = begin; i < begin + 256; ++i) largest = std::max(largest, std::fabs(m[i]));
      for (size_t i = begin; i < begin + 256; ++i) {
        const double x = std::fabs(m[i]), got = first ? std::fabs(back[i]) : std::sqrt(back[i]);
        const double step = first ? 0x1p-4 : 0x1p-5;
        ASSERT_LE(std::fabs(got - x), step * (x + 0x1p-15 * largest) * 1.0001 + (first ? 0 : 0x1p-18 * largest)) << i;
        if (first && got != 0) {
          ASSERT_EQ(std::signbit(back[i]), std::signbit(m[i]));
        }
      }
    }
  }
}

// A root is stored as 0 nowhere beside a larger one.
TEST(F8, NoRootVanishes) {
  std::vector<float> g(256, 1e-12f);
  g[7] = 1.0f;
  for (const float v : ThroughFormat(MomentFormat::kF8, OptimizerKind::kAdagrad, g, 1)) EXPECT_GT(v, 0);
}

// Stochastic rounding is unbiased: the mean over many steps is the value itself, which lies between two of the format.
TEST(Bf16Moments, MeanOverStepsIsTheValue) {
  const float x = 1 + 0x1p-7f * 0.3f;
  double sum = 0;
  constexpr uint64_t kSteps = 200, kElements = 4096;
  for (uint64_t step = 1; step <= kSteps; ++step) {
    for (const float m :
         ThroughFormat(MomentFormat::kBf16, OptimizerKind::kLion, std::vector<float>(kElements, x), step)) {
      ASSERT_TRUE(m == 1.0f || m == 1 + 0x1p-7f);
      sum += m;
    }
  }
  // Five standard deviations of the mean.
  const double deviation = 0x1p-7 * std::sqrt(0.3 * 0.7 / (kSteps * kElements));
  EXPECT_NEAR(sum / (kSteps * kElements), x, 5 * deviation);
}

// A written moment has the same bits as a moment stored by an update: Lion with take2 = 1 makes m = g, Adagrad v = g *
// g.
TEST(WriteMoment, IsWhatAnUpdateStores) {
  constexpr uint64_t kElements = 5 * kMomentBlock + 77;
  std::mt19937 random(3);
  std::vector<float> g(kElements), v(kElements);
  for (uint64_t i = 0; i < kElements; ++i) {
    g[i] =
        std::ldexp(static_cast<float>(static_cast<int32_t>(random())) * 0x1p-31f, static_cast<int>(random() % 12) - 8);
    v[i] = g[i] * g[i];
  }
  for (uint64_t i = 3; i < kElements; i += kMomentBlock) g[i] = 9, v[i] = 81;  // of each block the largest
  std::fill_n(g.begin() + kMomentBlock, kMomentBlock, 0.0f);                   // a block without a scale
  std::fill_n(v.begin() + kMomentBlock, kMomentBlock, 0.0f);
  for (const MomentFormat format : {MomentFormat::kF32, MomentFormat::kBf16, MomentFormat::kI8, MomentFormat::kF8}) {
    for (const OptimizerKind kind : {OptimizerKind::kLion, OptimizerKind::kAdagrad}) {
      const OptimizerSpec spec{.kind = kind, .moments = format, .gradient = Dtype::kF32, .working = Dtype::kF32};
      const RandomKey key{.seed = 5, .unit = 2, .step = 9, .first_element = 4 * kMomentBlock};
      std::vector<float> master(kElements), working(kElements), scales[2];
      std::vector<std::byte> values[2];
      for (int k = 0; k < 2; ++k) {
        values[k].resize(MomentBytes(format, kElements));
        scales[k].assign(kElements / kMomentBlock + 1, 0);
      }
      UpdateSpan span{.n = kElements,
                      .gradient = reinterpret_cast<const std::byte*>(g.data()),
                      .master = master.data(),
                      .moments = {},
                      .working = reinterpret_cast<std::byte*>(working.data())};
      span.moments[0] = {values[0].data(), scales[0].data()};
      Coefficients take;
      take.take2 = 1, take.eps = 1;
      Update(spec, take, key, span);
      const std::vector<float>& from = kind == OptimizerKind::kLion ? g : v;
      WriteMoment(spec, 0, key, from, {values[1].data(), scales[1].data()});
      EXPECT_EQ(values[0], values[1]) << static_cast<int>(format) << " " << static_cast<int>(kind);
      EXPECT_EQ(scales[0], scales[1]) << static_cast<int>(format) << " " << static_cast<int>(kind);
    }
  }
}

// Values read from a moment can be written back, with the same codes, whatever the sign of a block's largest value.
TEST(WriteMoment, TakesBackWhatWasRead) {
  constexpr uint64_t kElements = 40 * kMomentBlock + 77;
  std::mt19937 random(4);
  std::vector<float> g(kElements), first(kElements);
  for (float& x : g)
    x = std::ldexp(static_cast<float>(static_cast<int32_t>(random())), static_cast<int>(random() % 12));
  for (const MomentFormat format : {MomentFormat::kF32, MomentFormat::kBf16, MomentFormat::kI8, MomentFormat::kF8}) {
    for (const OptimizerKind kind : {OptimizerKind::kLion, OptimizerKind::kAdagrad}) {
      const OptimizerSpec spec{.kind = kind, .moments = format, .gradient = Dtype::kF32, .working = Dtype::kF32};
      std::vector<float> from = g;
      for (float& x : from) x = kind == OptimizerKind::kLion ? x : std::fabs(x);
      std::vector<float> master(kElements), working(kElements), scales(kElements / kMomentBlock + 1);
      std::vector<std::byte> codes(MomentBytes(format, kElements));
      const MomentSpan moment{codes.data(), scales.data()};
      if (kind == OptimizerKind::kLion) {  // coded by an update, whose scale is the largest magnitude's
        UpdateSpan span{.n = kElements,
                        .gradient = reinterpret_cast<const std::byte*>(from.data()),
                        .master = master.data(),
                        .moments = {},
                        .working = reinterpret_cast<std::byte*>(working.data())};
        span.moments[0] = moment;
        Coefficients take;
        take.take2 = 1, take.eps = 1;
        Update(spec, take, {.seed = 5}, span);
      } else {
        WriteMoment(spec, 0, {.seed = 5}, from, moment);
      }
      const std::vector<std::byte> coded = codes;
      const std::vector<float> scaled = scales;
      ReadMoment(spec, 0, moment, absl::MakeSpan(first));
      WriteMoment(spec, 0, {.seed = 1}, first, moment);
      EXPECT_EQ(codes, coded) << static_cast<int>(format) << " " << static_cast<int>(kind);
      for (size_t i = 0; i < scales.size(); ++i) EXPECT_NEAR(scales[i], scaled[i], 3e-7f * scaled[i]) << i;
    }
  }
}

}  // namespace
}  // namespace ballast::kernels
