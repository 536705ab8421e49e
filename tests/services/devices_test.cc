// A state server with NVMe state on several devices: restarts, a device that is lost, one that fails.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/synchronization/mutex.h"
#include "ballast/proto/base/status.h"
#include "ballast/storage/io/io_queue.h"
#include "ballast/tests/scratch_directory.h"
#include "ballast/tests/services/machine_with_disk.h"
#include "ballast/tests/services/trainer_group.h"
#include "ballast/tests/services/training_bits.h"
#include "ballast/tests/small_disk.h"

namespace ballast::services {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
namespace fs = std::filesystem;

constexpr uint64_t kMiB = uint64_t{1} << 20;

// This machine's disk, on which writes of extents below a directory fail from when a test says so.
class FailingDevice : public MachineWithDisk {
 public:
  void FailWrites(const std::string& directory) {
    absl::MutexLock lock(&mu_);
    failing_ = directory;
  }

 private:
  class Queue : public storage::IoQueue {
   public:
    Queue(std::unique_ptr<storage::IoQueue> queue, FailingDevice* disk) : queue_(std::move(queue)), disk_(disk) {}
    absl::Status Submit(const storage::IoRequest& request) override {
      const std::string& path = request.file->path();
      if (request.kind != storage::IoRequest::Kind::kWrite || !disk_->Fails(path)) return queue_->Submit(request);
      failed_.push_back({request.tag, storage::IoError(EIO, "write", path, request.offset, request.buffer.size())});
      return absl::OkStatus();
    }
    void Reap(bool wait, std::vector<storage::IoCompletion>* completions) override {
      queue_->Reap(wait && failed_.empty(), completions);
      for (storage::IoCompletion& failed : failed_) completions->push_back(std::move(failed));
      failed_.clear();
    }
    uint64_t in_flight() const override { return queue_->in_flight() + failed_.size(); }
    const char* name() const override { return queue_->name(); }

   private:
    const std::unique_ptr<storage::IoQueue> queue_;
    FailingDevice* const disk_;
    std::vector<storage::IoCompletion> failed_;
  };

  absl::StatusOr<std::unique_ptr<storage::BlockFile>> Open(const std::string& path, Mode mode) override {
    return storage::SystemDisk()->Open(path, mode);
  }
  absl::StatusOr<std::unique_ptr<storage::IoQueue>> MakeQueue(const storage::IoQueueOptions& options) override {
    auto queue = storage::SystemDisk()->MakeQueue(options);
    if (!queue.ok()) return queue;
    return std::make_unique<Queue>(*std::move(queue), this);
  }
  bool Fails(const std::string& path) const {
    absl::MutexLock lock(&mu_);
    return !failing_.empty() && absl::StartsWith(path, failing_);
  }

  mutable absl::Mutex mu_;
  std::string failing_ ABSL_GUARDED_BY(mu_);
};

// A job's training on the server, step by step, beside the same training on a server that nobody disturbs.
class Training {
 public:
  explicit Training(const std::string& name, v1::Durability durability = v1::DURABILITY_STEP)
      : spec_(MakeSpec(name, SmallModel())), reference_({undisturbed_.get()}, MakeSpec(name, SmallModel()), 1) {
    spec_.set_durability(durability);
    EXPECT_EQ(reference_.Start(), absl::OkStatus());
    EXPECT_EQ(reference_.Initialise(Initial), absl::OkStatus());
  }
  absl::Status Join(TestServer& server) {
    group_.reset();
    group_ = std::make_unique<TrainerGroup>(std::vector<StateServer*>{server.get()}, spec_, 1, ++epochs_);
    const absl::Status started = group_->Start();
    if (started.ok() && step_ == 0) {
      EXPECT_EQ(group_->Initialise(Initial), absl::OkStatus());
      step_ = 1;
    }
    // A step that was decided before the server ended is applied.
    while (started.ok() && step_ < group_->step()) StepReference();
    return started;
  }
  void Leave() { group_.reset(); }
  absl::Status TryStep() {
    const absl::Status pushed = Push(*group_);
    return pushed.ok() ? group_->Finish(UpdateHeader(Tensors())).status() : pushed;
  }
  void Step() {
    ASSERT_EQ(TryStep(), absl::OkStatus());
    StepReference();
  }
  // Steps until the server refuses.
  absl::Status StepsToRefusal() {
    for (int i = 0; i < 40; ++i) {
      if (const absl::Status stepped = TryStep(); !stepped.ok()) return stepped;
      StepReference();
    }
    return absl::OkStatus();
  }
  void Steps(int count) {
    for (int i = 0; i < count; ++i) ASSERT_NO_FATAL_FAILURE(Step());
  }
  // Waits until no write of the job is under way.
  void Settle(TestServer& server) {
    ASSERT_EQ(PinDurably(server.get(), spec_.name(), group_->epoch(), step_ - 1), absl::OkStatus());
    ASSERT_EQ(UnpinDurably(server.get(), spec_.name(), group_->epoch(), step_ - 1), absl::OkStatus());
  }
  void ExpectSame() { services::ExpectSame(reference_, *group_, step_ - 1); }
  TrainerGroup& group() { return *group_; }

 private:
  static uint32_t Tensors() { return static_cast<uint32_t>(SmallModel().size()); }
  void StepReference() {
    ASSERT_EQ(Push(reference_), absl::OkStatus());
    ASSERT_TRUE(reference_.Finish(UpdateHeader(Tensors())).ok());
    ++step_;
  }
  absl::Status Push(TrainerGroup& group) const {
    return group.PushAll(v1::SLICE_KIND_GRADIENT, AllTensors(Tensors()), GradientOf(step_));
  }
  v1::JobSpec spec_;
  TestServer undisturbed_{"reference"};
  TrainerGroup reference_;
  std::unique_ptr<TrainerGroup> group_;
  uint64_t epochs_ = 0;
  int64_t step_ = 0;
};

class ServerDevicesTest : public ::testing::Test {
 protected:
  void SetUp() override {
    for (const std::string& directory : {a_, b_}) fs::create_directories(directory);
  }
  void Devices(const std::vector<storage::NvmeDevice>& devices) {
    server_.options().nvme_devices = devices;
    server_.options().budget.nvme = 0;
    for (const storage::NvmeDevice& device : devices) server_.options().budget.nvme += device.budget;
    server_.Restart();
  }
  // Three steps of a job that has everything in the data directory, as an earlier version would. A short log would be
  // cut after a restart, by flushes to any device.
  void BeginAtHome(Training& training) {
    server_.options().log_steps = 16;
    server_.Restart();
    ASSERT_EQ(training.Join(server_), absl::OkStatus());
    training.Steps(3);
    training.Leave();
  }
  // Bytes used and the budget, as the server's status tells.
  std::pair<uint64_t, uint64_t> Told(const std::string& directory) {
    const v1::TierStatus nvme = server_.get()->Status().tiers(2);
    for (const v1::NvmeDeviceStatus& device : nvme.devices()) {
      if (device.directory() == directory) return {device.used_bytes(), device.capacity_bytes()};
    }
    ADD_FAILURE() << directory << " is not in " << nvme.ShortDebugString();
    return {};
  }
  uint64_t TierBytes(const std::string& directory) const { return fs::file_size(directory + "/nvme.tier"); }
  ScratchDirectory directory_;
  const std::string a_ = directory_ / "a", b_ = directory_ / "b";
  FailingDevice disk_;
  // Room in memory for one chunk's state of two jobs: the other chunks are on NVMe.
  TestServer server_{"s", {0, 2 * 3'700'000, 128 * kMiB}};
};

TEST_F(ServerDevicesTest, RestartsChangeNoBit) {
  Training training("job");
  Devices({{server_.directory(), 96 * kMiB}, {a_, 32 * kMiB}, {b_, 32 * kMiB}});
  ASSERT_EQ(training.Join(server_), absl::OkStatus());
  for (int i = 0; i < 4; ++i) {
    training.Steps(3);
    training.Leave();
    if (i == 1) fs::rename(a_, directory_ / "aside");  // the disks are mounted the other way round
    if (i == 1) fs::rename(b_, a_);
    if (i == 1) fs::rename(directory_ / "aside", b_);
    server_.Restart();
    ASSERT_EQ(training.Join(server_), absl::OkStatus());
  }
  training.ExpectSame();
  for (const std::string& directory : {server_.directory(), a_, b_}) {
    EXPECT_GT(TierBytes(directory), kMiB / 2);
    EXPECT_GT(Told(directory).first, kMiB / 2);
  }
  // Devices may come while jobs live, and the state of each is where it was.
  Devices({{server_.directory(), 96 * kMiB}, {b_, 32 * kMiB}, {a_, 32 * kMiB}, {directory_.path(), 32 * kMiB}});
  ASSERT_EQ(training.Join(server_), absl::OkStatus());
  training.Steps(2);
  training.ExpectSame();
}

TEST_F(ServerDevicesTest, ALostDeviceIsNamedAndOtherJobsGoOn) {
  Training spared("spared"), struck("struck");
  ASSERT_NO_FATAL_FAILURE(BeginAtHome(spared));
  Devices({{server_.directory(), 128 * kMiB}, {a_, 32 * kMiB}, {b_, 32 * kMiB}});
  ASSERT_EQ(spared.Join(server_), absl::OkStatus());
  ASSERT_EQ(struck.Join(server_), absl::OkStatus());
  struck.Steps(3);
  struck.Leave();
  spared.Leave();
  server_.End();
  const auto before = TierBytes(b_);
  for (const bool mount_point : {true, false}) {
    SCOPED_TRACE(mount_point);
    fs::rename(b_, directory_ / "aside");
    if (mount_point) fs::create_directories(b_);
    server_.Restart();
    const absl::Status refused = struck.Join(server_);
    EXPECT_EQ(refused.code(), absl::StatusCode::kInternal) << refused;
    EXPECT_THAT(refused.message(), AllOf(HasSubstr("extents of job 'struck'"), HasSubstr(b_ + "/nvme.tier"),
                                         HasSubstr("Bring the disk back"), HasSubstr("drop the job")));
    ASSERT_EQ(spared.Join(server_), absl::OkStatus());
    EXPECT_EQ(Told(b_), std::pair(uint64_t{0}, uint64_t{0}));
    EXPECT_EQ(Told(a_).second, 32 * kMiB);
    spared.Steps(2);
    spared.ExpectSame();
    spared.Leave();
    server_.End();
    fs::remove_all(b_);
    fs::rename(directory_ / "aside", b_);
  }
  EXPECT_EQ(TierBytes(b_), before);
  server_.Restart();
  ASSERT_EQ(struck.Join(server_), absl::OkStatus());
  struck.Steps(2);
  struck.ExpectSame();
}

// All of the job's own extents are there, and the budget left to it is too small.
TEST_F(ServerDevicesTest, AJobWithoutRoomIsToldOfTheDeviceThatIsNotThere) {
  Training spared("spared"), struck("struck");
  ASSERT_NO_FATAL_FAILURE(BeginAtHome(spared));
  Devices({{server_.directory(), 128 * kMiB}, {b_, 32 * kMiB}});
  ASSERT_EQ(struck.Join(server_), absl::OkStatus());
  struck.Steps(3);
  struck.Leave();
  server_.End();
  fs::rename(b_, directory_ / "aside");
  Devices({{server_.directory(), 16 * kMiB}, {b_, 32 * kMiB}});
  const absl::Status refused = spared.Join(server_);
  EXPECT_EQ(model::ReasonOf(refused), model::kBudget) << refused;
  EXPECT_THAT(refused.message(),
              AllOf(HasSubstr("nvme tier also has less room than before"), HasSubstr("of job 'struck'"),
                    HasSubstr(b_ + "/nvme.tier"), HasSubstr("Bring the disk back")));
  server_.End();
  fs::rename(directory_ / "aside", b_);
  Devices({{server_.directory(), 128 * kMiB}, {b_, 32 * kMiB}});
  ASSERT_EQ(spared.Join(server_), absl::OkStatus());
  spared.ExpectSame();
}

TEST_F(ServerDevicesTest, ADeviceThatFailsStopsWhatWroteToItAndNothingElse) {
  server_.options().foundation = &disk_;
  Training struck("struck"), spared("spared");
  Devices({{server_.directory(), 128 * kMiB}, {a_, 32 * kMiB}, {b_, 32 * kMiB}});
  ASSERT_EQ(struck.Join(server_), absl::OkStatus());
  ASSERT_EQ(spared.Join(server_), absl::OkStatus());
  struck.Steps(2);
  spared.Steps(2);
  spared.Settle(server_);
  disk_.FailWrites(b_);
  const absl::Status refused = struck.StepsToRefusal();
  EXPECT_THAT(refused.message(), AllOf(HasSubstr("an nvme device fails"), HasSubstr(b_ + "/nvme.tier"),
                                       HasSubstr("Input/output error"), HasSubstr("start the server again")));
  // Versions of the other job go to the other devices, though older ones lie on this device, and room of it.
  spared.Steps(12);
  spared.ExpectSame();
  struck.Leave();
  spared.Leave();
  server_.End();
  disk_.FailWrites("");
  server_.Restart();
  for (Training* const training : {&struck, &spared}) {
    ASSERT_EQ(training->Join(server_), absl::OkStatus());
    training->Steps(2);
    training->ExpectSame();
  }
}

TEST_F(ServerDevicesTest, ADiskThatIsSmallerThanItsShareLeavesTheRestToOthers) {
  const SmallDisk small(3 * kMiB);
  if (!small.mounted()) GTEST_SKIP() << "no file system of its own: " << small.why_not();
  Training training("job");
  Devices({{server_.directory(), 128 * kMiB}, {a_, 32 * kMiB}, {small.path(), 32 * kMiB}});
  ASSERT_EQ(training.Join(server_), absl::OkStatus());
  training.Steps(8);
  small.Fill();
  training.Steps(8);
  training.ExpectSame();
  EXPECT_GT(TierBytes(small.path()), kMiB / 2);
  training.Leave();
  server_.Restart();  // on the full disk
  ASSERT_EQ(training.Join(server_), absl::OkStatus());
  training.Steps(2);
  training.ExpectSame();
  training.Leave();
  server_.End();  // before its disk
}

TEST_F(ServerDevicesTest, ConfigurationsThatCannotBeAreRefused) {
  const auto refusal = [&](const std::vector<storage::NvmeDevice>& devices) {
    StateServerOptions options = server_.options();
    options.nvme_devices = devices;
    server_.End();
    const auto started = StateServer::Start(options);
    EXPECT_EQ(started.status().code(), absl::StatusCode::kInvalidArgument) << started.status();
    return std::string(started.status().message());
  };
  fs::create_directory_symlink(a_, directory_ / "link");
  EXPECT_THAT(refusal({{a_, kMiB}, {directory_ / "link", kMiB}}), HasSubstr("are one directory"));
  EXPECT_THAT(refusal({{directory_ / "nowhere", kMiB}}), HasSubstr("there is no directory"));
  EXPECT_THAT(refusal({{server_.directory(), kMiB}, {server_.directory() + "/", kMiB}}), HasSubstr("keep one"));
  TestServer other("other");
  EXPECT_THAT(refusal({{other.directory(), kMiB}}), HasSubstr("data directory of another server"));
}

}  // namespace
}  // namespace ballast::services
