// What jobs take of a server: a dry run says it beforehand, the job's account has it afterwards, and all accounts
// together are what the server's tiers have given away. And jobs that grow after their Open, which quotas bound.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <memory>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "ballast/proto/base/status.h"
#include "ballast/services/gateway/security/guard.h"
#include "ballast/services/journal/data_files.h"
#include "ballast/services/journal/log_length.h"
#include "ballast/tests/services/trainer_group.h"
#include "ballast/tests/services/training_bits.h"

namespace ballast::services {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kMiB = uint64_t{1} << 20;

// 24 whole chunks and two short ones: 3.2 MB of working copies, 6.3 MB of slices if all stay, 1.8 MB of staging.
std::vector<TestTensor> Model() {
  return {{"a", "u0", 20 << 16, 0}, {"b", "u1", (4 << 16) - 512, 0}, {"norm", "u1", 300, 1}, {"c", "u2", 700, 1}};
}
constexpr uint64_t kTight = 6'200'000;  // next to no slice stays in memory

v1::JobSpec Spec(const std::string& name, v1::Durability durability) {
  v1::JobSpec spec = MakeSpec(name, Model());
  spec.set_durability(durability);
  if (durability == v1::DURABILITY_EVERY_K) spec.set_pin_interval(2);
  return spec;
}

struct Server {
  storage::TierBytes budget;
  v1::Durability durability;
};

std::string NameOf(const ::testing::TestParamInfo<Server>& info) {
  const std::string durability = v1::Durability_Name(info.param.durability).substr(sizeof("DURABILITY_") - 1);
  return absl::StrCat(absl::StrReplaceAll(durability, {{"_", ""}}),
                      info.param.budget.dram == kTight ? "Tight" : "Roomy");
}

class TakenTest : public ::testing::TestWithParam<Server> {
 protected:
  TakenTest() : server_("s", GetParam().budget), spec_(Spec("job", GetParam().durability)) {}

  std::map<std::string, uint64_t> Taken() { return TakenIn(server_->Status()); }
  static std::map<std::string, uint64_t> TakenIn(const v1::GetServerStatusResponse& status) {
    std::map<std::string, uint64_t> taken;
    for (const v1::JobStatus& job : status.jobs()) {
      for (const v1::TierStatus& tier : job.tiers()) {
        uint64_t parts = 0;
        for (const v1::TierPart& part : tier.parts()) parts += part.bytes();
        EXPECT_EQ(parts, tier.used_bytes()) << tier.tier();
        taken[tier.tier()] += tier.used_bytes();
      }
    }
    return taken;
  }
  // What the server's tiers have given away is the jobs'.
  void ExpectAllAccounted(const std::string& when) {
    AwaitIdle(server_.get(), "job");
    const v1::GetServerStatusResponse status = server_->Status();
    std::map<std::string, uint64_t> taken = TakenIn(status);
    for (const v1::TierStatus& tier : status.tiers()) {
      EXPECT_EQ(tier.used_bytes(), taken[tier.tier()]) << tier.tier() << ", " << when;
    }
  }
  // A new group of so many ranks opens: it takes what its dry run said.
  void Open(uint32_t ranks, const std::string& when) {
    group_ = std::make_unique<TrainerGroup>(std::vector<StateServer*>{server_.get()}, spec_, ranks, ++epoch_);
    std::vector<v1::GetJobResponse> answers;
    ASSERT_EQ(group_->Fence(&answers), absl::OkStatus());
    v1::OpenRequest open = group_->open_request(answers[0].committed(), std::nullopt);
    open.set_dry_run(true);
    Answer<v1::OpenResponse> planned;
    server_->Open(open, absl::InfiniteFuture(), planned.reply());
    const absl::StatusOr<v1::OpenResponse> plan = planned.Wait();
    ASSERT_TRUE(plan.ok()) << plan.status() << ", " << when;
    ASSERT_EQ(plan->tiers_size(), 3);
    std::map<std::string, uint64_t> expected = Taken();
    for (const v1::PlannedTier& tier : plan->tiers()) {
      expected[tier.tier()] += tier.state_bytes() + tier.working_bytes() + tier.other_bytes();
    }
    ++epoch_;
    group_ = std::make_unique<TrainerGroup>(std::vector<StateServer*>{server_.get()}, spec_, ranks, epoch_);
    ASSERT_EQ(group_->Start(), absl::OkStatus()) << when;
    std::map<std::string, uint64_t> taken = Taken();
    // Where the budget is short, working copies or state of the job make room.
    if (expected["dram"] == GetParam().budget.dram) {
      EXPECT_LE(taken["dram"], expected["dram"]) << when;
      expected["dram"] = taken["dram"];
    }
    EXPECT_EQ(taken, expected) << when;
    ExpectAllAccounted(when);
  }
  absl::Status Step() {
    const auto count = static_cast<uint32_t>(Model().size() + more_);
    BALLAST_RETURN_IF_ERROR(group_->PushAll(v1::SLICE_KIND_GRADIENT, AllTensors(count), GradientOf(group_->step())));
    return group_->Finish(UpdateHeader(count)).status();
  }
  bool recoverable() const { return GetParam().durability == v1::DURABILITY_STEP; }

  TestServer server_;
  v1::JobSpec spec_;
  std::unique_ptr<TrainerGroup> group_;
  uint64_t epoch_ = 0;
  uint32_t more_ = 0;  // tensors appended
};

TEST_P(TakenTest, AnOpenTakesWhatItsDryRunSays) {
  Open(1, "the first Open");
  ASSERT_EQ(group_->Initialise(Initial), absl::OkStatus());
  for (int i = 0; i < 3; ++i) ASSERT_EQ(Step(), absl::OkStatus());
  ExpectAllAccounted("after steps");
  if (GetParam().budget.nvme > 0 && GetParam().durability != v1::DURABILITY_NONE) {
    const std::map<std::string, uint64_t> before = Taken();
    ASSERT_EQ(PinDurably(server_.get(), "job", group_->epoch(), group_->step() - 1), absl::OkStatus());
    EXPECT_GT(Taken()["nvme"], before.at("nvme")) << "a kept version";
    ExpectAllAccounted("after a durable pin");
    ASSERT_EQ(Step(), absl::OkStatus());
    ExpectAllAccounted("once the pin has extents of its own");
  }
  Open(3, "a group of more ranks");
  if (recoverable()) {
    ASSERT_EQ(Step(), absl::OkStatus());
    const std::map<std::string, uint64_t> before = Taken();
    group_.reset();
    server_.Restart();
    EXPECT_EQ(Taken(), before) << "a job that came back";
    ExpectAllAccounted("after a restart");
    Open(3, "the group after a restart");
  }
  if (GetParam().durability != v1::DURABILITY_EVERY_K) {
    Append({{"more", "u9", (5 << 16) - 300, 0}}, group_->step() - 1, &spec_);
    ++more_;
    Open(2, "further tensors");
  }
  v1::DropJobRequest drop;
  drop.set_job("job");
  *drop.mutable_epoch() = group_->epoch();
  Answer<v1::DropJobResponse> dropped;
  server_->DropJob(drop, dropped.reply());
  ASSERT_TRUE(dropped.Wait().ok());
  ExpectAllAccounted("after a drop");
}

INSTANTIATE_TEST_SUITE_P(All, TakenTest,
                         ::testing::Values(Server{{0, 64 * kMiB, 0}, v1::DURABILITY_NONE},
                                           Server{{0, kTight, 512 * kMiB}, v1::DURABILITY_NONE},
                                           Server{{0, 64 * kMiB, 512 * kMiB}, v1::DURABILITY_STEP},
                                           Server{{0, kTight, 512 * kMiB}, v1::DURABILITY_STEP},
                                           Server{{0, 64 * kMiB, 512 * kMiB}, v1::DURABILITY_EVERY_K},
                                           Server{{0, kTight, 512 * kMiB}, v1::DURABILITY_EVERY_K}),
                         NameOf);

// Opens after a refused one. They find all the space that the refused one had.
class AfterARefusedOpenTest : public ::testing::Test {
 protected:
  static v1::JobSpec Sgd() {
    v1::JobSpec spec = Spec("job", v1::DURABILITY_NONE);
    spec.set_optimizer(v1::OPTIMIZER_SGD);
    return spec;
  }
  static absl::Status Open(TestServer& server, const v1::JobSpec& spec, uint64_t epoch) {
    return TrainerGroup({server.get()}, spec, 1, epoch).Start();
  }
  // What the server's tiers have given away, and to what.
  static std::string Tiers(TestServer& server) {
    std::string text;
    const v1::GetServerStatusResponse status = server->Status();
    for (const v1::TierStatus& tier : status.tiers()) {
      absl::StrAppend(&text, tier.tier(), " ", tier.used_bytes(), "\n");
    }
    for (const v1::JobStatus& job : status.jobs()) {
      for (const v1::TierStatus& tier : job.tiers()) absl::StrAppend(&text, tier.ShortDebugString(), "\n");
    }
    return text;
  }
};

TEST_F(AfterARefusedOpenTest, AStoreThatDoesNotFitGoesBeforeTheNextOpenPlans) {
  constexpr storage::TierBytes kOneOfTwo{.dram = 34 * kMiB};
  const v1::JobSpec adam = Spec("job", v1::DURABILITY_NONE);
  TestServer server("s", kOneOfTwo), fresh("s", kOneOfTwo), other("s", kOneOfTwo);
  // A client that has gone: the server takes the space, and nobody sends the Open again.
  TrainerGroup gone({server.get()}, adam, 1, 1);
  std::vector<v1::GetJobResponse> answers;
  ASSERT_EQ(gone.Fence(&answers), absl::OkStatus());
  const auto caller = std::make_shared<Caller>();
  caller->Leave();
  Answer<v1::OpenResponse> refused;
  server->Open(gone.open_request(-1, std::nullopt), {absl::InfiniteFuture(), caller}, refused.reply());
  ASSERT_EQ(refused.Wait().status().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(Open(server, Sgd(), 2), absl::OkStatus());
  ASSERT_EQ(Open(fresh, Sgd(), 2), absl::OkStatus());
  EXPECT_EQ(Tiers(server), Tiers(fresh));
  ASSERT_EQ(Open(other, adam, 1), absl::OkStatus());
  EXPECT_GT(other->Status().tiers(1).used_bytes() + fresh->Status().tiers(1).used_bytes(), kOneOfTwo.dram);
}

TEST_F(AfterARefusedOpenTest, ChunksStayForTheNextWhenTheSpillCannotBeMade) {
  constexpr storage::TierBytes kSpills{.dram = kTight, .nvme = 512 * kMiB};
  TestServer server("s", kSpills), fresh("s", kSpills);
  v1::JobSpec spec = MakeSpec("job", {{"first", "u", 256, 0}});
  for (TestServer* const of : {&server, &fresh}) {
    TrainerGroup group({of->get()}, spec, 1, 1);
    ASSERT_EQ(group.Start(), absl::OkStatus());
    ASSERT_EQ(group.Initialise(Initial), absl::OkStatus());
  }
  Append(Model(), 0, &spec);
  const std::string spill = SpillPath(server.directory(), "job");
  ASSERT_TRUE(std::filesystem::create_directory(spill));
  ASSERT_EQ(model::ReasonOf(Open(server, spec, 2)), model::kIo);
  ASSERT_TRUE(std::filesystem::remove(spill));
  ASSERT_EQ(Open(server, spec, 3), absl::OkStatus());
  ASSERT_EQ(Open(fresh, spec, 3), absl::OkStatus());
  EXPECT_EQ(Tiers(server), Tiers(fresh));
}

// A restart makes the spill anew, of the size that the job's slices need.
TEST(TakenAfterARestart, ASpillStaysAsLarge) {
  v1::JobSpec spec = MakeSpec("job", {{"a", "u0", 12 << 16, 0}, {"norm", "u0", 300, 1}});
  spec.set_durability(v1::DURABILITY_EVERY_K);
  spec.set_pin_interval(2);
  TestServer server("s", {.dram = 4'600'000, .nvme = 512 * kMiB});
  {
    TrainerGroup group({server.get()}, spec, 1);
    ASSERT_EQ(group.Start(), absl::OkStatus());
    ASSERT_EQ(group.Initialise(Initial), absl::OkStatus());
    ASSERT_EQ(group.PushAll(v1::SLICE_KIND_GRADIENT, AllTensors(2), GradientOf(1)), absl::OkStatus());
    ASSERT_EQ(group.Finish(UpdateHeader(2)).status(), absl::OkStatus());
  }
  const uint64_t before = server->Status().jobs(0).log_capacity_bytes();
  ASSERT_GT(before, 0u);
  server.Restart();
  EXPECT_EQ(server->Status().jobs(0).log_capacity_bytes(), before);
}

// Jobs that grow after their Open.
class GrowthTest : public ::testing::Test {
 protected:
  GrowthTest() : server_("s", {0, 64 * kMiB, 512 * kMiB}) {
    options_.tokens = server_.directory() + "/tokens.yaml";
    options_.rights = server_.directory() + "/rights.yaml";
    Write(options_.tokens, absl::StrCat("tokens:\n- {identity: team-a, sha256: ", std::string(64, '1'),
                                        "}\n- {identity: team-b, sha256: ", std::string(64, '2'), "}\n"));
    SetQuotas("");
    guard_ = *Guard::Make(options_);
    server_.options().may_grow = [this](const std::string& job, const storage::TierBytes& more,
                                        const std::function<std::vector<v1::JobStatus>()>& taken) {
      return guard_->AskGrowth(job, {more.hbm, more.dram, more.nvme}, taken);
    };
    server_.options().log_steps = kLogStepsMin;
    server_.Restart();
  }
  ~GrowthTest() override { server_.End(); }

  static void Write(const std::string& path, const std::string& text) { std::ofstream(path) << text; }
  void SetQuotas(const std::string& quotas) {
    Write(options_.rights, absl::StrCat("rights:\n- {identity: team-a, jobs: 'a-*', can: [train]}\n"
                                        "- {identity: team-b, jobs: 'b-*', can: [train]}\n",
                                        quotas.empty() ? "" : absl::StrCat("quotas:\n", quotas)));
    if (guard_ != nullptr) guard_->Reload();
  }
  std::unique_ptr<TrainerGroup> Begin(const std::string& name, v1::Durability durability = v1::DURABILITY_STEP) {
    auto group =
        std::make_unique<TrainerGroup>(std::vector<StateServer*>{server_.get()}, Spec(name, durability), 1, ++epoch_);
    EXPECT_EQ(group->Start(), absl::OkStatus());
    if (group->step() == 0) {
      EXPECT_EQ(group->Initialise(Initial), absl::OkStatus());
    }
    return group;
  }
  static void Steps(TrainerGroup& group, int count) {
    const auto tensors = static_cast<uint32_t>(Model().size());
    for (int i = 0; i < count; ++i) {
      ASSERT_EQ(group.PushAll(v1::SLICE_KIND_GRADIENT, AllTensors(tensors), GradientOf(group.step())),
                absl::OkStatus());
      ASSERT_EQ(group.Finish(UpdateHeader(tensors)).status(), absl::OkStatus());
    }
  }
  v1::JobStatus Job(const std::string& name) {
    const v1::GetServerStatusResponse status = server_->Status();
    for (const v1::JobStatus& job : status.jobs()) {
      if (job.name() == name) return job;
    }
    return {};
  }
  uint64_t Nvme(const std::string& name) { return Job(name).tiers(2).used_bytes(); }

  TestServer server_;
  GuardOptions options_;
  std::unique_ptr<Guard> guard_;
  uint64_t epoch_ = 0;
};

TEST_F(GrowthTest, ALogStaysShortWithinTheQuotaAndStepsGoOn) {
  for (const char* name : {"a-1", "b-1"}) {
    ASSERT_FALSE(HasFatalFailure());
    (void)Begin(name);
  }
  const uint64_t first = Job("a-1").log_capacity_bytes();
  SetQuotas(absl::StrCat("- {identity: team-a, nvme: ", Nvme("a-1") + kMiB, "}\n"));
  // From now on logs are to hold more; jobs that come back count as they did.
  server_.options().log_steps = 3 * kLogStepsMin;
  server_.Restart();
  for (const char* name : {"a-1", "b-1"}) {
    const auto group = Begin(name);
    // As many steps as updates may wait, and the window in which the log would get longer.
    Steps(*group, 2 * LogLength::kStepsSeen + 4);
    EXPECT_EQ(Job(name).committed(), 2 * LogLength::kStepsSeen + 4);
    EXPECT_EQ(Job(name).failure(), "");
  }
  EXPECT_EQ(Job("a-1").log_capacity_bytes(), first);
  EXPECT_GT(Job("b-1").log_capacity_bytes(), first) << "another identity's job, which has no quota";
  // With a larger quota the next run lengthens it.
  SetQuotas("- {identity: team-a, nvme: 400MiB}\n");
  server_.Restart();
  const auto group = Begin("a-1");
  for (int i = 0; i < 5 && Job("a-1").log_capacity_bytes() == first; ++i) Steps(*group, LogLength::kStepsSeen);
  EXPECT_GT(Job("a-1").log_capacity_bytes(), first);
}

TEST_F(GrowthTest, AKeptVersionBeyondTheQuotaIsRefusedWithNumbers) {
  const auto group = Begin("a-1"), other = Begin("a-2"), alien = Begin("b-1");
  const uint64_t held = Nvme("a-1") + Nvme("a-2"), quota = held + kMiB;
  SetQuotas(absl::StrCat("- {identity: team-a, nvme: ", quota, "}\n- {identity: team-b, nvme: 400MiB}\n"));
  const absl::Status refused = PinDurably(server_.get(), "a-1", group->epoch(), 0);
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted) << refused;
  EXPECT_EQ(model::ReasonOf(refused), model::kQuota);
  EXPECT_THAT(std::string(refused.message()),
              HasSubstr(absl::StrCat("bytes of nvme. Jobs of 'team-a' already hold ", held, " (log ")));
  EXPECT_THAT(std::string(refused.message()), HasSubstr(absl::StrCat(" on this server, and the quota is ", quota)));
  EXPECT_EQ(Nvme("a-1") + Nvme("a-2"), held) << "nothing was taken";
  EXPECT_EQ(Job("a-1").failure(), "");
  EXPECT_EQ(PinDurably(server_.get(), "b-1", alien->epoch(), 0), absl::OkStatus());
  Steps(*group, 2);
  // The version that is kept counts from then on, also after a restart.
  SetQuotas("- {identity: team-a, nvme: 400MiB}\n");
  ASSERT_EQ(PinDurably(server_.get(), "a-1", group->epoch(), group->step() - 1), absl::OkStatus());
  Steps(*group, 1);
  const uint64_t with = Nvme("a-1");
  EXPECT_GT(with + Nvme("a-2"), held);
  server_.Restart();
  EXPECT_EQ(Nvme("a-1"), with);
  SetQuotas(absl::StrCat("- {identity: team-a, nvme: ", with + Nvme("a-2"), "}\n"));
  const auto next = Begin("a-1");
  EXPECT_EQ(model::ReasonOf(PinDurably(server_.get(), "a-1", next->epoch(), next->step() - 1)), model::kQuota);
}

// Its extents stay on the disk until somebody drops the job.
TEST_F(GrowthTest, AJobThatDidNotComeBackCountsItsDisk) {
  const auto group = Begin("a-1"), other = Begin("a-2");
  Steps(*other, 3);
  server_.End();
  ASSERT_TRUE(std::filesystem::remove(server_.directory() + "/log-a-2"));
  server_.Restart();
  ASSERT_NE(Job("a-2").failure(), "");
  EXPECT_GT(Nvme("a-2"), 0u);
  EXPECT_EQ(Nvme("a-1") + Nvme("a-2"), server_->Status().tiers(2).used_bytes());
  SetQuotas(absl::StrCat("- {identity: team-a, nvme: ", server_->Status().tiers(2).used_bytes(), "}\n"));
  const auto next = Begin("a-1");
  EXPECT_EQ(model::ReasonOf(PinDurably(server_.get(), "a-1", next->epoch(), next->step() - 1)), model::kQuota);
}

// Copies for a pin for reading: the pin yields, as where a budget is short.
TEST_F(GrowthTest, AReadersPinYieldsToTheQuota) {
  const auto group = Begin("a-1");
  SetQuotas(absl::StrCat("- {identity: team-a, nvme: ", Nvme("a-1") + kMiB, "}\n"));
  v1::PinRequest pin;
  pin.set_job("a-1");
  pin.set_version(0);
  Answer<v1::PinResponse> pinned;
  server_->Pin(pin, absl::InfiniteFuture(), pinned.reply());
  ASSERT_TRUE(pinned.Wait().ok());
  Steps(*group, 2);
  EXPECT_EQ(Job("a-1").pinned_versions_size(), 0);
  EXPECT_EQ(Job("a-1").committed(), 2);
  EXPECT_EQ(Job("a-1").failure(), "");
  const absl::StatusOr<std::vector<float>> gone = group->Read(0, v1::CONTENT_MASTER, 0);
  EXPECT_EQ(model::ReasonOf(gone.status()), model::kVersionGone);
  EXPECT_THAT(std::string(gone.status().message()), HasSubstr("Jobs of 'team-a' already hold "));
}

// Pins of readers go before the group's, whichever is older.
TEST_F(GrowthTest, ALeasedPinYieldsBeforeTheGroups) {
  const auto group = Begin("a-1");
  const auto pin = [&](int64_t version, uint64_t holder, uint32_t lease_ms) {
    v1::PinRequest request;
    request.set_job("a-1");
    request.set_version(version);
    request.set_holder(holder);
    request.set_lease_ms(lease_ms);
    Answer<v1::PinResponse> pinned;
    server_->Pin(request, absl::InfiniteFuture(), pinned.reply());
    return pinned.Wait().status();
  };
  ASSERT_EQ(pin(0, 0, 0), absl::OkStatus());
  Steps(*group, 1);
  ASSERT_EQ(pin(1, 7, 600'000), absl::OkStatus());
  SetQuotas(absl::StrCat("- {identity: team-a, nvme: ", Nvme("a-1") + kMiB, "}\n"));
  Steps(*group, 2);  // the first of them is applied
  EXPECT_THAT(Job("a-1").pinned_versions(), testing::ElementsAre(0));
  EXPECT_EQ(model::ReasonOf(group->Read(0, v1::CONTENT_MASTER, 1).status()), model::kVersionGone);
  EXPECT_TRUE(group->Read(0, v1::CONTENT_MASTER, 0).ok());
}

// A kept version that a server makes by itself has room of the Open's: the quota holds up no training.
TEST_F(GrowthTest, AutomaticPinsHaveRoomOfTheOpens) {
  const auto group = Begin("a-1", v1::DURABILITY_EVERY_K);
  SetQuotas(absl::StrCat("- {identity: team-a, nvme: ", Nvme("a-1"), "}\n"));
  const uint64_t before = Nvme("a-1");
  Steps(*group, 7);
  EXPECT_GT(Job("a-1").automatic_versions_size(), 0);
  EXPECT_EQ(Nvme("a-1"), before);
  EXPECT_EQ(Job("a-1").failure(), "");
}

}  // namespace
}  // namespace ballast::services
