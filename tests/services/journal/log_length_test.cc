// Logs of few steps: how long they are, when they get longer, and that a short one only makes steps wait.
#include "ballast/services/journal/log_length.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <limits>
#include <memory>

#include "absl/strings/match.h"
#include "absl/synchronization/mutex.h"
#include "ballast/tests/services/gated_disk.h"
#include "ballast/tests/services/trainer_group.h"
#include "ballast/tests/services/training_bits.h"

namespace ballast::services {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr uint64_t kElements = uint64_t{3} << 19;  // a step's gradients take most of a log segment

FlushWaits Waits(uint64_t log_steps, int waited_percent, uint64_t memory_bytes, uint64_t disk_bytes) {
  return {.log_steps = log_steps,
          .time = absl::Seconds(100),
          .waited = absl::Seconds(waited_percent),
          .memory_state_bytes = memory_bytes,
          .disk_state_bytes = disk_bytes};
}

TEST(LogStepsFor, StaysWhereNobodyWaitsForFlushes) {
  EXPECT_EQ(LogStepsFor(Waits(6, 10, 1000, 0)), 6u);
  EXPECT_EQ(LogStepsFor(Waits(6, 0, 1000, 0)), 6u);
  EXPECT_EQ(LogStepsFor({.log_steps = 6, .memory_state_bytes = 1000}), 6u) << "no time has passed";
  EXPECT_EQ(LogStepsFor(Waits(6, 90, 0, 0)), 6u);
}

TEST(LogStepsFor, FollowsTheWaits) {
  EXPECT_EQ(LogStepsFor(Waits(6, 15, 1000, 0)), 8u) << "four turns of flushes become six";
  EXPECT_EQ(LogStepsFor(Waits(6, 20, 1000, 0)), 10u);
  EXPECT_EQ(LogStepsFor(Waits(6, 90, 1000, 0)), 12u) << "at most twice as many at a time";
  EXPECT_EQ(LogStepsFor(Waits(12, 90, 1000, 0)), kLogStepsMax);
  EXPECT_EQ(LogStepsFor(Waits(kLogStepsMax, 90, 1000, 0)), kLogStepsMax);
  EXPECT_EQ(LogStepsFor(Waits(100, 90, 1000, 0)), 100u) << "a log of an earlier version stays";
  EXPECT_EQ(LogStepsFor(Waits(2, 30, 1000, 0)), 4u) << "so does one that is shorter than any made now";
}

TEST(LogStepsFor, CountsNoWaitsForStateThatEveryStepWrites) {
  EXPECT_EQ(LogStepsFor(Waits(6, 90, 0, 1000)), 6u);
  EXPECT_EQ(LogStepsFor(Waits(6, 90, 1000, 2250)), 6u) << "a tenth of the bytes are of flushes";
  EXPECT_EQ(LogStepsFor(Waits(6, 90, 1000, 250)), 12u);
}

class LogLengthTest : public ::testing::Test {
 protected:
  LogLengthTest() : server_("s", {0, 64 * kMiB, 512 * kMiB}), spec_(MakeSpec("job", {{"w", "u", kElements, 0}})) {
    spec_.set_durability(v1::DURABILITY_STEP);
    server_.options().foundation = &disk_;
  }
  ~LogLengthTest() override { server_.End(); }

  // Syncs of state take so long that steps wait for little else: longer than the work between two of them, on a
  // machine of any speed.
  void SlowFlushes() {
    disk_.Hold([last = std::make_shared<SyncEnd>()](const std::string& path, GatedOperation operation, uint64_t) {
      if (absl::EndsWith(path, "/nvme.tier") && operation == GatedOperation::kSync) last->SleepLonger();
      return false;
    });
  }
  struct SyncEnd {
    void SleepLonger() {
      absl::MutexLock lock(&mu);
      absl::SleepFor(std::clamp(2 * (absl::Now() - time), absl::Milliseconds(50), absl::Seconds(2)));
      time = absl::Now();
    }
    absl::Mutex mu;
    absl::Time time ABSL_GUARDED_BY(mu) = absl::Now();
  };
  void Restart(uint64_t log_steps) {
    server_.options().log_steps = log_steps;
    server_.Restart();
  }
  void NextGroup() {
    group_ = std::make_unique<TrainerGroup>(std::vector<StateServer*>{server_.get()}, spec_, 1, ++epoch_);
    ASSERT_EQ(group_->Start(), absl::OkStatus());
    if (group_->step() > 0) return;
    ASSERT_EQ(group_->Initialise(Initial), absl::OkStatus());
  }
  void Steps(int count) {
    for (int i = 0; i < count && !HasFatalFailure(); ++i) {
      ASSERT_EQ(group_->PushAll(v1::SLICE_KIND_GRADIENT, AllTensors(1), Initial), absl::OkStatus());
      ASSERT_EQ(group_->Finish(UpdateHeader(1)).status(), absl::OkStatus());
    }
  }
  v1::JobStatus Job() { return server_->Status().jobs(0); }
  std::vector<float> Master() {
    const auto master = group_->Read(0, v1::CONTENT_MASTER, group_->step() - 1);
    EXPECT_TRUE(master.ok()) << master.status();
    return master.value_or(std::vector<float>());
  }
  uint64_t Log() { return Job().log_capacity_bytes(); }
  uint64_t LogOf(uint64_t steps) {
    TestServer other("o", {0, 64 * kMiB, 512 * kMiB});
    other.options().log_steps = steps;
    other.Restart();
    TrainerGroup group({other.get()}, spec_, 1);
    EXPECT_EQ(group.Start(), absl::OkStatus());
    return other->Status().jobs(0).log_capacity_bytes();
  }

  GatedDisk disk_;
  TestServer server_;
  v1::JobSpec spec_;
  std::unique_ptr<TrainerGroup> group_;
  uint64_t epoch_ = 0;
};

// The figures are printed for the reader.
TEST_F(LogLengthTest, TakesLittleMoreDiskThanTheState) {
  uint64_t log_bytes[2] = {}, state_bytes[2] = {};
  const uint64_t lengths[2] = {kLogStepsMax, 0};
  spec_ = MakeSpec("job", {{"w", "u", uint64_t{4} << 20, 0}});
  spec_.set_durability(v1::DURABILITY_STEP);
  for (int i = 0; i < 2; ++i) {
    TestServer server("s", {0, 256 * kMiB, 1024 * kMiB});
    server.options().log_steps = lengths[i];
    server.Restart();
    TrainerGroup group({server.get()}, spec_, 1);
    ASSERT_EQ(group.Start(), absl::OkStatus());
    const v1::GetServerStatusResponse status = server->Status();
    log_bytes[i] = status.jobs(0).log_capacity_bytes();
    state_bytes[i] = status.tiers(1).state_bytes();
    printf("log of %d steps: state %d bytes, log %d bytes (%.2f of the state), all of nvme %d bytes (%.2f)\n",
           static_cast<int>(FirstLogSteps(lengths[i])), static_cast<int>(state_bytes[i]),
           static_cast<int>(log_bytes[i]), static_cast<double>(log_bytes[i]) / static_cast<double>(state_bytes[i]),
           static_cast<int>(status.tiers(2).used_bytes()),
           static_cast<double>(status.tiers(2).used_bytes()) / static_cast<double>(state_bytes[i]));
    EXPECT_EQ(std::filesystem::file_size(server.directory() + "/log-job"), log_bytes[i]);
  }
  EXPECT_GE(log_bytes[0], 4 * state_bytes[0]);
  EXPECT_LE(2 * log_bytes[1], 5 * state_bytes[1]) << "of which 20 MiB are there whatever the job";
  // Ten steps of 2 bytes for each of 2^22 parameters, an eighth of each segment unused.
  EXPECT_GE(log_bytes[0] - log_bytes[1], (uint64_t{20} << 22) / 7 * 8);
}

TEST_F(LogLengthTest, GetsLongerWhileStepsWaitForFlushes) {
  SlowFlushes();
  Restart(0);
  NextGroup();
  const uint64_t first = Log(), most = LogOf(kLogStepsMax);
  EXPECT_EQ(first, LogOf(kLogStepsFirst));
  ASSERT_LT(first, most);
  for (int i = 0; i < 20 && Log() < most; ++i) Steps(LogLength::kStepsSeen);
  EXPECT_GE(Log(), most);
  Steps(LogLength::kStepsSeen + 1);
  const uint64_t longest = Log();
  EXPECT_EQ(std::filesystem::file_size(server_.directory() + "/log-job"), longest);
  const std::vector<float> before = Master();
  group_.reset();
  server_.Restart();
  NextGroup();
  EXPECT_EQ(Master(), before);
  EXPECT_EQ(Log(), longest) << "a log keeps its length over a restart";
  spec_ = group_->spec();
  Append({{"more", "u9", 256, 0}}, group_->step() - 1, &spec_);
  NextGroup();
  EXPECT_GE(Log(), longest) << "and where further chunks come";
}

TEST_F(LogLengthTest, WithoutSpaceItStaysAndStepsGoOn) {
  Restart(0);
  NextGroup();
  server_.options().budget.nvme = server_->Status().tiers(2).used_bytes() + 3 * kMiB;  // less than any longer log takes
  SlowFlushes();
  Restart(0);
  NextGroup();
  const uint64_t first = Log();
  Steps(3 * LogLength::kStepsSeen);
  EXPECT_EQ(Log(), first);
  EXPECT_EQ(Job().failure(), "");
  EXPECT_EQ(Job().committed(), 3 * LogLength::kStepsSeen);
}

// At the floor nearly every chunk is flushed with every step, and the log is cut before the next step finds room.
TEST_F(LogLengthTest, AtTheFloorStepsWaitAndNoneIsLost) {
  SlowFlushes();
  Restart(kLogStepsMin);
  NextGroup();
  const uint64_t shortest = Log();
  EXPECT_LT(shortest, LogOf(kLogStepsFirst));
  for (int round = 0; round < 3; ++round) {
    Steps(7);
    const std::vector<float> before = Master();
    group_.reset();
    server_.Restart();
    NextGroup();
    EXPECT_EQ(group_->step(), 7 * (round + 1) + 1);
    EXPECT_EQ(Master(), before);
    EXPECT_EQ(Job().failure(), "");
  }
  EXPECT_EQ(Log(), shortest) << "a configured length is kept, whatever waits";
}

TEST_F(LogLengthTest, AConfiguredLengthReachesALogThatIsThere) {
  Restart(kLogStepsMin);
  NextGroup();
  Steps(2);
  group_.reset();
  Restart(8);
  NextGroup();
  const uint64_t wanted = LogOf(8);
  for (int i = 0; i < 4 && Log() < wanted; ++i) Steps(LogLength::kStepsSeen);
  EXPECT_EQ(Log(), wanted);
  group_.reset();
  Restart(kLogStepsMin);
  NextGroup();
  Steps(2 * LogLength::kStepsSeen);
  EXPECT_EQ(Log(), wanted) << "a log never gets shorter";
}

}  // namespace
}  // namespace ballast::services
