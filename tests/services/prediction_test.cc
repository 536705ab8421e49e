// A server with a machine profile predicts the cost of its plans. Without a profile, plans say nothing of time.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "ballast/proto/base/status.h"
#include "ballast/storage/placement/profile_file.h"
#include "ballast/tests/services/trainer_group.h"
#include "ballast/tests/services/training_bits.h"

namespace ballast::services {
namespace {

using ::testing::DoubleNear;
using ::testing::HasSubstr;

constexpr uint64_t kMiB = uint64_t{1} << 20;

// Every element takes a microsecond.
storage::MachineProfile Slow() {
  storage::MachineProfile profile;
  profile.threads = 1;
  profile.update_f32_elements_per_s.one_thread = 1'000'000;
  profile.update_f32_elements_per_s.all_threads = 1'000'000;
  return profile;
}

TEST(Prediction, OfTheProfileInTheDataDirectory) {
  TestServer server("s");
  ASSERT_EQ(storage::WriteProfile(Slow(), server.directory() + "/" + kMachineProfile), absl::OkStatus());
  server.Restart();
  TrainerGroup group({server.get()}, MakeSpec("job", SmallModel()), 1);
  ASSERT_EQ(group.Start(), absl::OkStatus());
  const v1::JobStatus job = server->Status().jobs(0);
  ASSERT_TRUE(job.has_prediction());
  // Tensors start at multiples of 256 elements.
  EXPECT_THAT(job.prediction().total_seconds(), DoubleNear(0.2107, 1e-3));
  EXPECT_EQ(job.prediction().disk_seconds(), 0);
}

TEST(Prediction, OfTheProfileThatIsNamed) {
  TestServer server("s");
  server.options().machine_profile = server.directory() + "/elsewhere.yaml";
  ASSERT_EQ(storage::WriteProfile(Slow(), server.options().machine_profile), absl::OkStatus());
  server.Restart();
  TrainerGroup group({server.get()}, MakeSpec("job", SmallModel()), 1);
  ASSERT_EQ(group.Start(), absl::OkStatus());
  EXPECT_TRUE(server->Status().jobs(0).has_prediction());
}

TEST(Prediction, NoneWithoutAProfile) {
  TestServer server("s");
  TrainerGroup group({server.get()}, MakeSpec("job", SmallModel()), 1);
  ASSERT_EQ(group.Start(), absl::OkStatus());
  EXPECT_FALSE(server->Status().jobs(0).has_prediction());
}

absl::StatusOr<v1::OpenResponse> DryRun(TrainerGroup* group, StateServer* server) {
  std::vector<v1::GetJobResponse> answers;
  BALLAST_RETURN_IF_ERROR(group->Fence(&answers));
  v1::OpenRequest open = group->open_request(-1, std::nullopt);
  open.set_dry_run(true);
  Answer<v1::OpenResponse> answer;
  server->Open(open, absl::InfiniteFuture(), answer.reply());
  return answer.Wait();
}

TEST(Prediction, ABrokenProfileIsRefused) {
  TestServer server("s");
  StateServerOptions options = server.options();
  options.data_directory = server.directory() + "/other";
  options.machine_profile = server.directory() + "/none.yaml";
  const absl::Status absent = StateServer::Start(options).status();
  EXPECT_EQ(model::ReasonOf(absent), model::kBadConfig);
  EXPECT_THAT(std::string(absent.message()), HasSubstr("none.yaml: cannot be read"));
  options.machine_profile = server.directory() + "/broken.yaml";
  std::ofstream(options.machine_profile) << "threads: many\n";
  EXPECT_THAT(std::string(StateServer::Start(options).status().message()),
              HasSubstr("broken.yaml:1: threads: expected a whole number, got 'many'"));
}

// Nobody named it: a power cut may have damaged it, and it is for plans alone.
TEST(Prediction, ABrokenProfileInADirectoryIsLeftOut) {
  TestServer server("s", {.dram = 3 * kMiB, .nvme = 64 * kMiB});
  const std::string other = server.directory() + "/other";
  std::filesystem::create_directory(other);
  for (const std::string& directory : {server.directory(), other}) {
    std::ofstream(directory + "/" + kMachineProfile) << "threads: many\n";
  }
  server.options().nvme_devices = {{server.directory(), 32 * kMiB, 0}, {other, 32 * kMiB, 0}};
  server.End();
  const auto started = StateServer::Start(server.options());
  ASSERT_TRUE(started.ok()) << started.status();
  TrainerGroup group({started->get()}, MakeSpec("job", SmallModel()), 1);
  const absl::StatusOr<v1::OpenResponse> response = DryRun(&group, started->get());
  ASSERT_TRUE(response.ok()) << response.status();
  EXPECT_FALSE(response->has_prediction());
}

TEST(Prediction, ADryRunShowsThePlan) {
  TestServer server("s", {.dram = 3 * kMiB, .nvme = 64 * kMiB});
  ASSERT_EQ(storage::WriteProfile(Slow(), server.directory() + "/" + kMachineProfile), absl::OkStatus());
  server.Restart();
  TrainerGroup group({server.get()}, MakeSpec("job", SmallModel()), 1);
  const absl::StatusOr<v1::OpenResponse> response = DryRun(&group, server.get());
  ASSERT_TRUE(response.ok()) << response.status();
  EXPECT_THAT(response->plan(), HasSubstr("nvme holds the state of"));
  EXPECT_THAT(response->plan(), HasSubstr("A step should take 0.211 s on this server"));
  EXPECT_THAT(response->plan(), HasSubstr("Not counted, since the profile has no figure: digests"));
  EXPECT_GT(response->prediction().unmeasured_size(), 0);
  EXPECT_EQ(server->Status().tiers(1).used_bytes(), 0u) << "a dry run takes nothing";
  // The Open then takes as much as the dry run has told.
  ASSERT_EQ(group.Start(), absl::OkStatus());
  const v1::GetServerStatusResponse status = server->Status();
  ASSERT_EQ(response->tiers_size(), 3);
  for (int i = 1; i < 3; ++i) {
    const v1::PlannedTier& planned = response->tiers(i);
    EXPECT_EQ(planned.tier(), status.tiers(i).tier());
    EXPECT_EQ(planned.state_bytes(), status.tiers(i).state_bytes()) << planned.tier();
    EXPECT_EQ(planned.working_bytes(), status.tiers(i).working_bytes()) << planned.tier();
    EXPECT_EQ(planned.state_bytes() + planned.working_bytes() + planned.other_bytes(), status.tiers(i).used_bytes())
        << planned.tier();
  }
}

// A disk as fast as the kernels: a plan by these figures spreads chunks, and reads slices back to give state their
// DRAM.
storage::MachineProfile Balanced() {
  storage::MachineProfile profile;
  profile.threads = 1;
  profile.update_f32_elements_per_s = {100'000'000, 100'000'000};
  profile.digest_bytes_per_s = {100'000'000'000, 100'000'000'000};
  profile.disk_read_bytes_per_s = profile.disk_write_bytes_per_s = profile.disk_mixed_bytes_per_s = 1'000'000'000;
  return profile;
}

TEST(Prediction, ADryRunNamesTheNextBestPlan) {
  TestServer server("s", {.dram = 16 * kMiB, .nvme = 512 * kMiB});
  ASSERT_EQ(storage::WriteProfile(Balanced(), server.directory() + "/" + kMachineProfile), absl::OkStatus());
  server.Restart();
  v1::JobSpec spec = MakeSpec("job", {{"a", "u0", 25 << 16, 0}, {"norm", "u1", 300, 1}});
  spec.set_durability(v1::DURABILITY_STEP);
  TrainerGroup group({server.get()}, spec, 1);
  const absl::StatusOr<v1::OpenResponse> response = DryRun(&group, server.get());
  ASSERT_TRUE(response.ok()) << response.status();
  EXPECT_THAT(response->plan(), HasSubstr("chunks of each tier spread evenly over the update, slices read back"));
  EXPECT_THAT(response->plan(), HasSubstr("bound by the disk, which alone takes "));
  EXPECT_THAT(response->plan(), HasSubstr("The next best plan would take "));
}

// Where chunks lie is planned anew at each start: the data directory has the states, and no plan.
TEST(Prediction, ADirectoryServesUnderAnyPlan) {
  const std::vector<TestTensor> model = {{"a", "u0", 20 << 16, 0}, {"b", "u1", 4 << 16, 0}, {"norm", "u1", 300, 1}};
  const auto count = static_cast<uint32_t>(model.size());
  v1::JobSpec spec = MakeSpec("job", model);
  TestServer plain("r", {.dram = 256 * kMiB});
  TrainerGroup reference({plain.get()}, spec, 1);
  spec.set_durability(v1::DURABILITY_STEP);
  TestServer server("s", {.dram = 16 * kMiB, .nvme = 512 * kMiB});
  const std::string path = server.directory() + "/" + kMachineProfile;
  ASSERT_EQ(reference.Start(), absl::OkStatus());
  ASSERT_EQ(reference.Initialise(Initial), absl::OkStatus());
  int64_t step = 0;
  for (uint64_t epoch = 1; epoch <= 3; ++epoch) {
    if (epoch == 2) {
      ASSERT_EQ(storage::WriteProfile(Balanced(), path), absl::OkStatus());
    } else {
      std::filesystem::remove(path);
    }
    server.Restart();
    TrainerGroup group({server.get()}, spec, 2, epoch);
    ASSERT_EQ(group.Start(), absl::OkStatus());
    if (epoch == 1) {
      ASSERT_EQ(group.Initialise(Initial), absl::OkStatus());
    }
    ASSERT_EQ(server->Status().jobs(0).has_prediction(), epoch == 2);
    for (int i = 0; i < 3; ++i) {
      ++step;
      for (TrainerGroup* each : {&reference, &group}) {
        ASSERT_EQ(each->PushAll(v1::SLICE_KIND_GRADIENT, AllTensors(count), GradientOf(step)), absl::OkStatus());
        ASSERT_EQ(each->Finish(UpdateHeader(count)).status(), absl::OkStatus());
      }
    }
    ExpectSame(reference, group, step);
  }
}

}  // namespace
}  // namespace ballast::services
