// Elements from one dtype to another, rounded once.
#include "ballast/client/tensors/convert.h"

#include <cmath>
#include <cstring>
#include <vector>

#include "ballast/kernels/kernels.h"
#include "gtest/gtest.h"

namespace ballast::client {
namespace {

using kernels::Dtype;

class ConvertTest : public ::testing::Test {
 protected:
  // `values` in dtype `from`, converted to `to`, widened.
  static std::vector<float> Through(Dtype from, Dtype to, const std::vector<float>& values) {
    std::vector<std::byte> narrow(values.size() * kernels::ElementBytes(from));
    std::vector<std::byte> out(values.size() * kernels::ElementBytes(to) + 1, std::byte{0xee});
    std::vector<float> wide, back(values.size());
    Convert(reinterpret_cast<const std::byte*>(values.data()), Dtype::kF32, narrow.data(), from, values.size(), &wide);
    Convert(narrow.data(), from, out.data(), to, values.size(), &wide);
    EXPECT_EQ(out.back(), std::byte{0xee}) << "beyond the elements";
    Convert(out.data(), to, reinterpret_cast<std::byte*>(back.data()), Dtype::kF32, values.size(), &wide);
    return back;
  }
};

TEST_F(ConvertTest, ValuesThatAllDtypesHaveComeThrough) {
  const std::vector<float> values = {0, 1, -2, 0.5F, 96, -0.0078125F};
  for (const Dtype from : {Dtype::kF32, Dtype::kBf16, Dtype::kF16}) {
    for (const Dtype to : {Dtype::kF32, Dtype::kBf16, Dtype::kF16}) {
      EXPECT_EQ(Through(from, to, values), values) << static_cast<int>(from) << " to " << static_cast<int>(to);
    }
  }
}

TEST_F(ConvertTest, RoundsToNearestEven) {
  // bf16 has 8 bits of precision, fp16 11.
  EXPECT_EQ(Through(Dtype::kF32, Dtype::kBf16, {257, 259, 1 + 1.0F / 512}), (std::vector<float>{256, 260, 1}));
  EXPECT_EQ(Through(Dtype::kF32, Dtype::kF16, {2049, 2051}), (std::vector<float>{2048, 2052}));
  EXPECT_EQ(Through(Dtype::kF16, Dtype::kBf16, {257, 259}), (std::vector<float>{256, 260}));
  EXPECT_TRUE(std::isinf(Through(Dtype::kBf16, Dtype::kF16, {1e6F})[0])) << "too large for fp16";
}

}  // namespace
}  // namespace ballast::client
