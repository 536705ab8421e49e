// Jobs whose masters are kept as remainder: the bits of a job with fp32 masters, wherever the state lies.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ballast/proto/base/status.h"
#include "ballast/tests/services/trainer_group.h"
#include "ballast/tests/services/training_bits.h"

namespace ballast::services {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kMiB = uint64_t{1} << 20;

// Eight whole chunks and two short ones: 1.2 MB of working copies, 2.4 MB of slices, 1.8 MB of staging.
std::vector<TestTensor> Model() {
  return {{"a", "u0", 6 << 16, 0}, {"b", "u1", (2 << 16) + 777, 0}, {"c", "u2", 300, 1}};
}
constexpr uint32_t kTensors = 3;

v1::JobSpec Spec(bool remainder, v1::MomentFormat moments = v1::MOMENT_FORMAT_F32) {
  v1::JobSpec spec = MakeSpec("job", Model());
  spec.set_moment_format(moments);
  if (remainder) spec.set_master_format(v1::MASTER_FORMAT_REMAINDER);
  return spec;
}

std::unique_ptr<TrainerGroup> Started(TestServer& server, const v1::JobSpec& spec, uint64_t epoch = 1) {
  auto group = std::make_unique<TrainerGroup>(std::vector<StateServer*>{server.get()}, spec, 1, epoch);
  EXPECT_EQ(group->Start(), absl::OkStatus());
  return group;
}

absl::Status Step(TrainerGroup& group, const std::vector<uint32_t>& trained) {
  v1::StepHeader header = UpdateHeader(kTensors);
  header.set_gradient_presence(model::MakeBitmap(kTensors, trained));
  BALLAST_RETURN_IF_ERROR(group.PushAll(v1::SLICE_KIND_GRADIENT, header.gradient_presence(), GradientOf(group.step())));
  return group.Finish(header).status();
}

// Writes tensor 1 anew.
absl::Status Edit(TrainerGroup& group) {
  v1::StepHeader header = ValuesHeader(kTensors);
  header.set_value_presence(model::MakeBitmap(kTensors, {1}));
  BALLAST_RETURN_IF_ERROR(group.PushAll(v1::SLICE_KIND_VALUE, header.value_presence(), GradientOf(77)));
  return group.Finish(header).status();
}

uint64_t StateBytes(TestServer& server) {
  uint64_t bytes = 0;
  const auto status = server->Status();
  for (const auto& tier : status.jobs(0).tiers()) bytes += tier.state_bytes();
  return bytes;
}

struct Way {
  const char* name;
  storage::TierBytes budget;
  v1::MomentFormat moments = v1::MOMENT_FORMAT_F32;
  bool all_copies = true;
};

class RemainderJobTest : public ::testing::TestWithParam<Way> {};
INSTANTIATE_TEST_SUITE_P(
    Ways, RemainderJobTest,
    ::testing::Values(Way{"Dram", {.dram = 64 * kMiB}}, Way{"DramAndNvme", {.dram = 8 * kMiB, .nvme = 64 * kMiB}},
                      Way{"EightBits", {.dram = 5'200'000, .nvme = 64 * kMiB}, v1::MOMENT_FORMAT_I8},
                      Way{"WithoutCopies", {.dram = 3'300'000, .nvme = 64 * kMiB}, v1::MOMENT_FORMAT_F32, false}),
    [](const auto& info) { return info.param.name; });

TEST_P(RemainderJobTest, HasTheBitsOfAnFp32Master) {
  const Way& way = GetParam();
  TestServer server("s", way.budget), whole_server("w", {.dram = 64 * kMiB});
  auto group = Started(server, Spec(true, way.moments)), whole = Started(whole_server, Spec(false, way.moments));
  const auto both = [&](const std::function<absl::Status(TrainerGroup&)>& work) {
    ASSERT_EQ(work(*group), absl::OkStatus());
    ASSERT_EQ(work(*whole), absl::OkStatus());
  };
  both([](TrainerGroup& g) { return g.Initialise(Initial); });
  for (int i = 0; i < 6; ++i) {
    both([&](TrainerGroup& g) {
      return i == 3 ? Edit(g) : Step(g, i % 2 == 0 ? std::vector<uint32_t>{0, 1, 2} : std::vector<uint32_t>{0, 2});
    });
  }
  ExpectSame(*group, *whole, 6);
  EXPECT_EQ(server->traffic().read.nvme > 0, way.budget.nvme > 0);
  // 15 bits less for each master that has a working copy.
  const uint64_t less = StateBytes(whole_server) - StateBytes(server), all = (uint64_t{8} << 16) * 15 / 8;
  EXPECT_LE(less, all + 4096);
  EXPECT_EQ(less >= all, way.all_copies) << less;
  // A group that comes back finds the job as it is.
  group = Started(server, Spec(true, way.moments), 2);
  ExpectSame(*group, *whole, 6);
}

void ExpectRefused(const absl::Status& status, absl::StatusCode code, const char* reason, const char* words) {
  EXPECT_EQ(status.code(), code) << status;
  EXPECT_EQ(model::ReasonOf(status), reason) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(words));
}

TEST(RemainderJobRefusalTest, NamesWhatCannotBeHonoured) {
  TestServer server("s", {.dram = 64 * kMiB, .nvme = 64 * kMiB});
  const auto open = [](TestServer& on, const v1::JobSpec& spec) { return TrainerGroup({on.get()}, spec, 1).Start(); };
  for (const v1::Durability durability : {v1::DURABILITY_STEP, v1::DURABILITY_EVERY_K}) {
    v1::JobSpec durable = Spec(true);
    durable.set_durability(durability);
    if (durability == v1::DURABILITY_EVERY_K) durable.set_pin_interval(2);
    ExpectRefused(open(server, durable), absl::StatusCode::kInvalidArgument, model::kBadSpec,
                  "expected durability none, got DURABILITY_");
  }
  for (const v1::Dtype dtype : {v1::DTYPE_F32, v1::DTYPE_F16}) {
    v1::JobSpec other = Spec(true);
    other.set_working_dtype(dtype);
    ExpectRefused(open(server, other), absl::StatusCode::kInvalidArgument, model::kBadSpec,
                  "needs bf16 working parameters");
  }
  v1::JobSpec unknown = Spec(true);
  unknown.set_master_format(static_cast<v1::MasterFormat>(9));
  ExpectRefused(open(server, unknown), absl::StatusCode::kInvalidArgument, model::kBadDtype, "got master_format 9");

  server.options().working_copies = false;
  server.Restart();
  ExpectRefused(open(server, Spec(true)), absl::StatusCode::kUnimplemented, model::kUnsupported,
                "keeps no working copies");
  EXPECT_EQ(open(server, Spec(false)), absl::OkStatus());
}

TEST(RemainderJobRefusalTest, AJobKeepsItsFormat) {
  TestServer server("s", {.dram = 64 * kMiB});
  auto group = Started(server, Spec(true));
  ASSERT_EQ(group->Initialise(Initial), absl::OkStatus());
  TrainerGroup other({server.get()}, Spec(false), 1, 2);
  ExpectRefused(other.Start(), absl::StatusCode::kInvalidArgument, model::kBadSpec, "masters as remainder");
}

}  // namespace
}  // namespace ballast::services
