// A trainer's memory in place of pushes.
#include "ballast/services/job/loans.h"

#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "ballast/proto/base/status.h"
#include "ballast/tests/services/job_part.h"

namespace ballast::services {
namespace {

using ::testing::HasSubstr;

class LoansTest : public JobPartTest {
 protected:
  LoansTest() { working_copies_ = false; }
  // Gradients, or values, of all tensors.
  model::LoanRequest RequestOf(bool values = false) {
    model::LoanRequest request;
    request.job = "job";
    request.epoch.set_counter(epoch_);
    request.step = step_;
    for (size_t i = 0; i < SmallModel().size(); ++i) {
      model::LentTensor& tensor = request.tensors.emplace_back();
      tensor.working = working_.emplace_back(SmallModel()[i].elements * 2).data();
      if (values) {
        tensor.value = reinterpret_cast<const std::byte*>(values_[i].data());
      } else {
        tensor.gradient = reinterpret_cast<const std::byte*>(gradients_[i].data());
      }
    }
    return request;
  }
  void ExpectRefused(const model::LoanRequest& request, const char* reason, const char* words) {
    const absl::Status status = loans_.Lend(request).status();
    EXPECT_EQ(model::ReasonOf(status), reason) << status;
    EXPECT_THAT(status.ToString(), HasSubstr(words));
    JobMutexLock lock(&core_.mu);
    EXPECT_EQ(core_.state.lent(), nullptr);
  }

  std::deque<std::vector<kernels::bf16>> gradients_;
  std::deque<std::vector<float>> values_;
  std::deque<std::vector<std::byte>> working_;
  Loans loans_{&core_};

  void SetUp() override {
    for (const TestTensor& tensor : SmallModel()) {
      gradients_.emplace_back(tensor.elements, kernels::ToBf16(3));
      values_.emplace_back(tensor.elements, 5.0F);
    }
  }
};

TEST_F(LoansTest, AStepOfLentValuesReachesTheChunksAndTheTrainersParameters) {
  Open();
  auto loan = loans_.Lend(RequestOf(/*values=*/true));
  ASSERT_TRUE(loan.ok()) << loan.status();
  const std::optional<v1::PreparedRecord> record = Prepare(ValuesHeader(tensors()));
  ASSERT_TRUE(record.has_value());
  Commit(*record);
  loan->reset();
  JobMutexLock lock(&core_.mu);
  for (const auto& chunk : core_.state.chunks()) {
    float value = 0;
    ASSERT_EQ(core_.state.store()->ReadState(chunk->store_index, storage::StateArray::kMaster, 0, {&value, 1}),
              absl::OkStatus());
    EXPECT_EQ(value, 5);
  }
  for (const std::vector<std::byte>& parameters : working_) {
    EXPECT_EQ(reinterpret_cast<const kernels::bf16*>(parameters.data())[0], kernels::ToBf16(5));
  }
  EXPECT_EQ(core_.state.lent(), nullptr);
}

TEST_F(LoansTest, WhatAPreparedStepWasLentIsCopied) {
  Open();
  auto loan = loans_.Lend(RequestOf(/*values=*/true));
  ASSERT_TRUE(loan.ok()) << loan.status();
  const std::optional<v1::PreparedRecord> record = Prepare(ValuesHeader(tensors()));
  ASSERT_TRUE(record.has_value());
  loan->reset();
  for (std::vector<float>& values : values_) std::fill(values.begin(), values.end(), 99.0F);
  Commit(*record);
  JobMutexLock lock(&core_.mu);
  float value = 0;
  ASSERT_EQ(core_.state.store()->ReadState(0, storage::StateArray::kMaster, 0, {&value, 1}), absl::OkStatus());
  EXPECT_EQ(value, 5);
}

TEST_F(LoansTest, AValueThatIsNotFiniteIsNamedAndNothingIsHeld) {
  Open();
  values_[2][777] = std::numeric_limits<float>::quiet_NaN();
  ExpectRefused(RequestOf(/*values=*/true), model::kBadRequest, "tensor 'weight' is not finite");
  values_[2][777] = 5;
  const auto loan = loans_.Lend(RequestOf(/*values=*/true));
  EXPECT_TRUE(loan.ok()) << loan.status();
}

TEST_F(LoansTest, WhatDoesNotFitTheJobIsRefused) {
  Open();
  model::LoanRequest request = RequestOf();
  request.tensors.pop_back();
  ExpectRefused(request, model::kBadLength, "the job has 4 tensors, 3 were lent");
  request = RequestOf(/*values=*/true);
  request.tensors[1].value_dtype = kernels::Dtype::kF16;
  ExpectRefused(request, model::kBadDtype, "neither fp32 nor of the job's working dtype");
  request = RequestOf();
  request.epoch.set_counter(epoch_ + 1);
  ExpectRefused(request, model::kNotOpen, "is not open");
}

TEST_F(LoansTest, AServerWithWorkingCopiesTakesNoLoans) {
  working_copies_ = true;
  Open();
  ExpectRefused(RequestOf(), model::kUnsupported, "keeps working copies");
}

TEST_F(LoansTest, SeveralRanksLendNothing) {
  Open(/*world_size=*/2);
  ExpectRefused(RequestOf(), model::kUnsupported, "by the one rank of a job to its one server");
}

TEST_F(LoansTest, ALoanOutlivesItsJob) {
  Open();
  auto loan = loans_.Lend(RequestOf());
  ASSERT_TRUE(loan.ok()) << loan.status();
  alive_.reset();
  loan->reset();
  JobMutexLock lock(&core_.mu);
  EXPECT_NE(core_.state.lent(), nullptr) << "nobody may touch a job that is being destroyed";
}

}  // namespace
}  // namespace ballast::services
