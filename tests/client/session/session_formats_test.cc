// Sessions of jobs with another optimizer or other dtypes than the default.
#include <gtest/gtest.h>

#include <cmath>

#include "ballast/kernels/kernels.h"
#include "ballast/proto/base/status.h"
#include "ballast/tests/client/session/session_fixture.h"

namespace ballast::client {
namespace {

using kernels::Dtype;
using kernels::MomentFormat;
using kernels::OptimizerKind;

class SessionFormats : public ::testing::Test {
 protected:
  absl::Status Run(const SessionOptions& options, const std::function<absl::Status(Session&)>& body) {
    return SessionFixture::RunRanks(1, [&](Collective* collective) -> absl::Status {
      BALLAST_ASSIGN_OR_RETURN(auto session, servers_.Open(collective, options, TestTensors()));
      return body(*session);
    });
  }
  static SessionOptions Options(const kernels::OptimizerSpec& optimizer) {
    SessionOptions options = TestOptions();
    options.optimizer = optimizer;
    return options;
  }

  SessionFixture servers_{2};
};

TEST_F(SessionFormats, Fp32GradientsAndParametersThroughEveryCall) {
  const kernels::OptimizerSpec sgd{.kind = OptimizerKind::kSgd, .gradient = Dtype::kF32, .working = Dtype::kF32};
  const absl::Status ran = Run(Options(sgd), [](Session& session) -> absl::Status {
    BALLAST_RETURN_IF_ERROR(InitialiseAll(session));
    BALLAST_RETURN_IF_ERROR(Expect(session.optimizer().kind == OptimizerKind::kSgd, "optimizer()"));
    std::vector<std::vector<float>> before;
    for (uint32_t unit = 0; unit < session.unit_count(); ++unit) {
      BALLAST_ASSIGN_OR_RETURN(const UnitLease lease, session.Acquire(unit));
      BALLAST_RETURN_IF_ERROR(Expect(lease.bytes().size() == 4 * session.unit_elements(unit), "bytes()"));
      EXPECT_DEATH((void)lease.parameters(), "4 bytes an element; use parameters_f32");
      BALLAST_RETURN_IF_ERROR(session.Push(unit, std::vector<float>(session.owned_elements(unit), 0.25f)));
      before.emplace_back(lease.parameters_f32().begin(), lease.parameters_f32().end());
    }
    StepOptions step = TestStep(0.5);
    for (GroupHyper& group : step.groups) group.weight_decay = 0, group.maximize = true;
    BALLAST_RETURN_IF_ERROR(session.Step(step).status());
    std::vector<float> up(700 * 100), master(up.size());
    BALLAST_RETURN_IF_ERROR(session.Read("layer.up", Content::kWorking, session.version(), absl::MakeSpan(up)));
    BALLAST_RETURN_IF_ERROR(session.Read("layer.up", Content::kMaster, session.version(), absl::MakeSpan(master)));
    BALLAST_ASSIGN_OR_RETURN(const Session::Location at, session.Locate("layer.up"));
    for (size_t i = 0; i < up.size(); ++i) {
      const float expected = std::fma(0.5f, 0.25f, before[at.unit][at.begin + i]);
      BALLAST_RETURN_IF_ERROR(Expect(up[i] == expected && master[i] == expected, "p + 0.5 x 0.25"));
    }
    return ExpectError(session.Read("layer.up", Content::kMoment1, session.version(), absl::MakeSpan(up)),
                       model::kBadRequest, "0 moment(s) of sgd");
  });
  EXPECT_EQ(ran, absl::OkStatus());
}

TEST_F(SessionFormats, ElementsOfAnotherWidthAreRefused) {
  const absl::Status ran = Run(Options({}), [](Session& session) -> absl::Status {
    BALLAST_RETURN_IF_ERROR(InitialiseAll(session));
    std::vector<float> wide(session.owned_elements(0));
    BALLAST_RETURN_IF_ERROR(
        ExpectError(session.Push(0, absl::MakeConstSpan(wide)), model::kBadDtype, "2 bytes an element, got 4"));
    return TrainStep(session, 1).status();
  });
  EXPECT_EQ(ran, absl::OkStatus());
}

TEST_F(SessionFormats, Fp16GradientsAreTakenAsTheyCome) {
  const kernels::OptimizerSpec spec{.kind = OptimizerKind::kSgd, .gradient = Dtype::kF16, .working = Dtype::kF16};
  const absl::Status ran = Run(Options(spec), [](Session& session) -> absl::Status {
    BALLAST_RETURN_IF_ERROR(InitialiseAll(session));
    const uint16_t bits = kernels::ToF16(0.3003f);
    std::vector<float> before(257), after(257);
    BALLAST_RETURN_IF_ERROR(session.Read("embed.norm", Content::kMaster, session.version(), absl::MakeSpan(before)));
    for (uint32_t unit = 0; unit < session.unit_count(); ++unit) {
      BALLAST_RETURN_IF_ERROR(session.Push(unit, std::vector<bf16>(session.owned_elements(unit), bits)));
    }
    StepOptions step = TestStep(1);
    for (GroupHyper& group : step.groups) group.weight_decay = 0;
    BALLAST_RETURN_IF_ERROR(session.Step(step).status());
    BALLAST_RETURN_IF_ERROR(session.Read("embed.norm", Content::kMaster, session.version(), absl::MakeSpan(after)));
    for (size_t i = 0; i < after.size(); ++i) {
      BALLAST_RETURN_IF_ERROR(Expect(after[i] == before[i] - kernels::FromF16(bits), "p - fp16(g)"));
    }
    return absl::OkStatus();
  });
  EXPECT_EQ(ran, absl::OkStatus());
}

// Blocks of e4m3 through every call of a session: gathers, runs, reads and leases; and what is refused.
TEST_F(SessionFormats, BlocksOfE4m3ThroughEveryCall) {
  constexpr Dtype kBlocks = Dtype::kE4m3Blocks;
  const absl::Status ran = Run(Options({.working = kBlocks}), [](Session& session) -> absl::Status {
    BALLAST_RETURN_IF_ERROR(InitialiseAll(session));
    BALLAST_RETURN_IF_ERROR(TrainStep(session, 1).status());
    std::vector<float> master(700 * 100), working(master.size());
    const int64_t version = session.version();
    BALLAST_RETURN_IF_ERROR(session.Read("layer.up", Content::kMaster, version, absl::MakeSpan(master)));
    BALLAST_RETURN_IF_ERROR(session.Read("layer.up", Content::kWorking, version, absl::MakeSpan(working)));
    std::vector<std::byte> coded(kernels::BytesOf(kBlocks, master.size()));
    std::vector<float> expected(master.size());
    kernels::FromF32(master, kBlocks, coded.data());
    kernels::ToF32(kBlocks, coded.data(), absl::MakeSpan(expected));
    BALLAST_RETURN_IF_ERROR(Expect(working == expected, "Read of kWorking"));

    BALLAST_ASSIGN_OR_RETURN(const Session::Location at, session.Locate("layer.up"));
    BALLAST_ASSIGN_OR_RETURN(const UnitLease lease, session.Acquire(at.unit));
    const uint64_t elements = session.unit_elements(at.unit);
    BALLAST_RETURN_IF_ERROR(Expect(lease.bytes().size() == kernels::BytesOf(kBlocks, elements), "bytes()"));
    std::vector<float> unit(elements);
    kernels::ToF32(kBlocks, lease.bytes().data(), absl::MakeSpan(unit));
    for (size_t i = 0; i < expected.size(); ++i) {
      BALLAST_RETURN_IF_ERROR(Expect(unit[at.begin + i] == expected[i], "Acquire"));
    }
    EXPECT_DEATH((void)lease.parameters(), "kernels::ToF32");

    // From the second block on, to amid the fourth.
    std::vector<std::byte> run(kernels::BytesOf(kBlocks, 600));
    const PullRun wanted{{at.begin + 256, at.begin + 856}, absl::MakeSpan(run)};
    BALLAST_ASSIGN_OR_RETURN(PendingPull pull, session.StartPull(at.unit, {wanted}));
    BALLAST_RETURN_IF_ERROR(pull.Await());
    BALLAST_RETURN_IF_ERROR(Expect(std::equal(run.begin(), run.end(), coded.begin() + 260), "StartPull"));
    BALLAST_ASSIGN_OR_RETURN(WorkingCopyLease held, session.StartLease(at.unit, {{at.begin + 256, at.begin + 856}}));
    BALLAST_ASSIGN_OR_RETURN(const auto parts, held.Await());
    BALLAST_RETURN_IF_ERROR(Expect(parts[0].bytes.size() == run.size(), "size of a lease"));
    BALLAST_RETURN_IF_ERROR(
        Expect(std::equal(run.begin(), run.end(), parts[0].bytes.begin(), parts[0].bytes.end()), "StartLease"));

    const PullRun amid{{at.begin + 255, at.begin + 855}, absl::MakeSpan(run)};
    BALLAST_ASSIGN_OR_RETURN(PendingPull refused, session.StartPull(at.unit, {amid}));
    BALLAST_RETURN_IF_ERROR(ExpectError(refused.Await(), model::kBadRange, "amid a block"));
    const PullRun narrow{wanted.range, absl::MakeSpan(run).first(600)};
    BALLAST_ASSIGN_OR_RETURN(PendingPull small, session.StartPull(at.unit, {narrow}));
    return ExpectError(small.Await(), model::kBadLength, "expected 780");
  });
  EXPECT_EQ(ran, absl::OkStatus());
}

TEST_F(SessionFormats, FrozenTensorsAreNoBlocks) {
  SessionOptions options = Options({.working = Dtype::kE4m3Blocks});
  std::vector<TensorSpec> tensors = TestTensors();
  tensors[0].frozen = v1::FROZEN_WORKING;
  const absl::Status ran = SessionFixture::RunRanks(
      1, [&](Collective* collective) -> absl::Status { return servers_.Open(collective, options, tensors).status(); });
  EXPECT_EQ(ExpectError(ran, model::kBadSpec, "which frozen values cannot be"), absl::OkStatus());
}

// Moments in 8 bits read as numbers near those of fp32; AMSGrad's third one is there.
TEST_F(SessionFormats, CodedMomentsAreReadAsFp32) {
  const kernels::OptimizerSpec spec{.amsgrad = true, .moments = MomentFormat::kF8};
  const absl::Status ran = Run(Options(spec), [](Session& session) -> absl::Status {
    BALLAST_RETURN_IF_ERROR(InitialiseAll(session));
    BALLAST_RETURN_IF_ERROR(TrainStep(session, 1).status());
    std::vector<float> m(257), v(257), x(257);
    const int64_t version = session.version();
    BALLAST_RETURN_IF_ERROR(session.Read("embed.norm", Content::kMoment1, version, absl::MakeSpan(m)));
    BALLAST_RETURN_IF_ERROR(session.Read("embed.norm", Content::kMoment2, version, absl::MakeSpan(v)));
    BALLAST_RETURN_IF_ERROR(session.Read("embed.norm", Content::kMoment3, version, absl::MakeSpan(x)));
    double largest = 0;
    for (size_t i = 0; i < m.size(); ++i) largest = std::fmax(largest, std::fabs(GradientValue("embed.norm", i, 1)));
    for (size_t i = 0; i < m.size(); ++i) {
      const double g = GradientValue("embed.norm", i, 1);
      // A sixteenth of the value, or the smallest code's half.
      const double error = std::fabs(g) / 16 + largest * 0x1p-18;
      BALLAST_RETURN_IF_ERROR(Expect(std::fabs(m[i] - 0.1 * g) <= 0.1 * error, "m"));
      BALLAST_RETURN_IF_ERROR(Expect(std::fabs(std::sqrt(v[i] / 0.001) - std::fabs(g)) <= error, "v"));
      BALLAST_RETURN_IF_ERROR(Expect(x[i] == v[i], "x = v after the first step"));
    }
    return absl::OkStatus();
  });
  EXPECT_EQ(ran, absl::OkStatus());
}

TEST_F(SessionFormats, AnotherOptimizerOnResumeIsRefusedByName) {
  ASSERT_EQ(Run(Options({.kind = OptimizerKind::kLion}), InitialiseAll), absl::OkStatus());
  SessionOptions options = Options({.kind = OptimizerKind::kLion, .moments = MomentFormat::kI8});
  options.resume = Resume::kMust;
  const absl::Status status = Run(options, [](Session&) { return absl::OkStatus(); });
  EXPECT_EQ(ExpectError(status, model::kBadSpec, "the job has lion, f32 moments"), absl::OkStatus());
  options.optimizer.moments = MomentFormat::kF32;
  EXPECT_EQ(Run(options, [](Session&) { return absl::OkStatus(); }), absl::OkStatus());
}

TEST_F(SessionFormats, WhatNoKernelComputesIsRefusedBeforeServersAreAsked) {
  const absl::Status bad_momentum =
      Run(Options({.kind = OptimizerKind::kAdagrad, .momentum = true}), [](Session&) { return absl::OkStatus(); });
  EXPECT_EQ(ExpectError(bad_momentum, model::kBadSpec, "optimizer adagrad: a momentum buffer is SGD's"),
            absl::OkStatus());
  for (const MomentFormat format : {MomentFormat::kI8, MomentFormat::kF8}) {
    const absl::Status coarse =
        Run(Options({.kind = OptimizerKind::kAdemamix, .moments = format}), [](Session&) { return absl::OkStatus(); });
    EXPECT_EQ(ExpectError(coarse, model::kBadSpec, "optimizer ademamix: its slow mean"), absl::OkStatus());
  }
  const absl::Status rounded = Run(Options({.kind = OptimizerKind::kAdamwScheduleFree, .moments = MomentFormat::kBf16}),
                                   [](Session&) { return absl::OkStatus(); });
  EXPECT_EQ(ExpectError(rounded, model::kBadSpec, "it takes f32 moments"), absl::OkStatus());
  const absl::Status bad_dtype = Run(Options({.gradient = Dtype::kE4m3}), [](Session&) { return absl::OkStatus(); });
  EXPECT_EQ(ExpectError(bad_dtype, model::kBadDtype, "gradients must be"), absl::OkStatus());
}

TEST_F(SessionFormats, NesterovTakesNoDampening) {
  const kernels::OptimizerSpec spec{.kind = OptimizerKind::kSgd, .momentum = true, .nesterov = true};
  const absl::Status ran = Run(Options(spec), [](Session& session) -> absl::Status {
    BALLAST_RETURN_IF_ERROR(InitialiseAll(session));
    StepOptions step = TestStep();
    step.groups[1].dampening = 0.5;
    BALLAST_RETURN_IF_ERROR(ExpectError(TrainStep(session, 1, step).status(), model::kBadRequest,
                                        "group 1: nesterov needs a dampening of 0"));
    step.groups[1].dampening = 0;
    step.groups[0].initial_accumulator = 0.1;
    BALLAST_RETURN_IF_ERROR(
        ExpectError(session.Step(step).status(), model::kBadRequest, "group 0: learning_rate_decay"));
    step.groups[0].initial_accumulator = 0;
    step.groups[0].alpha = 1;
    BALLAST_RETURN_IF_ERROR(ExpectError(session.Step(step).status(), model::kBadRequest, "group 0: beta3 and alpha"));
    step.groups[0].alpha = 0, step.groups[0].beta3 = 1;
    BALLAST_RETURN_IF_ERROR(ExpectError(session.Step(step).status(), model::kBadRequest, "expected beta3 in [0, 1)"));
    step.groups[0].beta3 = 0, step.groups[0].average = 0.5;
    BALLAST_RETURN_IF_ERROR(ExpectError(session.Step(step).status(), model::kBadRequest, "group 0: average is"));
    step.groups[0].average = 0;
    step.groups[0].learning_rate = 1e39;
    BALLAST_RETURN_IF_ERROR(ExpectError(session.Step(step).status(), model::kBadRequest, "finite in fp32"));
    step.groups[0].learning_rate = DefaultHyper(OptimizerKind::kSgd).learning_rate;
    return session.Step(step).status();
  });
  EXPECT_EQ(ran, absl::OkStatus());
}

}  // namespace
}  // namespace ballast::client
