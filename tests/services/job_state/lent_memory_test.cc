// A trainer's memory, as a server finds a chunk's elements in it.
#include "ballast/services/job_state/lent_memory.h"

#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/synchronization/notification.h"
#include "ballast/proto/base/lent_memory.h"
#include "ballast/tests/services/job_state.h"
#include "gtest/gtest.h"

namespace ballast::services {
namespace {

class LentMemoryTest : public ::testing::Test {
 protected:
  LentMemoryTest() : memory_(1 << 20) { request_.tensors.resize(SmallModel().size()); }
  std::shared_ptr<LentMemory> Lend() {
    return std::make_shared<LentMemory>(request_, *plan_, *model::OptimizerOf(plan_->open().spec()));
  }
  // The chunk with the tensor's element, and where in the chunk it is.
  std::pair<const model::Chunk*, uint64_t> Place(uint32_t tensor, uint64_t element) const {
    const model::Tensor& t = plan_->layout().tensors()[tensor];
    const uint64_t at = t.range.begin + element;
    for (const model::Chunk& chunk : plan_->layout().chunks()) {
      if (chunk.unit == t.unit && chunk.range.begin <= at && at < chunk.range.end) {
        return {&chunk, at - chunk.range.begin};
      }
    }
    ADD_FAILURE() << "no chunk has the element";
    return {nullptr, 0};
  }

  const std::shared_ptr<const model::EpochPlan> plan_ = PlanOf(MakeSpec("job", SmallModel()));
  std::vector<std::byte> memory_;
  model::LoanRequest request_;
};

TEST_F(LentMemoryTest, AnElementIsFoundFromAnyOfTheTensorsChunks) {
  request_.tensors[2].gradient = memory_.data();      // "weight": three chunks of unit 1
  request_.tensors[2].working = memory_.data() + 16;  // bf16, like the gradient
  request_.tensors[3].value = memory_.data() + 32;    // "bias", behind it in the unit
  request_.tensors[3].value_dtype = kernels::Dtype::kF32;
  const std::shared_ptr<LentMemory> lent = Lend();
  for (const uint64_t element : {0, 1, 65535, 65536, 139999}) {
    const auto [chunk, at] = Place(2, element);
    EXPECT_EQ(lent->Gradient(*chunk, 2, at), memory_.data() + 2 * element);
    EXPECT_EQ(lent->Working(*chunk, 2, at), memory_.data() + 16 + 2 * element);
    EXPECT_EQ(lent->Value(*chunk, 2, at), nullptr);
  }
  const auto [chunk, at] = Place(3, 299);
  EXPECT_EQ(lent->Value(*chunk, 3, at), memory_.data() + 32 + 4 * 299);
  EXPECT_EQ(lent->Gradient(*chunk, 3, at), nullptr);
  EXPECT_EQ(lent->presence(v1::SLICE_KIND_GRADIENT), model::MakeBitmap(4, {2}));
  EXPECT_EQ(lent->presence(v1::SLICE_KIND_VALUE), model::MakeBitmap(4, {3}));
}

TEST_F(LentMemoryTest, ValuesInTheWorkingDtypeAreHalfAsWide) {
  request_.tensors[3].value = memory_.data();
  request_.tensors[3].value_dtype = kernels::Dtype::kBf16;
  const auto [chunk, at] = Place(3, 100);
  EXPECT_EQ(Lend()->Value(*chunk, 3, at), memory_.data() + 2 * 100);
}

TEST_F(LentMemoryTest, TheTrainerGetsItsMemoryOnceNobodyUsesIt) {
  const std::shared_ptr<LentMemory> lent = Lend();
  lent->AwaitUnused();
  std::shared_ptr<void> one = lent->Use();
  std::shared_ptr<void> another = lent->Use();
  absl::Notification free;
  std::thread trainer([&] {
    lent->AwaitUnused();
    free.Notify();
  });
  one.reset();
  EXPECT_FALSE(free.HasBeenNotified());
  another.reset();
  trainer.join();
  EXPECT_TRUE(free.HasBeenNotified());
}

}  // namespace
}  // namespace ballast::services
