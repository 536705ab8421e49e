// Jobs whose slices do not fit into the DRAM budget: they are read back from the gradient log, or from a spill, and no
// bit differs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/members.h"
#include "ballast/tests/services/logged_slices.h"
#include "ballast/tests/services/trainer_group.h"
#include "ballast/tests/services/training_bits.h"

namespace ballast::services {
namespace {

using ::testing::HasSubstr;

// 24 whole chunks and two short ones: 3.2 MB of working copies, 6.3 MB of slices if all stay, 1.8 MB of staging.
std::vector<TestTensor> Model() {
  return {{"a", "u0", 20 << 16, 0}, {"b", "u1", (4 << 16) - 512, 0}, {"norm", "u1", 300, 1}, {"c", "u2", 700, 1}};
}
// With so much next to no slice stays in memory; with so much some chunks' state does, and slices still do not.
constexpr uint64_t kTight = 6'200'000, kRoomForState = 11'000'000;
// As tight, where u1 and u2 have their state in memory already.
constexpr uint64_t kTightOnceGrown = 10'200'000;
constexpr uint64_t kNvme = uint64_t{512} << 20;

uint32_t Tensors() { return static_cast<uint32_t>(Model().size()); }

v1::JobSpec Spec(v1::Durability durability) {
  v1::JobSpec spec = MakeSpec("job", Model());
  spec.set_durability(durability);
  if (durability == v1::DURABILITY_EVERY_K) spec.set_pin_interval(5);
  return spec;
}

// All slices at once, so that most of them wait for memory; the last first, as they come from a backward pass.
absl::Status PushAtOnce(TrainerGroup& group, v1::SliceKind kind, const std::string& presence, const Fill& fill) {
  std::vector<Answer<v1::PushResponse>> answers;
  for (auto i = static_cast<uint32_t>(group.plan().slices().size()); i-- > 0;) {
    if (!group.plan().Touches(group.plan().slices()[i], presence)) continue;
    answers.push_back(group.BeginPushSlice(i, kind, fill));
  }
  absl::Status status;
  for (auto& answer : answers) status.Update(answer.Wait().status());
  return status;
}

absl::Status Step(TrainerGroup& group, int64_t step) {
  BALLAST_RETURN_IF_ERROR(PushAtOnce(group, v1::SLICE_KIND_GRADIENT, AllTensors(Tensors()), GradientOf(step)));
  return group.Finish(UpdateHeader(Tensors())).status();
}

class ReadBackJobTest : public ::testing::Test {
 protected:
  ReadBackJobTest()
      : reference_server_("r", {.dram = uint64_t{256} << 20}),
        reference_({reference_server_.get()}, Spec(v1::DURABILITY_NONE), 1) {
    EXPECT_EQ(reference_.Start(), absl::OkStatus());
    EXPECT_EQ(reference_.Initialise(Initial), absl::OkStatus());
  }
  static std::unique_ptr<TrainerGroup> NewGroup(TestServer& server, uint32_t world_size, uint64_t epoch,
                                                v1::Durability durability = v1::DURABILITY_STEP) {
    auto group =
        std::make_unique<TrainerGroup>(std::vector<StateServer*>{server.get()}, Spec(durability), world_size, epoch);
    EXPECT_EQ(group->Start(), absl::OkStatus());
    return group;
  }
  void StepBoth(TrainerGroup& group, int64_t step) {
    ASSERT_EQ(Step(group, step), absl::OkStatus()) << step;
    ASSERT_EQ(Step(reference_, step), absl::OkStatus()) << step;
  }
  void ExpectSame(TrainerGroup& group, int64_t version) { services::ExpectSame(reference_, group, version); }
  TestServer reference_server_;
  TrainerGroup reference_;
};

class ReadBackDurabilityTest : public ReadBackJobTest, public ::testing::WithParamInterface<v1::Durability> {};
INSTANTIATE_TEST_SUITE_P(All, ReadBackDurabilityTest,
                         ::testing::Values(v1::DURABILITY_STEP, v1::DURABILITY_EVERY_K, v1::DURABILITY_NONE),
                         [](const auto& info) { return v1::Durability_Name(info.param); });

TEST_P(ReadBackDurabilityTest, ChangesNoBitWithinTheBudget) {
  TestServer server("s", {.dram = kTight, .nvme = kNvme});
  auto group = NewGroup(server, 1, 1, GetParam());
  ASSERT_EQ(PushAtOnce(*group, v1::SLICE_KIND_VALUE, AllTensors(Tensors()), Initial), absl::OkStatus());
  ASSERT_TRUE(group->Finish(ValuesHeader(Tensors())).ok());
  for (int64_t step = 1; step <= 24; ++step) {  // the log goes round
    const uint64_t read = server->traffic().read.nvme;
    if (step % 4 == 0) {
      // An older attempt brings different gradients, to be ignored.
      ASSERT_EQ(PushAtOnce(*group, v1::SLICE_KIND_GRADIENT, AllTensors(Tensors()), GradientOf(100 + step)),
                absl::OkStatus());
      group->set_attempt(1);
    }
    StepBoth(*group, step);
    EXPECT_LE(server->Status().tiers(1).used_bytes(), kTight) << step;
    if (step % 8 != 0) continue;
    ExpectSame(*group, step);
    constexpr uint64_t kElements = 24 << 16;
    EXPECT_GT(server->traffic().read.nvme - read, kElements * (12 + 2)) << "states and gradients come from the disk";
  }
  EXPECT_EQ(server->Status().jobs(0).tiers(1).state_bytes(), 0u);
}

// Log and spill have checksums of their own.
TEST_P(ReadBackDurabilityTest, TrainersInTheProcessSendNoChecksums) {
  TestServer server("s", {.dram = kTight, .nvme = kNvme});
  auto group = NewGroup(server, 1, 1, GetParam());
  group->set_within_process();
  ASSERT_EQ(PushAtOnce(*group, v1::SLICE_KIND_VALUE, AllTensors(Tensors()), Initial), absl::OkStatus());
  ASSERT_TRUE(group->Finish(ValuesHeader(Tensors())).ok());
  for (int64_t step = 1; step <= 4; ++step) {
    StepBoth(*group, step);
    ExpectSame(*group, step);
  }
  if (GetParam() != v1::DURABILITY_STEP) return;
  ASSERT_EQ(PushAtOnce(*group, v1::SLICE_KIND_GRADIENT, AllTensors(Tensors()), GradientOf(5)), absl::OkStatus());
  ASSERT_TRUE(group->SealAll(UpdateHeader(Tensors())).ok());
  server.Restart();  // the next group finds the step prepared and decides it from the log
  group = NewGroup(server, 1, 2);
  ASSERT_EQ(Step(reference_, 5), absl::OkStatus());
  ExpectSame(*group, 5);
}

TEST_P(ReadBackDurabilityTest, EditsBesideGradients) {
  TestServer server("s", {.dram = kTight, .nvme = kNvme});
  auto group = NewGroup(server, 3, 1, GetParam());
  ASSERT_EQ(group->Initialise(Initial), absl::OkStatus());
  for (int64_t step = 1; step <= 4; ++step) {
    v1::StepHeader header = UpdateHeader(Tensors());
    header.set_value_presence(std::string(1, step % 2 == 0 ? '\1' : '\6'));
    for (TrainerGroup* each : {group.get(), &reference_}) {
      ASSERT_EQ(PushAtOnce(*each, v1::SLICE_KIND_VALUE, header.value_presence(), GradientOf(50 + step)),
                absl::OkStatus());
      ASSERT_EQ(PushAtOnce(*each, v1::SLICE_KIND_GRADIENT, AllTensors(Tensors()), GradientOf(step)), absl::OkStatus());
      ASSERT_TRUE(each->Finish(header).ok());
    }
    ExpectSame(*group, step);
  }
}

TEST_F(ReadBackJobTest, RestartsFindWhatOnlyTheLogHas) {
  TestServer server("s", {.dram = kTight, .nvme = kNvme});
  uint64_t epoch = 0;
  auto group = NewGroup(server, 1, ++epoch);
  ASSERT_EQ(group->Initialise(Initial), absl::OkStatus());
  for (int64_t step = 1; step <= 12; ++step) {
    ASSERT_EQ(PushAtOnce(*group, v1::SLICE_KIND_GRADIENT, AllTensors(Tensors()), GradientOf(step)), absl::OkStatus());
    ASSERT_EQ(Step(reference_, step), absl::OkStatus());
    if (step % 3 == 1) server.Restart();  // pushed, not prepared: the slices are there again
    if (step % 3 == 1) {
      group = NewGroup(server, 1, ++epoch);
      ASSERT_EQ(Step(*group, step), absl::OkStatus()) << "an epoch of its own needs slices of its own";
    } else if (step % 3 == 2) {
      ASSERT_TRUE(group->SealAll(UpdateHeader(Tensors())).ok());
      server.Restart();  // the next group finds the step prepared and decides it from the log
      group = NewGroup(server, 1, ++epoch);
      ASSERT_EQ(group->step(), step + 1);
    } else {
      ASSERT_TRUE(group->Finish(UpdateHeader(Tensors())).ok());
    }
    ExpectSame(*group, step);
  }
  // With room for all of it the same log is replayed.
  server.options().budget.dram = uint64_t{256} << 20;
  server.Restart();
  group = NewGroup(server, 1, ++epoch);
  ExpectSame(*group, 12);
}

// Norms of what was pushed before a restart, when nothing is prepared yet.
TEST_F(ReadBackJobTest, NormsOutliveARestart) {
  TestServer server("s", {.dram = kTight, .nvme = kNvme});
  auto group = NewGroup(server, 1, 1);
  ASSERT_EQ(group->Initialise(Initial), absl::OkStatus());
  ASSERT_EQ(PushAtOnce(*group, v1::SLICE_KIND_GRADIENT, AllTensors(Tensors()), GradientOf(1)), absl::OkStatus());
  // A push is answered before its bytes are in the log, and nothing tells when they are: the file does.
  const std::string log = server.directory() + "/log-job";
  while (LoggedSlices(1, log).size() < group->plan().slices().size()) absl::SleepFor(absl::Milliseconds(5));
  server.Restart();
  // The same epoch goes on.
  v1::NormRequest request;
  request.set_job("job");
  *request.mutable_epoch() = group->epoch();
  request.set_step(1);
  request.set_gradient_presence(AllTensors(Tensors()));
  Answer<v1::NormResponse> answer;
  server->Norm(request, answer.reply());
  const absl::StatusOr<v1::NormResponse> norms = answer.Wait();
  ASSERT_TRUE(norms.ok()) << norms.status();

  ASSERT_EQ(PushAtOnce(reference_, v1::SLICE_KIND_GRADIENT, AllTensors(Tensors()), GradientOf(1)), absl::OkStatus());
  *request.mutable_epoch() = reference_.epoch();
  Answer<v1::NormResponse> expected;
  reference_server_->Norm(request, expected.reply());
  const absl::StatusOr<v1::NormResponse> in_memory = expected.Wait();
  ASSERT_TRUE(in_memory.ok()) << in_memory.status();
  ASSERT_GT(in_memory->norms_size(), 0);
  ASSERT_EQ(norms->norms_size(), in_memory->norms_size());
  for (int i = 0; i < norms->norms_size(); ++i) {
    EXPECT_EQ(norms->norms(i).SerializeAsString(), in_memory->norms(i).SerializeAsString()) << i;
  }
}

// The group's own next epoch takes slices over that have left memory, or are about to.
TEST_P(ReadBackDurabilityTest, TheGroupsNextEpochReadsBackWhatWasPushedBefore) {
  if (GetParam() == v1::DURABILITY_EVERY_K) return;  // has no table
  TestServer server("s", {.dram = kTight, .nvme = kNvme});
  v1::Table table;
  v1::Member* const member = table.add_members();
  member->set_server_id("s");
  member->set_weight(1);
  member->set_disk(server->disk());
  table.set_replicas(1);
  table.set_life(5);
  table.add_shards()->add_holders(0);
  TrainerGroup group({server.get()}, Spec(GetParam()), 1);
  uint64_t epoch = 0;
  const auto open = [&] {
    group.BeginEpoch(++epoch);
    std::vector<v1::GetJobResponse> answers;
    BALLAST_RETURN_IF_ERROR(group.Fence(&answers));
    model::Found found;
    if (epoch > 1) {
      BALLAST_ASSIGN_OR_RETURN(found, model::FindBase(table, *model::Layout::Make(Spec(GetParam())), answers));
    }
    return group.OpenWith(table, {server.get()}, found);
  };
  const auto push_half = [&](uint32_t first, int64_t step) {
    std::vector<Answer<v1::PushResponse>> answers;
    for (uint32_t i = first; i < group.plan().slices().size(); i += 2) {
      answers.push_back(group.BeginPushSlice(i, v1::SLICE_KIND_GRADIENT, GradientOf(step)));
    }
    for (auto& answer : answers) ASSERT_EQ(answer.Wait().status(), absl::OkStatus());
  };
  ASSERT_EQ(open(), absl::OkStatus());
  ASSERT_EQ(PushAtOnce(group, v1::SLICE_KIND_VALUE, AllTensors(Tensors()), Initial), absl::OkStatus());
  ASSERT_TRUE(group.Finish(ValuesHeader(Tensors())).ok());
  constexpr int64_t kSteps = 4;
  for (int64_t step = 1; step <= kSteps; ++step) {
    push_half(0, step);
    ASSERT_EQ(open(), absl::OkStatus());
    push_half(1, step);
    ASSERT_EQ(Step(reference_, step), absl::OkStatus());
    if (step < kSteps || GetParam() == v1::DURABILITY_NONE) {
      ASSERT_TRUE(group.Finish(UpdateHeader(Tensors())).ok());
      continue;
    }
    const auto records = group.SealAll(UpdateHeader(Tensors()));
    ASSERT_TRUE(records.ok()) << records.status();
    server.Restart();
    group.set_server(0, server.get());
    ASSERT_EQ(group.Commit(*model::Decide(*records)), absl::OkStatus());
  }
  ExpectSame(group, kSteps);
}

// Slices of chunks shared by several ranks stay in memory, so state in DRAM has to make room.
TEST_F(ReadBackJobTest, MoreRanksMoveStateDown) {
  TestServer server("s", {.dram = kRoomForState, .nvme = kNvme});
  uint64_t epoch = 0;
  const auto state = [&] { return server->Status().jobs(0).tiers(1).state_bytes(); };
  auto group = NewGroup(server, 1, ++epoch);
  ASSERT_EQ(group->Initialise(Initial), absl::OkStatus());
  StepBoth(*group, 1);
  const uint64_t before = state();
  ASSERT_GT(before, 0u);
  group = NewGroup(server, 19, ++epoch);
  EXPECT_LT(state(), before);
  EXPECT_GT(state(), 0u);
  for (int64_t step = 2; step <= 4; ++step) StepBoth(*group, step);
  EXPECT_LE(server->Status().tiers(1).used_bytes(), kRoomForState);
  ExpectSame(*group, 4);
  // The log holds both tilings.
  server.Restart();
  group = NewGroup(server, 19, ++epoch);
  ExpectSame(*group, 4);
  group = NewGroup(server, 1, ++epoch);
  for (int64_t step = 5; step <= 6; ++step) StepBoth(*group, step);
  ExpectSame(*group, 6);
}

TEST(ReadBackPlan, SaysWhatIsReadBack) {
  TestServer server("s", {.dram = kTight, .nvme = kNvme});
  TrainerGroup group({server.get()}, Spec(v1::DURABILITY_STEP), 1);
  std::vector<v1::GetJobResponse> jobs;
  ASSERT_EQ(group.Fence(&jobs), absl::OkStatus());
  v1::OpenRequest request = group.open_request(-1, std::nullopt);
  request.set_dry_run(true);
  Answer<v1::OpenResponse> answer;
  server->Open(request, absl::InfiniteFuture(), answer.reply());
  const absl::StatusOr<v1::OpenResponse> response = answer.Wait();
  ASSERT_TRUE(response.ok()) << response.status();
  EXPECT_THAT(response->plan(), HasSubstr("bytes are read back from it in each step"));
  EXPECT_EQ(server->Status().tiers(1).used_bytes(), 0u) << "a dry run took something";
}

// A spill: of a job that no other run will know.
TEST_F(ReadBackJobTest, WithoutALogNothingIsLeft) {
  TestServer server("s", {.dram = kTight, .nvme = kNvme});
  const auto files = [&] {
    std::set<std::string> names;
    for (const auto& file : std::filesystem::directory_iterator(server.directory())) {
      names.insert(file.path().filename().string());
    }
    return names;
  };
  const std::set<std::string> before = files();
  auto group = NewGroup(server, 1, 1, v1::DURABILITY_NONE);
  ASSERT_EQ(group->Initialise(Initial), absl::OkStatus());
  StepBoth(*group, 1);
  ExpectSame(*group, 1);
  const uint64_t state = server->Status().jobs(0).tiers(2).state_bytes();
  EXPECT_GT(server->Status().tiers(2).used_bytes(), state) << "the spill is of the budget";
  EXPECT_EQ(files(), before) << "it has a name";
  server.Restart();
  EXPECT_EQ(server->Status().tiers(2).used_bytes(), 0u);
  TrainerGroup again({server.get()}, Spec(v1::DURABILITY_NONE), 1, 2);
  EXPECT_TRUE(absl::IsDataLoss(again.Start())) << "its state was of the process";
}

// Each slice takes 12 KiB of the spill at least.
TEST(SpillTest, MoreRanksExtendIt) {
  TestServer tight("s", {.dram = kRoomForState, .nvme = kNvme}), ample("r", {.dram = uint64_t{256} << 20});
  const auto train = [&](TestServer& server, uint64_t* used) {
    auto group =
        std::make_unique<TrainerGroup>(std::vector<StateServer*>{server.get()}, Spec(v1::DURABILITY_NONE), 1, 1);
    EXPECT_EQ(group->Start(), absl::OkStatus());
    EXPECT_EQ(group->Initialise(Initial), absl::OkStatus());
    *used = server->Status().tiers(2).used_bytes();
    group = std::make_unique<TrainerGroup>(std::vector<StateServer*>{server.get()}, Spec(v1::DURABILITY_NONE), 400, 2);
    EXPECT_EQ(group->Start(), absl::OkStatus());
    for (int64_t step = 1; step <= 3; ++step) {
      // Values come from every rank, in slices of their own.
      v1::StepHeader header = UpdateHeader(Tensors());
      header.set_value_presence(AllTensors(Tensors()));
      EXPECT_EQ(PushAtOnce(*group, v1::SLICE_KIND_VALUE, header.value_presence(), GradientOf(50 + step)),
                absl::OkStatus());
      EXPECT_EQ(PushAtOnce(*group, v1::SLICE_KIND_GRADIENT, AllTensors(Tensors()), GradientOf(step)), absl::OkStatus());
      EXPECT_EQ(group->Finish(header).status(), absl::OkStatus());
    }
    return group;
  };
  uint64_t before = 0, nothing = 0;
  const auto spills = train(tight, &before), reference = train(ample, &nothing);
  EXPECT_GT(tight->Status().tiers(2).used_bytes(), before);
  EXPECT_EQ(nothing, 0u);
  services::ExpectSame(*reference, *spills, 3);
}

// Chunks that fit into memory do not use the spill that an earlier Open needed.
TEST(SpillTest, LaterChunksMayStayInMemory) {
  TestServer server("s", {.dram = kTight, .nvme = kNvme}), ample("r", {.dram = uint64_t{256} << 20});
  const auto train = [&](TestServer& of) {
    v1::JobSpec spec = Spec(v1::DURABILITY_NONE);
    auto group = std::make_unique<TrainerGroup>(std::vector<StateServer*>{of.get()}, spec, 1, 1);
    EXPECT_EQ(group->Start(), absl::OkStatus());
    EXPECT_EQ(group->Initialise(Initial), absl::OkStatus());
    if (&of == &server) {
      v1::SetBudgetRequest request;
      request.set_dram_bytes(uint64_t{256} << 20);
      Answer<v1::SetBudgetResponse> answer;
      of->SetBudget(request, answer.reply());
      EXPECT_EQ(answer.Wait().status(), absl::OkStatus());
    }
    Append({{"later", "u3", 120 << 16, 0}}, 0, &spec);
    group = std::make_unique<TrainerGroup>(std::vector<StateServer*>{of.get()}, spec, 1, 2);
    EXPECT_EQ(group->Start(), absl::OkStatus());
    v1::StepHeader values = ValuesHeader(Tensors() + 1);
    values.set_value_presence(model::MakeBitmap(Tensors() + 1, {Tensors()}));
    EXPECT_EQ(group->PushAll(v1::SLICE_KIND_VALUE, values.value_presence(), Initial), absl::OkStatus());
    EXPECT_EQ(group->Finish(values).status(), absl::OkStatus());
    for (int64_t step = 2; step <= 3; ++step) {
      EXPECT_EQ(group->PushAll(v1::SLICE_KIND_GRADIENT, AllTensors(Tensors() + 1), GradientOf(step)), absl::OkStatus());
      EXPECT_EQ(group->Finish(UpdateHeader(Tensors() + 1)).status(), absl::OkStatus());
    }
    return group;
  };
  const auto mixed = train(server), reference = train(ample);
  services::ExpectSame(*reference, *mixed, 3);
}

TEST_F(ReadBackJobTest, ASpillThatACrashLeftIsRemoved) {
  TestServer server("s", {.dram = kTight, .nvme = kNvme});
  server.End();
  const std::string left = server.directory() + "/spill-job";
  std::ofstream(left) << "slices";
  server.Restart();
  EXPECT_FALSE(std::filesystem::exists(left));
}

TEST(SpillTest, AJobMayGrowIntoOne) {
  TestServer tight("s", {.dram = kTightOnceGrown, .nvme = kNvme}), ample("r", {.dram = uint64_t{256} << 20});
  const std::vector<TestTensor> all = Model();
  const auto train = [&](TestServer& server) {
    v1::JobSpec spec = MakeSpec("job", {all.begin() + 1, all.end()});
    auto group = std::make_unique<TrainerGroup>(std::vector<StateServer*>{server.get()}, spec, 1, 1);
    EXPECT_EQ(group->Start(), absl::OkStatus());
    EXPECT_EQ(group->Initialise(Initial), absl::OkStatus());
    const auto step = [&](uint32_t tensors) {
      EXPECT_EQ(PushAtOnce(*group, v1::SLICE_KIND_GRADIENT, AllTensors(tensors), GradientOf(group->step())),
                absl::OkStatus());
      EXPECT_EQ(group->Finish(UpdateHeader(tensors)).status(), absl::OkStatus());
    };
    step(3);
    const bool spilt = server->Status().tiers(2).used_bytes() > 0;
    EXPECT_FALSE(spilt);
    Append({all[0]}, 1, &spec);
    group = std::make_unique<TrainerGroup>(std::vector<StateServer*>{server.get()}, spec, 1, 2);
    EXPECT_EQ(group->Start(), absl::OkStatus());
    v1::StepHeader values = ValuesHeader(4);
    values.set_value_presence(model::MakeBitmap(4, {3}));
    EXPECT_EQ(PushAtOnce(*group, v1::SLICE_KIND_VALUE, values.value_presence(), Initial), absl::OkStatus());
    EXPECT_EQ(group->Finish(values).status(), absl::OkStatus());
    for (int i = 0; i < 12; ++i) step(4);
    return group;
  };
  const auto spills = train(tight), reference = train(ample);
  EXPECT_GT(tight->Status().tiers(2).used_bytes(), tight->Status().jobs(0).tiers(2).state_bytes());
  EXPECT_EQ(spills->step(), 15);
  services::ExpectSame(*reference, *spills, 14);
}

}  // namespace
}  // namespace ballast::services
