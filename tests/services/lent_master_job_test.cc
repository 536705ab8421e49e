// Jobs whose fp32 masters are the parameters of the trainer in the server's process: the bits of a job with masters on
// the server, and by name all that such a job cannot have.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ballast/proto/base/status.h"
#include "ballast/tests/services/trainer_group.h"
#include "ballast/tests/services/training_bits.h"

namespace ballast::services {
namespace {

using ::testing::HasSubstr;

v1::JobSpec Spec(bool lent) {
  v1::JobSpec spec = MakeSpec("job", SmallModel());
  spec.set_gradient_dtype(v1::DTYPE_F32);
  spec.set_working_dtype(v1::DTYPE_F32);
  if (lent) spec.set_master_format(v1::MASTER_FORMAT_LENT);
  return spec;
}

// A trainer, and a server in its process.
struct Trainer {
  explicit Trainer(bool lent) : lends(lent), group({Server()}, Spec(lent), 1) {
    EXPECT_EQ(group.Start(), absl::OkStatus());
    tensors = static_cast<uint32_t>(group.plan().layout().tensors().size());
    for (uint32_t i = 0; i < tensors; ++i) {
      const uint64_t n = group.plan().layout().tensors()[i].range.size();
      parameters.emplace_back(n);
      gradients.emplace_back(n);
      for (uint64_t e = 0; e < n; ++e) parameters[i][e] = Initial(i, e);
    }
    auto loan = server->Lend(Values(AllTensors(tensors)));
    EXPECT_EQ(loan.status(), absl::OkStatus());
    EXPECT_EQ(group.Finish(ValuesHeader(tensors)).status(), absl::OkStatus());
  }
  StateServer* Server() {
    server.options().working_copies = false;
    server.Restart();
    return server.get();
  }

  model::LoanRequest Request() const {
    return {.job = "job",
            .epoch = group.epoch(),
            .step = group.step(),
            .attempt = 0,
            .tensors = std::vector<model::LentTensor>(tensors)};
  }
  model::LoanRequest Values(const std::string& presence) const {
    model::LoanRequest request = Request();
    for (uint32_t i = 0; i < tensors; ++i) {
      if (model::HasBit(presence, i))
        request.tensors[i].value = reinterpret_cast<const std::byte*>(parameters[i].data());
    }
    return request;
  }
  model::LoanRequest Gradients() {
    model::LoanRequest request = Request();
    const Fill fill = GradientOf(steps);
    for (uint32_t i = 0; i < tensors; ++i) {
      for (uint64_t e = 0; e < gradients[i].size(); ++e) gradients[i][e] = fill(i, e);
      request.tensors[i] = {.gradient = reinterpret_cast<const std::byte*>(gradients[i].data()),
                            .working = reinterpret_cast<std::byte*>(parameters[i].data())};
    }
    return request;
  }
  void Step() {
    auto loan = server->Lend(Gradients());
    ASSERT_EQ(loan.status(), absl::OkStatus());
    ASSERT_EQ(group.Finish(UpdateHeader(tensors)).status(), absl::OkStatus());
    ++steps;
  }
  // In place, told to a server with masters of its own.
  void Edit() {
    for (float& value : parameters[1]) value *= -0.5f;
    if (lends) return;
    v1::StepHeader header = ValuesHeader(tensors);
    header.set_value_presence(model::MakeBitmap(tensors, {1}));
    auto loan = server->Lend(Values(header.value_presence()));
    ASSERT_EQ(loan.status(), absl::OkStatus());
    ASSERT_EQ(group.Finish(header).status(), absl::OkStatus());
  }

  const bool lends;
  TestServer server{"s"};
  TrainerGroup group;
  uint32_t tensors = 0;
  int64_t steps = 0;
  std::vector<std::vector<float>> parameters, gradients;
};

TEST(LentMasterJobTest, HasTheBitsOfMastersOnTheServer) {
  Trainer lent(true), kept(false);
  for (int i = 0; i < 4; ++i) {
    for (Trainer* trainer : {&lent, &kept}) {
      trainer->Step();
      if (i == 1) trainer->Edit();
    }
  }
  EXPECT_TRUE(lent.parameters == kept.parameters);
  for (const v1::Content content : {v1::CONTENT_MOMENT1, v1::CONTENT_MOMENT2}) {
    for (uint32_t i = 0; i < lent.tensors; ++i) {
      const auto mine = lent.group.Read(i, content, lent.group.step() - 1);
      ASSERT_EQ(mine.status(), absl::OkStatus());
      EXPECT_EQ(*mine, *kept.group.Read(i, content, kept.group.step() - 1)) << "tensor " << i;
    }
  }
}

TEST(LentMasterJobTest, RefusesWhatNeedsAMasterOnTheServer) {
  Trainer lent(true);
  for (const v1::Content content : {v1::CONTENT_WORKING, v1::CONTENT_MASTER}) {
    EXPECT_EQ(model::ReasonOf(lent.group.Read(0, content, 0).status()), model::kUnsupported);
  }
  for (const v1::SliceKind kind : {v1::SLICE_KIND_GRADIENT, v1::SLICE_KIND_VALUE}) {
    const absl::Status pushed = lent.group.PushAll(kind, AllTensors(lent.tensors), Ones);
    EXPECT_EQ(model::ReasonOf(pushed), model::kUnsupported) << pushed;
  }
  model::LoanRequest request = lent.Gradients();
  request.tensors[1].working = nullptr;
  EXPECT_THAT(lent.server->Lend(request).status().ToString(), HasSubstr("without its parameter"));
  lent.Step();  // none of these was in the way
}

// The step may be decided by whoever fences next, and would find no parameters.
TEST(LentMasterJobTest, TakenBackFromAPreparedStepTheJobEnds) {
  Trainer lent(true);
  auto loan = lent.server->Lend(lent.Gradients());
  ASSERT_EQ(loan.status(), absl::OkStatus());
  const std::vector<std::vector<float>> before = lent.parameters;
  const auto records = lent.group.SealAll(UpdateHeader(lent.tensors));
  ASSERT_EQ(records.status(), absl::OkStatus());
  loan->reset();
  const absl::Status committed = lent.group.Commit(*model::Decide(*records));
  EXPECT_THAT(committed.ToString(), HasSubstr("took its parameters"));
  EXPECT_TRUE(lent.parameters == before);
}

TEST(LentMasterJobTest, RefusedWhereNobodyLends) {
  TestServer server("s", {.dram = uint64_t{64} << 20, .nvme = uint64_t{64} << 20}), other("t");
  const auto open = [](std::vector<StateServer*> on, const v1::JobSpec& spec, uint32_t ranks) {
    return model::ReasonOf(TrainerGroup(std::move(on), spec, ranks).Start());
  };
  EXPECT_EQ(open({server.get()}, Spec(true), 1), model::kUnsupported);  // keeps working copies
  for (TestServer* each : {&server, &other}) {
    each->options().working_copies = false;
    each->Restart();
  }
  EXPECT_EQ(open({server.get()}, Spec(true), 2), model::kUnsupported);
  EXPECT_EQ(open({server.get(), other.get()}, Spec(true), 1), model::kUnsupported);
  v1::JobSpec durable = Spec(true);
  durable.set_durability(v1::DURABILITY_STEP);
  EXPECT_EQ(open({server.get()}, durable, 1), model::kUnsupported);
  v1::JobSpec narrow = Spec(true);
  narrow.set_working_dtype(v1::DTYPE_BF16);
  EXPECT_EQ(open({server.get()}, narrow, 1), model::kBadSpec);
}

}  // namespace
}  // namespace ballast::services
