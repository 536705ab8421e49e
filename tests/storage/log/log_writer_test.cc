// The writer of a gradient log on a disk whose requests complete when the test says so, in any order.
#include "ballast/storage/log/log_writer.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace ballast::storage {
namespace {

constexpr uint64_t kWrittenSegmentBytes = 64 * kLogBlock;

// Keeps requests until the test completes them.
class HeldRequests : public IoQueue {
 public:
  absl::Status Submit(const IoRequest& request) override {
    if (!refuses.ok()) return refuses;
    held.push_back(request);
    return absl::OkStatus();
  }
  void Reap(bool wait, std::vector<IoCompletion>* completions) override {
    // Who waits here for what the test holds would wait for ever.
    if (wait && done.empty()) CompleteAll();
    completions->insert(completions->end(), done.begin(), done.end());
    done.clear();
  }
  uint64_t in_flight() const override { return held.size() + done.size(); }
  const char* name() const override { return "held"; }

  void Complete(size_t index, absl::Status status = absl::OkStatus()) {
    done.push_back({held[index].tag, std::move(status)});
    held.erase(held.begin() + static_cast<std::ptrdiff_t>(index));
  }
  void CompleteAll() {
    while (!held.empty()) Complete(0);
  }

  std::vector<IoRequest> held;
  std::vector<IoCompletion> done;
  absl::Status refuses;
};

class HeldDisk : public Disk {
 public:
  absl::StatusOr<std::unique_ptr<BlockFile>> Open(const std::string&, Mode) override {
    return absl::UnimplementedError("the writer opens nothing");
  }
  absl::Status Remove(const std::string&) override { return absl::UnimplementedError("the writer removes nothing"); }
  absl::StatusOr<std::unique_ptr<IoQueue>> MakeQueue(const IoQueueOptions&) override {
    if (!no_queue.ok()) return no_queue;
    auto queue = std::make_unique<HeldRequests>();
    requests = queue.get();
    return queue;
  }

  absl::Status no_queue;
  HeldRequests* requests = nullptr;
};

class LogWriterTest : public ::testing::Test {
 protected:
  static SegmentRing Ring() {
    SegmentRing ring(kWrittenSegmentBytes);
    ring.Add(3);
    return ring;
  }
  LogWriterTest() {
    queue_.set_progress([this] { ++progressed_; });
    Use(/*transient=*/false);
  }
  ~LogWriterTest() override {
    if (disk_.requests != nullptr) disk_.requests->CompleteAll();
  }
  void Use(bool transient) {
    BatchEncoder encoder(kWrittenSegmentBytes, /*salt=*/1, /*next_batch=*/1, /*previous_incarnation=*/0);
    writer_ = std::make_unique<LogWriter>(&disk_, /*file=*/nullptr, transient, encoder, /*synced_batch=*/0, &queue_);
  }

  // Queues a record whose payload makes its batch several writes.
  void Append(uint64_t lsn) {
    LogRecord record;
    record.lsn = lsn;
    record.payload = {payload_.get(), kLogBlock};
    record.written = [this, lsn](const PayloadPlace* place) {
      told_.push_back(absl::StrCat(lsn, place == nullptr ? " never" : " written"));
    };
    queue_.Append(std::move(record));
  }
  // One batch of one record, written by a pump of its own.
  void Batch(uint64_t lsn) {
    Append(lsn);
    Pump();
  }
  void Begin() {
    ASSERT_TRUE(queue_.Roll());
    Pump();
    ASSERT_EQ(held().size(), 1) << "the segment's head";
    requests().Complete(0);
    Pump();
  }
  void Pump() { writer_->Pump(/*wait=*/false); }
  HeldRequests& requests() { return *disk_.requests; }
  const std::vector<IoRequest>& held() { return requests().held; }
  bool HoldsSync() {
    return std::any_of(held().begin(), held().end(), [](const auto& r) { return r.kind == IoRequest::Kind::kSync; });
  }
  // Completes everything, until nothing is left to do.
  void Settle() {
    for (int i = 0; i < 20; ++i) {
      if (disk_.requests != nullptr) requests().CompleteAll();
      Pump();
    }
  }
  // The mark that waits to be written; it goes to block 2 or 3 of the file.
  LogMark HeldMark(uint64_t block) {
    LogMark mark;
    EXPECT_EQ(held().size(), 1);
    EXPECT_EQ(held()[0].offset, block * kLogBlock);
    EXPECT_TRUE(DecodeHead(absl::Span<const std::byte>(held()[0].buffer), &mark));
    return mark;
  }

  HeldDisk disk_;
  LogQueue queue_{Ring(), /*durable_lsn=*/0};
  int progressed_ = 0;
  std::vector<std::string> told_;
  LogMemory payload_ = MakeLogMemory(kLogBlock);
  std::unique_ptr<LogWriter> writer_;
};

TEST_F(LogWriterTest, ARecordIsDurableAfterASyncThatBeganOnceAllWasWritten) {
  ASSERT_TRUE(queue_.Roll());
  Append(1);
  queue_.Sync(1);
  Pump();
  ASSERT_EQ(held().size(), 3) << "the segment's head, the metas, the payload";
  requests().Complete(2);
  Pump();
  requests().Complete(1);
  Pump();
  EXPECT_EQ(told_, std::vector<std::string>{"1 written"});
  EXPECT_FALSE(HoldsSync()) << "the segment's head is not written";
  requests().Complete(0);
  Pump();
  ASSERT_TRUE(HoldsSync());
  EXPECT_EQ(queue_.durable_lsn(), 0);
  EXPECT_EQ(progressed_, 0);
  requests().Complete(0);
  Pump();
  EXPECT_EQ(queue_.durable_lsn(), 1);
  EXPECT_EQ(progressed_, 1);
}

TEST_F(LogWriterTest, ASyncCoversNoBatchBehindOneThatIsNotWritten) {
  Begin();
  Batch(1);
  Batch(2);
  queue_.Sync(2);
  ASSERT_EQ(held().size(), 4);
  requests().Complete(3);
  requests().Complete(2);
  Pump();
  EXPECT_EQ(told_, std::vector<std::string>{"2 written"});
  EXPECT_FALSE(HoldsSync());
  requests().Complete(1);
  Pump();
  EXPECT_FALSE(HoldsSync());
  requests().Complete(0);
  Pump();
  EXPECT_TRUE(HoldsSync());
}

TEST_F(LogWriterTest, ABatchWrittenDuringASyncWaitsForTheNext) {
  Begin();
  Batch(1);
  queue_.Sync(1);
  requests().CompleteAll();
  Pump();
  ASSERT_TRUE(HoldsSync());
  Batch(2);
  queue_.Sync(2);
  requests().Complete(2);
  requests().Complete(1);
  Pump();
  ASSERT_EQ(held().size(), 1) << "one sync at a time";
  requests().Complete(0);
  Pump();
  EXPECT_EQ(queue_.durable_lsn(), 1);
  EXPECT_TRUE(HoldsSync());
  Settle();
  EXPECT_EQ(queue_.durable_lsn(), 2);
}

TEST_F(LogWriterTest, NobodyWaitsNothingIsSynced) {
  Begin();
  Batch(1);
  Settle();
  EXPECT_EQ(told_, std::vector<std::string>{"1 written"});
  EXPECT_EQ(queue_.durable_lsn(), 0);
  EXPECT_FALSE(writer_->in_flight());
}

TEST_F(LogWriterTest, MarksTakeTurnsAndNameTheNewestDurableBatch) {
  Begin();
  for (const uint64_t lsn : {1, 2, 3}) {
    Batch(lsn);
    queue_.Sync(lsn);
    requests().CompleteAll();
    Pump();
    ASSERT_TRUE(HoldsSync());
    requests().Complete(0);
    Pump();
    const LogMark mark = HeldMark(lsn % 2 == 1 ? 2 : 3);
    EXPECT_EQ(mark.synced_batch, lsn);
    EXPECT_EQ(mark.incarnation, 1);
    requests().CompleteAll();
    Pump();
  }
}

TEST_F(LogWriterTest, AMarkIsNotChangedWhileItIsWritten) {
  Begin();
  Batch(1);
  queue_.Sync(1);
  requests().CompleteAll();
  Pump();
  requests().CompleteAll();
  Pump();
  ASSERT_EQ(HeldMark(2).synced_batch, 1);
  Batch(2);
  queue_.Sync(2);
  while (held().size() > 1) requests().Complete(1);
  Pump();
  requests().Complete(1);  // the sync
  Pump();
  EXPECT_EQ(queue_.durable_lsn(), 2);
  EXPECT_EQ(HeldMark(2).synced_batch, 1);
  requests().Complete(0, absl::InternalError("a mark that failed only lags"));
  Pump();
  EXPECT_TRUE(queue_.status().ok());
  EXPECT_EQ(HeldMark(3).synced_batch, 2);
}

TEST_F(LogWriterTest, AFailedWriteIsToldOnceAllOfItsBatchHasEnded) {
  Begin();
  Batch(1);
  Batch(2);
  queue_.Sync(2);
  requests().Complete(0, absl::InternalError("the disk failed"));
  Pump();
  EXPECT_EQ(queue_.status(), absl::InternalError("the disk failed"));
  EXPECT_EQ(progressed_, 1);
  EXPECT_TRUE(told_.empty()) << "the disk may still read the payload";
  Settle();
  EXPECT_EQ(told_, (std::vector<std::string>{"1 never", "2 written"}));
  EXPECT_EQ(queue_.durable_lsn(), 0) << "no sync after an error";
  Append(3);
  Settle();
  EXPECT_EQ(told_.back(), "3 never");
}

TEST_F(LogWriterTest, AFailedHeadFailsTheLog) {
  ASSERT_TRUE(queue_.Roll());
  Append(1);
  queue_.Sync(1);
  Pump();
  requests().Complete(0, absl::InternalError("no head"));
  Settle();
  EXPECT_EQ(queue_.status(), absl::InternalError("no head"));
  EXPECT_EQ(queue_.durable_lsn(), 0);
}

TEST_F(LogWriterTest, AFailedSyncMakesNothingDurable) {
  Begin();
  Batch(1);
  queue_.Sync(1);
  requests().CompleteAll();
  Pump();
  ASSERT_TRUE(HoldsSync());
  requests().Complete(0, absl::InternalError("lost writes"));
  Settle();
  EXPECT_EQ(queue_.status(), absl::InternalError("lost writes"));
  EXPECT_EQ(queue_.durable_lsn(), 0);
  EXPECT_TRUE(held().empty()) << "no second sync: the disk reports a lost write once";
}

TEST_F(LogWriterTest, ASyncDuringAnExtensionCountsForNothing) {
  Begin();
  Batch(1);
  queue_.Sync(1);
  requests().CompleteAll();
  Pump();
  ASSERT_TRUE(HoldsSync());
  queue_.BeginExtension();
  requests().CompleteAll();
  Pump();
  EXPECT_EQ(queue_.durable_lsn(), 0);
  queue_.EndExtension(1, 1, /*synced=*/true);
  Settle();
  EXPECT_EQ(queue_.durable_lsn(), 1);
}

TEST_F(LogWriterTest, ARefusedRequestIsAFailedWrite) {
  Begin();
  requests().refuses = absl::UnavailableError("no memory for a request");
  Batch(1);
  EXPECT_EQ(queue_.status(), absl::UnavailableError("no memory for a request"));
  EXPECT_EQ(told_, std::vector<std::string>{"1 never"});
}

TEST_F(LogWriterTest, ALogWithoutAQueueFails) {
  disk_.no_queue = absl::UnavailableError("no queue");
  ASSERT_TRUE(queue_.Roll());
  Append(1);
  Pump();
  EXPECT_EQ(queue_.status(), absl::UnavailableError("no queue"));
  EXPECT_EQ(told_, std::vector<std::string>{"1 never"});
}

TEST_F(LogWriterTest, ATransientLogIsNeverSynced) {
  Use(/*transient=*/true);
  Begin();
  Batch(1);
  queue_.Sync(1);
  while (!held().empty()) {
    EXPECT_FALSE(HoldsSync());
    requests().Complete(0);
    Pump();
  }
  EXPECT_EQ(queue_.durable_lsn(), 1);
}

TEST_F(LogWriterTest, ACutIsDurableWithoutAnybodyWhoAsks) {
  Begin();
  Append(1);
  ASSERT_TRUE(queue_.Roll());
  Append(2);
  Settle();
  queue_.Sync(2);
  Settle();
  queue_.Cut(0);
  EXPECT_EQ(queue_.free_segments(), 1);
  Settle();
  EXPECT_EQ(queue_.free_segments(), 2);
}

TEST_F(LogWriterTest, TheNextSegmentsHeadWaitsUntilTheLastOneIsWritten) {
  ASSERT_TRUE(queue_.Roll());
  Append(1);
  ASSERT_TRUE(queue_.Roll());
  Append(2);
  Pump();  // one block of memory serves both heads
  uint64_t heads = 0;
  for (const IoRequest& request : held()) {
    SegmentHead head;
    if (request.buffer.size() != kSegmentHeadBytes || !DecodeHead(request.buffer.first(kLogBlock), &head)) continue;
    ++heads;
    EXPECT_EQ(head.incarnation, 2);
    EXPECT_EQ(request.offset, kLogFirstSegment + kWrittenSegmentBytes);
  }
  EXPECT_EQ(heads, 1);
}

}  // namespace
}  // namespace ballast::storage
