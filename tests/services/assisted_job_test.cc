// Tensors whose updates the trainer assists: servers make plain SGD steps of the updates that it pushes, and of the
// gradients that go to its states, beside tensors that the job's own optimizer updates.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <spdlog/sinks/ringbuffer_sink.h>
#include <spdlog/spdlog.h>

#include <cmath>
#include <filesystem>
#include <limits>
#include <memory>
#include <optional>

#include "ballast/kernels/kernels.h"
#include "ballast/proto/base/status.h"
#include "ballast/services/tools/verify/verify.h"
#include "ballast/tests/instruction_sets.h"
#include "ballast/tests/services/trainer_group.h"

namespace ballast::services {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr uint32_t kBias = 0, kMatrix = 1, kState = 2, kNorm = 3, kTensors = 4;

// Several chunks of each kind, which end amid a block. `assisted`: else all are the optimizer's.
std::vector<TestTensor> Model(bool assisted = true) {
  const auto as = [&](v1::Assist assist) { return assisted ? assist : v1::ASSIST_UNSPECIFIED; };
  return {{"bias", "u", 70001, 0},
          {"matrix", "u", 140003, 1, v1::FROZEN_UNSPECIFIED, as(v1::ASSIST_UPDATE)},
          {"matrix#state", "u", 140003, 2, v1::FROZEN_UNSPECIFIED, as(v1::ASSIST_STATE)},
          {"norm", "u", 300, 0}};
}

float Initial(uint32_t tensor, uint64_t element) {
  return tensor == kState ? 0 : std::sin(static_cast<float>(element) * 0.37f + static_cast<float>(tensor));
}
// In bf16 without rounding.
Fill GradientOf(int64_t step) {
  return [step](uint32_t tensor, uint64_t element) {
    return static_cast<float>((tensor * 31 + element * 17 + static_cast<uint64_t>(step) * 101) % 255) / 128 - 1;
  };
}

v1::JobSpec Spec(v1::Durability durability, bool assisted = true) {
  v1::JobSpec spec = MakeSpec("job", Model(assisted));
  spec.set_group_count(3);
  spec.set_durability(durability);
  if (durability == v1::DURABILITY_EVERY_K) spec.set_pin_interval(1);
  return spec;
}

// Groups: AdamW's, the updates', and of the states, whose step is a running mean.
v1::StepHeader Header(double max_norm) {
  v1::StepHeader header = UpdateHeader(kTensors);
  header.mutable_groups(1)->set_weight_decay(0.25);
  v1::GroupHyper* const state = header.add_groups();
  state->set_learning_rate(1 - 0.875);
  state->set_weight_decay(1);
  state->set_maximize(true);
  header.set_gradient_scale(0.5);
  header.set_max_norm(max_norm);
  return header;
}

struct Way {
  const char* name;
  v1::Durability durability;
  storage::TierBytes budget;
  uint32_t ranks;
};

class AssistedJobTest : public ::testing::TestWithParam<Way> {
 protected:
  static void SetUpTestSuite() { spdlog::default_logger()->sinks().push_back(log_); }  // before there are servers

  AssistedJobTest() : server_("s", GetParam().budget), other_("o", {.dram = 64 * kMiB}) {
    for (const uint32_t tensor : {kMatrix, kState}) {
      for (uint64_t i = 0; i < 140003; ++i) expected_[tensor].push_back(Initial(tensor, i));
    }
  }

  void Open() {
    group_ = std::make_unique<TrainerGroup>(std::vector<StateServer*>{server_.get()}, Spec(GetParam().durability),
                                            GetParam().ranks, ++epochs_);
    ASSERT_EQ(group_->Start(), absl::OkStatus());
  }
  void Begin() {
    Open();
    ASSERT_EQ(group_->Initialise(Initial), absl::OkStatus());
    plain_ =
        std::make_unique<TrainerGroup>(std::vector<StateServer*>{other_.get()}, Spec(v1::DURABILITY_NONE, false), 1);
    ASSERT_EQ(plain_->Start(), absl::OkStatus());
    ASSERT_EQ(plain_->Initialise(Initial), absl::OkStatus());
  }

  // A step here, and in the job without assisted tensors, where the clip factor is another one unless max_norm is 0.
  void Step(double max_norm = 0) {
    const Fill gradient = GradientOf(group_->step());
    const v1::StepHeader header = Header(max_norm);
    ASSERT_EQ(group_->PushAll(v1::SLICE_KIND_GRADIENT, header.gradient_presence(), gradient), absl::OkStatus());
    const auto decision = group_->Finish(header);
    ASSERT_TRUE(decision.ok()) << decision.status();
    Expect(gradient, std::bit_cast<float>(decision->verdict().factor_bits()));
    ASSERT_EQ(plain_->PushAll(v1::SLICE_KIND_GRADIENT, header.gradient_presence(), gradient), absl::OkStatus());
    ASSERT_EQ(plain_->Finish(header).status(), absl::OkStatus());
  }

  // The same steps by the formulas of kernels/optimizer.h.
  void Expect(const Fill& gradient, float factor) {
    for (uint64_t i = 0; i < 140003; ++i) {
      float& p = expected_[kMatrix][i];
      p = std::fma(-0.005f, std::fma(0.25f, p, gradient(kMatrix, i)), p);
      float& m = expected_[kState][i];
      m = std::fma(-0.125f, std::fma(1.0f, m, -factor * gradient(kState, i)), m);
    }
  }

  void ExpectAll() {
    const int64_t version = group_->step() - 1;
    for (const uint32_t tensor : {kMatrix, kState}) {
      const auto master = group_->Read(tensor, v1::CONTENT_MASTER, version);
      ASSERT_TRUE(master.ok()) << master.status();
      EXPECT_EQ(*master, expected_[tensor]);
      const auto working = group_->Read(tensor, v1::CONTENT_WORKING, version);
      ASSERT_TRUE(working.ok()) << working.status();
      for (uint64_t i = 0; i < working->size(); ++i) {
        ASSERT_EQ((*working)[i], kernels::FromBf16(kernels::ToBf16((*master)[i]))) << i;
      }
    }
    for (const uint32_t tensor : {kBias, kNorm}) {
      for (const v1::Content what : {v1::CONTENT_MASTER, v1::CONTENT_MOMENT1, v1::CONTENT_MOMENT2}) {
        const auto mine = group_->Read(tensor, what, version);
        ASSERT_TRUE(mine.ok()) << mine.status();
        EXPECT_EQ(*mine, *plain_->Read(tensor, what, plain_->step() - 1)) << tensor << ", content " << what;
      }
    }
  }

  // What servers said last.
  std::string LastLines() {
    std::string lines;
    for (const std::string& line : log_->last_formatted(6)) lines += line;
    return lines;
  }

  static inline const auto log_ = std::make_shared<spdlog::sinks::ringbuffer_sink_mt>(6);
  TestServer server_, other_;
  std::unique_ptr<TrainerGroup> group_, plain_;
  std::vector<float> expected_[kTensors];
  uint64_t epochs_ = 0;
};

TEST_P(AssistedJobTest, UpdatesAreAppliedAndStatesAreMeans) {
  Begin();
  for (int i = 0; i < 3; ++i) Step();
  ExpectAll();
}

// The replay has updates as they were pushed, and states by the clip factor of the time.
TEST_P(AssistedJobTest, ARestartChangesNothing) {
  if (GetParam().durability == v1::DURABILITY_NONE) return;  // no state outlives the server
  Begin();
  for (int i = 0; i < 20; ++i) Step();
  for (int i = 0; i < 2; ++i) {
    group_.reset();
    server_.End();
    const auto report = Verify(server_.directory(), nullptr);
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_THAT(report->findings, IsEmpty()) << report->findings[0].what << ": " << report->findings[0].found;
    if (i == 1) {
      std::filesystem::remove_all(server_.directory() + "/catalog");
      const auto rebuilt = Rebuild(server_.directory(), nullptr);
      ASSERT_TRUE(rebuilt.ok()) << rebuilt.status();
      EXPECT_TRUE(rebuilt->written) << (rebuilt->refused.empty() ? "" : rebuilt->refused[0]);
    }
    server_.Restart();
    Open();
    ExpectAll();
    Step();
    ExpectAll();
  }
}

TEST_P(AssistedJobTest, ClippingCountsTheStatesGradientsAlone) {
  Begin();
  const v1::StepHeader header = Header(1.5);
  const auto fill = [](uint32_t tensor, uint64_t) { return tensor == kMatrix ? 64.0f : 1.0f; };
  ASSERT_EQ(group_->PushAll(v1::SLICE_KIND_GRADIENT, header.gradient_presence(), fill), absl::OkStatus());
  const auto decision = group_->Finish(header);
  ASSERT_TRUE(decision.ok()) << decision.status();
  const double norm = 0.5 * std::sqrt(70001.0 + 140003 + 300);
  EXPECT_DOUBLE_EQ(decision->verdict().norm(), norm);
  const auto factor = static_cast<float>(0.5 * (1.5 / (norm + 1e-6)));
  EXPECT_EQ(std::bit_cast<float>(decision->verdict().factor_bits()), factor);
  const auto matrix = group_->Read(kMatrix, v1::CONTENT_MASTER, group_->step() - 1);
  ASSERT_TRUE(matrix.ok()) << matrix.status();
  for (uint64_t i = 0; i < matrix->size(); i += 101) {
    const float p = Initial(kMatrix, i);
    ASSERT_EQ((*matrix)[i], std::fma(-0.005f, std::fma(0.25f, p, 64.0f), p)) << i;
  }
  EXPECT_EQ((*group_->Read(kState, v1::CONTENT_MASTER, group_->step() - 1))[7], 0.125f * factor);
}

TEST_P(AssistedJobTest, AnUpdateThatIsNotFiniteSkipsTheStep) {
  Begin();
  const v1::StepHeader header = Header(0);
  const auto fill = [](uint32_t tensor, uint64_t element) {
    return tensor == kMatrix && element == 140002 ? std::numeric_limits<float>::quiet_NaN() : 1.0f;
  };
  ASSERT_EQ(group_->PushAll(v1::SLICE_KIND_GRADIENT, header.gradient_presence(), fill), absl::OkStatus());
  const auto decision = group_->Finish(header);
  ASSERT_TRUE(decision.ok()) << decision.status();
  EXPECT_TRUE(decision->verdict().skip());
  ExpectAll();
}

// A master each, and a working copy; AdamW's have two moments more.
TEST_P(AssistedJobTest, KeepsNoMoments) {
  Begin();
  const auto padded = [](uint64_t bytes) { return (bytes + 4095) / 4096 * 4096; };
  constexpr uint64_t kLabel = 4096, kChunk = 65536;
  uint64_t expected = 0;
  for (const uint64_t n : {kChunk, 70144 + 512 - kChunk}) expected += 3 * padded(4 * n) + kLabel;
  for (const uint64_t n : {kChunk, kChunk, 140032 - 2 * kChunk}) expected += 2 * (padded(4 * n) + kLabel);
  uint64_t state = 0;
  const v1::JobStatus job = server_->Status().jobs(0);
  for (const v1::TierStatus& tier : job.tiers()) state += tier.state_bytes();
  EXPECT_EQ(state, expected);
  EXPECT_THAT(std::string(group_->Read(kMatrix, v1::CONTENT_MOMENT1, 0).status().message()),
              HasSubstr("is of assisted tensors, which have no moments"));
  v1::StepHeader moments = ValuesHeader(kTensors);
  moments.set_value_presence(model::MakeBitmap(kTensors, {kBias, kState}));
  moments.set_value_array(1);
  EXPECT_THAT(std::string(group_->SealAll(moments).status().message()),
              HasSubstr("names tensor 'matrix#state' with value_array 1: the trainer assists"));
}

// The kernels' instruction set while no server runs: a server that starts computes with it.
class Machine {
 public:
  void Become(int64_t instructions) {
    use_.reset();
    use_.emplace(instructions);
  }

 private:
  std::optional<kernels::UseInstructionSet> use_;
};

// Each restart replays steps on a machine of another instruction set than made them, also those of tensors that the
// job's own optimizer updates. The job without assisted tensors does not restart.
TEST_P(AssistedJobTest, AnotherInstructionSetReplaysTheSameBits) {
  if (GetParam().durability == v1::DURABILITY_NONE) return;  // no state outlives the server
  const std::vector<int64_t> sets = kernels::InstructionSets();
  Machine machine;
  machine.Become(sets.back());
  Begin();
  for (int i = 0; i < 20; ++i) Step();
  for (const int64_t instructions : sets) {
    AwaitIdle(other_.get(), "job");  // its last step is the old machine's
    const int64_t steps = group_->step() - 1;
    group_.reset();
    server_.End();
    machine.Become(instructions);
    server_.Restart();
    EXPECT_THAT(LastLines(), ContainsRegex("recovered step " + std::to_string(steps) +
                                           " in [^\n]* [1-9][0-9]* steps and [1-9][0-9]* MiB of slices replayed"));
    Open();
    ExpectAll();
    for (int i = 0; i < 6; ++i) Step();
    ExpectAll();
  }
}

INSTANTIATE_TEST_SUITE_P(
    Ways, AssistedJobTest,
    ::testing::Values(Way{"Dram", v1::DURABILITY_NONE, {.dram = 64 * kMiB}, 2},
                      Way{"Nvme", v1::DURABILITY_NONE, {.dram = 4 * kMiB, .nvme = 64 * kMiB}, 1},
                      Way{"Logged", v1::DURABILITY_STEP, {.dram = 64 * kMiB, .nvme = 256 * kMiB}, 2},
                      Way{"LoggedNvme", v1::DURABILITY_STEP, {.dram = 6 * kMiB, .nvme = 256 * kMiB}, 1}),
    [](const auto& info) { return info.param.name; });

TEST(AssistedSpecTest, RefusesWhatItCannotHonour) {
  const auto refused = [](const v1::JobSpec& spec, const std::string& words) {
    const auto layout = model::Layout::Make(spec);
    EXPECT_EQ(model::ReasonOf(layout.status()), model::kBadSpec);
    EXPECT_THAT(std::string(layout.status().message()), HasSubstr(words));
  };
  v1::JobSpec spec = Spec(v1::DURABILITY_NONE);
  v1::TensorSpec* const matrix = spec.mutable_registrations(0)->mutable_tensors(kMatrix);
  matrix->set_frozen(v1::FROZEN_Q8);
  refused(spec, "'matrix' is FROZEN_Q8 and ASSIST_UPDATE: a frozen tensor has no updates");
  matrix->set_frozen(v1::FROZEN_UNSPECIFIED);
  matrix->set_assist(static_cast<v1::Assist>(7));
  refused(spec, "'matrix' is to be assisted as 7");
  matrix->set_assist(v1::ASSIST_UPDATE);
  spec.set_working_dtype(v1::DTYPE_F32);
  spec.set_master_format(v1::MASTER_FORMAT_LENT);
  refused(spec, "which needs a master on the servers");
}

}  // namespace
}  // namespace ballast::services
