#include "ballast/client/examples/local_source.h"

#include <bit>
#include <cmath>
#include <limits>

#include "ballast/kernels/kernels.h"
#include "ballast/proto/model/verdict.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ballast::client {
namespace {

constexpr uint64_t kChunk = uint64_t{1} << 16;

v1::StepHeader Header() {
  v1::StepHeader header;
  header.set_kind(v1::STEP_KIND_UPDATE);
  for (uint32_t group = 0; group < kGroupCount; ++group) {
    v1::GroupHyper& hyper = *header.add_groups();
    hyper.set_learning_rate(0.25);
    hyper.set_beta1(0.9);
    hyper.set_beta2(0.95);
    hyper.set_epsilon(1e-8);
    hyper.set_weight_decay(group == kGainGroup ? 0 : 0.5);
  }
  header.set_gradient_scale(1);
  return header;
}

class LocalSourceTest : public ::testing::Test {
 protected:
  // A layer of about 200,000 parameters: several chunks.
  ModelShape shape_{.layers = 1, .width = 128, .heads = 2};
  std::unique_ptr<LocalSource> source_ = *LocalSource::Create(shape_, 3, kChunk);

  void PushAll(float value) {
    for (uint32_t unit = 0; unit < 2; ++unit) {
      const std::vector<float> gradient(source_->unit_elements(unit), value);
      ASSERT_TRUE(source_->Push(unit, gradient).ok());
    }
  }
  std::vector<float> Master(const ModelTensor& tensor) {
    std::vector<float> values(tensor.elements());
    EXPECT_TRUE(source_->ReadMaster(tensor.name, absl::MakeSpan(values)).ok());
    return values;
  }
};

TEST_F(LocalSourceTest, StartsWithInitialValuesAndTheirRounding) {
  for (const ModelTensor& tensor : TensorsOf(shape_)) {
    std::vector<float> expected(tensor.elements());
    FillInitialValues(shape_, tensor, 3, 0, absl::MakeSpan(expected));
    EXPECT_EQ(Master(tensor), expected);
    const uint32_t unit = tensor.unit == "embedding" ? 0 : 1;
    std::vector<float> parameters(source_->unit_elements(unit));
    ASSERT_TRUE(source_->Acquire(unit, absl::MakeSpan(parameters)).ok());
    const uint64_t begin = *source_->Locate(tensor.name);
    for (size_t i = 0; i < expected.size(); ++i) {
      ASSERT_EQ(parameters[begin + i], kernels::FromBf16(kernels::ToBf16(expected[i])));
    }
  }
}

TEST_F(LocalSourceTest, FirstStepOfAdamwMovesEachParameterByTheLearningRate) {
  std::vector<std::vector<float>> before;
  for (const ModelTensor& tensor : TensorsOf(shape_)) before.push_back(Master(tensor));
  PushAll(0.5f);
  const auto verdict = source_->FinishStep(Header(), "");
  ASSERT_TRUE(verdict.ok()) << verdict.status();
  EXPECT_FALSE(verdict->skip());
  EXPECT_EQ(source_->version(), 1);
  size_t index = 0;
  for (const ModelTensor& tensor : TensorsOf(shape_)) {
    const std::vector<float> after = Master(tensor);
    // m / sqrt(v) = sign(g) at t = 1.
    const float decay = tensor.group == kGainGroup ? 1.0f : 1 - 0.25f * 0.5f;
    for (size_t i = 0; i < after.size(); ++i)
      ASSERT_NEAR(after[i], before[index][i] * decay - 0.25f, 1e-5) << tensor.name;
    ++index;
  }
}

TEST_F(LocalSourceTest, NormAndClipAreThoseOfTheWholeModel) {
  uint64_t parameters = 0;
  for (const ModelTensor& tensor : TensorsOf(shape_)) parameters += tensor.elements();
  PushAll(0.5f);
  v1::StepHeader header = Header();
  header.set_gradient_scale(0.25);
  header.set_max_norm(1);
  const auto verdict = source_->FinishStep(header, "");
  ASSERT_TRUE(verdict.ok());
  const double norm = 0.125 * std::sqrt(static_cast<double>(parameters));
  EXPECT_NEAR(verdict->norm(), norm, 1e-9 * norm);
  EXPECT_NEAR(std::bit_cast<float>(verdict->factor_bits()), 0.25 / norm, 1e-6);
}

TEST_F(LocalSourceTest, AStepWithANanChangesNothingButTheVersion) {
  const ModelTensor tensor = TensorsOf(shape_)[2];
  const std::vector<float> before = Master(tensor);
  PushAll(0.5f);
  std::vector<float> gradient(source_->unit_elements(0), 0);
  gradient[77] = std::numeric_limits<float>::quiet_NaN();
  ASSERT_TRUE(source_->Push(0, gradient).ok());
  const auto verdict = source_->FinishStep(Header(), "");
  ASSERT_TRUE(verdict.ok());
  EXPECT_TRUE(verdict->skip());
  EXPECT_EQ(source_->version(), 1);
  EXPECT_EQ(Master(tensor), before);
}

TEST_F(LocalSourceTest, WrongLengthIsRefused) {
  const std::vector<float> gradient(3);
  EXPECT_THAT(source_->Push(0, gradient).message(), ::testing::HasSubstr("got 3"));
}

}  // namespace
}  // namespace ballast::client
