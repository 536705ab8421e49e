// Loans that end at every point of a step. The server copies the data it may still need; afterwards nothing touches the
// trainer's memory.
#include <cstring>

#include "ballast/kernels/kernels.h"
#include "ballast/proto/base/status.h"
#include "ballast/tests/services/trainer_group.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ballast::services {
namespace {

using ::testing::HasSubstr;

float ValueOf(uint32_t tensor, uint64_t element) {
  return 0.01f * static_cast<float>(tensor + 1) + static_cast<float>(element % 97) * 0x1p-10f;
}
float GradientOf(uint32_t tensor, uint64_t element) {
  return static_cast<float>(element % 31) * 0x1p-8f - 0.03f * static_cast<float>(tensor);
}

struct Lender : TestServer {
  Lender() : TestServer("s") {
    options().working_copies = false;
    Restart();
  }
};

class LendingTest : public ::testing::Test {
 protected:
  LendingTest() {
    for (TrainerGroup* group : {&group_, &copier_group_}) {
      EXPECT_TRUE(group->Start().ok());
      EXPECT_TRUE(group->Initialise(ValueOf).ok());
    }
    tensors_ = static_cast<uint32_t>(group_.plan().layout().tensors().size());
    gradients_.resize(tensors_);
    parameters_.resize(tensors_);
    for (uint32_t i = 0; i < tensors_; ++i) {
      const uint64_t n = group_.plan().layout().tensors()[i].range.size();
      for (uint64_t e = 0; e < n; ++e) gradients_[i].push_back(kernels::ToBf16(GradientOf(i, e)));
      parameters_[i].assign(n, kUntouched);
    }
  }

  model::LoanRequest Request(uint64_t attempt = 0) {
    model::LoanRequest request{.job = "job", .epoch = group_.epoch(), .step = group_.step(), .attempt = attempt};
    for (uint32_t i = 0; i < tensors_; ++i) {
      request.tensors.push_back({.gradient = reinterpret_cast<const std::byte*>(gradients_[i].data()),
                                 .working = reinterpret_cast<std::byte*>(parameters_[i].data())});
    }
    return request;
  }
  // As if the trainer freed it.
  void Spoil() {
    for (auto& gradient : gradients_) std::fill(gradient.begin(), gradient.end(), kernels::bf16{0x7f80});
  }
  bool Untouched() const {
    return std::all_of(parameters_.begin(), parameters_.end(), [](const auto& parameter) {
      return std::all_of(parameter.begin(), parameter.end(), [](kernels::bf16 p) { return p == kUntouched; });
    });
  }
  // Expects the lender's state to equal a server with copies, after a step with the same gradients.
  void ExpectStepped() {
    ASSERT_TRUE(copier_group_.PushAll(v1::SLICE_KIND_GRADIENT, AllTensors(tensors_), GradientOf).ok());
    ASSERT_TRUE(copier_group_.Finish(UpdateHeader(tensors_)).ok());
    for (uint32_t i = 0; i < tensors_; ++i) {
      for (const v1::Content content : {v1::CONTENT_WORKING, v1::CONTENT_MASTER, v1::CONTENT_MOMENT2}) {
        const auto expected = copier_group_.Read(i, content, copier_group_.step() - 1);
        const auto found = group_.Read(i, content, group_.step() - 1);
        ASSERT_TRUE(found.ok()) << found.status();
        EXPECT_EQ(*found, *expected) << "tensor " << i << " content " << content;
      }
    }
  }

  static constexpr kernels::bf16 kUntouched = 0x1234;
  Lender lender_;
  TestServer copier_{"s"};
  TrainerGroup group_{{lender_.get()}, MakeSpec("job", SmallModel()), 1};
  TrainerGroup copier_group_{{copier_.get()}, MakeSpec("job", SmallModel()), 1};
  uint32_t tensors_ = 0;
  std::vector<std::vector<kernels::bf16>> gradients_, parameters_;
};

TEST_F(LendingTest, AppliedBeforeTheLoanEnds) {
  auto loan = lender_->Lend(Request());
  ASSERT_TRUE(loan.ok()) << loan.status();
  ASSERT_TRUE(group_.Finish(UpdateHeader(tensors_)).ok());
  // Without waiting for the version: the loan's end waits for the update.
  loan->reset();
  Spoil();
  for (uint32_t i = 0; i < tensors_; ++i) {
    const auto working = group_.Read(i, v1::CONTENT_WORKING, group_.step() - 1);
    std::vector<float> mine(parameters_[i].size());
    kernels::F32FromBf16(parameters_[i], absl::MakeSpan(mine));
    EXPECT_EQ(*working, mine) << "tensor " << i;
  }
  ExpectStepped();
}

// Prepared and not decided: whoever fences next may decide it, from copies.
TEST_F(LendingTest, EndsBetweenPreparedAndDecided) {
  auto loan = lender_->Lend(Request());
  ASSERT_TRUE(loan.ok()) << loan.status();
  const auto records = group_.SealAll(UpdateHeader(tensors_));
  ASSERT_TRUE(records.ok()) << records.status();
  loan->reset();
  Spoil();
  ASSERT_TRUE(group_.Commit(*model::Decide(*records)).ok());
  ExpectStepped();
  EXPECT_TRUE(Untouched());
}

// The same of values: in fp32 of one tensor, in the working dtype of the others.
TEST_F(LendingTest, ValuesEndBetweenPreparedAndDecided) {
  const auto edit = [](uint32_t tensor, uint64_t element) { return tensor == 1 ? 0.1f : 0.5f * (element % 3); };
  std::vector<float> wide(group_.plan().layout().tensors()[1].range.size());
  for (size_t e = 0; e < wide.size(); ++e) wide[e] = edit(1, e);
  for (uint32_t i = 0; i < tensors_; ++i) {
    for (size_t e = 0; e < gradients_[i].size(); ++e) gradients_[i][e] = kernels::ToBf16(edit(i, e));
  }
  model::LoanRequest request = Request();
  for (model::LentTensor& tensor : request.tensors) {
    tensor = {.value = tensor.gradient, .value_dtype = kernels::Dtype::kBf16};
  }
  request.tensors[1] = {.value = reinterpret_cast<const std::byte*>(wide.data())};
  v1::StepHeader header;
  header.set_kind(v1::STEP_KIND_VALUES);
  header.set_gradient_scale(1);
  header.set_value_presence(AllTensors(tensors_));
  header.set_gradient_presence(std::string(header.value_presence().size(), 0));
  auto loan = lender_->Lend(request);
  ASSERT_TRUE(loan.ok()) << loan.status();
  const auto records = group_.SealAll(header);
  ASSERT_TRUE(records.ok()) << records.status();
  loan->reset();
  Spoil();
  std::fill(wide.begin(), wide.end(), -1.0f);
  ASSERT_TRUE(group_.Commit(*model::Decide(*records)).ok());
  for (uint32_t i = 0; i < tensors_; ++i) {
    const auto master = group_.Read(i, v1::CONTENT_MASTER, group_.step() - 1);
    ASSERT_TRUE(master.ok()) << master.status();
    for (size_t e = 0; e < master->size(); ++e) ASSERT_EQ((*master)[e], edit(i, e)) << "tensor " << i << " at " << e;
  }
}

TEST_F(LendingTest, ValuesThatAreNotFinite) {
  std::vector<float> wide(group_.plan().layout().tensors()[1].range.size());
  wide.back() = std::numeric_limits<float>::infinity();
  model::LoanRequest request = Request();
  for (model::LentTensor& tensor : request.tensors) tensor = {};
  request.tensors[1].value = reinterpret_cast<const std::byte*>(wide.data());
  const auto loan = lender_->Lend(request);
  EXPECT_EQ(model::ReasonOf(loan.status()), model::kBadRequest);
  EXPECT_THAT(loan.status().ToString(), HasSubstr(group_.plan().layout().tensors()[1].name));
  request.tensors[1].value_dtype = kernels::Dtype::kF16;
  EXPECT_EQ(model::ReasonOf(lender_->Lend(request).status()), model::kBadDtype);
  request.tensors[1].value_dtype = kernels::Dtype::kF32;
  // Nothing stays behind: the same slices are missing as before.
  Answer<v1::SealResponse> answer;
  lender_->Seal(group_.SealOf(0, UpdateHeader(tensors_), /*wait_ms=*/0), absl::InfiniteFuture(), answer.reply());
  EXPECT_EQ(answer.Wait()->pending().missing_count(), group_.plan().slices().size());
}

TEST_F(LendingTest, EndsBeforeTheSeal) {
  auto loan = lender_->Lend(Request());
  ASSERT_TRUE(loan.ok()) << loan.status();
  loan->reset();
  Answer<v1::SealResponse> answer;
  lender_->Seal(group_.SealOf(0, UpdateHeader(tensors_), /*wait_ms=*/0), absl::InfiniteFuture(), answer.reply());
  const auto sealed = answer.Wait();
  ASSERT_TRUE(sealed.ok()) << sealed.status();
  EXPECT_EQ(sealed->pending().missing_count(), group_.plan().slices().size());
  EXPECT_TRUE(Untouched());
}

TEST_F(LendingTest, LentAgainAfterItsEnd) {
  auto first = lender_->Lend(Request());
  ASSERT_TRUE(first.ok());
  EXPECT_THAT(lender_->Lend(Request()).status().ToString(), HasSubstr("already"));
  first->reset();
  auto second = lender_->Lend(Request(/*attempt=*/1));
  ASSERT_TRUE(second.ok()) << second.status();
  group_.set_attempt(1);
  ASSERT_TRUE(group_.Finish(UpdateHeader(tensors_)).ok());
  second->reset();
  ExpectStepped();
}

// A new group's fence makes an older group's loan void.
TEST_F(LendingTest, FencedLoan) {
  auto loan = lender_->Lend(Request());
  ASSERT_TRUE(loan.ok());
  TrainerGroup next({lender_.get()}, MakeSpec("job", SmallModel()), 1, /*epoch_counter=*/2);
  ASSERT_TRUE(next.Start().ok());
  EXPECT_EQ(model::ReasonOf(lender_->Lend(Request()).status()), model::kStaleEpoch);
  ASSERT_TRUE(next.PushAll(v1::SLICE_KIND_GRADIENT, AllTensors(tensors_), GradientOf).ok());
  ASSERT_TRUE(next.Finish(UpdateHeader(tensors_)).ok());
  loan->reset();
  EXPECT_TRUE(Untouched());
}

TEST_F(LendingTest, EndsAfterTheServer) {
  auto loan = lender_->Lend(Request());
  ASSERT_TRUE(loan.ok());
  ASSERT_TRUE(group_.Finish(UpdateHeader(tensors_)).ok());
  lender_->Stop();
  loan->reset();
  Spoil();
}

TEST_F(LendingTest, RefusedWhereThereAreCopies) {
  model::LoanRequest request = Request();
  request.epoch = copier_group_.epoch();
  EXPECT_EQ(model::ReasonOf(copier_->Lend(request).status()), model::kUnsupported);
  request = Request();
  request.tensors.pop_back();
  EXPECT_EQ(model::ReasonOf(lender_->Lend(request).status()), model::kBadLength);
  request = Request();
  request.step += 1;
  EXPECT_EQ(model::ReasonOf(lender_->Lend(request).status()), model::kBehind);
}

}  // namespace
}  // namespace ballast::services
