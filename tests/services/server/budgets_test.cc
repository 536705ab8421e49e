// Budgets that change while jobs run: chunks move, and no bit of the training changes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/services/job_state/foundation.h"
#include "ballast/tests/services/machine_with_disk.h"
#include "ballast/tests/services/trainer_group.h"
#include "ballast/tests/services/training_bits.h"
#include "ballast/tests/storage/tier/test_hbm.h"

namespace ballast::services {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kMiB = uint64_t{1} << 20;
// SmallModel has 2.4 MiB of state, and takes 3 MiB besides if some of it is on NVMe: room for all, for some, for none.
constexpr uint64_t kDram[] = {16 * kMiB, 7 * kMiB / 2, 3 * kMiB};

v1::JobSpec Spec(v1::Durability durability) {
  v1::JobSpec spec = MakeSpec("job", SmallModel());
  spec.set_durability(durability);
  return spec;
}

uint32_t Tensors() { return static_cast<uint32_t>(SmallModel().size()); }

absl::Status Step(TrainerGroup& group, int64_t step) {
  BALLAST_RETURN_IF_ERROR(group.PushAll(v1::SLICE_KIND_GRADIENT, AllTensors(Tensors()), GradientOf(step)));
  return group.Finish(UpdateHeader(Tensors())).status();
}

absl::StatusOr<v1::SetBudgetResponse> SetDram(StateServer* server, uint64_t bytes,
                                              std::optional<uint64_t> hbm_bytes = std::nullopt) {
  Answer<v1::SetBudgetResponse> answer;
  v1::SetBudgetRequest request;
  request.set_dram_bytes(bytes);
  if (hbm_bytes.has_value()) request.set_hbm_bytes(*hbm_bytes);
  server->SetBudget(request, answer.reply());
  return answer.Wait();
}

v1::JobStatus JobOf(StateServer* server) { return server->Status().jobs(0); }

void AwaitMoves(StateServer* server) {
  for (int i = 0; i < 30'000 && JobOf(server).chunks_moving() > 0; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  ASSERT_EQ(JobOf(server).chunks_moving(), 0u);
}

class BudgetsTest : public ::testing::TestWithParam<v1::Durability> {
 protected:
  BudgetsTest()
      : server_("s", {.dram = kDram[0], .nvme = 64 * kMiB}),
        undisturbed_server_("r"),
        undisturbed_({undisturbed_server_.get()}, Spec(v1::DURABILITY_NONE), 1) {
    EXPECT_EQ(undisturbed_.Start(), absl::OkStatus());
    EXPECT_EQ(undisturbed_.Initialise(Initial), absl::OkStatus());
  }
  std::unique_ptr<TrainerGroup> NewGroup() {
    auto group =
        std::make_unique<TrainerGroup>(std::vector<StateServer*>{server_.get()}, Spec(GetParam()), 1, ++epochs_);
    EXPECT_EQ(group->Start(), absl::OkStatus());
    return group;
  }
  void ExpectSame(TrainerGroup& group, int64_t version) { services::ExpectSame(undisturbed_, group, version); }
  TestServer server_;
  TestServer undisturbed_server_;
  TrainerGroup undisturbed_;
  uint64_t epochs_ = 0;
};

TEST_P(BudgetsTest, ChangesWhileAJobTrainsChangeNoBit) {
  const uint32_t seed = 20261122;
  SCOPED_TRACE(absl::StrCat("seed ", seed));
  std::mt19937 random(seed);
  auto group = NewGroup();
  ASSERT_EQ(group->Initialise(Initial), absl::OkStatus());
  for (int64_t step = 1; step <= 40; ++step) {
    // Moves run beside the pushes, or between two updates.
    if (random() % 2 == 0) {
      ASSERT_TRUE(SetDram(server_.get(), kDram[random() % 3]).ok());
    }
    ASSERT_EQ(Step(*group, step), absl::OkStatus());
    ASSERT_EQ(Step(undisturbed_, step), absl::OkStatus());
    if (step % 8 == 0) ExpectSame(*group, step);
  }
  EXPECT_GT(JobOf(server_.get()).chunks_moved(), 8u);
  AwaitMoves(server_.get());
  ExpectSame(*group, 40);
}

TEST_P(BudgetsTest, ChunksFollowTheBudgetDownAndUp) {
  auto group = NewGroup();
  ASSERT_EQ(group->Initialise(Initial), absl::OkStatus());
  const auto state = [&](int tier) { return JobOf(server_.get()).tiers(tier).state_bytes(); };
  const uint64_t all = state(1);
  ASSERT_GT(all, 0u);
  const auto lowered = SetDram(server_.get(), kDram[1]);
  ASSERT_TRUE(lowered.ok()) << lowered.status();
  EXPECT_EQ(lowered->tiers(1).capacity_bytes(), kDram[1]);
  ASSERT_EQ(lowered->jobs_size(), 1);
  EXPECT_GT(lowered->jobs(0).chunks_to_nvme(), 0u);
  EXPECT_THAT(lowered->jobs(0).plan(), HasSubstr("nvme holds the state of"));
  AwaitMoves(server_.get());
  EXPECT_GT(state(2), 0u);
  EXPECT_EQ(state(1) + state(2), all);
  EXPECT_LE(server_->Status().tiers(1).used_bytes(), kDram[1]);
  ASSERT_EQ(Step(*group, 1), absl::OkStatus());
  ASSERT_EQ(Step(undisturbed_, 1), absl::OkStatus());

  ASSERT_TRUE(SetDram(server_.get(), kDram[0]).ok());
  AwaitMoves(server_.get());
  EXPECT_EQ(state(1), all);
  EXPECT_EQ(state(2), 0u);
  ASSERT_EQ(Step(*group, 2), absl::OkStatus());
  ASSERT_EQ(Step(undisturbed_, 2), absl::OkStatus());
  ExpectSame(*group, 2);
}

// 0.4 MiB of working copies give way to the budget, and pulls round masters on NVMe.
TEST_P(BudgetsTest, WorkingCopiesGiveWayToTheBudget) {
  auto group = NewGroup();
  ASSERT_EQ(group->Initialise(Initial), absl::OkStatus());
  const auto working = [&] { return JobOf(server_.get()).tiers(1).working_bytes(); };
  const uint64_t before = working();
  uint64_t budget = kDram[2], dropped = 0;
  for (int64_t step = 1; step <= 40; ++step) {
    budget -= 64 << 10;
    const auto lowered = SetDram(server_.get(), budget);
    if (!lowered.ok()) {
      EXPECT_THAT(std::string(lowered.status().message()), HasSubstr("working copies that stay"));
      break;
    }
    dropped += lowered->jobs(0).working_copies_dropped();
    ASSERT_EQ(Step(*group, step), absl::OkStatus());
    ASSERT_EQ(Step(undisturbed_, step), absl::OkStatus());
    AwaitMoves(server_.get());
    EXPECT_LE(server_->Status().tiers(1).used_bytes(), budget);
    ExpectSame(*group, step);
  }
  EXPECT_GT(dropped, 0u);
  EXPECT_LT(working(), before / 2);
}

// The first eight working parameters of a job's first chunk, in place.
model::LeasedBytes Lease(StateServer* server, int64_t version) {
  v1::PullRequest request;
  request.set_job("job");
  request.set_version(version);
  request.set_content(v1::CONTENT_WORKING);
  request.set_end(8);
  Answer<model::LeasedBytes> answer;
  server->Lease(request, absl::InfiniteFuture(), answer.reply());
  const auto leased = answer.Wait();
  EXPECT_TRUE(leased.ok()) << leased.status();
  return leased.ok() ? *leased : model::LeasedBytes();
}

// Nothing that a reader has is dropped under it, and nothing stays when it has given it back, though no step follows.
TEST_P(BudgetsTest, ALoweredBudgetWaitsForLeases) {
  auto group = NewGroup();
  ASSERT_EQ(group->Initialise(Initial), absl::OkStatus());
  model::LeasedBytes leased = Lease(server_.get(), 0);
  ASSERT_NE(leased.held, nullptr);
  const std::vector<std::byte> before(leased.bytes.begin(), leased.bytes.end());
  uint64_t budget = kDram[2], dropped = 0;
  while (dropped == 0) {
    budget -= 64 << 10;
    const auto lowered = SetDram(server_.get(), budget);
    ASSERT_TRUE(lowered.ok()) << lowered.status();
    dropped = lowered->jobs(0).working_copies_dropped();
  }
  EXPECT_EQ(Lease(server_.get(), 0).held, nullptr) << "no other lease is taken";
  EXPECT_GE(JobOf(server_.get()).chunks_moving(), dropped);
  EXPECT_TRUE(std::equal(before.begin(), before.end(), leased.bytes.begin()));
  leased = {};
  AwaitMoves(server_.get());
  EXPECT_LE(server_->Status().tiers(1).used_bytes(), budget);
  ASSERT_EQ(Step(*group, 1), absl::OkStatus());
  ASSERT_EQ(Step(undisturbed_, 1), absl::OkStatus());
  ExpectSame(*group, 1);
}

TEST_P(BudgetsTest, WhatDoesNotMoveIsRefusedWithNumbers) {
  auto group = NewGroup();
  ASSERT_EQ(group->Initialise(Initial), absl::OkStatus());
  const absl::Status status = SetDram(server_.get(), kMiB).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(model::ReasonOf(status), model::kBudget);
  EXPECT_THAT(std::string(status.message()), HasSubstr("a dram budget of 1048576 bytes is short of "));
  EXPECT_EQ(server_->Status().tiers(1).capacity_bytes(), kDram[0]);
  EXPECT_EQ(JobOf(server_.get()).chunks_moving(), 0u);
  // No such tier.
  Answer<v1::SetBudgetResponse> answer;
  v1::SetBudgetRequest request;
  request.set_hbm_bytes(kMiB);
  server_->SetBudget(request, answer.reply());
  EXPECT_EQ(answer.Wait().status().code(), absl::StatusCode::kInvalidArgument);
}

INSTANTIATE_TEST_SUITE_P(Durabilities, BudgetsTest, ::testing::Values(v1::DURABILITY_NONE, v1::DURABILITY_STEP),
                         [](const auto& info) { return v1::Durability_Name(info.param); });

using DurableBudgetsTest = BudgetsTest;
INSTANTIATE_TEST_SUITE_P(Step, DurableBudgetsTest, ::testing::Values(v1::DURABILITY_STEP));

// A restart amid moves plans with the budgets of the configuration, from what is on the disk.
TEST_P(DurableBudgetsTest, RestartsAmidMovesLoseNothing) {
  auto group = NewGroup();
  ASSERT_EQ(group->Initialise(Initial), absl::OkStatus());
  for (int64_t step = 1; step <= 24; ++step) {
    ASSERT_TRUE(SetDram(server_.get(), kDram[step % 3]).ok());
    ASSERT_EQ(Step(*group, step), absl::OkStatus());
    ASSERT_EQ(Step(undisturbed_, step), absl::OkStatus());
    if (step % 3 != 0) continue;
    ASSERT_TRUE(SetDram(server_.get(), kDram[(step / 3) % 3]).ok());
    group.reset();
    server_.Restart();
    EXPECT_EQ(server_->Status().tiers(1).capacity_bytes(), kDram[0]);
    group = NewGroup();
    ExpectSame(*group, step);
  }
}

// This machine, with HBM that the host plays.
class HbmFoundation : public ThisMachine {
 public:
  storage::HbmOpener hbm() override { return storage::TestHbm(); }
};

// SmallModel's state and working copies, some of it, nothing.
constexpr uint64_t kHbm[] = {storage::kHbmScratchBytes + 4 * kMiB, storage::kHbmScratchBytes + 3 * kMiB / 2,
                             storage::kHbmScratchBytes};

class HbmBudgetsTest : public BudgetsTest {
 protected:
  HbmBudgetsTest() {
    server_.options().foundation = &foundation_;
    server_.options().budget.hbm = kHbm[0];
    server_.Restart();
  }
  ~HbmBudgetsTest() override { server_.End(); }
  HbmFoundation foundation_;
};
INSTANTIATE_TEST_SUITE_P(Durabilities, HbmBudgetsTest, ::testing::Values(v1::DURABILITY_NONE, v1::DURABILITY_STEP),
                         [](const auto& info) { return v1::Durability_Name(info.param); });

TEST_P(HbmBudgetsTest, StateGoesThroughAllTiersAndBack) {
  auto group = NewGroup();
  ASSERT_EQ(group->Initialise(Initial), absl::OkStatus());
  const auto state = [&](int tier) { return JobOf(server_.get()).tiers(tier).state_bytes(); };
  const uint64_t all = state(0);
  ASSERT_GT(all, 0u);
  const auto step = [&](int64_t number) {
    ASSERT_EQ(Step(*group, number), absl::OkStatus());
    ASSERT_EQ(Step(undisturbed_, number), absl::OkStatus());
  };
  step(1);
  const auto down = SetDram(server_.get(), kDram[2], kHbm[2]);
  ASSERT_TRUE(down.ok()) << down.status();
  EXPECT_GT(down->jobs(0).chunks_to_nvme(), 0u);
  AwaitMoves(server_.get());
  EXPECT_EQ(state(0), 0u);
  EXPECT_EQ(server_->Status().tiers(0).used_bytes(), storage::kHbmScratchBytes);
  EXPECT_LE(server_->Status().tiers(1).used_bytes(), kDram[2]);
  step(2);
  ASSERT_TRUE(SetDram(server_.get(), kDram[0]).ok());
  AwaitMoves(server_.get());
  EXPECT_EQ(state(1), all);
  step(3);
  const auto up = SetDram(server_.get(), kDram[0], kHbm[0]);
  ASSERT_TRUE(up.ok()) << up.status();
  EXPECT_GT(up->jobs(0).chunks_to_hbm(), 0u);
  AwaitMoves(server_.get());
  EXPECT_EQ(state(0), all);
  step(4);
  ExpectSame(*group, 4);
}

TEST_P(HbmBudgetsTest, ChangesAndRestartsChangeNoBit) {
  const uint32_t seed = 20261124;
  SCOPED_TRACE(absl::StrCat("seed ", seed));
  std::mt19937 random(seed);
  auto group = NewGroup();
  ASSERT_EQ(group->Initialise(Initial), absl::OkStatus());
  for (int64_t step = 1; step <= 32; ++step) {
    if (random() % 2 == 0) {
      const auto changed = SetDram(server_.get(), kDram[random() % 3], kHbm[random() % 3]);
      ASSERT_TRUE(changed.ok()) << changed.status();
    }
    ASSERT_EQ(Step(*group, step), absl::OkStatus());
    ASSERT_EQ(Step(undisturbed_, step), absl::OkStatus());
    if (step % 8 != 0) continue;
    if (GetParam() == v1::DURABILITY_STEP) {
      group.reset();
      server_.Restart();
      group = NewGroup();
    }
    ExpectSame(*group, step);
  }
  AwaitMoves(server_.get());
  ExpectSame(*group, 32);
}

}  // namespace
}  // namespace ballast::services
