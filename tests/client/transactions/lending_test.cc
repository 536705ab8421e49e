#include "ballast/client/transactions/lending.h"

#include <cstring>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "ballast/client/collective/loopback_collective.h"
#include "ballast/proto/base/status.h"
#include "ballast/tests/client/transactions/rank_of_job.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ballast::client {
namespace {

using ::testing::ElementsAre;

constexpr uint32_t kC = 2;  // the tensor of 300 elements

// One rank at version 4 of a job, on a server that takes loans.
class LendingTest : public ::testing::Test {
 protected:
  struct CountedLoan : model::Loan {
    explicit CountedLoan(int* alive) : alive(alive) { ++*alive; }
    ~CountedLoan() override { --*alive; }
    int* alive;
  };

  LendingTest() {
    rank_.server->on_lend = [this](const model::LoanRequest& request) {
      requests_.push_back(request);
      return absl::StatusOr<std::unique_ptr<model::Loan>>(std::make_unique<CountedLoan>(&alive_));
    };
  }
  void WriteC() {
    std::vector<float> values(300);
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
    rank_.values->Write(kC, values, std::vector<model::BoxRun>{{0, 0, 300}});
  }

  int alive_ = 0;  // loans
  std::vector<model::LoanRequest> requests_;
  std::vector<std::unique_ptr<Collective>> seats_ = MakeLoopbackGroup(1);
  RankOfJob rank_{seats_[0].get(), 1, 4};
  Lending lending_{rank_.job.get(), rank_.values.get(), rank_.transactions.get()};
};

TEST_F(LendingTest, ALoanIsForTheNextStepAndBringsWrittenValues) {
  rank_.job->NextAttempt();
  WriteC();
  std::vector<model::LentTensor> tensors(3);
  const std::byte gradient{1};
  tensors[0].gradient = &gradient;
  ASSERT_EQ(lending_.Lend(tensors), absl::OkStatus());
  EXPECT_TRUE(lending_.active());
  EXPECT_TRUE(rank_.values->lent());
  ASSERT_EQ(requests_.size(), 1u);
  const model::LoanRequest& request = requests_[0];
  EXPECT_EQ(request.job, "job");
  EXPECT_EQ(request.epoch.counter(), 3);
  EXPECT_EQ(request.step, 5);
  EXPECT_EQ(request.attempt, 1);
  ASSERT_EQ(request.tensors.size(), 3u);
  EXPECT_EQ(request.tensors[0].gradient, &gradient);
  EXPECT_EQ(request.tensors[0].value, nullptr);
  ASSERT_NE(request.tensors[kC].value, nullptr);
  EXPECT_EQ(request.tensors[kC].value_dtype, kernels::Dtype::kF32);
  float last = 0;
  std::memcpy(&last, request.tensors[kC].value + 299 * sizeof(float), sizeof(last));
  EXPECT_EQ(last, 299);
}

TEST_F(LendingTest, TheLoanEndsOnlyAfterAllIsApplied) {
  std::vector<std::optional<uint32_t>> asked;
  rank_.server->on_await_applied = [&](int64_t version, std::optional<uint32_t> unit) {
    EXPECT_EQ(version, 4);
    EXPECT_EQ(alive_, 1);
    asked.push_back(unit);
    return absl::OkStatus();
  };
  ASSERT_EQ(lending_.Lend(std::vector<model::LentTensor>(3)), absl::OkStatus());
  ASSERT_EQ(lending_.Await(1), absl::OkStatus());
  EXPECT_EQ(alive_, 1) << "a unit's end does not end the loan";
  ASSERT_EQ(lending_.AwaitApplied(), absl::OkStatus());
  EXPECT_THAT(asked, ElementsAre(std::optional<uint32_t>(1), std::nullopt));
  EXPECT_EQ(alive_, 0);
  EXPECT_FALSE(lending_.active());
  EXPECT_FALSE(rank_.values->lent());
}

TEST_F(LendingTest, AnErrorOfTheUpdateEndsTheLoan) {
  rank_.server->on_await_applied = [](int64_t, std::optional<uint32_t>) {
    return model::Error(absl::StatusCode::kInternal, model::kIo, "the disk failed");
  };
  ASSERT_EQ(lending_.Lend(std::vector<model::LentTensor>(3)), absl::OkStatus());
  EXPECT_EQ(model::ReasonOf(lending_.AwaitApplied()), model::kIo);
  EXPECT_EQ(alive_, 0);
  EXPECT_FALSE(lending_.active());
}

TEST_F(LendingTest, ARefusedLoanLeavesWrittenValuesToBePushed) {
  rank_.server->on_lend = [](const model::LoanRequest&) {
    return model::Error(absl::StatusCode::kFailedPrecondition, model::kNotOpen, "no");
  };
  WriteC();
  EXPECT_EQ(model::ReasonOf(lending_.Lend(std::vector<model::LentTensor>(3))), model::kNotOpen);
  EXPECT_FALSE(lending_.active());
  EXPECT_FALSE(rank_.values->lent());
  ASSERT_EQ(rank_.values->Push(rank_.values->presence(), rank_.values->written()), absl::OkStatus());
  EXPECT_FALSE(rank_.server->pushed().empty());
}

TEST_F(LendingTest, OnlyOneRankOnOneServerThatTakesLoansCanLend) {
  EXPECT_TRUE(lending_.possible());
  EXPECT_TRUE(lending_.of_values());
  rank_.server->on_lend = nullptr;
  EXPECT_FALSE(lending_.possible());
  EXPECT_FALSE(lending_.of_values());

  const std::vector<std::unique_ptr<Collective>> seats = MakeLoopbackGroup(2);
  const RankOfJob one_of_two(seats[0].get(), 2, 4);
  one_of_two.server->on_lend = [](const model::LoanRequest&) { return std::unique_ptr<model::Loan>(); };
  const Lending lending(one_of_two.job.get(), one_of_two.values.get(), one_of_two.transactions.get());
  EXPECT_FALSE(lending.possible());
}

}  // namespace
}  // namespace ballast::client
