// Training through sessions: every result is compared, bit for bit, with direct calls of the kernels.
#include "ballast/client/session.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "ballast/kernels/kernels.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/layout.h"
#include "ballast/tests/client/session/session_fixture.h"

namespace ballast::client {
namespace {

struct Division {
  int world_size = 1;
  Split split = Split::kEven;
};

class Training : public ::testing::TestWithParam<Division> {
 protected:
  static SessionOptions Options() {
    SessionOptions options = TestOptions();
    options.split = GetParam().split;
    return options;
  }
  static std::vector<TensorSpec> Tensors(const std::vector<TensorSpec>& tensors = TestTensors()) {
    return GetParam().split == Split::kPlaced ? InRows(tensors, GetParam().world_size) : tensors;
  }
  SessionFixture servers_{2};
  Reference reference_{TestTensors()};
};

// Shape (a): parameters live on the servers only.
TEST_P(Training, GathersWhatTheServersHold) {
  EXPECT_EQ(
      SessionFixture::RunRanks(
          GetParam().world_size,
          [&](Collective* collective) -> absl::Status {
            BALLAST_ASSIGN_OR_RETURN(auto session, servers_.Open(collective, Options(), Tensors()));
            BALLAST_RETURN_IF_ERROR(Expect(session->version() == -1 && session->needs_values(), "a new job"));
            BALLAST_RETURN_IF_ERROR(ExpectError(session->Acquire(0).status(), model::kBadRequest, "Initialise"));
            BALLAST_RETURN_IF_ERROR(InitialiseAll(*session));
            BALLAST_RETURN_IF_ERROR(Expect(session->version() == 0 && !session->needs_values(), "initialised"));
            for (int64_t step = 1; step <= 3; ++step) {
              session->Prefetch(0);
              for (uint32_t unit = 0; unit < session->unit_count(); ++unit) {
                session->Prefetch(unit + 1);
                BALLAST_ASSIGN_OR_RETURN(const UnitLease lease, session->Acquire(unit));
                BALLAST_RETURN_IF_ERROR(Expect(lease.parameters().size() == session->unit_elements(unit), "size"));
                for (const TensorSpec& tensor : TestTensors()) {
                  BALLAST_ASSIGN_OR_RETURN(const auto at, session->Locate(tensor.name));
                  if (at.unit != unit) continue;
                  std::vector<float> read(at.end - at.begin), mine(at.end - at.begin);
                  BALLAST_RETURN_IF_ERROR(
                      session->Read(tensor.name, Content::kWorking, session->version(), absl::MakeSpan(read)));
                  kernels::F32FromBf16(lease.parameters().subspan(at.begin, at.end - at.begin), absl::MakeSpan(mine));
                  BALLAST_RETURN_IF_ERROR(Expect(read == mine, "the gathered unit is what Read gives"));
                }
              }
              BALLAST_ASSIGN_OR_RETURN(const StepReport report, TrainStep(*session, step));
              BALLAST_RETURN_IF_ERROR(Expect(report.version == step && !report.skipped, "the step counts"));
            }
            Reference reference(TestTensors());
            for (int64_t step = 1; step <= 3; ++step) reference.Step(step, TestStep());
            BALLAST_RETURN_IF_ERROR(reference.Compare(*session, 3));
            BALLAST_ASSIGN_OR_RETURN(const uint64_t t, session->TensorSteps("head.weight", 3));
            return Expect(t == 3, "step count");
          }),
      absl::OkStatus());
}

// Pulls the unit's tensors, whoever owns them: each is the same as in the gathered unit.
absl::Status ExpectPulled(Session& session, uint32_t unit, const std::vector<TensorSpec>& tensors,
                          const UnitLease& gathered) {
  std::vector<bf16> pulled(session.unit_elements(unit));
  std::vector<PullRun> runs;
  for (const TensorSpec& tensor : tensors) {
    BALLAST_ASSIGN_OR_RETURN(const auto at, session.Locate(tensor.name));
    if (at.unit != unit) continue;
    runs.push_back({{at.begin, at.end},
                    {reinterpret_cast<std::byte*>(pulled.data() + at.begin), (at.end - at.begin) * sizeof(bf16)}});
  }
  BALLAST_ASSIGN_OR_RETURN(PendingPull pull, session.StartPull(unit, runs));
  BALLAST_RETURN_IF_ERROR(pull.Await());
  for (const PullRun& run : runs) {
    for (uint64_t i = run.range.begin; i < run.range.end; ++i) {
      if (pulled[i] != gathered.parameters()[i]) return Wrong("pulled differs from gathered");
    }
  }
  return absl::OkStatus();
}

// Shape (b): the trainer keeps its parameters and pulls what was updated.
TEST_P(Training, PullsUpdatedRanges) {
  EXPECT_EQ(SessionFixture::RunRanks(GetParam().world_size,
                                     [&](Collective* collective) -> absl::Status {
                                       BALLAST_ASSIGN_OR_RETURN(auto session,
                                                                servers_.Open(collective, Options(), Tensors()));
                                       BALLAST_RETURN_IF_ERROR(InitialiseAll(*session));
                                       BALLAST_RETURN_IF_ERROR(TrainStep(*session, 1).status());
                                       for (uint32_t unit = 0; unit < session->unit_count(); ++unit) {
                                         if (unit == 0) session->Prefetch(unit);
                                         BALLAST_ASSIGN_OR_RETURN(const UnitLease gathered, session->Acquire(unit));
                                         BALLAST_RETURN_IF_ERROR(ExpectPulled(*session, unit, TestTensors(), gathered));
                                       }
                                       return absl::OkStatus();
                                     }),
            absl::OkStatus());
}

TEST_P(Training, ClipsByTheGlobalNorm) {
  EXPECT_EQ(SessionFixture::RunRanks(
                GetParam().world_size,
                [&](Collective* collective) -> absl::Status {
                  BALLAST_ASSIGN_OR_RETURN(auto session, servers_.Open(collective, Options(), Tensors()));
                  BALLAST_RETURN_IF_ERROR(InitialiseAll(*session));
                  for (uint32_t unit = 0; unit < session->unit_count(); ++unit) {
                    BALLAST_RETURN_IF_ERROR(session->Push(unit, OwnedGradient(*session, unit, 1)));
                  }
                  // Directly: per segment, in chunk order.
                  v1::JobSpec spec;
                  spec.set_name("test");
                  spec.set_chunk_elements(kChunk);
                  spec.set_group_count(2);
                  v1::Registration* registration = spec.add_registrations();
                  for (const TensorSpec& tensor : TestTensors()) {
                    v1::TensorSpec* proto = registration->add_tensors();
                    proto->set_name(tensor.name);
                    proto->set_unit(tensor.unit);
                    proto->set_group(tensor.group);
                    for (const uint64_t extent : tensor.shape) proto->add_shape(extent);
                  }
                  BALLAST_ASSIGN_OR_RETURN(const auto layout, model::Layout::Make(spec));
                  double squared = 0;
                  for (const model::Chunk& chunk : layout.chunks()) {
                    double of_chunk = 0;
                    for (const model::Segment& segment : chunk.segments) {
                      const model::Tensor& tensor = layout.tensors()[segment.tensor];
                      std::vector<bf16> part(segment.in_chunk.size());
                      const uint64_t first = chunk.range.begin + segment.in_chunk.begin - tensor.range.begin;
                      for (size_t i = 0; i < part.size(); ++i)
                        part[i] = kernels::ToBf16(GradientValue(tensor.name, first + i, 1));
                      of_chunk += kernels::SquaredNorm(part).squared_norm;
                    }
                    squared += of_chunk;
                  }
                  BALLAST_ASSIGN_OR_RETURN(const double norm, session->Norm());
                  BALLAST_RETURN_IF_ERROR(
                      Expect(norm == std::sqrt(squared), absl::StrCat("norm ", norm, " ", std::sqrt(squared))));

                  StepOptions options = TestStep();
                  options.gradient_scale = 0.5;
                  options.max_norm = 0.125;
                  BALLAST_ASSIGN_OR_RETURN(const StepReport report, session->Step(options));
                  BALLAST_RETURN_IF_ERROR(Expect(report.norm == 0.5 * std::sqrt(squared), "scaled norm"));
                  const double clip = 0.125 / (0.5 * std::sqrt(squared) + 1e-6);
                  Reference reference(TestTensors());
                  reference.Step(1, options, {}, static_cast<float>(0.5 * clip));
                  return reference.Compare(*session, 1);
                }),
            absl::OkStatus());
}

TEST_P(Training, AbsentTensorsAreLeftAlone) {
  EXPECT_EQ(SessionFixture::RunRanks(
                GetParam().world_size,
                [&](Collective* collective) -> absl::Status {
                  BALLAST_ASSIGN_OR_RETURN(auto session, servers_.Open(collective, Options(), Tensors()));
                  BALLAST_RETURN_IF_ERROR(InitialiseAll(*session));
                  BALLAST_ASSIGN_OR_RETURN(const uint32_t layer, session->FindUnit("layer"));
                  // "embed" is not pushed at all (frozen), of "layer" two tensors are.
                  BALLAST_RETURN_IF_ERROR(session->Push(layer, OwnedGradient(*session, layer, 1), {"layer.up"}));
                  BALLAST_RETURN_IF_ERROR(session->Step(TestStep()).status());
                  Reference reference(TestTensors());
                  reference.Step(1, TestStep(), {"embed.weight", "embed.norm", "layer.up"});
                  BALLAST_RETURN_IF_ERROR(reference.Compare(*session, 1));
                  // Step counts are per tensor.
                  BALLAST_RETURN_IF_ERROR(TrainStep(*session, 2).status());
                  reference.Step(2, TestStep());
                  BALLAST_RETURN_IF_ERROR(reference.Compare(*session, 2));
                  BALLAST_ASSIGN_OR_RETURN(const uint64_t up, session->TensorSteps("layer.up", session->version()));
                  BALLAST_ASSIGN_OR_RETURN(const uint64_t down, session->TensorSteps("layer.down", session->version()));
                  return Expect(up == 1 && down == 2, "step counts per tensor");
                }),
            absl::OkStatus());
}

TEST_P(Training, NonFiniteGradientSkipsTheStepEverywhere) {
  EXPECT_EQ(SessionFixture::RunRanks(
                GetParam().world_size,
                [&](Collective* collective) -> absl::Status {
                  BALLAST_ASSIGN_OR_RETURN(auto session, servers_.Open(collective, Options(), Tensors()));
                  BALLAST_RETURN_IF_ERROR(InitialiseAll(*session));
                  for (const float poison :
                       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
                    for (uint32_t unit = 0; unit < session->unit_count(); ++unit) {
                      std::vector<bf16> gradient = OwnedGradient(*session, unit, 1);
                      if (unit == 1 && session->rank() == 0) gradient[7] = kernels::ToBf16(poison);
                      BALLAST_RETURN_IF_ERROR(session->Push(unit, gradient));
                    }
                    BALLAST_ASSIGN_OR_RETURN(const double norm, session->Norm());
                    BALLAST_RETURN_IF_ERROR(Expect(std::isinf(norm), "norm of a non-finite gradient"));
                    BALLAST_ASSIGN_OR_RETURN(const StepReport report, session->Step(TestStep()));
                    BALLAST_RETURN_IF_ERROR(Expect(report.skipped, "skipped"));
                  }
                  Reference reference(TestTensors());
                  BALLAST_RETURN_IF_ERROR(Expect(session->version() == 2, "skips count as transactions"));
                  BALLAST_RETURN_IF_ERROR(reference.Compare(*session, 2));
                  BALLAST_RETURN_IF_ERROR(TrainStep(*session, 3).status());
                  reference.Step(3, TestStep());
                  return reference.Compare(*session, 3);
                }),
            absl::OkStatus());
  for (int i = 0; i < 2; ++i) EXPECT_EQ(servers_.server(i)->Status().jobs(0).skipped_steps(), 2u);
}

TEST_P(Training, DropForgetsWhatWasPushed) {
  EXPECT_EQ(SessionFixture::RunRanks(
                GetParam().world_size,
                [&](Collective* collective) -> absl::Status {
                  BALLAST_ASSIGN_OR_RETURN(auto session, servers_.Open(collective, Options(), Tensors()));
                  BALLAST_RETURN_IF_ERROR(InitialiseAll(*session));
                  for (uint32_t unit = 0; unit < session->unit_count(); ++unit) {
                    BALLAST_RETURN_IF_ERROR(session->Push(unit, OwnedGradient(*session, unit, 99)));
                  }
                  BALLAST_RETURN_IF_ERROR(session->Norm().status());
                  BALLAST_RETURN_IF_ERROR(session->Drop());
                  BALLAST_RETURN_IF_ERROR(TrainStep(*session, 1).status());
                  Reference reference(TestTensors());
                  reference.Step(1, TestStep());
                  return reference.Compare(*session, 1);
                }),
            absl::OkStatus());
}

TEST_P(Training, WrittenValuesComeBeforeGradients) {
  EXPECT_EQ(SessionFixture::RunRanks(GetParam().world_size,
                                     [&](Collective* collective) -> absl::Status {
                                       BALLAST_ASSIGN_OR_RETURN(auto session,
                                                                servers_.Open(collective, Options(), Tensors()));
                                       BALLAST_RETURN_IF_ERROR(InitialiseAll(*session));
                                       BALLAST_RETURN_IF_ERROR(ExpectError(session->CommitValues().status(),
                                                                           model::kBadRequest, "nothing was written"));
                                       Reference reference(TestTensors());
                                       std::vector<float> up(70000), norm(257);
                                       for (size_t i = 0; i < up.size(); ++i)
                                         up[i] = 0.001f * static_cast<float>(i % 1000);
                                       for (size_t i = 0; i < norm.size(); ++i)
                                         norm[i] = 1.0f - 0.001f * static_cast<float>(i);
                                       // Alone...
                                       BALLAST_RETURN_IF_ERROR(session->Write("layer.up", up));
                                       BALLAST_ASSIGN_OR_RETURN(const StepReport alone, session->CommitValues());
                                       BALLAST_RETURN_IF_ERROR(Expect(alone.version == 1, "a transaction"));
                                       reference.at("layer.up").master = up;
                                       kernels::Bf16FromF32(up, absl::MakeSpan(reference.at("layer.up").working));
                                       BALLAST_RETURN_IF_ERROR(reference.Compare(*session, 1));
                                       // ... and in a step, before its gradients.
                                       BALLAST_RETURN_IF_ERROR(session->Write("embed.norm", norm));
                                       BALLAST_RETURN_IF_ERROR(TrainStep(*session, 2).status());
                                       reference.at("embed.norm").master = norm;
                                       reference.Step(2, TestStep());
                                       BALLAST_RETURN_IF_ERROR(reference.Compare(*session, 2));
                                       // Applied once.
                                       BALLAST_RETURN_IF_ERROR(TrainStep(*session, 3).status());
                                       reference.Step(3, TestStep());
                                       BALLAST_RETURN_IF_ERROR(reference.Compare(*session, 3));
                                       return ExpectError(session->Write("layer.up", norm), model::kBadLength, "70000");
                                     }),
            absl::OkStatus());
}

TEST_P(Training, PinnedVersionStaysReadable) {
  EXPECT_EQ(SessionFixture::RunRanks(
                GetParam().world_size,
                [&](Collective* collective) -> absl::Status {
                  BALLAST_ASSIGN_OR_RETURN(auto session, servers_.Open(collective, Options(), Tensors()));
                  BALLAST_RETURN_IF_ERROR(InitialiseAll(*session));
                  Reference reference(TestTensors());
                  BALLAST_RETURN_IF_ERROR(TrainStep(*session, 1).status());
                  reference.Step(1, TestStep());
                  BALLAST_RETURN_IF_ERROR(session->Pin());
                  BALLAST_RETURN_IF_ERROR(collective->Exchange("pinned").status());
                  Reference later = reference;
                  for (int64_t step = 2; step <= 3; ++step) {
                    BALLAST_RETURN_IF_ERROR(TrainStep(*session, step).status());
                    later.Step(step, TestStep());
                  }
                  BALLAST_RETURN_IF_ERROR(reference.Compare(*session, 1));
                  BALLAST_RETURN_IF_ERROR(later.Compare(*session, 3));
                  BALLAST_ASSIGN_OR_RETURN(const uint64_t then, session->TensorSteps("layer.bias", 1));
                  BALLAST_ASSIGN_OR_RETURN(const uint64_t now, session->TensorSteps("layer.bias", 3));
                  BALLAST_RETURN_IF_ERROR(Expect(then == 1 && now == 3, "step counts of both versions"));
                  BALLAST_RETURN_IF_ERROR(ExpectError(session->TensorSteps("layer.bias", 2).status(),
                                                      model::kVersionGone, "did not pin 2"));
                  BALLAST_RETURN_IF_ERROR(collective->Exchange("read").status());
                  if (session->rank() == 0) BALLAST_RETURN_IF_ERROR(session->Unpin(1));
                  BALLAST_RETURN_IF_ERROR(collective->Exchange("unpinned").status());
                  std::vector<float> to(100);
                  return ExpectError(session->Read("layer.bias", Content::kMaster, 1, absl::MakeSpan(to)),
                                     model::kVersionGone, "1");
                }),
            absl::OkStatus());
}

TEST_P(Training, RegistersTensorsLater) {
  EXPECT_EQ(
      SessionFixture::RunRanks(
          GetParam().world_size,
          [&](Collective* collective) -> absl::Status {
            BALLAST_ASSIGN_OR_RETURN(auto session, servers_.Open(collective, Options(), Tensors()));
            BALLAST_RETURN_IF_ERROR(InitialiseAll(*session));
            Reference reference(TestTensors());
            BALLAST_RETURN_IF_ERROR(TrainStep(*session, 1).status());
            reference.Step(1, TestStep());
            // A tensor of a group that does not exist is refused and changes nothing.
            const std::vector<TensorSpec> bad = {{.name = "x", .unit = "y", .shape = {5}, .group = 7}};
            BALLAST_RETURN_IF_ERROR(ExpectError(session->Register(bad), model::kBadSpec, "group 7"));
            // A new unit, and an embedding that grew.
            const std::vector<TensorSpec> added = {
                {.name = "adapter", .unit = "adapter", .shape = {50, 30}, .group = 1},
                {.name = "embed.weight", .unit = "embed", .shape = {320, 257}, .group = 0, .aliases = {"head.weight"}}};
            BALLAST_RETURN_IF_ERROR(session->Register(Tensors(added)));
            BALLAST_RETURN_IF_ERROR(Expect(session->unit_count() == 3 && session->needs_values(), "registered"));
            BALLAST_RETURN_IF_ERROR(ExpectError(session->Step(TestStep()).status(), model::kBadRequest, "Initialise"));
            BALLAST_RETURN_IF_ERROR(InitialiseAll(*session));
            for (const TensorSpec& tensor : added) reference.Add(tensor);
            BALLAST_RETURN_IF_ERROR(reference.Compare(*session, 2));
            // Gradients of the new layout, from the session's own map of it.
            std::vector<TensorSpec> live = TestTensors();
            live[0] = added[1];
            live.push_back(added[0]);
            for (uint32_t unit = 0; unit < session->unit_count(); ++unit) {
              std::vector<bf16> gradient(session->owned_elements(unit), 0);
              for (const TensorSpec& tensor : live) {
                BALLAST_ASSIGN_OR_RETURN(const auto at, session->Locate(tensor.name));
                uint64_t offset = 0;
                for (const UnitRange& range : session->owned(unit)) {
                  for (uint64_t i = std::max(range.begin, at.begin); at.unit == unit && i < std::min(range.end, at.end);
                       ++i) {
                    gradient[offset + i - range.begin] = kernels::ToBf16(GradientValue(tensor.name, i - at.begin, 3));
                  }
                  offset += range.end - range.begin;
                }
              }
              BALLAST_RETURN_IF_ERROR(session->Push(unit, gradient));
            }
            BALLAST_RETURN_IF_ERROR(session->Step(TestStep()).status());
            reference.Step(3, TestStep());
            BALLAST_RETURN_IF_ERROR(reference.Compare(*session, 3));
            for (uint32_t unit = 0; unit < session->unit_count(); ++unit) {
              BALLAST_ASSIGN_OR_RETURN(const UnitLease gathered, session->Acquire(unit));
              BALLAST_RETURN_IF_ERROR(ExpectPulled(*session, unit, live, gathered));
            }
            BALLAST_ASSIGN_OR_RETURN(const uint64_t grown, session->TensorSteps("embed.weight", session->version()));
            return Expect(grown == 1, "a replaced tensor starts its own count");
          }),
      absl::OkStatus());
}

TEST_P(Training, OneByteInFlightOnlyMakesItSlow) {
  EXPECT_EQ(SessionFixture::RunRanks(GetParam().world_size,
                                     [&](Collective* collective) -> absl::Status {
                                       SessionOptions options = Options();
                                       options.inflight_bytes_max = 1;
                                       BALLAST_ASSIGN_OR_RETURN(auto session,
                                                                servers_.Open(collective, options, Tensors()));
                                       BALLAST_RETURN_IF_ERROR(InitialiseAll(*session));
                                       BALLAST_RETURN_IF_ERROR(TrainStep(*session, 1).status());
                                       Reference reference(TestTensors());
                                       reference.Step(1, TestStep());
                                       return reference.Compare(*session, 1);
                                     }),
            absl::OkStatus());
}

INSTANTIATE_TEST_SUITE_P(Divisions, Training,
                         ::testing::Values(Division{1, Split::kEven}, Division{2, Split::kEven},
                                           Division{3, Split::kEven}, Division{1, Split::kPlaced},
                                           Division{2, Split::kPlaced}, Division{3, Split::kPlaced}),
                         [](const auto& division) {
                           return absl::StrCat("W", division.param.world_size,
                                               division.param.split == Split::kPlaced ? "Rows" : "Even");
                         });

}  // namespace
}  // namespace ballast::client
