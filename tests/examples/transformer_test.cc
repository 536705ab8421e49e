#include "ballast/client/examples/bytes_lm/transformer.h"

#include <cmath>
#include <random>

#include "ballast/client/examples/bytes_lm/numerics.h"
#include "gtest/gtest.h"

namespace ballast::client {
namespace {

// Tensors one after another, each unit in a space of its own; gains off 1, so that mistakes in them show.
struct TinyModel {
  ModelShape shape{.layers = 2, .width = 8, .heads = 2, .context = 5, .sequences = 2};
  EmbeddingPlaces ends;
  LayerPlaces layer;
  std::vector<std::vector<double>> units;
  std::vector<uint8_t> inputs, targets;

  TinyModel() {
    std::mt19937_64 random(1);
    std::normal_distribution<double> normal;
    const uint64_t w = shape.width, h = shape.hidden();
    ends = {.embedding = 0, .final_norm = kByteValues * w};
    layer.attention_norm = 0;
    layer.qkv = w;
    layer.attention_out = layer.qkv + 3 * w * w;
    layer.mlp_norm = layer.attention_out + w * w;
    layer.gate_up = layer.mlp_norm + w;
    layer.down = layer.gate_up + 2 * h * w;
    units.emplace_back(kByteValues * w + w);
    for (int i = 0; i < shape.layers; ++i) units.emplace_back(layer.down + w * h);
    for (auto& unit : units) {
      for (double& value : unit) value = 0.4 * normal(random);
    }
    for (int i = 0; i < shape.tokens(); ++i) {
      // Few values, so that some bytes are input and target several times.
      inputs.push_back(static_cast<uint8_t>(random() % 7));
      targets.push_back(static_cast<uint8_t>(random() % 7));
    }
  }
};

template <typename T>
double LossOf(const TinyModel& model, const std::vector<std::vector<T>>& units,
              std::vector<std::vector<T>>* gradients) {
  const size_t size = size_t(model.shape.tokens()) * model.shape.width;
  TransformerLayer<T> layer(model.shape);
  EmbeddingEnds<T> ends(model.shape);
  std::vector<std::vector<T>> x(model.shape.layers + 1, std::vector<T>(size));
  std::vector<T> dx(size), gradient(units[0].size());
  ends.Embed(units[0].data(), model.ends, model.inputs.data(), x[0].data());
  for (int i = 0; i < model.shape.layers; ++i)
    layer.Forward(units[1 + i].data(), model.layer, x[i].data(), x[i + 1].data());
  const double loss = ends.LossAndBackward(units[0].data(), model.ends, x.back().data(), model.targets.data(),
                                           gradient.data(), dx.data());
  if (gradients == nullptr) return loss;
  gradients->clear();
  // Gradients left unwritten by the pass show as NaN.
  for (const auto& unit : units) gradients->emplace_back(unit.size(), std::numeric_limits<T>::quiet_NaN());
  for (int i = model.shape.layers; i-- > 0;) {
    layer.Backward(units[1 + i].data(), model.layer, x[i].data(), dx.data(), (*gradients)[1 + i].data(), dx.data());
  }
  ends.EmbedBackward(model.ends, model.inputs.data(), dx.data(), gradient.data());
  (*gradients)[0] = gradient;
  return loss;
}

TEST(TransformerTest, EveryGradientEqualsItsCentralDifference) {
  TinyModel model;
  std::vector<std::vector<double>> gradients;
  LossOf(model, model.units, &gradients);
  constexpr double kStep = 1e-5;
  double largest = 0;
  for (size_t u = 0; u < model.units.size(); ++u) {
    int nonzero = 0;
    for (size_t i = 0; i < model.units[u].size(); ++i) {
      double& weight = model.units[u][i];
      const double value = weight;
      weight = value + kStep;
      const double above = LossOf<double>(model, model.units, nullptr);
      weight = value - kStep;
      const double below = LossOf<double>(model, model.units, nullptr);
      weight = value;
      const double expected = (above - below) / (2 * kStep);
      ASSERT_NEAR(gradients[u][i], expected, 1e-8 + 1e-6 * std::abs(expected)) << "unit " << u << " element " << i;
      nonzero += std::abs(expected) > 1e-7;
      largest = std::max(largest, std::abs(expected));
    }
    EXPECT_GT(nonzero, static_cast<int>(model.units[u].size() / 2)) << "unit " << u << ": the check sees nothing";
  }
  EXPECT_GT(largest, 1e-2);
}

TEST(TransformerTest, FloatFollowsDouble) {
  TinyModel model;
  std::vector<std::vector<float>> units;
  for (const auto& unit : model.units) units.emplace_back(unit.begin(), unit.end());
  std::vector<std::vector<double>> expected;
  std::vector<std::vector<float>> gradients;
  EXPECT_NEAR(LossOf(model, units, &gradients), LossOf(model, model.units, &expected), 1e-5);
  for (size_t u = 0; u < expected.size(); ++u) {
    for (size_t i = 0; i < expected[u].size(); ++i) {
      ASSERT_NEAR(gradients[u][i], expected[u][i], 1e-5) << "unit " << u << " element " << i;
    }
  }
}

TEST(TransformerTest, NoTokenSeesALaterOneOrAnotherSequence) {
  TinyModel model;
  const size_t width = model.shape.width;
  const size_t size = model.shape.tokens() * width;
  TransformerLayer<double> layer(model.shape);
  std::mt19937_64 random(2);
  std::vector<double> x(size), y(size), changed(size);
  for (double& value : x) value = std::normal_distribution<double>()(random);
  layer.Forward(model.units[1].data(), model.layer, x.data(), y.data());
  const size_t token = 2;  // of the first sequence
  x[token * width] += 1;
  layer.Forward(model.units[1].data(), model.layer, x.data(), changed.data());
  for (size_t i = 0; i < size; ++i) {
    const size_t at = i / width;
    if (at < token || at >= static_cast<size_t>(model.shape.context)) {
      EXPECT_EQ(y[i], changed[i]) << "token " << at;
    }
  }
  for (size_t at = token; at < static_cast<size_t>(model.shape.context); ++at)
    EXPECT_NE(y[at * width], changed[at * width]);
}

TEST(TransformerTest, PositionsMatterAndStartAnewWithEachSequence) {
  // The second sequence is the first with its first two tokens swapped. Attention adds to the third token a sum over
  // the tokens before it, so only their positions can change the sum.
  TinyModel model;
  const size_t width = model.shape.width;
  const size_t half = model.shape.context * width;
  TransformerLayer<double> layer(model.shape);
  std::vector<double> x(2 * half), y(2 * half);
  std::mt19937_64 random(3);
  for (size_t i = 0; i < half; ++i) x[i] = x[half + i] = std::normal_distribution<double>()(random);
  layer.Forward(model.units[1].data(), model.layer, x.data(), y.data());
  for (size_t i = 0; i < half; ++i) EXPECT_EQ(y[i], y[half + i]);

  std::swap_ranges(x.begin() + half, x.begin() + half + width, x.begin() + half + width);
  layer.Forward(model.units[1].data(), model.layer, x.data(), y.data());
  double difference = 0;
  for (size_t i = 2 * width; i < 3 * width; ++i) difference = std::max(difference, std::abs(y[i] - y[half + i]));
  EXPECT_GT(difference, 1e-3);
}

TEST(NumericsTest, ExpIsCloseAndNeverOverflowsIntoGarbage) {
  for (double x = -87; x <= 88; x += 0.0137) {
    const float argument = static_cast<float>(x);
    const double exact = std::exp(static_cast<double>(argument));
    ASSERT_NEAR(Exp(argument) / exact, 1, 3e-7) << x;
  }
  EXPECT_EQ(Exp(0.0f), 1.0f);
  EXPECT_LT(Exp(-1000.0f), 1e-37f);
  EXPECT_GE(Exp(-1000.0f), 0.0f);
  EXPECT_GT(Exp(1000.0f), 1e38f);
  EXPECT_TRUE(std::isnan(Exp(std::numeric_limits<float>::quiet_NaN())));
}

TEST(NumericsTest, SumsTakeAllElements) {
  for (int n = 1; n < 40; ++n) {
    std::vector<double> a(n), b(n);
    double sum = 0, dot = 0;
    for (int i = 0; i < n; ++i) {
      a[i] = i + 1, b[i] = 2 * i - 5;
      sum += a[i], dot += a[i] * b[i];
    }
    EXPECT_EQ(Sum(a.data(), n), sum);
    EXPECT_EQ(Dot(a.data(), b.data(), n), dot);
    EXPECT_EQ(Largest(a.data(), n), n);
  }
}

}  // namespace
}  // namespace ballast::client
