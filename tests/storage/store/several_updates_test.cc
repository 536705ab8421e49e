// Several updates of a run are under way at a time; what callers see is the same as if one followed another.
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <map>
#include <memory>
#include <thread>

#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "ballast/proto/base/status.h"
#include "ballast/tests/storage/store/store_on_tiers.h"
#include "gtest/gtest.h"

namespace ballast::storage {
namespace {

// Calls `before` before each piece.
class WatchedPool : public kernels::ThreadPool {
 public:
  WatchedPool(int threads, std::function<void()> before) : ThreadPool(threads), before_(std::move(before)) {}

 private:
  void Compute(absl::FunctionRef<void(uint64_t)> piece, uint64_t index) override {
    before_();
    piece(index);
  }
  const std::function<void()> before_;
};

class SeveralUpdatesTest : public ::testing::TestWithParam<TierKind> {
 protected:
  absl::Status Make(kernels::ThreadPool* pool) {
    s_.store = std::make_unique<ChunkStore>(s_.tiers.get(), kernels::OptimizerSpec(), pool);
    BALLAST_RETURN_IF_ERROR(s_.store->Add(Sizes(), s_.PlanOf({GetParam()})));
    return s_.RunValues(1);
  }
  // An update of each chunk.
  static void Fill(StepUpdates* step) {
    for (size_t i = 0; i < Sizes().size(); ++i) step->AddSegments(i, Sizes()[i], 1);
  }

  StoreOnTiers s_{{.dram = 16 * kMiB, .nvme = 16 * kMiB}, Sizes().size()};
};

INSTANTIATE_TEST_SUITE_P(Tiers, SeveralUpdatesTest, ::testing::Values(TierKind::kDram, TierKind::kNvme),
                         [](const auto& info) { return std::string(TierName(info.param)); });

// Each chunk is a single piece: others end while the first does not.
TEST_P(SeveralUpdatesTest, LaterChunksAreComputedWhileAnEarlierOneIs) {
  std::atomic<int> begun = INT_MAX / 2;  // not watched
  std::unique_ptr<absl::Notification> others;
  std::atomic<bool> overlapped = false;
  const std::thread::id caller = std::this_thread::get_id();
  WatchedPool pool(3, [&] {
    const int before = begun.fetch_add(1);
    // On NVMe the caller starts reads of later chunks: a piece that it takes itself does not wait.
    if (before == 0 && (GetParam() == TierKind::kDram || std::this_thread::get_id() != caller)) {
      overlapped = others->WaitForNotificationWithTimeout(absl::Seconds(60));
    }
    if (before == 3) others->Notify();
  });
  ASSERT_EQ(Make(&pool), absl::OkStatus());
  for (int64_t version = 2; !overlapped && version < 100; ++version) {
    StepUpdates step(version);
    Fill(&step);
    others = std::make_unique<absl::Notification>();
    begun = 0;
    size_t next = 0;
    ASSERT_EQ(s_.store->Run(step.updates(), [&](size_t i) { EXPECT_EQ(i, next++); }), absl::OkStatus());
    EXPECT_EQ(next, Sizes().size());
    step.ApplyTo(s_.reference);
    for (size_t i = 0; i < Sizes().size(); ++i) EXPECT_TRUE(Holds(*s_.store, i, s_.reference[i])) << i;
  }
  EXPECT_TRUE(overlapped.load());
}

// Also of a chunk of which only a part changes, and whether or not the state goes to the disk.
TEST_P(SeveralUpdatesTest, AnUpdateTellsTheDigestsOfItsNewState) {
  kernels::ThreadPool pool(3);
  ASSERT_EQ(Make(&pool), absl::OkStatus());
  StepUpdates step(2);
  for (size_t i = 0; i < Sizes().size(); ++i) step.AddSegments(i, i == 0 ? 1024 : Sizes()[i], 1);
  std::vector<ChunkUpdate> updates(step.updates().begin(), step.updates().end());
  std::vector<std::optional<ArrayDigests>> told(updates.size());
  for (size_t i = 0; i < updates.size(); i += 2) updates[i].digests = &told[i];
  size_t announced = 0;
  const auto done = [&](size_t i) {
    EXPECT_EQ(told[i].has_value(), i % 2 == 0);
    ++announced;
  };
  ASSERT_EQ(s_.store->Run(updates, done), absl::OkStatus());
  EXPECT_EQ(announced, updates.size());
  for (size_t i = 0; i < updates.size(); i += 2) {
    const auto whole = s_.store->ReadWhole(i);
    ASSERT_TRUE(whole.ok()) << whole.status();
    for (size_t k = 0; k < whole->arrays.size(); ++k) {
      EXPECT_EQ((*told[i])[k], kernels::Crc32c(whole->arrays[k].bytes)) << "array " << k << " of chunk " << i;
    }
  }
}

TEST_P(SeveralUpdatesTest, AReadOfAChunkUnderWayWaits) {
  std::atomic<bool> watching = false;
  absl::Notification begun, release;
  std::atomic_flag first;
  WatchedPool pool(3, [&] {
    if (!watching.load()) return;
    if (!first.test_and_set()) begun.Notify();
    release.WaitForNotification();
  });
  ASSERT_EQ(Make(&pool), absl::OkStatus());
  StepUpdates step(2);
  Fill(&step);
  step.ApplyTo(s_.reference);
  watching = true;
  std::thread run([&] { EXPECT_EQ(s_.store->Run(step.updates(), [](size_t) {}), absl::OkStatus()); });
  begun.WaitForNotification();
  std::thread reader([&] { EXPECT_TRUE(Holds(*s_.store, 0, s_.reference[0])) << "neither old nor half of it"; });
  absl::SleepFor(absl::Milliseconds(30));  // without the wait, the reader would have read by now
  release.Notify();
  reader.join();
  run.join();
}

TEST_P(SeveralUpdatesTest, AnInterruptLeavesWhatIsNotAnnouncedAsItWas) {
  kernels::ThreadPool pool(3);
  ASSERT_EQ(Make(&pool), absl::OkStatus());
  StepUpdates step(2);
  Fill(&step);
  int asked = 0;
  const auto interrupt = [&] { return ++asked <= 5 ? absl::OkStatus() : absl::CancelledError("stopping"); };
  size_t done = 0;
  const auto count = [&](size_t i) { EXPECT_EQ(i, done++); };
  EXPECT_EQ(s_.store->Run(step.updates(), count, {}, interrupt).code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(done, 5);
  for (size_t i = 0; i < done; ++i) s_.reference[i].Apply(step.updates()[i]);
  for (size_t i = 0; i < Sizes().size(); ++i) EXPECT_TRUE(Holds(*s_.store, i, s_.reference[i])) << i;
  ASSERT_EQ(s_.store->Run(step.updates().subspan(done), [](size_t) {}), absl::OkStatus());
  for (size_t i = done; i < Sizes().size(); ++i) s_.reference[i].Apply(step.updates()[i]);
  for (size_t i = 0; i < Sizes().size(); ++i) EXPECT_TRUE(Holds(*s_.store, i, s_.reference[i])) << i;
}

// Chunk 4's state rots on the disk. The run finds out once later chunks are under way: chunks announced have the new
// version, in the catalog too; all others have the version before there.
TEST(FailedUpdateTest, AnnouncedChunksAreRecordedAndNoOthers) {
  StoreOnTiers s({.dram = 16 * kMiB, .nvme = 32 * kMiB}, Sizes().size());
  kernels::ThreadPool pool(3);
  std::map<uint64_t, DurableChunk> recorded;
  ChunkStore store(s.tiers.get(), kernels::OptimizerSpec(), &pool,
                   DurableOptions{.job = "job", .life = 1, .record = [&](absl::Span<const DurableChunk> chunks) {
                                    for (const DurableChunk& chunk : chunks) recorded[chunk.id] = chunk;
                                    return absl::OkStatus();
                                  }});
  std::vector<ChunkToAdd> added;
  for (const uint64_t n : Sizes()) added.push_back({.elements = n, .id = added.size()});
  ASSERT_EQ(store.Add(added, s.PlanOf({TierKind::kNvme})), absl::OkStatus());
  const auto run = [&](int64_t version, absl::FunctionRef<void(size_t)> done) {
    StepUpdates step(static_cast<uint64_t>(version) + 1);
    for (size_t i = 0; i < Sizes().size(); ++i) step.AddSegments(i, Sizes()[i], 1);
    std::vector<ChunkUpdate> updates(step.updates().begin(), step.updates().end());
    for (ChunkUpdate& update : updates) update.version = version;
    return store.Run(updates, done);
  };
  ASSERT_EQ(run(0, [](size_t) {}), absl::OkStatus());
  ASSERT_EQ(store.Harden(), absl::OkStatus());
  const int fd = open((s.directory / "nvme.tier").c_str(), O_WRONLY);
  ASSERT_EQ(pwrite(fd, "rotten", 6, static_cast<off_t>(recorded[4].offset + 1000)), 6);
  ASSERT_EQ(fsync(fd), 0);
  close(fd);
  size_t done = 0;
  EXPECT_EQ(run(1, [&](size_t i) { EXPECT_EQ(i, done++); }).code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(done, 4);
  for (uint64_t i = 0; i < Sizes().size(); ++i) {
    EXPECT_EQ(recorded[i].version, i < 4 ? 1 : 0) << i;
    std::vector<float> any(16);
    store.ReadState(i, StateArray::kMaster, 0, absl::MakeSpan(any)).IgnoreError();  // whatever it finds, it returns
  }
  EXPECT_EQ(run(1, [](size_t) { ADD_FAILURE(); }).code(), absl::StatusCode::kDataLoss);
  store.Discard();
}

}  // namespace
}  // namespace ballast::storage
