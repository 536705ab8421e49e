// Tensors over a server that works in the trainer's memory, and over a server with copies of everything, both in this
// process. Parameters and state must have the same bits, whatever is absent, skipped, clipped, dropped or written.
#include "ballast/client/tensors.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "ballast/client/collective/loopback_collective.h"
#include "ballast/kernels/kernels.h"
#include "ballast/proto/base/status.h"
#include "ballast/services/gateway/embedded_transport.h"
#include "ballast/tests/client/session/session_fixture.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ballast::client {
namespace {

using kernels::Dtype;
using ::testing::HasSubstr;

constexpr uint64_t kMiB = uint64_t{1} << 20;

// "wide" spans chunks, the others share one; sizes with padding behind them.
// `parts`: servers have "wide" and "table" in another order than the trainer.
std::vector<TensorSpec> Specs(bool parts) {
  std::vector<TensorSpec> specs = {{.name = "wide", .unit = "a", .shape = {3, 50001}},
                                   {.name = "bias", .unit = "a", .shape = {77}},
                                   {.name = "scale", .unit = "a", .shape = {1}, .group = 1},
                                   {.name = "table", .unit = "b", .shape = {1000, 33}, .group = 1},
                                   {.name = "frozen", .unit = "b", .shape = {300}}};
  if (parts) specs[0].parts = specs[3].parts = {1, 3};
  return specs;
}

struct Shape {
  const char* name;
  v1::Durability durability = v1::DURABILITY_NONE;
  uint64_t dram_bytes = 64 * kMiB;
  Dtype gradient = Dtype::kBf16, working = Dtype::kBf16;            // the job's
  Dtype odd_gradient = Dtype::kBf16, odd_parameter = Dtype::kBf16;  // of "bias" and "table" in the trainer
  bool parts = false;
};

// One trainer and its server.
class Trainer {
 public:
  Trainer(const Shape& shape, bool lends) : shape_(shape) {
    services::StateServerOptions options;
    options.data_directory = directory_.path();
    // Copies need room for slices, too.
    options.budget = {.dram = shape.dram_bytes + (lends ? 0 : 8 * kMiB), .nvme = 256 * kMiB};
    options.staging_bytes = 6 * kMiB;
    options.compute_threads = 2;
    options.working_copies = !lends;
    auto server = services::StateServer::Start(options);
    EXPECT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    for (const TensorSpec& spec : Specs(shape.parts)) {
      const bool odd = spec.name == "bias" || spec.name == "table";
      Own& own = own_.emplace_back();
      own.elements = spec.shape.size() == 1 ? spec.shape[0] : spec.shape[0] * spec.shape[1];
      own.gradient_dtype = odd ? shape.odd_gradient : shape.gradient;
      own.parameter_dtype = odd ? shape.odd_parameter : shape.working;
      own.gradient.resize(own.elements * kernels::ElementBytes(own.gradient_dtype));
      own.parameter.resize(own.elements * kernels::ElementBytes(own.parameter_dtype));
      names_.push_back(spec.name);
      Fill(own.parameter_dtype, own.elements, 1 + names_.size(), 0.5f, own.parameter.data());
    }
    Open(Resume::kNever);
    const absl::Status initialised = tensors_->Initialise(Memory({}));
    EXPECT_TRUE(initialised.ok()) << initialised;
  }
  ~Trainer() { Close(); }

  void Open(Resume resume) {
    collective_ = std::move(MakeLoopbackGroup(1).front());
    SessionOptions options = TestOptions();
    options.job = "tensors";
    options.resume = resume;
    options.group_count = 2;
    options.chunk_elements = kChunk;
    options.durability = shape_.durability;
    options.pin_interval = shape_.durability == v1::DURABILITY_EVERY_K ? 2 : 0;
    options.optimizer.gradient = shape_.gradient;
    options.optimizer.working = shape_.working;
    std::vector<std::unique_ptr<Transport>> transports;
    transports.push_back(services::MakeEmbeddedTransport(server_.get(), 3));
    auto session = Session::Open(options, Specs(shape_.parts), std::move(transports), collective_.get());
    ASSERT_TRUE(session.ok()) << session.status();
    session_ = *std::move(session);
    tensors_ = std::make_unique<Tensors>(*Tensors::Make(session_.get(), names_));
  }
  void Close() {
    tensors_.reset();
    session_.reset();
  }

  // New gradients, but of `absent`; `inf`: one is infinite.
  std::vector<TensorMemory> Gradients(int64_t step, const std::vector<std::string>& absent = {}, bool inf = false) {
    for (size_t i = 0; i < own_.size(); ++i) {
      Own& own = own_[i];
      Fill(own.gradient_dtype, own.elements, 100 * static_cast<uint64_t>(step) + i, 0.25f, own.gradient.data());
      if (!inf || i != 0) continue;
      const float infinite = std::numeric_limits<float>::infinity();
      const uint64_t at = 70001 * kernels::ElementBytes(own.gradient_dtype);
      kernels::FromF32({&infinite, 1}, own.gradient_dtype, own.gradient.data() + at);
    }
    return Memory(absent);
  }
  absl::StatusOr<TensorsReport> Step(absl::Span<const TensorMemory> memory, double max_norm = 0) {
    StepOptions options = TestStep();
    options.max_norm = max_norm;
    return tensors_->Step(memory, options);
  }
  std::vector<TensorMemory> Memory(const std::vector<std::string>& absent) {
    std::vector<TensorMemory> memory;
    for (size_t i = 0; i < own_.size(); ++i) {
      const bool without = std::find(absent.begin(), absent.end(), names_[i]) != absent.end();
      memory.push_back({.gradient = without ? nullptr : own_[i].gradient.data(),
                        .gradient_dtype = own_[i].gradient_dtype,
                        .parameter = own_[i].parameter.data(),
                        .parameter_dtype = own_[i].parameter_dtype});
    }
    return memory;
  }
  Session& session() { return *session_; }
  Tensors& tensors() { return *tensors_; }
  std::vector<std::byte>& parameter(size_t i) { return own_[i].parameter; }

  // Parameters, all state and step counts.
  std::vector<std::string> Everything() {
    std::vector<std::string> all;
    for (size_t i = 0; i < own_.size(); ++i) {
      const Own& own = own_[i];
      all.emplace_back(reinterpret_cast<const char*>(own.parameter.data()), own.parameter.size());
      for (const Content content : {Content::kWorking, Content::kMaster, Content::kMoment1, Content::kMoment2}) {
        std::vector<float> values(own.elements);
        const absl::Status read = session_->Read(names_[i], content, session_->version(), absl::MakeSpan(values));
        EXPECT_TRUE(read.ok()) << read;
        all.emplace_back(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float));
      }
      all.push_back(std::to_string(session_->TensorSteps(names_[i], session_->version()).value_or(999)));
    }
    return all;
  }

 private:
  struct Own {
    uint64_t elements = 0;
    Dtype gradient_dtype = Dtype::kF32, parameter_dtype = Dtype::kF32;
    std::vector<std::byte> gradient, parameter;
  };
  static void Fill(Dtype dtype, uint64_t elements, uint64_t seed, float scale, std::byte* to) {
    std::mt19937 random(static_cast<uint32_t>(seed));
    std::vector<float> values(elements);
    for (float& value : values) value = scale * static_cast<float>(static_cast<int32_t>(random())) * 0x1p-31f;
    kernels::FromF32(values, dtype, to);
  }

  const Shape shape_;
  ScratchDirectory directory_;
  std::unique_ptr<services::StateServer> server_;
  std::unique_ptr<Collective> collective_;
  std::unique_ptr<Session> session_;
  std::unique_ptr<Tensors> tensors_;
  std::vector<std::string> names_;
  std::vector<Own> own_;
};

class TensorsTest : public ::testing::TestWithParam<Shape> {
 protected:
  void ExpectSame() {
    const std::vector<std::string> a = lender_.Everything(), b = copier_.Everything();
    ASSERT_EQ(a.size(), b.size());
    for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(a[i] == b[i]) << "entry " << i;
  }
  void StepBoth(int64_t step, const std::vector<std::string>& absent = {}, double max_norm = 0, bool inf = false) {
    const auto lent = lender_.Step(lender_.Gradients(step, absent, inf), max_norm);
    const auto copied = copier_.Step(copier_.Gradients(step, absent, inf), max_norm);
    ASSERT_TRUE(lent.ok()) << lent.status();
    ASSERT_TRUE(copied.ok()) << copied.status();
    EXPECT_EQ(lent->step.version, copied->step.version);
    EXPECT_EQ(lent->step.skipped, inf);
    EXPECT_EQ(copied->step.skipped, inf);
    EXPECT_EQ(lent->step.norm, copied->step.norm);  // the same bits
    EXPECT_TRUE(inf || lent->step.norm > 0);
    ExpectSame();
  }

  Trainer lender_{GetParam(), true};
  Trainer copier_{GetParam(), false};
};

TEST_P(TensorsTest, BitsOfTheCopyingPath) {
  EXPECT_TRUE(lender_.session().takes_loans());
  EXPECT_FALSE(copier_.session().takes_loans());
  StepBoth(1);
  StepBoth(2, {"frozen"}, /*max_norm=*/0.5);
  StepBoth(3, {"frozen", "wide"});  // some chunks have nothing
  StepBoth(4, {}, /*max_norm=*/0, /*inf=*/true);
  StepBoth(5, {"table", "frozen"});  // a whole unit
  StepBoth(6);
  const uint64_t pushed = lender_.session().stats().pushed_bytes;
  EXPECT_EQ(pushed == 0, GetParam().durability != v1::DURABILITY_STEP);
  EXPECT_GT(copier_.session().stats().pulled_bytes, lender_.session().stats().pulled_bytes);
}

// The step includes values written by the user, with and without a gradient of the same tensor.
TEST_P(TensorsTest, WrittenValues) {
  StepBoth(1);
  for (Trainer* trainer : {&lender_, &copier_}) {
    for (const auto& [name, elements] : {std::pair{"wide", 150003}, std::pair{"table", 33000}}) {
      std::vector<float> values(static_cast<size_t>(elements));
      for (size_t i = 0; i < values.size(); ++i) values[i] = 0.001f * static_cast<float>(i % 999) + 0.3f;
      ASSERT_TRUE(trainer->session().Write(name, values).ok());
    }
  }
  StepBoth(2, {"table"}, 0, /*inf=*/true);  // written values wait for a step that is not skipped
  StepBoth(3, {"wide"});
  StepBoth(4);
}

TEST_P(TensorsTest, ValuesAlone) {
  StepBoth(1);
  for (Trainer* trainer : {&lender_, &copier_}) {
    const std::vector<float> values(150003, 0.7f), scale{3.0f};
    ASSERT_TRUE(trainer->session().Write("wide", values).ok());
    ASSERT_TRUE(trainer->session().Write("scale", scale).ok());
    const auto committed = trainer->session().CommitValues();
    ASSERT_TRUE(committed.ok()) << committed.status();
    EXPECT_EQ(committed->version, 2);
    std::vector<float> master(1);
    ASSERT_TRUE(trainer->session().Read("scale", Content::kMaster, 2, absl::MakeSpan(master)).ok());
    EXPECT_EQ(master[0], 3.0f);
  }
  StepBoth(2, {"frozen"});
}

// Arrays from elsewhere: lent or pushed, whatever they are of, and nothing else is touched by them.
TEST_P(TensorsTest, StateIsWritten) {
  StepBoth(1);
  const std::vector<size_t> which = {0, 2, 3};  // "wide", "scale", "table"
  const std::vector<uint64_t> elements = {150003, 1, 33000}, steps = {11, 12, 13};
  std::vector<std::vector<float>> values;
  for (const uint64_t n : elements) {
    for (std::vector<float>& x = values.emplace_back(n); float& one : x) {
      one = 0.001f * static_cast<float>((&one - x.data()) % 1009) + 0.25f;
    }
  }
  const std::vector<const float*> from = {values[0].data(), values[1].data(), values[2].data()};
  for (const Content array : {Content::kMoment2, Content::kMaster, Content::kMoment1}) {
    for (Trainer* trainer : {&lender_, &copier_}) {
      const std::vector<std::string> before = trainer->Everything();
      const auto committed = trainer->tensors().CommitState(array, which, from, steps, "blob");
      ASSERT_TRUE(committed.ok()) << committed.status();
      const std::vector<std::string> after = trainer->Everything();
      for (size_t i = 0; i < 5; ++i) {
        const auto written = std::find(which.begin(), which.end(), i);
        const auto k = static_cast<size_t>(written - which.begin());
        // Parts of each tensor: the trainer's parameter; the server's parameter, master and moments; the step count.
        for (size_t part = 0; part < 6; ++part) {
          const size_t at = 6 * i + part;
          const bool touched = written != which.end() && (part == static_cast<size_t>(array) + 1 || part == 5 ||
                                                          (part == 1 && array == Content::kMaster));
          if (!touched) {
            EXPECT_TRUE(before[at] == after[at]) << i << " " << part;
          } else if (part == static_cast<size_t>(array) + 1) {
            const std::string expected(reinterpret_cast<const char*>(from[k]), elements[k] * sizeof(float));
            EXPECT_TRUE(after[at] == expected) << i << " " << part;
          } else if (part == 5) {
            EXPECT_EQ(after[at], std::to_string(steps[k]));
          }
        }
      }
    }
  }
  StepBoth(2, {"frozen"});
  const auto pending = std::vector<float>(1);
  ASSERT_TRUE(lender_.session().Write("scale", pending).ok());
  EXPECT_THAT(lender_.tensors().CommitState(Content::kMoment1, which, from, steps, "").status().ToString(),
              HasSubstr("values were written"));
}

TEST_P(TensorsTest, ASessionThatFollowsPullsWhatIsThere) {
  StepBoth(1);
  StepBoth(2, {"frozen"});
  for (Trainer* trainer : {&lender_, &copier_}) {
    trainer->Close();
    for (size_t i = 0; i < 5; ++i) std::fill(trainer->parameter(i).begin(), trainer->parameter(i).end(), std::byte{7});
    trainer->Open(Resume::kMust);
    ASSERT_TRUE(trainer->tensors().Pull(trainer->Memory({})).ok());
  }
  ExpectSame();
  StepBoth(3);
}

// Parameters without memory in the trainer are pulled by themselves, and no step brings them anywhere.
TEST_P(TensorsTest, ParametersOnServersAlone) {
  std::vector<TensorMemory> memory = copier_.Gradients(1);
  for (const size_t i : {size_t{0}, size_t{3}}) memory[i].parameter = nullptr;
  const std::vector<std::byte> before = copier_.parameter(3), other = copier_.parameter(1);
  ASSERT_TRUE(copier_.Step(memory).ok());
  EXPECT_TRUE(copier_.parameter(3) == before);
  EXPECT_FALSE(copier_.parameter(1) == other);
  const std::vector<size_t> which = {3, 0};  // of two units
  const Dtype dtype = GetParam().working;
  std::vector<std::vector<std::byte>> places;
  std::vector<std::byte*> to;
  for (const size_t i : which) {
    const uint64_t bytes = copier_.tensors().local_elements(i) * kernels::ElementBytes(dtype);
    to.push_back(places.emplace_back(bytes, std::byte{7}).data());
  }
  auto pulls = copier_.tensors().StartPull(which, to);
  ASSERT_TRUE(pulls.ok()) << pulls.status();
  for (PendingPull& pull : *pulls) ASSERT_EQ(pull.Await(), absl::OkStatus());
  for (size_t k = 0; k < which.size(); ++k) {
    std::vector<float> came(copier_.tensors().local_elements(which[k])), expected(came.size());
    kernels::ToF32(dtype, places[k].data(), absl::MakeSpan(came));
    const std::string name = which[k] == 0 ? "wide" : "table";
    ASSERT_TRUE(copier_.session().Read(name, Content::kWorking, 1, absl::MakeSpan(expected)).ok());
    EXPECT_TRUE(came == expected) << name;
  }
  EXPECT_TRUE(copier_.parameter(3) == before);
}

TEST_P(TensorsTest, DroppedLoansCountForNothing) {
  if (!lender_.session().takes_gradients()) GTEST_SKIP() << "gradients are not lent";
  std::vector<model::LentTensor> lent(lender_.session().tensor_count());
  const std::vector<TensorMemory> memory = lender_.Gradients(77);
  for (size_t i = 0; i < lent.size(); ++i) lent[i] = {.gradient = memory[i].gradient};
  ASSERT_TRUE(lender_.session().Lend(lent).ok());
  EXPECT_THAT(lender_.session().Lend(lent).ToString(), HasSubstr("already"));
  const std::vector<float> values(150003);
  EXPECT_THAT(lender_.session().Write("wide", values).ToString(), HasSubstr("values are lent"));
  EXPECT_THAT(lender_.session().AwaitApplied().ToString(), HasSubstr("Step or Drop comes before"));
  EXPECT_THAT(lender_.session().PushBorrowed(1, {}).ToString(), HasSubstr("lent"));
  ASSERT_TRUE(lender_.session().Norm().ok());
  ASSERT_TRUE(lender_.session().Drop().ok());
  StepBoth(1);
  // Values written while parameters are lent for a step are not committed during the step. The loan goes on.
  ASSERT_TRUE(lender_.session().Write("wide", values).ok());
  for (model::LentTensor& tensor : lent) tensor = {};
  ASSERT_TRUE(lender_.session().Lend(lent).ok());
  EXPECT_THAT(lender_.session().CommitValues().status().ToString(), HasSubstr("memory is lent for a step"));
  EXPECT_THAT(lender_.session().Lend(lent).ToString(), HasSubstr("already"));
  ASSERT_TRUE(lender_.session().Drop().ok());
  for (model::LentTensor& tensor : lent) tensor.value = reinterpret_cast<const std::byte*>(values.data());
  EXPECT_THAT(lender_.session().Lend(lent).ToString(), HasSubstr("of no others"));
}

// After a failed step, none of its gradients are read or sent again.
TEST_P(TensorsTest, AFailedStepIsDropped) {
  StepBoth(1);
  StepOptions wrong = TestStep();
  wrong.groups.pop_back();
  EXPECT_FALSE(copier_.tensors().Step(copier_.Gradients(2), wrong).ok());
  StepBoth(4);
}

TEST_P(TensorsTest, ReturnedGradientsAreDroppedFirst) {
  StepBoth(1);
  const uint32_t unit = *copier_.session().FindUnit("a");
  ASSERT_TRUE(copier_.session().PushBorrowed(unit, {}).ok());
  copier_.session().ReturnGradients();
  EXPECT_THAT(copier_.session().PushBorrowed(unit, {}).ToString(), HasSubstr("Drop() starts over"));
  EXPECT_THAT(copier_.session().Step(TestStep()).status().ToString(), HasSubstr("were returned"));
  ASSERT_TRUE(copier_.session().Drop().ok());
  StepBoth(4);
}

TEST_P(TensorsTest, RunsOfGradients) {
  Session& session = copier_.session();
  const uint32_t unit = *session.FindUnit("a");
  const uint64_t owned = session.owned_elements(unit), width = kernels::ElementBytes(session.optimizer().gradient);
  std::vector<std::byte> bytes(owned * width);
  const absl::Span<const std::byte> all = bytes;
  for (const auto& [begin, count] : {std::pair{owned - 5, uint64_t{6}}, std::pair{owned + 1, uint64_t{0}}}) {
    EXPECT_EQ(model::ReasonOf(session.PushBorrowed(unit, {{begin, all.subspan(0, count * width)}})), model::kBadRange);
  }
  EXPECT_FALSE(session.PushBorrowed(unit, {{0, all.subspan(0, width + 1)}}).ok());
  EXPECT_FALSE(session.PushBorrowed(unit, {{0, all.subspan(0, 2 * width)}, {1, all.subspan(0, width)}}).ok());
  EXPECT_TRUE(session.PushBorrowed(unit, {}).ok());
  EXPECT_EQ(*session.Norm(), 0);
  ASSERT_TRUE(session.Drop().ok());
}

constexpr Dtype kF32 = Dtype::kF32, kBf16 = Dtype::kBf16;
INSTANTIATE_TEST_SUITE_P(
    Shapes, TensorsTest,
    ::testing::Values(Shape{"Dram"}, Shape{"F32", v1::DURABILITY_NONE, 64 * kMiB, kF32, kF32, kF32, kF32},
                      Shape{"OddDtypes", v1::DURABILITY_NONE, 64 * kMiB, kBf16, kBf16, kF32, kF32},
                      Shape{"Nvme", v1::DURABILITY_NONE, 8 * kMiB},
                      Shape{"NvmeNoRoomForSlices", v1::DURABILITY_NONE, 6 * kMiB + 128 * 1024},
                      Shape{"EveryK", v1::DURABILITY_EVERY_K, 64 * kMiB},
                      Shape{"EveryKNvme", v1::DURABILITY_EVERY_K, 8 * kMiB},
                      Shape{"Step", v1::DURABILITY_STEP, 64 * kMiB, kBf16, kBf16, kBf16, kF32},
                      Shape{"Parts", v1::DURABILITY_NONE, 64 * kMiB, kBf16, kBf16, kF32, kF32, true},
                      Shape{"PartsEveryK", v1::DURABILITY_EVERY_K, 8 * kMiB, kBf16, kBf16, kBf16, kBf16, true},
                      Shape{"PartsStep", v1::DURABILITY_STEP, 64 * kMiB, kBf16, kBf16, kBf16, kF32, true}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace ballast::client
