// Frozen tensors: servers keep their working copies alone, and each value stays what it was rounded to, whatever
// happens to the trained tensors beside them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <filesystem>
#include <limits>
#include <memory>
#include <thread>

#include "absl/strings/str_cat.h"
#include "ballast/kernels/kernels.h"
#include "ballast/proto/base/status.h"
#include "ballast/services/tools/verify/verify.h"
#include "ballast/tests/services/trainer_group.h"

namespace ballast::services {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr uint64_t kMiB = uint64_t{1} << 20;

// Both units have trained and frozen tensors; those in bf16 and in 8 bits fill several chunks and end amid a block.
std::vector<TestTensor> Model(bool frozen) {
  const v1::Frozen working = frozen ? v1::FROZEN_WORKING : v1::FROZEN_UNSPECIFIED;
  const v1::Frozen q8 = frozen ? v1::FROZEN_Q8 : v1::FROZEN_UNSPECIFIED;
  return {{"embed", "u0", 70001, 0, working}, {"lora_a", "u0", 1000, 0},       {"weight", "u1", 140003, 0, q8},
          {"lora_b", "u1", 70000, 1},         {"norm", "u1", 100, 1, working}, {"gate", "u1", 300, 0, q8}};
}
constexpr uint32_t kTensors = 6;
const std::vector<uint32_t> kTrained = {1, 3}, kWorking = {0, 4}, kQ8 = {2, 5};

float Initial(uint32_t tensor, uint64_t element) {
  return std::sin(static_cast<float>(element) * 0.37f + static_cast<float>(tensor)) *
         std::ldexp(1.0f, static_cast<int>(element / 256 % 7) - 3);
}
Fill GradientOf(int64_t step) {
  return [step](uint32_t tensor, uint64_t element) {
    return 0.001f * static_cast<float>((tensor * 31 + element * 17 + static_cast<uint64_t>(step) * 101) % 997) - 0.5f;
  };
}

v1::JobSpec Spec(v1::Durability durability, bool frozen = true) {
  v1::JobSpec spec = MakeSpec("job", Model(frozen));
  spec.set_durability(durability);
  if (durability == v1::DURABILITY_EVERY_K) spec.set_pin_interval(2);
  return spec;
}

absl::Status Step(TrainerGroup& group) {
  v1::StepHeader header = UpdateHeader(kTensors);
  header.set_gradient_presence(model::MakeBitmap(kTensors, kTrained));
  BALLAST_RETURN_IF_ERROR(group.PushAll(v1::SLICE_KIND_GRADIENT, header.gradient_presence(), GradientOf(group.step())));
  return group.Finish(header).status();
}

// Writes new values of some tensors.
absl::Status WriteValues(TrainerGroup& group, const std::vector<uint32_t>& tensors, const Fill& fill) {
  v1::StepHeader header = ValuesHeader(kTensors);
  header.set_value_presence(model::MakeBitmap(kTensors, tensors));
  BALLAST_RETURN_IF_ERROR(group.PushAll(v1::SLICE_KIND_VALUE, header.value_presence(), fill));
  return group.Finish(header).status();
}

float Rounded(float value) { return kernels::FromBf16(kernels::ToBf16(value)); }

// The frozen tensors hold `fill` at `version`.
void ExpectFrozen(TrainerGroup& group, int64_t version, const Fill& fill = Initial) {
  for (const uint32_t tensor : kWorking) {
    const auto working = group.Read(tensor, v1::CONTENT_WORKING, version);
    const auto master = group.Read(tensor, v1::CONTENT_MASTER, version);
    ASSERT_TRUE(working.ok() && master.ok()) << working.status() << master.status();
    EXPECT_EQ(*working, *master);
    for (uint64_t i = 0; i < working->size(); ++i) {
      ASSERT_EQ((*working)[i], Rounded(fill(tensor, i))) << "tensor " << tensor << ", element " << i;
    }
  }
  for (const uint32_t tensor : kQ8) {
    const auto working = group.Read(tensor, v1::CONTENT_WORKING, version);
    const auto master = group.Read(tensor, v1::CONTENT_MASTER, version);
    ASSERT_TRUE(working.ok() && master.ok()) << working.status() << master.status();
    for (uint64_t block = 0; block < master->size(); block += kernels::kQuantBlock) {
      const uint64_t end = std::min<uint64_t>(block + kernels::kQuantBlock, master->size());
      float largest = 0;
      for (uint64_t i = block; i < end; ++i) largest = std::max(largest, std::abs(fill(tensor, i)));
      bool all_exact = true;
      for (uint64_t i = block; i < end; ++i) {
        const float value = fill(tensor, i);
        ASSERT_LE(std::abs((*master)[i] - value), largest / 254 * (1 + 0x1p-13f)) << tensor << ", element " << i;
        ASSERT_EQ((*working)[i], Rounded((*master)[i])) << tensor << ", element " << i;
        all_exact = all_exact && (*master)[i] == value;
      }
      EXPECT_FALSE(all_exact) << "values in 8 bits are not these";
    }
  }
}

struct Way {
  const char* name;
  v1::Durability durability;
  storage::TierBytes budget;
  uint32_t ranks;
};

class FrozenJobTest : public ::testing::TestWithParam<Way> {
 protected:
  FrozenJobTest() : server_("s", GetParam().budget), other_("o", {.dram = 64 * kMiB}) {}

  std::unique_ptr<TrainerGroup> NewGroup() {
    auto group = std::make_unique<TrainerGroup>(std::vector<StateServer*>{server_.get()}, Spec(GetParam().durability),
                                                GetParam().ranks, ++epochs_);
    EXPECT_EQ(group->Start(), absl::OkStatus());
    return group;
  }
  // Makes the job, and the same of which nothing is frozen.
  void Begin() {
    group_ = NewGroup();
    ASSERT_EQ(group_->Initialise(Initial), absl::OkStatus());
    unfrozen_ =
        std::make_unique<TrainerGroup>(std::vector<StateServer*>{other_.get()}, Spec(v1::DURABILITY_NONE, false), 1);
    ASSERT_EQ(unfrozen_->Start(), absl::OkStatus());
    ASSERT_EQ(unfrozen_->Initialise(Initial), absl::OkStatus());
  }
  void Steps(int count) {
    for (int i = 0; i < count; ++i) {
      ASSERT_EQ(Step(*group_), absl::OkStatus());
      ASSERT_EQ(Step(*unfrozen_), absl::OkStatus());
    }
  }
  void ExpectAll(int64_t version) {
    ExpectFrozen(*group_, version);
    for (const uint32_t tensor : kTrained) {
      for (const v1::Content what :
           {v1::CONTENT_WORKING, v1::CONTENT_MASTER, v1::CONTENT_MOMENT1, v1::CONTENT_MOMENT2}) {
        const auto mine = group_->Read(tensor, what, version);
        ASSERT_TRUE(mine.ok()) << mine.status();
        EXPECT_EQ(*mine, *unfrozen_->Read(tensor, what, unfrozen_->step() - 1)) << tensor << ", content " << what;
      }
    }
  }
  TestServer server_, other_;
  std::unique_ptr<TrainerGroup> group_, unfrozen_;
  uint64_t epochs_ = 0;
};

TEST_P(FrozenJobTest, TrainedTensorsTrainAndFrozenOnesStay) {
  Begin();
  ExpectFrozen(*group_, 0);
  Steps(5);
  ExpectAll(5);
}

TEST_P(FrozenJobTest, ARestartChangesNothing) {
  if (GetParam().durability == v1::DURABILITY_NONE) return;  // no state outlives the server
  Begin();
  Steps(4);
  for (int i = 0; i < 2; ++i) {
    group_.reset();
    server_.Restart();
    group_ = NewGroup();
    int64_t version = 4 + 3 * i;
    if (GetParam().durability == v1::DURABILITY_EVERY_K) {
      version += i;  // the restore is a transaction, too
      ASSERT_TRUE(group_->restores().has_value());
      v1::StepHeader header;
      header.set_kind(v1::STEP_KIND_RESTORE);
      header.set_restored_version(*group_->restores());
      header.set_gradient_presence(std::string(1, 0));
      header.set_value_presence(std::string(1, 0));
      ASSERT_EQ(group_->Finish(header).status(), absl::OkStatus());
      ExpectFrozen(*group_, group_->step() - 1);
      return;  // steps behind the pin are lost, and what comes next is another history
    }
    ExpectAll(version);
    Steps(3);
    ExpectAll(version + 3);
  }
}

// What flushes and logs do when the log has wrapped, and every chunk has been flushed once.
TEST_P(FrozenJobTest, ARestartAfterManySteps) {
  if (GetParam().durability != v1::DURABILITY_STEP) return;
  Begin();
  Steps(40);
  group_.reset();
  server_.End();
  const auto report = Verify(server_.directory(), nullptr);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_THAT(report->findings, IsEmpty()) << report->findings[0].what << ": " << report->findings[0].found;
  EXPECT_EQ(report->counts.extents, 9u);
  std::filesystem::remove_all(server_.directory() + "/catalog");
  const auto rebuilt = Rebuild(server_.directory(), nullptr);
  ASSERT_TRUE(rebuilt.ok()) << rebuilt.status();
  EXPECT_TRUE(rebuilt->written) << (rebuilt->refused.empty() ? "" : rebuilt->refused[0]);
  server_.Restart();
  group_ = NewGroup();
  ExpectAll(40);
}

TEST_P(FrozenJobTest, NewValuesTakeTheirPlaceAndPinsKeepTheOld) {
  Begin();
  Steps(2);
  v1::PinRequest pin;
  pin.set_job("job");
  pin.set_version(2);
  Answer<v1::PinResponse> pinned;
  server_->Pin(pin, absl::InfiniteFuture(), pinned.reply());
  ASSERT_EQ(pinned.Wait().status(), absl::OkStatus());
  const Fill other = [](uint32_t tensor, uint64_t element) { return -3.0f * Initial(tensor + 1, element + 5); };
  ASSERT_EQ(WriteValues(*group_, {0, 2, 4, 5}, other), absl::OkStatus());
  ExpectFrozen(*group_, 3, other);
  ExpectFrozen(*group_, 2);
  // One tensor of a chunk alone: the chunk's other values stay.
  ASSERT_EQ(WriteValues(*group_, {2}, Initial), absl::OkStatus());
  ExpectFrozen(*group_, 4, [&](uint32_t tensor, uint64_t element) {
    return tensor == 2 ? Initial(tensor, element) : other(tensor, element);
  });
}

TEST_P(FrozenJobTest, TakesItsWorkingCopiesAlone) {
  Begin();
  const auto padded = [](uint64_t bytes) { return (bytes + 4095) / 4096 * 4096; };
  constexpr uint64_t kLabel = 4096, kChunk = 65536;
  uint64_t trained = 0, working = 0;
  for (const uint64_t n : {uint64_t{1024}, kChunk, 70000 / 256 * 256 + 256 - kChunk}) {
    trained += 3 * padded(4 * n) + kLabel;
    working += padded(2 * n);
  }
  const uint64_t embed = 70001 / 256 * 256 + 256 - kChunk, weight = 140003 / 256 * 256 + 256 + 512 - 2 * kChunk;
  uint64_t frozen = padded(2 * kChunk) + padded(2 * embed) + padded(2 * 256) + 3 * kLabel;
  for (const uint64_t n : {kChunk, kChunk, weight}) frozen += padded(n + n / 256 * 4) + kLabel;
  uint64_t state = 0, copies = 0;
  const v1::JobStatus job = server_->Status().jobs(0);
  for (const v1::TierStatus& tier : job.tiers()) {
    state += tier.state_bytes();
    copies += tier.working_bytes();
  }
  EXPECT_EQ(state, trained + frozen);
  EXPECT_EQ(copies, working);
}

TEST_P(FrozenJobTest, IsInNoNorm) {
  Begin();
  const std::string presence = model::MakeBitmap(kTensors, kTrained);
  ASSERT_EQ(group_->PushAll(v1::SLICE_KIND_GRADIENT, presence, Ones), absl::OkStatus());
  v1::StepHeader header = UpdateHeader(kTensors);
  header.set_gradient_presence(presence);
  const auto records = group_->SealAll(header);
  ASSERT_TRUE(records.ok()) << records.status();
  double sum = 0;
  for (const v1::ChunkNorm& norm : (*records)[0].norms()) sum += model::ChunkSquaredNorm(norm);
  EXPECT_EQ(sum, 1000 + 70000);
}

INSTANTIATE_TEST_SUITE_P(
    Ways, FrozenJobTest,
    ::testing::Values(Way{"InMemory", v1::DURABILITY_NONE, {.dram = 64 * kMiB}, 1},
                      Way{"InMemoryRanks", v1::DURABILITY_NONE, {.dram = 64 * kMiB}, 3},
                      Way{"OnDisk", v1::DURABILITY_NONE, {.dram = 7 * kMiB, .nvme = 64 * kMiB}, 1},
                      Way{"Durable", v1::DURABILITY_STEP, {.dram = 64 * kMiB, .nvme = 512 * kMiB}, 1},
                      Way{"DurableRanks", v1::DURABILITY_STEP, {.dram = 64 * kMiB, .nvme = 512 * kMiB}, 2},
                      Way{"DurableOnDisk", v1::DURABILITY_STEP, {.dram = 5 * kMiB, .nvme = 512 * kMiB}, 2},
                      Way{"EveryK", v1::DURABILITY_EVERY_K, {.dram = 64 * kMiB, .nvme = 512 * kMiB}, 1}),
    [](const auto& info) { return std::string(info.param.name); });

class FrozenRefusals : public ::testing::Test {
 protected:
  FrozenRefusals() : server_("s"), group_({server_.get()}, Spec(v1::DURABILITY_NONE), 1) {
    EXPECT_EQ(group_.Start(), absl::OkStatus());
  }
  static void ExpectRefused(const absl::Status& status, const std::vector<std::string>& texts) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    for (const std::string& text : texts) EXPECT_THAT(std::string(status.message()), HasSubstr(text));
  }
  // The first slice of a tensor.
  uint32_t SliceOf(uint32_t tensor) const {
    for (uint32_t i = 0; i < group_.plan().slices().size(); ++i) {
      if (group_.plan().Touches(group_.plan().slices()[i], model::MakeBitmap(kTensors, {&tensor, 1}))) return i;
    }
    return ~0u;
  }
  TestServer server_;
  TrainerGroup group_;
};

TEST_F(FrozenRefusals, GradientsMomentsAndStepCounts) {
  ASSERT_EQ(group_.Initialise(Initial), absl::OkStatus());
  ExpectRefused(group_.PushSlice(SliceOf(0), v1::SLICE_KIND_GRADIENT, Ones), {"of unit 'u0' is of frozen tensors"});
  v1::StepHeader header = UpdateHeader(kTensors);
  header.set_gradient_presence(model::MakeBitmap(kTensors, {1, 2}));
  ExpectRefused(group_.SealAll(header).status(), {"gradient_presence names tensor 'weight'", "as frozen"});
  header = ValuesHeader(kTensors);
  header.set_value_presence(model::MakeBitmap(kTensors, {0}));
  header.set_value_array(1);
  ExpectRefused(group_.SealAll(header).status(), {"tensor 'embed' is frozen", "neither moments"});
  header.set_value_array(0);
  for (uint32_t i = 0; i < kTensors; ++i) header.add_value_tensor_steps(i == 0 ? 3 : 0);
  ExpectRefused(group_.SealAll(header).status(), {"tensor 'embed' is frozen", "count of updates"});
  ExpectRefused(group_.Read(2, v1::CONTENT_MOMENT1, 0).status(), {"of frozen tensors, which have no moments"});
  ExpectFrozen(group_, 0);
}

TEST_F(FrozenRefusals, ValuesThatAreNotFiniteWhereTheyAreKept) {
  constexpr float kInf = std::numeric_limits<float>::infinity(), kMax = std::numeric_limits<float>::max();
  for (const float bad : {kInf, std::numeric_limits<float>::quiet_NaN(), kMax}) {  // kMax is infinite in bf16
    const Fill fill = [&](uint32_t tensor, uint64_t i) { return tensor == 2 && i == 70000 ? bad : 1.0f; };
    ExpectRefused(group_.PushAll(v1::SLICE_KIND_VALUE, AllTensors(kTensors), fill),
                  {absl::StrCat("element 70000 of tensor 'weight' is ", bad), "must be finite", "a frozen tensor"});
  }
  group_.set_attempt(1);
  const Fill largest = [&](uint32_t tensor, uint64_t i) { return tensor != 2 && i == 7 ? 3.3895e38f : 1.0f; };
  EXPECT_EQ(group_.PushAll(v1::SLICE_KIND_VALUE, AllTensors(kTensors), largest), absl::OkStatus());
}

TEST_F(FrozenRefusals, AnotherWayToKeepThemLater) {
  ASSERT_EQ(group_.Initialise(Initial), absl::OkStatus());
  TrainerGroup unfrozen({server_.get()}, Spec(v1::DURABILITY_NONE, false), 1, 2);
  ExpectRefused(unfrozen.Start(), {"would lay them out differently"});
  v1::JobSpec unknown = Spec(v1::DURABILITY_NONE);
  unknown.set_name("unknown");
  unknown.mutable_registrations(0)->mutable_tensors(0)->set_frozen(static_cast<v1::Frozen>(7));
  ExpectRefused(model::Layout::Make(unknown).status(), {"tensor 'embed' is to be frozen as 7"});
}

// The first values pass through memory that must be there, and is not kept.
TEST(FrozenSpace, FirstValuesNeedRoomOnce) {
  constexpr uint64_t kElements = 4 << 20;
  v1::JobSpec spec = MakeSpec("job", {{"base", "u", kElements, 0, v1::FROZEN_WORKING}, {"lora", "u", 256, 0}});
  const auto open = [&](uint64_t dram, TestServer* server) {
    server->options().budget.dram = dram;
    server->Restart();
    TrainerGroup group({server->get()}, spec, 1);
    BALLAST_RETURN_IF_ERROR(group.Start());
    BALLAST_RETURN_IF_ERROR(group.Initialise(Initial));
    BALLAST_RETURN_IF_ERROR(group.Read(0, v1::CONTENT_WORKING, 0).status());
    AwaitIdle(server->get(), "job");  // they are applied, and the worker has given back what it took for them
    const uint64_t used = server->get()->Status().tiers(1).used_bytes();
    EXPECT_LT(used, 2 * kElements + 2 * kMiB);
    return absl::OkStatus();
  };
  TestServer roomy("a"), tight("b");
  EXPECT_EQ(open(6 * kElements + 2 * kMiB, &roomy), absl::OkStatus());
  const absl::Status refused = open(5 * kElements, &tight);
  EXPECT_EQ(model::ReasonOf(refused), model::kBudget) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("dram is short of"));
}

// With a log they pass through the log.
TEST(FrozenSpace, WithALogFirstValuesNeedNoRoom) {
  constexpr uint64_t kElements = 16 << 20;
  v1::JobSpec spec = MakeSpec("job", {{"base", "u", kElements, 0, v1::FROZEN_Q8}, {"lora", "u", 256, 0}});
  spec.set_durability(v1::DURABILITY_STEP);
  TestServer server("s", {.dram = kElements * 260 / 256 + 4 * kMiB, .nvme = 256 * kMiB});
  TrainerGroup group({server.get()}, spec, 1);
  ASSERT_EQ(group.Start(), absl::OkStatus());
  ASSERT_EQ(group.Initialise(Initial), absl::OkStatus());
  const auto read = group.Read(0, v1::CONTENT_MASTER, 0);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_NEAR((*read)[12345], Initial(0, 12345), 0.1f);
}

// Frozen chunks on NVMe from the start: written, read, written anew, and found again.
TEST(FrozenSpace, FrozenChunksOnDisk) {
  constexpr uint64_t kElements = 40 * 65536;
  v1::JobSpec spec = MakeSpec("job", {{"base", "u", kElements, 0, v1::FROZEN_WORKING},
                                      {"lora", "u", 256, 0},
                                      {"weight", "u", kElements, 0, v1::FROZEN_Q8}});
  spec.set_durability(v1::DURABILITY_STEP);
  TestServer server("s", {.dram = 6 * kMiB, .nvme = 512 * kMiB});
  const auto expect = [&](TrainerGroup& group, const Fill& fill) {
    for (const uint32_t tensor : {0u, 2u}) {
      const auto read = group.Read(tensor, v1::CONTENT_MASTER, group.step() - 1);
      ASSERT_TRUE(read.ok()) << read.status();
      for (uint64_t i = 0; i < kElements; i += 97) {
        const float value = fill(tensor, i), bound = tensor == 0 ? 0 : 8.0f / 254;
        ASSERT_NEAR((*read)[i], tensor == 0 ? Rounded(value) : value, bound) << tensor << ", element " << i;
      }
    }
  };
  auto group = std::make_unique<TrainerGroup>(std::vector<StateServer*>{server.get()}, spec, 2, 1);
  ASSERT_EQ(group->Start(), absl::OkStatus());
  ASSERT_EQ(group->Initialise(Initial), absl::OkStatus());
  expect(*group, Initial);
  const auto tiers = server->Status().jobs(0).tiers();
  EXPECT_GT(tiers[2].state_bytes(), 3 * kMiB);
  EXPECT_GT(tiers[1].state_bytes(), 0u);
  const Fill other = [](uint32_t tensor, uint64_t element) { return -Initial(tensor + 1, element + 5); };
  v1::StepHeader header = ValuesHeader(3);
  ASSERT_EQ(group->PushAll(v1::SLICE_KIND_VALUE, AllTensors(3), other), absl::OkStatus());
  ASSERT_EQ(group->Finish(header).status(), absl::OkStatus());
  expect(*group, other);
  for (uint64_t epoch = 2; epoch < 4; ++epoch) {
    group.reset();
    server.Restart();
    group = std::make_unique<TrainerGroup>(std::vector<StateServer*>{server.get()}, spec, 2, epoch);
    ASSERT_EQ(group->Start(), absl::OkStatus());
    expect(*group, other);
  }
}

TEST(FrozenSpace, NewBudgetsMoveFrozenChunks) {
  constexpr uint64_t kElements = 48 * 65536;
  v1::JobSpec spec = MakeSpec("job", {{"base", "u", kElements, 0, v1::FROZEN_WORKING}, {"lora", "u", 256, 0}});
  TestServer server("s", {.dram = 64 * kMiB, .nvme = 64 * kMiB});
  TrainerGroup group({server.get()}, spec, 1);
  ASSERT_EQ(group.Start(), absl::OkStatus());
  ASSERT_EQ(group.Initialise(Initial), absl::OkStatus());
  const auto before = group.Read(0, v1::CONTENT_WORKING, 0);
  ASSERT_TRUE(before.ok()) << before.status();
  const uint64_t all = server->Status().jobs(0).tiers(1).state_bytes();
  for (const uint64_t dram : {5 * kMiB, 64 * kMiB}) {
    Answer<v1::SetBudgetResponse> answer;
    v1::SetBudgetRequest request;
    request.set_dram_bytes(dram);
    server->SetBudget(request, answer.reply());
    ASSERT_EQ(answer.Wait().status(), absl::OkStatus());
    for (int i = 0; i < 30'000 && server->Status().jobs(0).chunks_moving() > 0; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    const v1::JobStatus job = server->Status().jobs(0);
    EXPECT_EQ(job.tiers(1).state_bytes() + job.tiers(2).state_bytes(), all);
    EXPECT_EQ(job.tiers(1).state_bytes() == all, dram == 64 * kMiB);
    EXPECT_EQ(*group.Read(0, v1::CONTENT_WORKING, 0), *before);
  }
}

}  // namespace
}  // namespace ballast::services
