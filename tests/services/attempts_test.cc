// One rank has dropped fewer attempts than the other: the log must not fill with its slices, nor lose the other's.
#include <filesystem>

#include "absl/time/clock.h"
#include "ballast/tests/services/logged_slices.h"
#include "ballast/tests/services/trainer_group.h"
#include "ballast/tests/services/training_bits.h"
#include "gtest/gtest.h"

namespace ballast::services {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr absl::Duration kTimeout = absl::Seconds(30);

v1::JobSpec Spec(v1::Durability durability) {
  v1::JobSpec spec = MakeSpec("job", SmallModel());
  spec.set_durability(durability);
  return spec;
}

uint32_t Tensors() { return static_cast<uint32_t>(SmallModel().size()); }

// By the server's DRAM budget.
class AttemptsTest : public ::testing::TestWithParam<uint64_t> {
 protected:
  AttemptsTest() : server_("s", {0, GetParam(), 128 * kMiB}), group_({server_.get()}, Spec(v1::DURABILITY_STEP), 2) {
    EXPECT_EQ(group_.Start(), absl::OkStatus());
    EXPECT_EQ(group_.Initialise(Initial), absl::OkStatus());
  }
  std::string log() const { return server_.directory() + "/log-job"; }

  // The gradients of step 1 of one rank. Returns how many slices they are.
  size_t Push(uint32_t rank, uint64_t attempt) {
    group_.set_attempt(attempt);
    size_t pushed = 0;
    for (uint32_t i = 0; i < group_.plan().slices().size(); ++i) {
      if (group_.plan().slices()[i].rank != rank) continue;
      EXPECT_EQ(group_.PushSlice(i, v1::SLICE_KIND_GRADIENT, GradientOf(1)), absl::OkStatus());
      ++pushed;
    }
    return pushed;
  }
  void Finish() { ASSERT_TRUE(group_.Finish(UpdateHeader(Tensors())).ok()); }
  // Compares with step 1 on an undisturbed server.
  static void ExpectStepOne(TrainerGroup& group) {
    TestServer server("reference");
    TrainerGroup reference({server.get()}, Spec(v1::DURABILITY_NONE), 1);
    ASSERT_EQ(reference.Start(), absl::OkStatus());
    ASSERT_EQ(reference.Initialise(Initial), absl::OkStatus());
    ASSERT_EQ(reference.PushAll(v1::SLICE_KIND_GRADIENT, AllTensors(Tensors()), GradientOf(1)), absl::OkStatus());
    ASSERT_TRUE(reference.Finish(UpdateHeader(Tensors())).ok());
    ExpectSame(reference, group, 1);
  }

  TestServer server_;
  TrainerGroup group_;
};

// Slices of the rank behind cannot become a step, and must not fill the log.
TEST_P(AttemptsTest, ARankThatLagsBehindHoldsNobodyUp) {
  uint64_t step_bytes = 0;
  for (const auto& tensor : SmallModel()) step_bytes += tensor.elements * 2;
  const uint64_t drops = 4 * std::filesystem::file_size(log()) / step_bytes;
  Push(0, drops);
  for (uint64_t attempt = 0; attempt <= drops && !HasFailure(); ++attempt) Push(1, attempt);
  Finish();
  ExpectStepOne(group_);
}

// Slices pushed by the rank behind after the server's restart must not make the log release slices pushed before by its
// peer.
TEST_P(AttemptsTest, TheOneAtWorkOutlivesARestart) {
  const size_t slices = Push(0, 0) + Push(0, 1);
  const absl::Time deadline = absl::Now() + kTimeout;
  while (LoggedSlices(1, log()).size() < slices) {
    ASSERT_LT(absl::Now(), deadline) << "the log has not all that was pushed";
    absl::SleepFor(absl::Milliseconds(1));
  }
  server_.Restart();
  group_.set_server(0, server_.get());
  Push(1, 0);
  Push(1, 1);
  // Cuts the log at the step before.
  ASSERT_EQ(PinDurably(server_.get(), "job", group_.epoch(), 0), absl::OkStatus());
  Finish();
  server_.Restart();
  TrainerGroup next({server_.get()}, Spec(v1::DURABILITY_STEP), 1, 2);
  ASSERT_EQ(next.Start(), absl::OkStatus());
  ExpectStepOne(next);
}

INSTANTIATE_TEST_SUITE_P(Budgets, AttemptsTest, ::testing::Values(64 * kMiB, 3'190'000),
                         [](const auto& budget) { return budget.param == 64 * kMiB ? "Dram" : "ReadBack"; });

}  // namespace
}  // namespace ballast::services
