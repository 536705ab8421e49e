// Working parameters in blocks of e4m3: whatever the tier, and after restarts, a pull has the blocks of the masters, at
// half of bf16's bytes. Masters and moments are those of a job in bf16.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <memory>

#include "ballast/kernels/kernels.h"
#include "ballast/proto/base/status.h"
#include "ballast/tests/services/trainer_group.h"

namespace ballast::services {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kMiB = uint64_t{1} << 20;

// Tensors that fill several chunks and end amid a block.
std::vector<TestTensor> Model() {
  return {{"embed", "u0", 70001, 0}, {"bias", "u0", 1000, 0}, {"weight", "u1", 140003, 1}, {"gate", "u1", 300, 1}};
}
constexpr uint32_t kTensors = 4;

float Initial(uint32_t tensor, uint64_t element) {
  return std::sin(static_cast<float>(element) * 0.37f + static_cast<float>(tensor)) *
         std::ldexp(1.0f, static_cast<int>(element / 256 % 7) - 3);
}
Fill GradientOf(int64_t step) {
  return [step](uint32_t tensor, uint64_t element) {
    return 0.001f * static_cast<float>((tensor * 31 + element * 17 + static_cast<uint64_t>(step) * 101) % 997) - 0.5f;
  };
}

v1::JobSpec Spec(v1::Durability durability, v1::Dtype working = v1::DTYPE_F8_E4M3) {
  v1::JobSpec spec = MakeSpec("job", Model());
  spec.set_durability(durability);
  spec.set_working_dtype(working);
  return spec;
}

absl::Status Step(TrainerGroup& group) {
  v1::StepHeader header = UpdateHeader(kTensors);
  BALLAST_RETURN_IF_ERROR(group.PushAll(v1::SLICE_KIND_GRADIENT, header.gradient_presence(), GradientOf(group.step())));
  return group.Finish(header).status();
}

struct Way {
  const char* name;
  v1::Durability durability;
  storage::TierBytes budget;
  uint32_t ranks;
  bool working_copies = true;
};

class F8JobTest : public ::testing::TestWithParam<Way> {
 protected:
  F8JobTest() : server_("s", GetParam().budget), other_("o", {.dram = 64 * kMiB}) {
    if (!GetParam().working_copies) {
      server_.End();
      server_.options().working_copies = false;
      server_.Restart();
    }
  }

  std::unique_ptr<TrainerGroup> NewGroup() {
    auto group = std::make_unique<TrainerGroup>(std::vector<StateServer*>{server_.get()}, Spec(GetParam().durability),
                                                GetParam().ranks, ++epochs_);
    EXPECT_EQ(group->Start(), absl::OkStatus());
    return group;
  }
  // Makes the job, and the same in bf16.
  void Begin() {
    group_ = NewGroup();
    ASSERT_EQ(group_->Initialise(Initial), absl::OkStatus());
    plain_ = std::make_unique<TrainerGroup>(std::vector<StateServer*>{other_.get()},
                                            Spec(v1::DURABILITY_NONE, v1::DTYPE_BF16), 1);
    ASSERT_EQ(plain_->Start(), absl::OkStatus());
    ASSERT_EQ(plain_->Initialise(Initial), absl::OkStatus());
  }
  void Steps(int count) {
    for (int i = 0; i < count; ++i) {
      ASSERT_EQ(Step(*group_), absl::OkStatus());
      ASSERT_EQ(Step(*plain_), absl::OkStatus());
    }
  }
  void ExpectAll(int64_t version) {
    for (uint32_t tensor = 0; tensor < kTensors; ++tensor) {
      for (const v1::Content what : {v1::CONTENT_MASTER, v1::CONTENT_MOMENT1, v1::CONTENT_MOMENT2}) {
        const auto mine = group_->Read(tensor, what, version);
        ASSERT_TRUE(mine.ok()) << mine.status();
        EXPECT_EQ(*mine, *plain_->Read(tensor, what, plain_->step() - 1)) << tensor << ", content " << what;
      }
      ExpectBlocks(tensor, version);
    }
  }
  void ExpectBlocks(uint32_t tensor, int64_t version) {
    const auto master = group_->Read(tensor, v1::CONTENT_MASTER, version);
    const auto working = group_->Read(tensor, v1::CONTENT_WORKING, version);
    ASSERT_TRUE(master.ok() && working.ok()) << master.status() << working.status();
    // Tensors begin at blocks, and zeros follow them.
    std::vector<std::byte> coded(kernels::BytesOf(kernels::Dtype::kE4m3Blocks, master->size()));
    std::vector<float> expected(master->size());
    kernels::FromF32(*master, kernels::Dtype::kE4m3Blocks, coded.data());
    kernels::ToF32(kernels::Dtype::kE4m3Blocks, coded.data(), absl::MakeSpan(expected));
    ASSERT_EQ(*working, expected) << tensor;
    EXPECT_NE(*working, *master);
  }
  TestServer server_, other_;
  std::unique_ptr<TrainerGroup> group_, plain_;
  uint64_t epochs_ = 0;
};

TEST_P(F8JobTest, PullsHaveTheBlocksOfTheMasters) {
  Begin();
  ExpectAll(0);
  Steps(5);
  ExpectAll(5);
}

TEST_P(F8JobTest, ARestartChangesNothing) {
  if (GetParam().durability == v1::DURABILITY_NONE) return;  // no state outlives the server
  Begin();
  Steps(4);
  group_.reset();
  server_.Restart();
  group_ = NewGroup();
  ExpectAll(4);
  Steps(3);
  ExpectAll(7);
}

TEST_P(F8JobTest, APinKeepsItsBlocks) {
  Begin();
  Steps(2);
  v1::PinRequest pin;
  pin.set_job("job");
  pin.set_version(2);
  Answer<v1::PinResponse> pinned;
  server_->Pin(pin, absl::InfiniteFuture(), pinned.reply());
  ASSERT_EQ(pinned.Wait().status(), absl::OkStatus());
  Steps(2);
  ExpectAll(4);
  for (uint32_t tensor = 0; tensor < kTensors; ++tensor) ExpectBlocks(tensor, 2);
}

TEST_P(F8JobTest, NewValuesOfSomeTensorsLeaveTheOthers) {
  Begin();
  Steps(1);
  const Fill other = [](uint32_t tensor, uint64_t element) { return -3.0f * Initial(tensor + 1, element + 5); };
  for (TrainerGroup* group : {group_.get(), plain_.get()}) {
    v1::StepHeader header = ValuesHeader(kTensors);
    header.set_value_presence(model::MakeBitmap(kTensors, {1, 2}));
    ASSERT_EQ(group->PushAll(v1::SLICE_KIND_VALUE, header.value_presence(), other), absl::OkStatus());
    ASSERT_EQ(group->Finish(header).status(), absl::OkStatus());
  }
  ExpectAll(2);
}

INSTANTIATE_TEST_SUITE_P(
    Ways, F8JobTest,
    ::testing::Values(Way{"InMemory", v1::DURABILITY_NONE, {.dram = 64 * kMiB}, 1},
                      Way{"InMemoryRanks", v1::DURABILITY_NONE, {.dram = 64 * kMiB}, 3},
                      Way{"WithoutCopies", v1::DURABILITY_NONE, {.dram = 64 * kMiB}, 2, false},
                      Way{"OnDisk", v1::DURABILITY_NONE, {.dram = 7 * kMiB, .nvme = 64 * kMiB}, 1},
                      Way{"Durable", v1::DURABILITY_STEP, {.dram = 64 * kMiB, .nvme = 512 * kMiB}, 1},
                      Way{"DurableRanks", v1::DURABILITY_STEP, {.dram = 64 * kMiB, .nvme = 512 * kMiB}, 2},
                      Way{"DurableOnDisk", v1::DURABILITY_STEP, {.dram = 5 * kMiB, .nvme = 512 * kMiB}, 2}),
    [](const auto& info) { return std::string(info.param.name); });

// Working copies, and what pulls of everything send: the bytes of blocks, and at most 0.52 of bf16's.
TEST(F8JobBytes, AreAtMost52PercentOfBf16s) {
  uint64_t copies[2], sent[2];
  for (const int f8 : {0, 1}) {
    TestServer server("s", {.dram = 64 * kMiB});
    TrainerGroup group({server.get()}, Spec(v1::DURABILITY_NONE, f8 == 1 ? v1::DTYPE_F8_E4M3 : v1::DTYPE_BF16), 1);
    ASSERT_EQ(group.Start(), absl::OkStatus());
    ASSERT_EQ(group.Initialise(Initial), absl::OkStatus());
    for (uint32_t tensor = 0; tensor < kTensors; ++tensor) {
      ASSERT_TRUE(group.Read(tensor, v1::CONTENT_WORKING, 0).ok());
    }
    const v1::JobStatus job = server->Status().jobs(0);
    sent[f8] = server->Figures().jobs.at("job")->sent_bytes.load();
    copies[f8] = 0;
    for (const v1::TierStatus& tier : job.tiers()) copies[f8] += tier.working_bytes();
  }
  EXPECT_EQ(sent[0], 2 * (70001 + 1000 + 140003 + 300));
  EXPECT_EQ(sent[1], 260 * (70001 / 256 + 1 + 1000 / 256 + 1 + 140003 / 256 + 1 + 300 / 256 + 1));
  EXPECT_LE(sent[1] * 100, sent[0] * 52);
  EXPECT_LE(copies[1] * 100, copies[0] * 54) << "each copy is padded to 4096 bytes";
}

class F8Refusals : public ::testing::Test {
 protected:
  TestServer server_{"s"};
};

TEST_F(F8Refusals, PullsThatBeginAmidABlock) {
  TrainerGroup group({server_.get()}, Spec(v1::DURABILITY_NONE), 1);
  ASSERT_EQ(group.Start(), absl::OkStatus());
  ASSERT_EQ(group.Initialise(Initial), absl::OkStatus());
  v1::PullRequest request;
  request.set_job("job");
  request.set_version(0);
  request.set_content(v1::CONTENT_WORKING);
  request.set_begin(255);
  request.set_end(512);
  std::string bytes;
  const absl::Status refused =
      group.Pull(server_.get(), request, absl::Now() + absl::Seconds(50), &bytes).Wait().status();
  EXPECT_EQ(model::ReasonOf(refused), model::kBadRange);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("amid a block"));
  request.set_content(v1::CONTENT_MASTER);
  EXPECT_TRUE(group.Pull(server_.get(), request, absl::Now() + absl::Seconds(50), &bytes).Wait().ok());
}

TEST_F(F8Refusals, WhatF8CannotBe) {
  const auto refused = [&](const v1::JobSpec& spec, absl::string_view words) {
    TrainerGroup group({server_.get()}, spec, 1);
    const absl::Status status = group.Start();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(words));
  };
  v1::JobSpec gradients = Spec(v1::DURABILITY_NONE);
  gradients.set_gradient_dtype(v1::DTYPE_F8_E4M3);
  refused(gradients, "gradients may be");
  v1::JobSpec remainder = Spec(v1::DURABILITY_NONE);
  remainder.set_master_format(v1::MASTER_FORMAT_REMAINDER);
  refused(remainder, "needs bf16 working parameters");
}

}  // namespace
}  // namespace ballast::services
