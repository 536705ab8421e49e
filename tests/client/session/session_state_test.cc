// Ranks move their parts of the state from one job into another. Both jobs then train on with the same bits.
#include <gtest/gtest.h>

#include <limits>
#include <map>

#include "absl/strings/str_cat.h"
#include "ballast/client/tensors.h"
#include "ballast/proto/base/status.h"
#include "ballast/tests/client/session/session_fixture.h"

namespace ballast::client {
namespace {

constexpr Content kArrays[] = {Content::kMoment1, Content::kMaster, Content::kMoment2};

using Whole = std::map<std::string, std::vector<float>>;

uint64_t ElementsOf(const TensorSpec& tensor) {
  uint64_t elements = 1;
  for (const uint64_t n : tensor.shape) elements *= n;
  return elements;
}

absl::StatusOr<Whole> ReadAll(Session& session, Content array) {
  Whole all;
  for (const TensorSpec& tensor : TestTensors()) {
    std::vector<float>& values = all[tensor.name];
    values.resize(ElementsOf(tensor));
    BALLAST_RETURN_IF_ERROR(session.Read(tensor.name, array, session.version(), absl::MakeSpan(values)));
  }
  return all;
}

// This rank's part of each tensor, and no more.
absl::StatusOr<std::vector<TensorState>> OwnedOf(const Session& session, const Whole& whole, uint64_t steps) {
  std::vector<TensorState> states;
  for (const auto& [name, values] : whole) {
    BALLAST_ASSIGN_OR_RETURN(const Session::Location at, session.Locate(name));
    uint64_t begin = values.size(), end = 0;
    for (const UnitRange& range : session.owned(at.unit)) {
      const uint64_t from = std::max(range.begin, at.begin), to = std::min(range.end, at.end);
      if (from >= to) continue;
      begin = std::min(begin, from - at.begin);
      end = std::max(end, to - at.begin);
    }
    begin = std::min(begin, end);
    const auto part = absl::MakeConstSpan(values).subspan(begin, end - begin);
    states.push_back({name, part, {{begin, 0, part.size()}}, steps});
  }
  return states;
}

absl::Status Follow(Collective* collective, const SessionFixture& servers, Split split) {
  SessionOptions options = TestOptions();
  options.split = split;
  const std::vector<TensorSpec> tensors =
      split == Split::kPlaced ? InRows(TestTensors(), collective->world_size()) : TestTensors();
  BALLAST_ASSIGN_OR_RETURN(auto first, servers.Open(collective, options, tensors));
  BALLAST_RETURN_IF_ERROR(InitialiseAll(*first));
  for (int64_t step = 1; step <= 3; ++step) BALLAST_RETURN_IF_ERROR(TrainStep(*first, step).status());
  options.job = "other";
  BALLAST_ASSIGN_OR_RETURN(auto second, servers.Open(collective, options, tensors));
  BALLAST_RETURN_IF_ERROR(second->Initialise([](absl::string_view, uint64_t, absl::Span<float> values) {
    for (float& value : values) value = 7;
  }));
  for (const Content array : kArrays) {
    BALLAST_ASSIGN_OR_RETURN(const Whole whole, ReadAll(*first, array));
    BALLAST_ASSIGN_OR_RETURN(const std::vector<TensorState> owned, OwnedOf(*second, whole, 3));
    BALLAST_RETURN_IF_ERROR(second->CommitState(array, owned, "cursor").status());
  }
  BALLAST_RETURN_IF_ERROR(Expect(second->version() == 3, "a transaction per array"));
  for (int64_t step = 4; step <= 5; ++step) {
    BALLAST_RETURN_IF_ERROR(TrainStep(*first, step).status());
    BALLAST_RETURN_IF_ERROR(TrainStep(*second, step).status());
  }
  for (const Content array : {Content::kWorking, Content::kMaster, Content::kMoment1, Content::kMoment2}) {
    BALLAST_ASSIGN_OR_RETURN(const Whole expected, ReadAll(*first, array));
    BALLAST_ASSIGN_OR_RETURN(const Whole found, ReadAll(*second, array));
    BALLAST_RETURN_IF_ERROR(Expect(expected == found, "the same bits"));
  }
  BALLAST_ASSIGN_OR_RETURN(const uint64_t steps, second->TensorSteps("layer.up", second->version()));
  return Expect(steps == 5, "step counts");
}

TEST(SessionState, ArraysThatRanksOwnPartsOf) {
  for (const Split split : {Split::kEven, Split::kPlaced}) {
    for (const int ranks : {1, 3}) {
      SessionFixture servers(2);
      const absl::Status ran =
          SessionFixture::RunRanks(ranks, [&](Collective* collective) { return Follow(collective, servers, split); });
      EXPECT_TRUE(ran.ok()) << ran << " with " << ranks << " rank(s)";
    }
  }
}

absl::Status Refusals(Session& session, int rank) {
  const std::vector<float> values(70000, 1.0f);
  const std::vector<TensorState> whole = {{"layer.up", values, {}, 5}};
  const auto commit = [&](const std::vector<TensorState>& states, Content array = Content::kMoment1) {
    return session.CommitState(array, states, "").status();
  };
  BALLAST_RETURN_IF_ERROR(ExpectError(commit(whole), model::kBadRequest, "Initialise comes first"));
  BALLAST_RETURN_IF_ERROR(InitialiseAll(session));
  BALLAST_RETURN_IF_ERROR(ExpectError(commit({}), model::kBadRequest, "no tensors"));
  BALLAST_RETURN_IF_ERROR(ExpectError(commit(whole, Content::kWorking), model::kBadRequest, "write those"));
  BALLAST_RETURN_IF_ERROR(ExpectError(commit(whole, Content::kMoment3), model::kBadRequest, "keeps 2 moment(s)"));
  BALLAST_RETURN_IF_ERROR(ExpectError(commit({whole[0], whole[0]}), model::kBadRequest, "twice"));
  std::vector<TensorState> other = whole;
  other[0].values = absl::MakeConstSpan(values).subspan(0, 100);
  BALLAST_RETURN_IF_ERROR(ExpectError(commit(other), model::kBadLength, "70000 elements"));
  std::vector<float> infinite = values;
  infinite[69999] = std::numeric_limits<float>::infinity();
  other[0].values = infinite;
  BALLAST_RETURN_IF_ERROR(ExpectError(commit(other), model::kBadRequest, "element 69999"));
  std::vector<float> negative = values;
  negative[3] = -1e-30f;
  other[0].values = negative;
  BALLAST_RETURN_IF_ERROR(ExpectError(commit(other, Content::kMoment2), model::kBadRequest, "second moment at least"));
  other = whole;
  other[0].steps = 5 + static_cast<uint64_t>(rank);
  BALLAST_RETURN_IF_ERROR(ExpectError(commit(other), model::kPlanMismatch, "other step counts"));
  const Content array = rank == 0 ? Content::kMoment1 : Content::kMoment2;
  BALLAST_RETURN_IF_ERROR(ExpectError(commit(whole, array), model::kPlanMismatch, "another array"));
  // And the session goes on.
  BALLAST_RETURN_IF_ERROR(commit(whole));
  return TrainStep(session, 1).status();
}

TEST(SessionState, RefusalsChangeNothing) {
  SessionFixture servers(2);
  const absl::Status ran = SessionFixture::RunRanks(2, [&](Collective* collective) -> absl::Status {
    BALLAST_ASSIGN_OR_RETURN(auto session, servers.Open(collective, TestOptions(), TestTensors()));
    return Refusals(*session, collective->rank());
  });
  EXPECT_TRUE(ran.ok()) << ran;
}

// Rows of a tensor that several chunks share are initial values in their places.
TEST(SessionState, InitialValuesOfRowsOverSeveralChunks) {
  SessionFixture servers(1);
  const std::vector<TensorSpec> specs = InRows({{.name = "w", .unit = "u", .shape = {400, 1000}}}, 2);
  const absl::Status ran = SessionFixture::RunRanks(2, [&](Collective* collective) -> absl::Status {
    SessionOptions options = TestOptions();
    options.split = Split::kPlaced;
    options.optimizer.working = kernels::Dtype::kF32;
    BALLAST_ASSIGN_OR_RETURN(auto session, servers.Open(collective, options, specs));
    BALLAST_ASSIGN_OR_RETURN(Tensors tensors, Tensors::Make(session.get(), {"w"}));
    std::vector<float> rows(200 * 1000);
    const size_t first = static_cast<size_t>(collective->rank()) * rows.size();
    for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<float>(first + i);
    const TensorMemory memory{.parameter = reinterpret_cast<std::byte*>(rows.data())};
    BALLAST_RETURN_IF_ERROR(tensors.Initialise({memory}));
    std::vector<float> whole(400 * 1000);
    BALLAST_RETURN_IF_ERROR(session->Read("w", Content::kMaster, 0, absl::MakeSpan(whole)));
    for (size_t i = 0; i < whole.size(); ++i) {
      BALLAST_RETURN_IF_ERROR(Expect(whole[i] == static_cast<float>(i), absl::StrCat("element ", i)));
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(ran.ok()) << ran;
}

absl::Status TrainWithoutAPart(Session* session, const std::vector<std::string>& names) {
  BALLAST_ASSIGN_OR_RETURN(Tensors tensors, Tensors::Make(session, names));
  std::vector<float> values(1000, 1.0f);
  std::vector<TensorMemory> memory;
  for (size_t i = 0; i < names.size(); ++i) {
    const bool has = tensors.local_elements(i) > 0;
    std::byte* const at = reinterpret_cast<std::byte*>(values.data());
    memory.push_back({.gradient = has ? at : nullptr, .parameter = has ? at : nullptr});
  }
  BALLAST_RETURN_IF_ERROR(tensors.Initialise(memory));
  // A rank that has nothing of what was written takes part all the same.
  const std::vector<float> written(1000, 2.0f);
  for (int i = 0; i < 2; ++i) {
    for (size_t k = 0; k < names.size(); ++k) {
      BALLAST_RETURN_IF_ERROR(tensors.Write(k, absl::MakeConstSpan(written).first(tensors.local_elements(k))));
    }
    BALLAST_RETURN_IF_ERROR(i == 0 ? session->CommitValues().status() : tensors.Step(memory, TestStep()).status());
  }
  for (const std::string& name : session->tensor_names()) {
    std::vector<float> master(1);
    BALLAST_RETURN_IF_ERROR(session->Read(name, Content::kMaster, 2, absl::MakeSpan(master)));
    BALLAST_RETURN_IF_ERROR(
        Expect(master[0] > 1.5f && master[0] < 2.0f, absl::StrCat(name, " was written and updated")));
  }
  return absl::OkStatus();
}

// Of one row the second rank has nothing; and ranks may have other tensors, or none.
TEST(SessionState, RanksWithoutAPartGoAlong) {
  const TensorSpec a{.name = "a", .unit = "u", .shape = {1}}, b{.name = "b", .unit = "v", .shape = {1}};
  const struct {
    std::vector<TensorSpec> first, second;
  } kinds[] = {{InRows({a}, 2), InRows({a}, 2)}, {{a}, {b}}, {{a, b}, {}}};
  for (const auto& kind : kinds) {
    SessionFixture servers(1);
    const absl::Status ran = SessionFixture::RunRanks(2, [&](Collective* collective) -> absl::Status {
      SessionOptions options = TestOptions();
      options.split = Split::kPlaced;
      options.optimizer.working = options.optimizer.gradient = kernels::Dtype::kF32;
      const std::vector<TensorSpec>& specs = collective->rank() == 0 ? kind.first : kind.second;
      BALLAST_ASSIGN_OR_RETURN(auto session, servers.Open(collective, options, specs));
      std::vector<std::string> names;
      for (const TensorSpec& spec : specs) names.push_back(spec.name);
      return TrainWithoutAPart(session.get(), names);
    });
    EXPECT_TRUE(ran.ok()) << ran;
  }
}

// All of a model's tensors in this rank's memory: fp32 parameters, and gradients of ones.
struct WholeModel {
  std::vector<std::string> names;
  std::vector<std::vector<float>> parameters, gradients;

  explicit WholeModel(const std::vector<TensorSpec>& specs) {
    for (const TensorSpec& spec : specs) {
      names.push_back(spec.name);
      parameters.emplace_back(ElementsOf(spec), 0.5f);
      gradients.emplace_back(ElementsOf(spec), 1.0f);
    }
  }
  std::vector<TensorMemory> memory() {
    std::vector<TensorMemory> all;
    for (size_t i = 0; i < names.size(); ++i) {
      all.push_back({.gradient = reinterpret_cast<const std::byte*>(gradients[i].data()),
                     .parameter = reinterpret_cast<std::byte*>(parameters[i].data())});
    }
    return all;
  }
};

// The next step needs no Drop, on whichever rank the last one failed.
TEST(SessionState, AStepOfTensorsThatFailsIsDroppedByAll) {
  SessionFixture servers(2);
  const absl::Status ran = SessionFixture::RunRanks(2, [&](Collective* collective) -> absl::Status {
    BALLAST_ASSIGN_OR_RETURN(auto session, servers.Open(collective, TestOptions(), TestTensors()));
    WholeModel model(TestTensors());
    BALLAST_ASSIGN_OR_RETURN(Tensors tensors, Tensors::Make(session.get(), model.names));
    BALLAST_RETURN_IF_ERROR(tensors.Initialise(model.memory()));
    const StepOptions own = TestStep(session->rank() == 0 ? 0.01 : 0.02);
    BALLAST_RETURN_IF_ERROR(
        ExpectError(tensors.Step(model.memory(), own).status(), model::kPlanMismatch, "rank 1 has other"));
    BALLAST_RETURN_IF_ERROR(tensors.Step(model.memory(), TestStep()).status());
    if (session->rank() == 1) BALLAST_RETURN_IF_ERROR(session->Push(0, OwnedGradient(*session, 0, 1)));
    const absl::Status twice = tensors.Step(model.memory(), TestStep()).status();
    BALLAST_RETURN_IF_ERROR(ExpectError(twice, model::kBadRequest, "pushed already"));
    BALLAST_RETURN_IF_ERROR(tensors.Step(model.memory(), TestStep()).status());
    return Expect(session->version() == 2, "two steps");
  });
  EXPECT_TRUE(ran.ok()) << ran;
}

TEST(SessionState, TensorsAreAllOfTheJobs) {
  SessionFixture servers(1);
  const absl::Status ran = SessionFixture::RunRanks(1, [&](Collective* collective) -> absl::Status {
    BALLAST_ASSIGN_OR_RETURN(auto session, servers.Open(collective, TestOptions(), TestTensors()));
    WholeModel model(TestTensors());
    const std::vector<std::string> some(model.names.begin(), model.names.end() - 1);
    BALLAST_RETURN_IF_ERROR(
        ExpectError(Tensors::Make(session.get(), some).status(), model::kBadSpec, model.names.back()));
    BALLAST_ASSIGN_OR_RETURN(Tensors tensors, Tensors::Make(session.get(), model.names));
    BALLAST_RETURN_IF_ERROR(tensors.Initialise(model.memory()));
    BALLAST_RETURN_IF_ERROR(session->Register({{.name = "head", .unit = "head", .shape = {300}}}));
    const absl::Status stale = tensors.Step(model.memory(), TestStep()).status();
    return ExpectError(stale, model::kBadRequest, "Make them again");
  });
  EXPECT_TRUE(ran.ok()) << ran;
}

}  // namespace
}  // namespace ballast::client
