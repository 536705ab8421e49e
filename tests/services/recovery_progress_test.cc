// How far a recovery says that it is, while reads of its log are held.
#include "ballast/services/counters/recovery_progress.h"

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <thread>
#include <utility>

#include "ballast/tests/services/hung_disk.h"
#include "ballast/tests/services/logged_slices.h"

namespace ballast::services {
namespace {

// A job with steps 0 to 2 in its log, whose server has ended.
class RecoveryProgressTest : public HungDiskTest {
 protected:
  void SetUp() override {
    TrainerGroup group({server_.get()}, Spec("job", v1::DURABILITY_STEP), 1);
    ASSERT_EQ(group.Start(), absl::OkStatus());
    ASSERT_EQ(group.Initialise(Ones), absl::OkStatus());
    for (int i = 0; i < 2; ++i) ASSERT_EQ(Step(group), absl::OkStatus());
    // The answer to a step does not wait for its decision in the log; a promise waits for all before it.
    ASSERT_EQ(Fence(server_.get(), "job", group.epoch().counter() + 1), absl::OkStatus());
    server_.End();
    server_.options().progress = &progress_;
  }
  std::string LogPath() const { return server_.directory() + "/log-job"; }
  uint64_t SliceBytes(int64_t step) const {
    uint64_t bytes = 0;
    for (const storage::PayloadPlace& place : LoggedSlices(step, LogPath())) bytes += place.bytes;
    return bytes;
  }
  // Starts the server, and holds it at its first read of the log from an offset on.
  void StartAndHold(std::function<bool(uint64_t offset)> held) {
    disk_.Hold([this, held = std::move(held)](const std::string& path, GatedOperation operation, uint64_t offset) {
      return path == LogPath() && operation == GatedOperation::kRead && held(offset);
    });
    starting_ = std::thread([this] { server_.Restart(); });
    disk_.AwaitWaiting();
  }
  void ExpectStarts() {
    disk_.Release();
    starting_.join();
    EXPECT_EQ(progress_.done_bytes.load(), progress_.total_bytes.load());
    EXPECT_EQ(server_->Status().jobs(0).committed(), 2);
  }

  RecoveryProgress progress_;
  std::thread starting_;
};

TEST_F(RecoveryProgressTest, AScanShowsWhatItHasRead) {
  uint64_t end = 0;
  for (const storage::PayloadPlace& place : LoggedSlices(2, LogPath())) end = std::max(end, place.offset + place.bytes);
  // Behind the last record, in the first segment, the scan looks for more, piece by piece.
  ASSERT_LT(end + 2 * kMiB, 4 * kMiB);
  StartAndHold([end](uint64_t offset) { return offset > end + kMiB && offset < 4 * kMiB; });
  EXPECT_GT(progress_.done_bytes, kMiB);
  EXPECT_GE(progress_.total_bytes, std::filesystem::file_size(LogPath()));
  ExpectStarts();
}

TEST_F(RecoveryProgressTest, ASliceCountsOnceItIsReplayed) {
  uint64_t first = UINT64_MAX;
  for (const storage::PayloadPlace& place : LoggedSlices(1, LogPath())) first = std::min(first, place.offset);
  const uint64_t left = SliceBytes(1) + SliceBytes(2);
  ASSERT_GT(SliceBytes(0), 0);
  ASSERT_GT(left, 0);
  StartAndHold([first](uint64_t offset) { return offset == first; });
  EXPECT_EQ(progress_.total_bytes - progress_.done_bytes, left);
  EXPECT_GT(progress_.done_bytes, SliceBytes(0));
  ExpectStarts();
}

// A job that is refused leaves nothing that recovery would still read.
TEST_F(RecoveryProgressTest, AStartedServerHasDoneAll) {
  std::filesystem::resize_file(LogPath(), 100);
  server_.Restart();
  EXPECT_NE(server_->Status().jobs(0).failure(), "");
  EXPECT_GT(progress_.total_bytes, 0);
  EXPECT_EQ(progress_.done_bytes.load(), progress_.total_bytes.load());
}

}  // namespace
}  // namespace ballast::services
