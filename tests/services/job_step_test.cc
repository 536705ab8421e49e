// Whole steps over real servers. Their state afterwards must have the bits of direct kernel calls.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>

#include "ballast/kernels/kernels.h"
#include "ballast/proto/base/status.h"
#include "ballast/tests/adamw_step.h"
#include "ballast/tests/services/trainer_group.h"

namespace ballast::services {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;

float InitialValue(uint32_t tensor, uint64_t i) { return std::sin(static_cast<float>(i % 9973 + 131 * tensor)); }
Fill GradientOf(int64_t step) {
  return [step](uint32_t tensor, uint64_t i) {
    return std::cos(static_cast<float>((i + static_cast<uint64_t>(step) * 7919) % 10007 + 17 * tensor)) * 0.25f;
  };
}

// The same training in one process, kernels only.
class Reference {
 public:
  explicit Reference(const std::vector<TestTensor>& tensors) {
    for (const TestTensor& t : tensors) Add(t);
  }
  void Add(const TestTensor& t) {
    const auto index = static_cast<uint32_t>(tensors_.size());
    State s;
    s.group = t.group;
    s.master.resize(t.elements);
    for (uint64_t i = 0; i < t.elements; ++i) s.master[i] = InitialValue(index, i);
    s.moment1.resize(t.elements);
    s.moment2.resize(t.elements);
    s.working.resize(t.elements);
    kernels::Bf16FromF32(s.master, absl::MakeSpan(s.working));
    tensors_.push_back(std::move(s));
  }
  void Step(const v1::StepHeader& header, const v1::Verdict& verdict, const Fill& gradient) {
    for (uint32_t index = 0; index < tensors_.size(); ++index) {
      if (verdict.skip() || !model::HasBit(header.gradient_presence(), index)) continue;
      State& s = tensors_[index];
      const v1::GroupHyper& h = header.groups(static_cast<int>(s.group));
      const kernels::Hyper hyper{h.learning_rate(), h.beta1(), h.beta2(), h.epsilon(), h.weight_decay()};
      AdamwStep(kernels::MakeCoefficients({}, hyper, ++s.t, std::bit_cast<float>(verdict.factor_bits())),
                Rounded(index, gradient), absl::MakeSpan(s.master), absl::MakeSpan(s.moment1),
                absl::MakeSpan(s.moment2), absl::MakeSpan(s.working));
    }
  }
  void Write(uint32_t tensor, const Fill& values) {
    State& s = tensors_[tensor];
    for (uint64_t i = 0; i < s.master.size(); ++i) s.master[i] = values(tensor, i);
    kernels::Bf16FromF32(s.master, absl::MakeSpan(s.working));
  }
  double Norm(const v1::StepHeader& header, const Fill& gradient) const {
    double sum = 0;
    for (uint32_t index = 0; index < tensors_.size(); ++index) {
      if (!model::HasBit(header.gradient_presence(), index)) continue;
      for (const kernels::bf16 g : Rounded(index, gradient)) sum += std::pow(kernels::FromBf16(g), 2.0);
    }
    return std::sqrt(sum);
  }
  void ExpectEqual(TrainerGroup& group, int64_t version) const {
    for (uint32_t index = 0; index < tensors_.size(); ++index) {
      const State& s = tensors_[index];
      ExpectSame(group, index, v1::CONTENT_MASTER, version, s.master);
      ExpectSame(group, index, v1::CONTENT_MOMENT1, version, s.moment1);
      ExpectSame(group, index, v1::CONTENT_MOMENT2, version, s.moment2);
      std::vector<float> working(s.working.size());
      kernels::F32FromBf16(s.working, absl::MakeSpan(working));
      ExpectSame(group, index, v1::CONTENT_WORKING, version, working);
    }
  }

 private:
  struct State {
    uint32_t group = 0;
    uint64_t t = 0;
    std::vector<float> master, moment1, moment2;
    std::vector<kernels::bf16> working;
  };
  std::vector<kernels::bf16> Rounded(uint32_t tensor, const Fill& gradient) const {
    std::vector<kernels::bf16> g(tensors_[tensor].master.size());
    for (uint64_t i = 0; i < g.size(); ++i) g[i] = kernels::ToBf16(gradient(tensor, i));
    return g;
  }
  static void ExpectSame(TrainerGroup& group, uint32_t tensor, v1::Content content, int64_t version,
                         const std::vector<float>& expected) {
    const auto read = group.Read(tensor, content, version);
    ASSERT_TRUE(read.ok()) << read.status();
    ASSERT_EQ(read->size(), expected.size());
    uint64_t wrong = 0;
    for (size_t i = 0; i < expected.size(); ++i) {
      wrong += std::bit_cast<uint32_t>((*read)[i]) != std::bit_cast<uint32_t>(expected[i]);
    }
    EXPECT_EQ(wrong, 0u) << "tensor " << tensor << " content " << content << " at version " << version;
  }
  std::vector<State> tensors_;
};

struct Shape {
  int servers;
  uint32_t world_size;
  storage::TierBytes budget;
  bool large = false;  // the working copies alone do not fit into DRAM

  std::vector<TestTensor> model() const {
    if (!large) return SmallModel();
    return {
        {"embed", "u0", 3'000'000, 0}, {"norm", "u0", 100, 1}, {"weight", "u1", 4'000'000, 0}, {"bias", "u1", 300, 1}};
  }
};

class JobStep : public ::testing::TestWithParam<Shape> {
 protected:
  void SetUp() override {
    for (int i = 0; i < GetParam().servers; ++i) {
      servers_.push_back(std::make_unique<TestServer>("s" + std::to_string(i), GetParam().budget));
      pointers_.push_back(servers_.back()->get());
    }
  }
  std::vector<std::unique_ptr<TestServer>> servers_;
  std::vector<StateServer*> pointers_;
};

TEST_P(JobStep, HoldsTheBitsOfTheKernels) {
  TrainerGroup group(pointers_, MakeSpec("job", GetParam().model()), GetParam().world_size);
  ASSERT_EQ(group.Start(), absl::OkStatus());
  ASSERT_EQ(group.Initialise(InitialValue), absl::OkStatus());
  Reference reference(GetParam().model());
  reference.ExpectEqual(group, 0);
  for (int64_t step = 1; step <= 5; ++step) {
    v1::StepHeader header = UpdateHeader(4);
    // Some tensors absent: their t stands still, so later bias corrections differ from the others'.
    if (step % 2 == 0) header.set_gradient_presence(model::MakeBitmap(4, {1, 2}));
    if (step == 3) header.set_max_norm(0);
    // Pushed at once after the last commit, so that pushes meet chunks whose update still runs.
    ASSERT_EQ(group.PushAll(v1::SLICE_KIND_GRADIENT, header.gradient_presence(), GradientOf(step)), absl::OkStatus());
    const auto decision = group.Finish(header);
    ASSERT_TRUE(decision.ok()) << decision.status();
    const double norm = reference.Norm(header, GradientOf(step)) * header.gradient_scale();
    EXPECT_NEAR(decision->verdict().norm(), norm, 1e-9 * norm);
    reference.Step(header, decision->verdict(), GradientOf(step));
  }
  reference.ExpectEqual(group, 5);
  if (GetParam().budget.nvme > 0) {
    uint64_t nvme = 0;
    for (StateServer* server : pointers_) nvme += server->Status().tiers(2).state_bytes();
    EXPECT_GT(nvme, 0u) << "the budget should have pushed state to NVMe";
  }
  if (GetParam().large) {
    EXPECT_LT(pointers_[0]->Status().tiers(1).working_bytes(), 10'000'000u);
    EXPECT_LE(pointers_[0]->Status().tiers(1).used_bytes(), GetParam().budget.dram);
  }
}

TEST_P(JobStep, SkipsOnAllServersWhenAGradientIsNotFinite) {
  TrainerGroup group(pointers_, MakeSpec("job", GetParam().model()), GetParam().world_size);
  ASSERT_EQ(group.Start(), absl::OkStatus());
  ASSERT_EQ(group.Initialise(InitialValue), absl::OkStatus());
  Reference reference(GetParam().model());
  const auto poisoned = [](uint32_t tensor, uint64_t i) {
    return tensor == 2 && i == 99'999 ? std::numeric_limits<float>::quiet_NaN() : 0.5f;
  };
  ASSERT_EQ(group.PushAll(v1::SLICE_KIND_GRADIENT, AllTensors(4), poisoned), absl::OkStatus());
  const auto skipped = group.Finish(UpdateHeader(4));
  ASSERT_TRUE(skipped.ok()) << skipped.status();
  EXPECT_TRUE(skipped->verdict().skip());
  reference.ExpectEqual(group, 1);
  for (StateServer* server : pointers_) {
    const v1::GetServerStatusResponse status = server->Status();
    EXPECT_EQ(status.jobs(0).skipped_steps(), 1u);
    EXPECT_EQ(status.jobs(0).committed(), 1);
  }
  // The next step is the first update: t did not move.
  ASSERT_EQ(group.PushAll(v1::SLICE_KIND_GRADIENT, AllTensors(4), GradientOf(2)), absl::OkStatus());
  const auto decision = group.Finish(UpdateHeader(4));
  ASSERT_TRUE(decision.ok()) << decision.status();
  reference.Step(UpdateHeader(4), decision->verdict(), GradientOf(2));
  reference.ExpectEqual(group, 2);
}

TEST_P(JobStep, AppliesValuesBeforeGradients) {
  TrainerGroup group(pointers_, MakeSpec("job", GetParam().model()), GetParam().world_size);
  ASSERT_EQ(group.Start(), absl::OkStatus());
  ASSERT_EQ(group.Initialise(InitialValue), absl::OkStatus());
  Reference reference(GetParam().model());
  const auto edit = [](uint32_t, uint64_t i) { return static_cast<float>(i % 13) - 6; };
  v1::StepHeader header = UpdateHeader(4);
  header.set_value_presence(model::MakeBitmap(4, {1}));
  // Slices of tensor 1 reach into tensor 0, which is not edited: those elements must not be taken.
  ASSERT_EQ(group.PushAll(v1::SLICE_KIND_VALUE, header.value_presence(), edit), absl::OkStatus());
  ASSERT_EQ(group.PushAll(v1::SLICE_KIND_GRADIENT, AllTensors(4), GradientOf(1)), absl::OkStatus());
  const auto decision = group.Finish(header);
  ASSERT_TRUE(decision.ok()) << decision.status();
  reference.Write(1, edit);
  reference.Step(header, decision->verdict(), GradientOf(1));
  reference.ExpectEqual(group, 1);
}

TEST_P(JobStep, ADroppedAttemptLeavesNothing) {
  TrainerGroup group(pointers_, MakeSpec("job", GetParam().model()), GetParam().world_size);
  ASSERT_EQ(group.Start(), absl::OkStatus());
  ASSERT_EQ(group.Initialise(InitialValue), absl::OkStatus());
  ASSERT_EQ(group.PushAll(v1::SLICE_KIND_GRADIENT, AllTensors(4), [](uint32_t, uint64_t) { return 1e30f; }),
            absl::OkStatus());
  group.set_attempt(1);
  ASSERT_EQ(group.PushAll(v1::SLICE_KIND_GRADIENT, AllTensors(4), GradientOf(1)), absl::OkStatus());
  const auto decision = group.Finish(UpdateHeader(4));
  ASSERT_TRUE(decision.ok()) << decision.status();
  Reference reference(GetParam().model());
  EXPECT_LT(decision->verdict().norm(), 1e6);
  reference.Step(UpdateHeader(4), decision->verdict(), GradientOf(1));
  reference.ExpectEqual(group, 1);
}

TEST_P(JobStep, GoesOnWithAnotherWorldSizeAndMoreTensors) {
  v1::JobSpec spec = MakeSpec("job", GetParam().model());
  Reference reference(GetParam().model());
  const auto step = [&](TrainerGroup& group, uint32_t tensors) {
    const int64_t n = group.step();
    ASSERT_EQ(group.PushAll(v1::SLICE_KIND_GRADIENT, AllTensors(tensors), GradientOf(n)), absl::OkStatus());
    const auto decision = group.Finish(UpdateHeader(tensors));
    ASSERT_TRUE(decision.ok()) << decision.status();
    reference.Step(UpdateHeader(tensors), decision->verdict(), GradientOf(n));
    reference.ExpectEqual(group, n);
  };
  TrainerGroup first(pointers_, spec, GetParam().world_size, 1);
  ASSERT_EQ(first.Start(), absl::OkStatus());
  ASSERT_EQ(first.Initialise(InitialValue), absl::OkStatus());
  step(first, 4);

  TrainerGroup second(pointers_, spec, GetParam().world_size + 2, 2);
  ASSERT_EQ(second.Start(), absl::OkStatus());
  EXPECT_EQ(model::ReasonOf(first.PushAll(v1::SLICE_KIND_GRADIENT, AllTensors(4), GradientOf(2))), model::kStaleEpoch);
  step(second, 4);

  const TestTensor added{"head", "u1", 30'000, 1};
  Append({added}, 2, &spec);
  TrainerGroup third(pointers_, spec, GetParam().world_size, 3);
  ASSERT_EQ(third.Start(), absl::OkStatus());
  v1::StepHeader values = ValuesHeader(5);
  values.set_value_presence(model::MakeBitmap(5, {4}));
  ASSERT_EQ(third.PushAll(v1::SLICE_KIND_VALUE, values.value_presence(), InitialValue), absl::OkStatus());
  ASSERT_EQ(third.Finish(values).status(), absl::OkStatus());
  reference.Add(added);
  reference.ExpectEqual(third, 3);
  step(third, 5);
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, JobStep,
    ::testing::Values(Shape{1, 1, {0, 64 * kMiB, 0}}, Shape{2, 2, {0, 64 * kMiB, 0}}, Shape{3, 4, {0, 64 * kMiB, 0}},
                      Shape{1, 2, {0, 3 * kMiB + kMiB / 2, 64 * kMiB}}, Shape{1, 2, {0, 13 * kMiB, 256 * kMiB}, true}),
    [](const auto& info) {
      return std::to_string(info.param.servers) + "servers" + std::to_string(info.param.world_size) + "ranks" +
             (info.param.budget.nvme > 0 ? "nvme" : "") + (info.param.large ? "withoutCopies" : "");
    });

TEST(Job, DoublePushesAreHeldOnce) {
  TestServer server("s");
  TrainerGroup group({server.get()}, MakeSpec("job", SmallModel()), 2);
  ASSERT_EQ(group.Start(), absl::OkStatus());
  ASSERT_EQ(group.PushSlice(0, v1::SLICE_KIND_VALUE, InitialValue), absl::OkStatus());
  EXPECT_EQ(group.PushSlice(0, v1::SLICE_KIND_VALUE, InitialValue), absl::OkStatus());
  const absl::Status other = group.PushSlice(0, v1::SLICE_KIND_VALUE, [](uint32_t, uint64_t) { return 3.0f; });
  EXPECT_EQ(other.code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(model::ReasonOf(other), model::kDigestConflict);
}

}  // namespace
}  // namespace ballast::services
