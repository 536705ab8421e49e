// The disk is full when a job is opened, when the job grows, or while the job trains. Durability `step` then refuses
// with the reason, leaves existing state alone, and goes on with the same bits once there is space.
#include <gtest/gtest.h>
#include <sys/statvfs.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <optional>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ballast/proto/base/status.h"
#include "ballast/proto/model/epoch_plan.h"
#include "ballast/tests/fault/job_image.h"
#include "ballast/tests/small_disk.h"

namespace ballast {
namespace {

using services::StateServer;
using services::TrainerGroup;

// The log of ImageModel on one server, its NVMe state with room for new versions, and the catalog.
constexpr uint64_t kDiskBytes = 80 * kMiB;
constexpr uint64_t kLogBytesMax = 48 * kMiB;

class FullDiskTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!disk_.mounted()) GTEST_SKIP() << "no right to mount a small disk: " << disk_.why_not();
    Restart();
  }

  // With so little DRAM that some state is on NVMe.
  absl::StatusOr<std::unique_ptr<StateServer>> Start(uint64_t dram_bytes = 6 * kMiB) const {
    services::StateServerOptions options = ImageServer(directory(), 0);
    options.budget.dram = dram_bytes;
    return StateServer::Start(options);
  }

  void Restart(uint64_t dram_bytes = 6 * kMiB) {
    server_.reset();
    auto started = Start(dram_bytes);
    ASSERT_TRUE(started.ok()) << started.status();
    server_ = *std::move(started);
  }

  std::string directory() const { return disk_.path() + "/data"; }

  TrainerGroup MakeGroup(v1::Durability durability = v1::DURABILITY_STEP,
                         const std::vector<services::TestTensor>& more = {}, int64_t version = -1) {
    v1::JobSpec spec = services::MakeSpec(kImageJob, ImageModel());
    spec.set_durability(durability);
    if (!more.empty()) services::Append(more, version, &spec);
    return TrainerGroup({server_.get()}, spec, 1, ++epochs_);
  }

  uint64_t FreeBytes() const {
    struct statvfs info;
    return ::statvfs(disk_.path().c_str(), &info) == 0 ? info.f_bavail * info.f_frsize : 0;
  }

  // Takes all but `bytes`.
  void FillBut(uint64_t bytes) const {
    disk_.Fill();
    std::filesystem::resize_file(disk_.path() + "/filler",
                                 std::filesystem::file_size(disk_.path() + "/filler") - bytes);
  }

  // State at `step` of a group that never met a full disk.
  static std::vector<std::string> Undisturbed(int64_t step) {
    ScratchDirectory scratch;
    services::StateServerOptions options = ImageServer(scratch.path(), 0);
    auto server = StateServer::Start(options);
    EXPECT_TRUE(server.ok()) << server.status();
    TrainerGroup group({server->get()}, services::MakeSpec(kImageJob, ImageModel()), 1);
    EXPECT_EQ(group.Start(), absl::OkStatus());
    EXPECT_EQ(TrainTo(group, step), absl::OkStatus());
    const auto snapshot = TakeSnapshot(**server);
    EXPECT_TRUE(snapshot.ok()) << snapshot.status();
    return snapshot.ok() ? snapshot->contents : std::vector<std::string>{};
  }

  void ExpectBitsAt(int64_t step) {
    const auto snapshot = TakeSnapshot(*server_);
    ASSERT_TRUE(snapshot.ok()) << snapshot.status();
    EXPECT_EQ(snapshot->job.committed(), step);
    EXPECT_TRUE(snapshot->contents == Undisturbed(step)) << "other bits at step " << step;
  }

  static void ExpectFull(const absl::Status& status, absl::string_view file) {
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
    EXPECT_EQ(model::ReasonOf(status), model::kDiskFull) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), file)) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "free space")) << status;
  }

  // How much disk the job takes besides its log, is found out by making the job.
  uint64_t TierBytes() {
    const uint64_t free = FreeBytes();
    TrainerGroup group = MakeGroup();
    EXPECT_EQ(group.Start(), absl::OkStatus());
    const uint64_t log_bytes = std::filesystem::file_size(absl::StrCat(directory(), "/log-", kImageJob));
    EXPECT_LT(log_bytes, kLogBytesMax);
    const uint64_t taken = free - FreeBytes();
    v1::DropJobRequest drop;
    drop.set_job(kImageJob);
    *drop.mutable_epoch() = group.epoch();
    services::Answer<v1::DropJobResponse> dropped;
    server_->DropJob(drop, dropped.reply());
    EXPECT_EQ(dropped.Wait().status(), absl::OkStatus());
    return taken - log_bytes;
  }

  uint64_t NvmeUsed() const { return server_->Status().tiers(2).used_bytes(); }

  const SmallDisk disk_{kDiskBytes};
  std::unique_ptr<StateServer> server_;
  uint64_t epochs_ = 0;
};

TEST_F(FullDiskTest, NoSpaceForTheLog) {
  const uint64_t tier_bytes = TierBytes();
  FillBut(tier_bytes + 2 * kMiB);
  TrainerGroup refused = MakeGroup();
  ExpectFull(refused.Start(), absl::StrCat("log-", kImageJob));
  EXPECT_FALSE(std::filesystem::exists(absl::StrCat(directory(), "/log-", kImageJob)));
  disk_.Empty();
  TrainerGroup group = MakeGroup();
  ASSERT_EQ(group.Start(), absl::OkStatus());
  ASSERT_EQ(TrainTo(group, 3), absl::OkStatus());
  ExpectBitsAt(3);
  Restart();
  ExpectBitsAt(3);
}

TEST_F(FullDiskTest, NoSpaceForTheLogEndsWithARestart) {
  const uint64_t tier_bytes = TierBytes();
  FillBut(tier_bytes + 2 * kMiB);
  TrainerGroup refused = MakeGroup();
  ExpectFull(refused.Start(), absl::StrCat("log-", kImageJob));
  Restart();  // on the full disk
  disk_.Empty();
  TrainerGroup group = MakeGroup();
  ASSERT_EQ(group.Start(), absl::OkStatus());
  ASSERT_EQ(TrainTo(group, 3), absl::OkStatus());
  ExpectBitsAt(3);
}

TEST_F(FullDiskTest, NoSpaceForExtents) {
  FillBut(256 * 1024);
  TrainerGroup refused = MakeGroup();
  ExpectFull(refused.Start(), "nvme.tier");
  EXPECT_EQ(NvmeUsed(), 0u);
  for (const bool restart : {false, true}) {
    if (restart) Restart();
    TrainerGroup still = MakeGroup();
    ExpectFull(still.Start(), "nvme.tier");
  }
  disk_.Empty();
  TrainerGroup group = MakeGroup();
  ASSERT_EQ(group.Start(), absl::OkStatus());
  ASSERT_EQ(TrainTo(group, 3), absl::OkStatus());
  ExpectBitsAt(3);
}

TEST_F(FullDiskTest, NoSpaceToGrow) {
  constexpr uint64_t kDramBytes = 64 * kMiB;  // not what is short
  Restart(kDramBytes);
  TrainerGroup group = MakeGroup();
  ASSERT_EQ(group.Start(), absl::OkStatus());
  ASSERT_EQ(TrainTo(group, 3), absl::OkStatus());
  FillBut(512 * 1024);
  const std::vector<services::TestTensor> more = {{"more", "u2", 100000, 0}};
  TrainerGroup larger = MakeGroup(v1::DURABILITY_STEP, more, 3);
  ExpectFull(larger.Start(), directory());
  // The job is unchanged, and goes on when opened with its old spec.
  ExpectBitsAt(3);
  disk_.Empty();
  TrainerGroup again = MakeGroup();
  ASSERT_EQ(again.Start(), absl::OkStatus());
  ASSERT_EQ(TrainTo(again, 5), absl::OkStatus());
  ExpectBitsAt(5);
  Restart(kDramBytes);
  ExpectBitsAt(5);
  TrainerGroup grown = MakeGroup(v1::DURABILITY_STEP, more, 5);
  EXPECT_EQ(grown.Start(), absl::OkStatus());
}

TEST_F(FullDiskTest, NoSpaceForALargerLogHoweverOftenItIsTried) {
  constexpr uint64_t kDramBytes = 64 * kMiB;  // not what is short
  Restart(kDramBytes);
  TrainerGroup group = MakeGroup();
  ASSERT_EQ(group.Start(), absl::OkStatus());
  ASSERT_EQ(TrainTo(group, 3), absl::OkStatus());
  // Room for the new chunks, and not for the segments of the log that their gradients need.
  FillBut(7 * kMiB + 512 * 1024);
  const std::vector<services::TestTensor> more = {{"more", "u2", 150000, 0}};
  for (int tries = 0; tries < 3; ++tries) {
    TrainerGroup larger = MakeGroup(v1::DURABILITY_STEP, more, 3);
    ExpectFull(larger.Start(), absl::StrCat("log-", kImageJob));
  }
  disk_.Empty();
  TrainerGroup grown = MakeGroup(v1::DURABILITY_STEP, more, 3);
  EXPECT_EQ(grown.Start(), absl::OkStatus());
}

TEST_F(FullDiskTest, FullWhileItTrains) {
  constexpr int64_t kEnd = 60;
  std::optional<TrainerGroup> group(MakeGroup());
  ASSERT_EQ(group->Start(), absl::OkStatus());
  ASSERT_EQ(TrainTo(*group, 4), absl::OkStatus());
  ASSERT_GT(server_->Status().tiers(2).state_bytes(), 0u);
  disk_.Fill();
  ASSERT_EQ(FreeBytes(), 0u);
  // All space was taken when the job was opened, but the catalog's: it may stop the job, not harm it.
  const absl::Status trained = TrainTo(*group, kEnd);
  std::printf("on a full disk: %s\n", trained.ok() ? "all steps went on" : trained.ToString().c_str());
  if (!trained.ok()) {
    EXPECT_EQ(model::ReasonOf(trained), model::kDiskFull) << trained;
  }
  disk_.Empty();
  Restart();
  group.emplace(MakeGroup());
  ASSERT_EQ(group->Start(), absl::OkStatus());
  std::printf("continues at step %lld\n", static_cast<long long>(group->step()));
  ASSERT_EQ(TrainTo(*group, kEnd), absl::OkStatus());
  ExpectBitsAt(kEnd);
}

TEST_F(FullDiskTest, ARestartOnAFullDisk) {
  TrainerGroup group = MakeGroup();
  ASSERT_EQ(group.Start(), absl::OkStatus());
  ASSERT_EQ(TrainTo(group, 8), absl::OkStatus());
  disk_.Fill();
  server_.reset();
  auto full = Start();
  // Refused, or it serves the job or says why not; nothing is lost either way.
  std::printf("a start on a full disk: %s\n", full.status().ToString().c_str());
  if (full.ok()) {
    server_ = *std::move(full);
    const auto snapshot = TakeSnapshot(*server_);
    std::printf("its job: %s\n", snapshot.status().ToString().c_str());
    if (snapshot.ok()) ExpectBitsAt(8);
  }
  server_.reset();
  disk_.Empty();
  Restart();
  ExpectBitsAt(8);
}

}  // namespace
}  // namespace ballast
