// The gradient log on this machine's disk.
#include "ballast/storage/log/gradient_log.h"

#include <atomic>
#include <filesystem>
#include <functional>
#include <set>

#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "ballast/proto/base/status.h"
#include "ballast/tests/scratch_directory.h"
#include "ballast/tests/sim/random.h"
#include "ballast/tests/small_disk.h"
#include "ballast/tests/storage/log/log_caller.h"
#include "gtest/gtest.h"

namespace ballast::storage {
namespace {

constexpr uint64_t kSegmentBytes = 64 * kLogBlock;
constexpr uint64_t kSegmentCount = 4;

class GradientLogTest : public ::testing::Test {
 protected:
  GradientLog::Options Options() const {
    return {.path = path_, .job = "job", .segment_bytes = kSegmentBytes, .segment_count = kSegmentCount};
  }
  void Create() {
    auto log = GradientLog::Create(SystemDisk(), Options());
    ASSERT_TRUE(log.ok()) << log.status();
    caller_.Use(*std::move(log));
  }
  // Drops the log, recovers the log and checks the scan.
  void Reopen() {
    const uint64_t durable_lsn = caller_.log().durable_lsn();
    caller_.Drop();
    auto log = GradientLog::Recover(SystemDisk(), path_, &scanned_);
    ASSERT_TRUE(log.ok()) << log.status();
    const absl::Status status = caller_.Check(scanned_, (*log)->file(), durable_lsn);
    ASSERT_TRUE(status.ok()) << status;
    caller_.Resume(scanned_, *std::move(log));
  }
  uint64_t AllFree() const { return kSegmentCount * (kSegmentBytes - kSegmentHeadBytes); }

  ScratchDirectory directory_;
  const std::string path_ = directory_ / "gradients";
  LogCaller caller_{1};
  ScannedLog scanned_;
};

TEST_F(GradientLogTest, ANewLogIsEmpty) {
  Create();
  EXPECT_EQ(caller_.log().free_bytes(), AllFree());
  EXPECT_EQ(caller_.log().file_bytes(), kLogFirstSegment + kSegmentCount * kSegmentBytes);
  EXPECT_EQ(std::filesystem::file_size(path_), caller_.log().file_bytes());
  EXPECT_FALSE(caller_.log().HasRoom(0, 0)) << "before the first Roll";
  Reopen();
  EXPECT_EQ(scanned_.name, "job");
  EXPECT_EQ(scanned_.segment_count, kSegmentCount);
  EXPECT_EQ(scanned_.record_count, 0);
  EXPECT_TRUE(scanned_.live.empty());
}

TEST_F(GradientLogTest, RecordsOfAllShapesComeBack) {
  Create();
  ASSERT_TRUE(caller_.Roll());
  for (const uint64_t body_bytes : {uint64_t{0}, uint64_t{1}, uint64_t{8}, kLogBlock, 3 * kLogBlock + 5}) {
    for (const uint64_t payload_bytes :
         {uint64_t{0}, uint64_t{1}, kLogBlock - 1, kLogBlock, kLogBlock + 1, 3 * kLogBlock, 3 * kLogBlock + 100}) {
      for (const bool aligned : {true, false}) {
        ASSERT_TRUE(caller_.Append({body_bytes, payload_bytes, /*keep_for=*/-1, aligned}) ||
                    caller_.log().Extend(2).ok());
      }
    }
  }
  ASSERT_TRUE(caller_.SyncAll().ok());
  EXPECT_EQ(caller_.log().durable_lsn(), caller_.last_lsn());
  EXPECT_EQ(caller_.payloads_borrowed(), 0);
  const uint64_t count = caller_.last_lsn();
  Reopen();
  EXPECT_EQ(scanned_.record_count, count);
  EXPECT_EQ(scanned_.torn_batches, 0);
  EXPECT_EQ(scanned_.repaired_blocks, 0);
}

TEST_F(GradientLogTest, ARecordMayFillASegmentExactly) {
  Create();
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(caller_.Roll());
    // Two segment heads, the room for two cuts and the snapshot's two metas are gone; the record's own two metas and
    // its parity go too.
    const uint64_t payload_bytes = kSegmentBytes - 11 * kLogBlock;
    EXPECT_FALSE(caller_.log().HasRoom(1, payload_bytes + 1));
    ASSERT_TRUE(caller_.log().HasRoom(1, payload_bytes));
    caller_.AppendHere(kOtherRecord, {.body_bytes = 1, .payload_bytes = payload_bytes, .keep_for = i});
    EXPECT_FALSE(caller_.log().HasRoom(0, 0));
    if (i == 1) caller_.PumpAll();
  }
  ASSERT_TRUE(caller_.SyncAll().ok());
  Reopen();
  EXPECT_EQ(scanned_.live.size(), 3);
}

TEST_F(GradientLogTest, ACutBeforeARollTakesNoRoomOfFullSegments) {
  Create();
  ASSERT_TRUE(caller_.Roll());
  ASSERT_TRUE(caller_.Append({.payload_bytes = kLogBlock, .keep_for = 1}));
  ASSERT_TRUE(caller_.Roll());
  ASSERT_TRUE(caller_.SyncAll().ok());
  // The batch that tells of the cut comes to lie in the new segment.
  caller_.Cut(1);
  ASSERT_TRUE(caller_.Roll());
  caller_.PumpAll();
  while (caller_.log().HasRoom(1, 0)) {
    caller_.AppendHere(kOtherRecord, {.body_bytes = 1});
    caller_.PumpAll();
  }
  ASSERT_TRUE(caller_.Roll()) << "the segment that lies behind the full one";
  ASSERT_TRUE(caller_.SyncAll().ok());
  Reopen();
}

TEST_F(GradientLogTest, CutsThatCutNothingTakeNoRoom) {
  Create();
  ASSERT_TRUE(caller_.Roll());
  ASSERT_TRUE(caller_.Append({.payload_bytes = kLogBlock, .keep_for = 1}));
  ASSERT_TRUE(caller_.Roll());
  ASSERT_TRUE(caller_.SyncAll().ok());
  for (int i = 0; i < 1000; ++i) caller_.Cut(1);
  EXPECT_TRUE(caller_.log().HasRoom(1, kSegmentBytes / 2));
}

TEST_F(GradientLogTest, RecordsStayRightOverManyRoundsOfTheRing) {
  Create();
  sim::Random random(7);
  for (int64_t step = 0; step < 400; ++step) {
    for (uint64_t i = 0; i < 4; ++i) {
      ASSERT_TRUE(caller_.Append({.body_bytes = random.Below(200),
                                  .payload_bytes = random.Below(6 * kLogBlock),
                                  .keep_for = step,
                                  .aligned = random.Percent(50)}))
          << "step " << step;
    }
    ASSERT_TRUE(caller_.SyncAll().ok());
    caller_.Cut(step - 2);
    caller_.PumpAll();
    if (step % 7 == 0) Reopen();
    if (HasFatalFailure()) return;
  }
  EXPECT_GT(scanned_.last_incarnation, 50);
}

TEST_F(GradientLogTest, AllButTheLastSegmentIsFreeAgainWhenCut) {
  Create();
  for (int64_t step = 0; step < 4; ++step) {
    ASSERT_TRUE(caller_.Roll());
    ASSERT_TRUE(caller_.Append({.payload_bytes = 10 * kLogBlock, .keep_for = step}));
  }
  ASSERT_TRUE(caller_.SyncAll().ok());
  EXPECT_EQ(caller_.log().free_bytes(), 0);
  EXPECT_FALSE(caller_.log().Roll());
  caller_.Cut(0);
  EXPECT_EQ(caller_.log().free_bytes(), 0) << "not before a sync";
  caller_.PumpAll();
  EXPECT_EQ(caller_.log().free_bytes(), AllFree() / kSegmentCount);
  caller_.Cut(3);
  caller_.PumpAll();
  EXPECT_EQ(caller_.log().free_bytes(), AllFree() / kSegmentCount * (kSegmentCount - 1));
  Reopen();
  EXPECT_EQ(scanned_.live.size(), 1);
}

// A segment has room for two cuts' batches besides what HasRoom gives out.
TEST_F(GradientLogTest, ACutThatFindsNoRoomIsToldInTheNextSegment) {
  Create();
  for (int64_t step = 1; step <= 3; ++step) {
    ASSERT_TRUE(caller_.Roll());
    ASSERT_TRUE(caller_.Append({.payload_bytes = kLogBlock, .keep_for = step}));
  }
  ASSERT_TRUE(caller_.Roll());
  ASSERT_TRUE(caller_.SyncAll().ok());
  caller_.Cut(1);
  caller_.PumpAll();
  EXPECT_FALSE(caller_.log().cut_lacks_room());
  while (caller_.log().HasRoom(1, 0)) caller_.AppendHere(kOtherRecord, {.body_bytes = 1});
  ASSERT_TRUE(caller_.SyncAll().ok());
  EXPECT_EQ(caller_.log().free_segments(), 1);
  caller_.Cut(2);
  caller_.PumpAll();
  EXPECT_FALSE(caller_.log().cut_lacks_room());
  EXPECT_EQ(caller_.log().free_segments(), 2);
  caller_.Cut(3);
  EXPECT_TRUE(caller_.log().cut_lacks_room());
  ASSERT_TRUE(caller_.Roll());
  EXPECT_FALSE(caller_.log().cut_lacks_room());
  caller_.PumpAll();
  EXPECT_EQ(caller_.log().free_segments(), 2) << "without a sync that somebody else asks for";
  Reopen();
}

TEST_F(GradientLogTest, ACutWaitsForTheSnapshotThatStandsIn) {
  Create();
  ASSERT_TRUE(caller_.Roll());
  ASSERT_TRUE(caller_.Append({.payload_bytes = kLogBlock, .keep_for = 1}));
  ASSERT_TRUE(caller_.SyncAll().ok());
  ASSERT_TRUE(caller_.Roll());
  caller_.Cut(1);
  caller_.PumpAll();
  EXPECT_EQ(caller_.log().free_bytes(), AllFree() / kSegmentCount * (kSegmentCount - 1)) << "no further call needed";
  Reopen();
}

TEST_F(GradientLogTest, AnOlderSegmentStaysForItsPayloads) {
  Create();
  ASSERT_TRUE(caller_.Append({.payload_bytes = kLogBlock, .keep_for = 9}));
  ASSERT_TRUE(caller_.Roll());
  ASSERT_TRUE(caller_.Append({.payload_bytes = kLogBlock, .keep_for = 1}));
  ASSERT_TRUE(caller_.Roll());
  ASSERT_TRUE(caller_.SyncAll().ok());
  caller_.Cut(5);
  caller_.PumpAll();
  EXPECT_EQ(caller_.log().free_bytes(), AllFree() / kSegmentCount) << "none behind one that is needed";
  Reopen();
  EXPECT_EQ(scanned_.live.size(), 3);
}

TEST_F(GradientLogTest, AfterARecoveryAllIsKeptUntilTold) {
  Create();
  ASSERT_TRUE(caller_.Append({.payload_bytes = kLogBlock, .keep_for = 1}));
  ASSERT_TRUE(caller_.SyncAll().ok());
  caller_.Drop();
  auto log = GradientLog::Recover(SystemDisk(), path_, &scanned_);
  ASSERT_TRUE(log.ok()) << log.status();
  caller_.Use(*std::move(log));
  ASSERT_TRUE(caller_.Roll());
  ASSERT_TRUE(caller_.SyncAll().ok());
  caller_.Cut(100);
  caller_.PumpAll();
  EXPECT_EQ(caller_.log().free_bytes(), AllFree() / 2);
  caller_.log().Keep(scanned_.live.at(0).incarnation, 1);
  caller_.Cut(100);
  caller_.PumpAll();
  EXPECT_EQ(caller_.log().free_bytes(), AllFree() / kSegmentCount * 3);
}

TEST_F(GradientLogTest, NothingIsDurableBeforeASync) {
  Create();
  ASSERT_TRUE(caller_.Append({.payload_bytes = kLogBlock}));
  caller_.PumpAll();
  EXPECT_EQ(caller_.payloads_borrowed(), 0) << "written all the same";
  EXPECT_EQ(caller_.log().durable_lsn(), 0);
  caller_.log().Sync(1);
  EXPECT_EQ(caller_.log().durable_lsn(), 0);
  caller_.PumpAll();
  EXPECT_GE(caller_.log().durable_lsn(), 1);
}

TEST_F(GradientLogTest, RecoveriesOneAfterTheOther) {
  Create();
  for (int round = 0; round < 20; ++round) {
    const uint64_t before = caller_.last_lsn();
    ASSERT_TRUE(caller_.Append({.body_bytes = 10, .payload_bytes = 100, .keep_for = round}) ||
                caller_.log().Extend(1).ok());
    ASSERT_TRUE(caller_.SyncAll().ok());
    // Never synced: it may be there or not, both here and in the next life.
    if (round % 3 == 0) {
      (void)caller_.Append({.body_bytes = 10, .payload_bytes = 5000, .keep_for = round});
      caller_.log().Pump(/*wait=*/false);
    }
    Reopen();
    if (HasFatalFailure()) return;
    EXPECT_GE(caller_.last_lsn(), before);
    caller_.Cut(round - 1);
    Reopen();
    if (HasFatalFailure()) return;
  }
}

TEST_F(GradientLogTest, AThreadPumps) {
  Create();
  std::atomic<int> progress = 0;
  ASSERT_EQ(caller_.log().Start([&] { ++progress; }), absl::OkStatus());
  for (int64_t step = 0; step < 200; ++step) {
    ASSERT_TRUE(caller_.Append({.body_bytes = 20, .payload_bytes = 3 * kLogBlock + 7, .keep_for = step})) << step;
    caller_.log().Sync(caller_.last_lsn());
    const absl::Time deadline = absl::Now() + absl::Seconds(30);
    while (caller_.log().durable_lsn() < caller_.last_lsn()) {
      ASSERT_LT(absl::Now(), deadline) << "step " << step << ": " << caller_.log().status();
      absl::SleepFor(absl::Microseconds(100));
    }
    caller_.Cut(step - 1);
  }
  EXPECT_GT(progress, 0);
  Reopen();
}

TEST_F(GradientLogTest, ATransientLogHasNoName) {
  GradientLog::Options options = Options();
  options.transient = true;
  auto log = GradientLog::Create(SystemDisk(), options);
  ASSERT_TRUE(log.ok()) << log.status();
  EXPECT_FALSE(std::filesystem::exists(path_));
  caller_.Use(*std::move(log));
  EXPECT_EQ(caller_.log().free_bytes(), AllFree());
  for (int64_t step = 0; step < 200; ++step) {  // many rounds of the ring
    ASSERT_TRUE(caller_.Append({.body_bytes = 20, .payload_bytes = 3 * kLogBlock + 7, .keep_for = step})) << step;
    while (caller_.log().Pump(/*wait=*/true)) {
    }
    caller_.Cut(step - 1);
  }
  ASSERT_TRUE(caller_.log().Extend(2).ok());
  ASSERT_TRUE(caller_.SyncAll().ok());
  caller_.Drop();
  EXPECT_TRUE(std::filesystem::is_empty(directory_.path()));
}

TEST_F(GradientLogTest, AThreadIsStoppedWithWorkLeft) {
  Create();
  ASSERT_EQ(caller_.log().Start([] {}), absl::OkStatus());
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(caller_.Append({.payload_bytes = 5 * kLogBlock, .keep_for = i}));
  caller_.log().Sync(caller_.last_lsn());
  Reopen();
}

TEST_F(GradientLogTest, ExtendAddsFreeSegments) {
  Create();
  for (uint64_t i = 0; i < kSegmentCount; ++i) ASSERT_TRUE(caller_.Roll());
  ASSERT_FALSE(caller_.Roll());
  ASSERT_TRUE(caller_.log().Extend(2).ok());
  EXPECT_EQ(caller_.log().free_bytes(), 2 * (kSegmentBytes - kSegmentHeadBytes));
  ASSERT_TRUE(caller_.Roll());
  ASSERT_TRUE(caller_.Append({.payload_bytes = kLogBlock, .keep_for = 1}));
  ASSERT_TRUE(caller_.SyncAll().ok());
  Reopen();
  EXPECT_EQ(scanned_.segment_count, kSegmentCount + 2);
}

TEST_F(GradientLogTest, AFullDiskLeavesNothingOfANewLogAndAllOfAnOld) {
  SmallDisk disk(2 << 20);
  if (!disk.mounted()) GTEST_SKIP() << "no right to mount: " << disk.why_not();
  const std::string path = disk.path() + "/gradients";
  const GradientLog::Options options{.path = path, .job = "job", .segment_bytes = kSegmentBytes, .segment_count = 4};
  GradientLog::Options large = options;
  large.segment_count = 9;
  const absl::Status status = GradientLog::Create(SystemDisk(), large).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_EQ(model::ReasonOf(status), model::kDiskFull);
  EXPECT_FALSE(std::filesystem::exists(path));

  auto log = GradientLog::Create(SystemDisk(), options);
  ASSERT_TRUE(log.ok()) << log.status();
  const uint64_t bytes = (*log)->file_bytes();
  EXPECT_EQ((*log)->Extend(5).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ((*log)->file_bytes(), bytes);
  EXPECT_EQ(std::filesystem::file_size(path), bytes);
  disk.Fill();
  caller_.Use(*std::move(log));
  for (int64_t step = 0; step < 100; ++step) {
    ASSERT_TRUE(caller_.Append({.payload_bytes = 5 * kLogBlock, .keep_for = step}));
    ASSERT_TRUE(caller_.SyncAll().ok()) << "a log that was made needs no space";
    caller_.Cut(step);
    caller_.PumpAll();
  }
}

TEST_F(GradientLogTest, AnInterruptLeavesNothingOfANewLogAndAllOfAnOld) {
  int pieces = 1;
  const auto interrupt = [&] { return pieces-- > 0 ? absl::OkStatus() : absl::CancelledError("enough"); };
  EXPECT_EQ(GradientLog::Create(SystemDisk(), Options(), interrupt).status(), absl::CancelledError("enough"));
  EXPECT_FALSE(std::filesystem::exists(path_));
  Create();
  const uint64_t bytes = caller_.log().file_bytes();
  ASSERT_TRUE(caller_.Append({.payload_bytes = 5}));
  // Before the first piece; and before the sync, when all is written.
  for (const int done : {0, 1}) {
    pieces = done;
    EXPECT_EQ(caller_.log().Extend(8, interrupt), absl::CancelledError("enough"));
    EXPECT_EQ(pieces, -1);
    EXPECT_EQ(caller_.log().file_bytes(), bytes);
    EXPECT_EQ(std::filesystem::file_size(path_), bytes);
  }
  ASSERT_TRUE(caller_.SyncAll().ok());
  Reopen();
  pieces = 100;
  EXPECT_EQ(caller_.log().Extend(8, interrupt), absl::OkStatus());
  EXPECT_EQ(caller_.log().file_bytes(), bytes + 8 * kSegmentBytes);
}

// This machine's disk; says before each write of a caller's own thread where it begins.
class ToldDisk : public Disk {
 public:
  explicit ToldDisk(std::function<void(uint64_t)> tell) : tell_(std::move(tell)) {}
  absl::StatusOr<std::unique_ptr<BlockFile>> Open(const std::string& path, Mode mode) override;
  absl::StatusOr<std::unique_ptr<IoQueue>> MakeQueue(const IoQueueOptions& options) override {
    return SystemDisk()->MakeQueue(options);
  }
  absl::Status Remove(const std::string& path) override { return SystemDisk()->Remove(path); }

 private:
  class File;
  const std::function<void(uint64_t)> tell_;
};

class ToldDisk::File : public BlockFile {
 public:
  File(std::unique_ptr<BlockFile> file, const ToldDisk* disk)
      : BlockFile(file->path()), file_(std::move(file)), disk_(disk) {}
  int fd() const override { return file_->fd(); }
  const std::string& buffered_because() const override { return file_->buffered_because(); }
  absl::StatusOr<uint64_t> Size() const override { return file_->Size(); }
  absl::Status Read(uint64_t offset, absl::Span<std::byte> buffer) const override {
    return file_->Read(offset, buffer);
  }
  absl::Status Write(uint64_t offset, absl::Span<const std::byte> buffer) const override {
    disk_->tell_(offset);
    return file_->Write(offset, buffer);
  }
  absl::Status Sync() const override { return file_->Sync(); }
  absl::Status Reserve(uint64_t offset, uint64_t bytes) override { return file_->Reserve(offset, bytes); }
  void Discard(uint64_t offset, uint64_t bytes) override { file_->Discard(offset, bytes); }
  absl::Status Truncate(uint64_t bytes) override { return file_->Truncate(bytes); }

 private:
  const std::unique_ptr<BlockFile> file_;
  const ToldDisk* const disk_;
};

absl::StatusOr<std::unique_ptr<BlockFile>> ToldDisk::Open(const std::string& path, Mode mode) {
  auto file = SystemDisk()->Open(path, mode);
  if (!file.ok()) return file;
  return std::make_unique<File>(*std::move(file), this);
}

uint64_t SegmentBegin(uint64_t segment) { return kLogFirstSegment + segment * kSegmentBytes; }

TEST_F(GradientLogTest, SegmentsAreWrittenAheadOfTheirFirstUse) {
  absl::Mutex mutex;
  std::set<uint64_t> begun;
  ToldDisk disk([&](uint64_t offset) {
    absl::MutexLock lock(&mutex);
    begun.insert(offset);
  });
  GradientLog::Options options = Options();
  options.segment_count = 12;
  auto log = GradientLog::Create(&disk, options);
  ASSERT_TRUE(log.ok()) << log.status();
  EXPECT_EQ(std::filesystem::file_size(path_), SegmentBegin(12));
  {
    absl::MutexLock lock(&mutex);
    EXPECT_LT(*begun.rbegin(), SegmentBegin(GradientLog::kWrittenSegments)) << "Create wrote segments of later use";
  }
  ASSERT_EQ((*log)->Start([] {}), absl::OkStatus());
  absl::MutexLock lock(&mutex);
  for (uint64_t segment = GradientLog::kWrittenSegments; segment < options.segment_count; ++segment) {
    const auto written = [&] { return begun.contains(SegmentBegin(segment)); };
    EXPECT_TRUE(mutex.AwaitWithTimeout(absl::Condition(&written), absl::Seconds(30))) << segment;
  }
}

TEST_F(GradientLogTest, RecordsThatReachASegmentWhileItIsWrittenAheadStay) {
  absl::Notification reached, go_on;
  ToldDisk disk([&](uint64_t offset) {
    if (offset != SegmentBegin(GradientLog::kWrittenSegments) || reached.HasBeenNotified()) return;
    reached.Notify();
    go_on.WaitForNotification();
  });
  GradientLog::Options options = Options();
  options.segment_count = 8;
  auto log = GradientLog::Create(&disk, options);
  ASSERT_TRUE(log.ok()) << log.status();
  caller_.Use(*std::move(log));
  ASSERT_EQ(caller_.log().Start([] {}), absl::OkStatus());
  reached.WaitForNotification();
  for (uint64_t segment = 0; segment <= GradientLog::kWrittenSegments; ++segment) {
    ASSERT_TRUE(caller_.Roll());
    ASSERT_TRUE(caller_.Append({.payload_bytes = 5 * kLogBlock, .keep_for = 9}));
  }
  caller_.log().Sync(caller_.last_lsn());
  absl::SleepFor(absl::Milliseconds(200));  // the log's thread would write the records here
  go_on.Notify();
  while (caller_.log().durable_lsn() < caller_.last_lsn()) absl::SleepFor(absl::Milliseconds(1));
  ASSERT_TRUE(caller_.log().status().ok()) << caller_.log().status();
  Reopen();
}

TEST_F(GradientLogTest, TwoOpenersAreRefused) {
  Create();
  for (const absl::Status& status : {GradientLog::Recover(SystemDisk(), path_, &scanned_).status(),
                                     GradientLog::Create(SystemDisk(), Options()).status()}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_EQ(model::ReasonOf(status), model::kBusy);
  }
  ASSERT_TRUE(caller_.Append({.payload_bytes = 5}));
  ASSERT_TRUE(caller_.SyncAll().ok());
  Reopen();
}

TEST_F(GradientLogTest, BadOptionsAreRefused) {
  GradientLog::Options options = Options();
  options.segment_bytes += 512;
  EXPECT_EQ(GradientLog::Create(SystemDisk(), options).status().code(), absl::StatusCode::kInvalidArgument);
  options = Options();
  options.segment_count = 2;
  EXPECT_EQ(GradientLog::Create(SystemDisk(), options).status().code(), absl::StatusCode::kInvalidArgument);
  options = Options();
  options.job.assign(129, 'x');
  EXPECT_EQ(GradientLog::Create(SystemDisk(), options).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_FALSE(std::filesystem::exists(path_));
}

}  // namespace
}  // namespace ballast::storage
