// A disk that cannot read what a recovery wants: what others still have does not refuse a job.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>

#include "absl/time/clock.h"
#include "ballast/tests/services/logged_slices.h"
#include "ballast/tests/services/machine_with_disk.h"
#include "ballast/tests/services/trainer_group.h"
#include "ballast/tests/sim_disk/bad_file.h"

namespace ballast::services {
namespace {

// The log of "job" has bad blocks.
class BadDisk : public MachineWithDisk {
 public:
  // The log's blocks that hold it, and its parity, cannot be read from now on.
  void Spoil(const storage::PayloadPlace& place) {
    bad_ = {place.offset, place.parity_offset() + storage::kLogBlock - place.offset};
  }
  void Heal() { bad_ = {}; }

 private:
  absl::StatusOr<std::unique_ptr<storage::BlockFile>> Open(const std::string& path, Mode mode) override {
    auto file = storage::SystemDisk()->Open(path, mode);
    if (!file.ok() || !path.ends_with("/log-job")) return file;
    return std::make_unique<storage::BadFile>(*std::move(file), &bad_);
  }

  storage::BadBlocks bad_;
};

float Ones(uint32_t, uint64_t) { return 1; }

// Like a rotten slice: before the step is prepared only the slice's rank needs the bytes, and the rank still has them.
TEST(DiskError, ASliceThatCannotBeReadIsPushedAgainUnlessItsStepIsPrepared) {
  BadDisk disk;
  TestServer server("s", {0, uint64_t{64} << 20, uint64_t{128} << 20});
  server.options().foundation = &disk;
  server.Restart();
  v1::JobSpec spec = MakeSpec("job", SmallModel());
  spec.set_durability(v1::DURABILITY_STEP);
  const auto tensors = static_cast<uint32_t>(SmallModel().size());
  const std::string log = server.directory() + "/log-job";
  std::optional<v1::Decision> first;
  {
    TrainerGroup group({server.get()}, spec, 1);
    ASSERT_EQ(group.Start(), absl::OkStatus());
    ASSERT_EQ(group.PushAll(v1::SLICE_KIND_VALUE, AllTensors(tensors), Ones), absl::OkStatus());
    const auto decision = group.Finish(ValuesHeader(tensors));
    ASSERT_TRUE(decision.ok()) << decision.status();
    first = *decision;
  }
  {
    TrainerGroup group({server.get()}, spec, 1, 2);
    ASSERT_EQ(group.Start(), absl::OkStatus());
    ASSERT_EQ(group.PushAll(v1::SLICE_KIND_GRADIENT, AllTensors(tensors), Ones), absl::OkStatus());
    while (LoggedSlices(1, log).size() < group.plan().slices().size()) absl::SleepFor(absl::Milliseconds(5));
  }
  server.End();
  disk.Spoil(LoggedSlices(1, log).back());
  server.Restart();
  ASSERT_EQ(server->Status().jobs(0).failure(), "");
  // The group that kept its gradients is told what is missing.
  TrainerGroup same({server.get()}, spec, 1, 2);
  ASSERT_EQ(same.Open(0, first), absl::OkStatus());
  Answer<v1::SealResponse> sealed;
  server->Seal(same.SealOf(0, UpdateHeader(tensors), 0), absl::Now() + absl::Seconds(20), sealed.reply());
  const auto pending = sealed.Wait();
  ASSERT_TRUE(pending.ok()) << pending.status();
  EXPECT_EQ(pending->pending().missing_count(), 1u);
  ASSERT_EQ(same.PushAll(v1::SLICE_KIND_GRADIENT, AllTensors(tensors), Ones), absl::OkStatus());
  ASSERT_TRUE(same.SealAll(UpdateHeader(tensors)).ok());
  // The older record does not count any more.
  server.Restart();
  ASSERT_EQ(server->Status().jobs(0).failure(), "");
  server.End();
  disk.Spoil(LoggedSlices(1, log).back());
  server.Restart();
  EXPECT_THAT(server->Status().jobs(0).failure(), ::testing::HasSubstr("Input/output error"));
  EXPECT_FALSE(server->Status().jobs(0).state_lost()) << "another start may read it";
  server.End();
  disk.Heal();
  server.Restart();
  TrainerGroup next({server.get()}, spec, 1, 3);
  ASSERT_EQ(next.Start(), absl::OkStatus());
  EXPECT_EQ(next.step(), 2);
}

}  // namespace
}  // namespace ballast::services
