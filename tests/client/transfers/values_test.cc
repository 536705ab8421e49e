// Values that were written, as this rank's slices have them.
#include "ballast/client/transfers/values.h"

#include <cstring>
#include <functional>
#include <map>
#include <stdexcept>
#include <vector>

#include "ballast/tests/client/transfers/transfers_fixture.h"

namespace ballast::client {
namespace {

class ValuesTest : public TransfersTest {
 protected:
  static std::vector<model::BoxRun> Whole(uint64_t elements) { return {{0, 0, elements}}; }
  std::vector<float> Tensor(uint32_t tensor) const {
    std::vector<float> values(seat_.units->layout().tensors()[tensor].range.size());
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(1000 * tensor + i);
    return values;
  }
  // Each pushed element, against what `expected` says of the tensor's element.
  void ExpectPushed(const std::function<float(uint32_t, uint64_t)>& expected) {
    const auto received = Received(v1::SLICE_KIND_VALUE);
    EXPECT_FALSE(received.empty());
    for (const auto& [place, payload] : received) {
      std::vector<float> values(payload.size() / sizeof(float));
      std::memcpy(values.data(), payload.data(), payload.size());
      for (const uint32_t t : seat_.units->layout().units()[place.first].tensors) {
        const model::Tensor& tensor = seat_.units->layout().tensors()[t];
        const model::Range part = model::Intersect(tensor.range, {place.second, place.second + values.size()});
        for (uint64_t i = part.begin; i < part.end; ++i) {
          ASSERT_EQ(values[i - place.second], expected(t, i - tensor.range.begin)) << "tensor " << t;
        }
      }
    }
  }

  Values values_{&seat_};
};

TEST_F(ValuesTest, WrittenValuesAreThisRanksPartOfTheTensor) {
  EXPECT_TRUE(values_.empty());
  for (const uint32_t tensor : {0, 1}) values_.Write(tensor, Tensor(tensor), Whole(Tensor(tensor).size()));
  EXPECT_EQ(values_.presence(), model::MakeBitmap(3, {0, 1}));
  ASSERT_EQ(values_.Push(values_.presence(), values_.written()), absl::OkStatus());
  EXPECT_EQ(Count(), view(0).slices.size());
  ExpectPushed([](uint32_t tensor, uint64_t element) { return static_cast<float>(1000 * tensor + element); });
}

TEST_F(ValuesTest, TensorsThatAreNotWrittenAreZerosInTheirSlices) {
  values_.Write(1, Tensor(1), Whole(10));
  ASSERT_EQ(values_.Push(model::MakeBitmap(3, {0}),
                         [](uint32_t, uint64_t first, absl::Span<float> to) {
                           for (size_t i = 0; i < to.size(); ++i) to[i] = static_cast<float>(first + i + 7);
                         }),
            absl::OkStatus());
  ExpectPushed([](uint32_t tensor, uint64_t element) { return tensor == 0 ? static_cast<float>(element + 7) : 0.0F; });
}

TEST_F(ValuesTest, ForgottenValuesAreGone) {
  values_.Write(0, Tensor(0), Whole(70000));
  values_.Write(2, Tensor(2), Whole(300));
  values_.Forget(model::MakeBitmap(3, {0}));
  EXPECT_EQ(values_.presence(), model::MakeBitmap(3, {2}));
  values_.Forget(model::MakeBitmap(3, {2}));
  EXPECT_TRUE(values_.empty());
}

TEST_F(ValuesTest, LentValuesAreNotPushedAndStayUntilTheLoanEnds) {
  values_.Write(2, Tensor(2), Whole(300));
  const std::map<uint32_t, const float*> lent = values_.Lend();
  ASSERT_EQ(lent.size(), 1);
  ASSERT_EQ(values_.Push(values_.presence(), values_.written()), absl::OkStatus());
  values_.Resend(view(1).slices[0], values_.presence(), values_.written());
  EXPECT_EQ(Count(), 0);
  values_.Forget(model::MakeBitmap(3, {2}));
  EXPECT_TRUE(values_.empty());
  EXPECT_EQ(*lent.at(2), 2000) << "a server may still read it";
  values_.EndLoan();
  EXPECT_FALSE(values_.lent());
}

TEST_F(ValuesTest, ASourceThatThrowsLosesNoBuffer) {
  const auto throws = [](uint32_t, uint64_t, absl::Span<float>) { throw std::runtime_error("the user's"); };
  for (int i = 0; i < 10; ++i) {
    EXPECT_THROW(values_.Resend(view(0).slices[0], model::MakeBitmap(3, {0}), throws), std::runtime_error);
  }
  EXPECT_TRUE(values_.idle());
  values_.ReleaseBuffers();
  values_.Write(0, Tensor(0), Whole(70000));
  EXPECT_EQ(values_.Push(values_.presence(), values_.written()), absl::OkStatus());
}

}  // namespace
}  // namespace ballast::client
