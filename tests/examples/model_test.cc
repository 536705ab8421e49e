#include "ballast/client/examples/bytes_lm/model.h"

#include <cmath>
#include <set>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ballast::client {
namespace {

using ::testing::HasSubstr;

TEST(ModelTest, DefaultHasAboutThreeMillionParametersInAUnitPerLayer) {
  const ModelShape shape;
  ASSERT_TRUE(CheckShape(shape).ok());
  uint64_t parameters = 0;
  std::set<std::string> names, units;
  for (const ModelTensor& tensor : TensorsOf(shape)) {
    parameters += tensor.elements();
    units.insert(tensor.unit);
    EXPECT_TRUE(names.insert(tensor.name).second) << tensor.name;
  }
  EXPECT_GT(parameters, 2'500'000u);
  EXPECT_LT(parameters, 4'000'000u);
  EXPECT_EQ(units.size(), 1u + shape.layers);
}

TEST(ModelTest, BadShapesSayWhatIsWrong) {
  EXPECT_THAT(CheckShape({.width = 100, .heads = 3}).message(), HasSubstr("multiple of 2 x heads"));
  EXPECT_THAT(CheckShape({.layers = 0}).message(), HasSubstr("layers must be from 1"));
  EXPECT_THAT(CheckShape({.context = 8192, .sequences = 8192}).message(), HasSubstr("lower batch or context"));
}

TEST(InitialValuesTest, AnyPartIsThatOfTheWhole) {
  const ModelShape shape{.layers = 2, .width = 16, .heads = 2};
  for (const ModelTensor& tensor : TensorsOf(shape)) {
    std::vector<float> whole(tensor.elements()), parts(tensor.elements());
    FillInitialValues(shape, tensor, 7, 0, absl::MakeSpan(whole));
    const uint64_t cut = tensor.elements() / 3;
    FillInitialValues(shape, tensor, 7, cut, absl::MakeSpan(parts).subspan(cut));
    FillInitialValues(shape, tensor, 7, 0, absl::MakeSpan(parts).first(cut));
    EXPECT_EQ(whole, parts) << tensor.name;
  }
}

TEST(InitialValuesTest, GainsAreOneAndMatricesHaveTheDeviationAsked) {
  const ModelShape shape{.layers = 2};
  std::vector<float> first;
  for (const ModelTensor& tensor : TensorsOf(shape)) {
    std::vector<float> values(tensor.elements());
    FillInitialValues(shape, tensor, 1, 0, absl::MakeSpan(values));
    if (tensor.group == kGainGroup) {
      for (const float value : values) ASSERT_EQ(value, 1.0f);
      continue;
    }
    double sum = 0, squares = 0;
    for (const float value : values) sum += value, squares += double{value} * value;
    const bool into_residual = tensor.role == TensorRole::kAttentionOut || tensor.role == TensorRole::kDown;
    const double n = static_cast<double>(values.size());
    EXPECT_NEAR(std::sqrt(squares / n), into_residual ? 0.01 : 0.02, 2e-4) << tensor.name;
    EXPECT_NEAR(sum / n, 0, 4e-4) << tensor.name;
    // Other tensors, other numbers.
    EXPECT_NE(values[0], first.empty() ? 0 : first[0]) << tensor.name;
    if (first.empty()) first = values;
  }
}

}  // namespace
}  // namespace ballast::client
