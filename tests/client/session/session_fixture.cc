#include "ballast/tests/client/session/session_fixture.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "absl/strings/str_cat.h"
#include "ballast/client/collective/loopback_collective.h"
#include "ballast/kernels/kernels.h"
#include "ballast/proto/base/status.h"
#include "ballast/services/gateway/embedded_transport.h"
#include "ballast/tests/adamw_step.h"

namespace ballast::client {
namespace {

uint64_t ElementsOf(const TensorSpec& tensor) {
  uint64_t elements = 1;
  for (const uint64_t extent : tensor.shape) elements *= extent;
  return elements;
}

uint64_t Mix(absl::string_view tensor, uint64_t a, uint64_t b) {
  uint64_t h = 0x9e3779b97f4a7c15u;
  for (const char c : tensor) h = (h ^ static_cast<uint8_t>(c)) * 0x100000001b3u;
  h ^= a * 0xbf58476d1ce4e5b9u + b * 0x94d049bb133111ebu;
  h = (h ^ (h >> 29)) * 0xbf58476d1ce4e5b9u;
  return h ^ (h >> 32);
}

template <typename T>
bool SameBits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

}  // namespace

SessionFixture::SessionFixture(const std::vector<uint64_t>& dram_bytes) {
  for (size_t i = 0; i < dram_bytes.size(); ++i) {
    Server& server = servers_.emplace_back();
    services::StateServerOptions options;
    options.data_directory = server.directory.path();
    options.server_id = absl::StrCat("s", i);
    options.budget.dram = dram_bytes[i];
    auto state = services::StateServer::Start(options);
    if (!state.ok()) {
      fprintf(stderr, "%s\n", state.status().ToString().c_str());
      std::abort();
    }
    server.state = *std::move(state);
  }
}

std::vector<std::unique_ptr<Transport>> SessionFixture::Connect() const {
  std::vector<std::unique_ptr<Transport>> transports;
  for (const Server& server : servers_) transports.push_back(services::MakeEmbeddedTransport(server.state.get(), 3));
  return transports;
}

absl::Status SessionFixture::RunRanks(int world_size, const std::function<absl::Status(Collective*)>& rank,
                                      absl::Duration timeout) {
  auto group = MakeLoopbackGroup(world_size, timeout);
  std::vector<absl::Status> results(world_size);
  std::vector<std::thread> threads;
  for (int r = 0; r < world_size; ++r) {
    threads.emplace_back([&, r] { results[r] = rank(group[r].get()); });
  }
  for (std::thread& thread : threads) thread.join();
  for (int r = 0; r < world_size; ++r) {
    if (!results[r].ok()) return model::Annotate(results[r], absl::StrCat("seat ", r));
  }
  return absl::OkStatus();
}

std::vector<TensorSpec> TestTensors() {
  return {
      {.name = "embed.weight", .unit = "embed", .shape = {300, 257}, .group = 0, .aliases = {"head.weight"}},
      {.name = "embed.norm", .unit = "embed", .shape = {257}, .group = 1},
      {.name = "layer.up", .unit = "layer", .shape = {700, 100}, .group = 0},
      {.name = "layer.bias", .unit = "layer", .shape = {100}, .group = 1},
      {.name = "layer.down", .unit = "layer", .shape = {1000, 90}, .group = 0},
  };
}

std::vector<TensorSpec> InRows(std::vector<TensorSpec> tensors, int ranks) {
  v1::MeshCuts rows;
  rows.mutable_mesh()->add_size(static_cast<uint32_t>(ranks));
  rows.mutable_mesh()->add_stride(1);
  rows.add_cuts();  // axis 0 of dimension 0
  for (TensorSpec& tensor : tensors) tensor.placement = rows;
  return tensors;
}

SessionOptions TestOptions() {
  SessionOptions options;
  options.durability = v1::DURABILITY_NONE;
  options.job = "test";
  options.group_count = 2;
  options.chunk_elements = kChunk;
  options.step_timeout = absl::Minutes(2);
  options.open_timeout = absl::Minutes(1);
  return options;
}

StepOptions TestStep(double learning_rate) {
  StepOptions options;
  options.groups.resize(2);
  for (GroupHyper& group : options.groups) group.learning_rate = learning_rate;
  options.groups[1].weight_decay = 0;
  return options;
}

float InitialValue(absl::string_view tensor, uint64_t element) {
  return static_cast<float>(static_cast<int64_t>(Mix(tensor, element, 0) % 2001) - 1000) / 1024.0f;
}

float GradientValue(absl::string_view tensor, uint64_t element, int64_t step) {
  return static_cast<float>(static_cast<int64_t>(Mix(tensor, element, static_cast<uint64_t>(step) + 1) % 511) - 255) /
         4096.0f;
}

std::vector<bf16> OwnedGradient(const Session& session, uint32_t unit, int64_t step,
                                const std::vector<std::string>& absent) {
  std::vector<bf16> gradient(session.owned_elements(unit), 0);
  for (const TensorSpec& tensor : TestTensors()) {
    const auto at = session.Locate(tensor.name);
    if (!at.ok() || at->unit != unit || std::count(absent.begin(), absent.end(), tensor.name) > 0) continue;
    uint64_t offset = 0;
    for (const UnitRange& range : session.owned(unit)) {
      for (uint64_t i = std::max(range.begin, at->begin); i < std::min(range.end, at->end); ++i) {
        gradient[offset + i - range.begin] = kernels::ToBf16(GradientValue(tensor.name, i - at->begin, step));
      }
      offset += range.end - range.begin;
    }
  }
  return gradient;
}

absl::Status InitialiseAll(Session& session) {
  return session.Initialise([](absl::string_view tensor, uint64_t first, absl::Span<float> values) {
    for (size_t i = 0; i < values.size(); ++i) values[i] = InitialValue(tensor, first + i);
  });
}

absl::StatusOr<StepReport> TrainStep(Session& session, int64_t step, const StepOptions& options) {
  for (uint32_t unit = 0; unit < session.unit_count(); ++unit) {
    BALLAST_RETURN_IF_ERROR(session.Push(unit, OwnedGradient(session, unit, step)));
  }
  return session.Step(options);
}

absl::Status Wrong(absl::string_view what) { return absl::InternalError(what); }

absl::Status ExpectError(const absl::Status& status, absl::string_view reason, absl::string_view text) {
  if (model::ReasonOf(status) == reason && status.message().find(text) != absl::string_view::npos) {
    return absl::OkStatus();
  }
  return Wrong(absl::StrCat("expected ", reason, " with '", text, "', got ", status.ToString(), " reason ",
                            model::ReasonOf(status)));
}

absl::Status Expect(bool fact, absl::string_view what) { return fact ? absl::OkStatus() : Wrong(what); }

Reference::Reference(const std::vector<TensorSpec>& tensors) {
  for (const TensorSpec& tensor : tensors) Add(tensor);
}

void Reference::Add(const TensorSpec& tensor) {
  State& state = states_[tensor.name];
  state = State();
  state.group = tensor.group;
  const uint64_t elements = ElementsOf(tensor);
  state.master.resize(elements);
  state.moment1.assign(elements, 0);
  state.moment2.assign(elements, 0);
  state.working.resize(elements);
  for (uint64_t i = 0; i < elements; ++i) state.master[i] = InitialValue(tensor.name, i);
  kernels::Bf16FromF32(state.master, absl::MakeSpan(state.working));
}

void Reference::Step(int64_t step, const StepOptions& options, const std::vector<std::string>& absent, float factor) {
  for (auto& [name, state] : states_) {
    if (std::count(absent.begin(), absent.end(), name) > 0) continue;
    std::vector<bf16> gradient(state.master.size());
    for (size_t i = 0; i < gradient.size(); ++i) gradient[i] = kernels::ToBf16(GradientValue(name, i, step));
    const GroupHyper& g = options.groups[state.group];
    const auto c = kernels::MakeCoefficients({}, {g.learning_rate, g.beta1, g.beta2, g.epsilon, g.weight_decay},
                                             ++state.t, factor);
    AdamwStep(c, gradient, absl::MakeSpan(state.master), absl::MakeSpan(state.moment1), absl::MakeSpan(state.moment2),
              absl::MakeSpan(state.working));
  }
}

absl::Status Reference::Compare(Session& session, int64_t version) {
  for (const auto& [name, state] : states_) {
    std::vector<float> got(state.master.size()), working(state.master.size());
    kernels::F32FromBf16(state.working, absl::MakeSpan(working));
    const std::pair<Content, const std::vector<float>*> parts[] = {{Content::kMaster, &state.master},
                                                                   {Content::kMoment1, &state.moment1},
                                                                   {Content::kMoment2, &state.moment2},
                                                                   {Content::kWorking, &working}};
    for (const auto& [content, expected] : parts) {
      BALLAST_RETURN_IF_ERROR(session.Read(name, content, version, absl::MakeSpan(got)));
      if (SameBits(got, *expected)) continue;
      const size_t i = std::mismatch(got.begin(), got.end(), expected->begin()).first - got.begin();
      return absl::InternalError(absl::StrCat(name, " content ", static_cast<int>(content), " differs at ", i, ": ",
                                              i < got.size() ? got[i] : 0, " for ",
                                              i < got.size() ? (*expected)[i] : 0));
    }
  }
  return absl::OkStatus();
}

}  // namespace ballast::client
