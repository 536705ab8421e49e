// The gradient log's reader on damaged files: exactly the written records, or DATA_LOSS.
#include "ballast/storage/log/log_format.h"

#include <cstring>
#include <functional>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/storage/log/log_reader.h"
#include "ballast/storage/log/payload_reader.h"
#include "ballast/storage/memory/arena.h"
#include "ballast/tests/sim/random.h"
#include "ballast/tests/sim_disk/bad_file.h"
#include "ballast/tests/sim_disk/sim_disk.h"
#include "ballast/tests/storage/log/all_records.h"
#include "ballast/tests/storage/log/log_caller.h"
#include "gtest/gtest.h"

namespace ballast::storage {
namespace {

constexpr char kPath[] = "log";
constexpr uint64_t kSegmentBytes = 28 * kLogBlock;

// A log of two lives and a crash, cut and recycled, all of it synced: every batch that is needed was durable.
class LogFormatTest : public ::testing::Test {
 protected:
  explicit LogFormatTest(uint64_t seed = 3) : random_(seed), disk_(seed), caller_(seed) {}

  void SetUp() override {
    auto log =
        GradientLog::Create(&disk_, {.path = kPath, .job = "job", .segment_bytes = kSegmentBytes, .segment_count = 5});
    ASSERT_TRUE(log.ok()) << log.status();
    caller_.Use(*std::move(log));
    Live(12);
    // Batches that the crash leaves are void, but look real.
    for (int i = 0; i < 6; ++i)
      ASSERT_TRUE(caller_.Append({.body_bytes = 9, .payload_bytes = 5000, .keep_for = step_}));
    for (int i = 0; i < 4; ++i) caller_.log().Pump(/*wait=*/false);
    disk_.Crash();
    caller_.Drop();
    ScannedLog scanned;
    auto again = GradientLog::Recover(&disk_, kPath, &scanned);
    ASSERT_TRUE(again.ok()) << again.status();
    caller_.Resume(scanned, *std::move(again));
    ASSERT_TRUE(caller_.Roll());
    Live(1 + static_cast<int64_t>(random_.Below(12)));
    caller_.Drop();
    content_ = ReadAll();
    ASSERT_TRUE(ScanStatus().ok()) << ScanStatus();
    first_lsn_ = records_.front().lsn;
  }

  void Live(int64_t steps) {
    for (const int64_t end = step_ + steps; step_ < end; ++step_) {
      ASSERT_TRUE(caller_.Append(
          {.body_bytes = 1 + random_.Below(200), .payload_bytes = random_.Below(3 * kLogBlock), .keep_for = step_}));
      if (random_.Percent(50)) {
        ASSERT_TRUE(caller_.SyncAll().ok());
      }
      caller_.Cut(step_ - 4);
    }
    ASSERT_TRUE(caller_.SyncAll().ok());
  }

  std::vector<std::byte> ReadAll() {
    auto file = *disk_.Open(kPath, Disk::Mode::kShared);
    const Arena content = *Arena::Map(*file->Size());
    EXPECT_TRUE(file->Read(0, content.bytes()).ok());
    return {content.bytes().begin(), content.bytes().end()};
  }

  // Scans the disk's current content. OK if every written record is there.
  absl::Status ScanStatus() {
    auto file = disk_.Open(kPath, Disk::Mode::kShared);
    if (!file.ok()) return file.status();
    absl::StatusOr<ScannedLog> scanned = ScanLog(**file);
    if (!scanned.ok()) return scanned.status();
    scanned_ = *std::move(scanned);
    absl::StatusOr<AllRecords> all = RecordsOf(**file, scanned_);
    if (!all.ok()) return all.status();
    records_ = std::move(all->records);
    const absl::Status status = caller_.Check(scanned_, **file, caller_.last_lsn());
    if (!status.ok()) return status;
    // Neither fewer nor more than without the damage.
    if (first_lsn_ == 0 || records_.front().lsn == first_lsn_) return status;
    return absl::InternalError(absl::StrCat("begins at ", records_.front().lsn, ", not ", first_lsn_));
  }

  void ExpectRightOrDataLoss(const std::string& damage) {
    const absl::Status status = ScanStatus();
    status.ok() ? ++right_ : ++refused_;
    if (status.ok() && scanned_.repaired_blocks > 0) ++repaired_;
    EXPECT_TRUE(status.ok() || absl::IsDataLoss(status)) << damage << ": " << status;
  }

  void Restore() { disk_.SetContent(kPath, content_); }

  sim::Random random_;
  SimDisk disk_;
  LogCaller caller_;
  int64_t step_ = 1;
  std::vector<std::byte> content_;
  ScannedLog scanned_;
  std::vector<ReadRecord> records_;  // of `scanned_`
  uint64_t first_lsn_ = 0;
  uint64_t right_ = 0, repaired_ = 0, refused_ = 0;
};

TEST_F(LogFormatTest, OverwrittenBytes) {
  for (int i = 0; i < 4000; ++i) {
    Restore();
    const uint64_t at = random_.Below(content_.size() - 64);
    disk_.Corrupt(kPath, at, 64);
    ExpectRightOrDataLoss(absl::StrCat("64 bytes at ", at));
  }
  EXPECT_GT(right_, 100);
  EXPECT_GT(repaired_, 100);
  EXPECT_GT(refused_, 100);
}

TEST_F(LogFormatTest, FlippedBits) {
  for (int i = 0; i < 1000; ++i) {
    Restore();
    const uint64_t bit = random_.Below(content_.size()) * 8 + random_.Below(8);
    disk_.FlipBit(kPath, bit);
    ExpectRightOrDataLoss(absl::StrCat("bit ", bit));
  }
  EXPECT_GT(right_, 100);
  EXPECT_GT(refused_, 10);
}

TEST_F(LogFormatTest, EachBlockZeroedOrSpoiled) {
  for (uint64_t at = 0; at < content_.size(); at += kLogBlock) {
    Restore();
    disk_.Corrupt(kPath, at, kLogBlock);
    ExpectRightOrDataLoss(absl::StrCat("block at ", at));
    std::vector<std::byte> zeroed = content_;
    std::memset(zeroed.data() + at, 0, kLogBlock);
    disk_.SetContent(kPath, zeroed);
    ExpectRightOrDataLoss(absl::StrCat("zeroed block at ", at));
  }
}

// Most disks report rot as an error. The reader then uses the second copy, if there is one. Where the reader cannot
// tell whether the log goes on, the error is the answer, never a shorter log.
TEST_F(LogFormatTest, BlocksThatCannotBeRead) {
  BadBlocks bad;
  const BadFile file(*disk_.Open(kPath, Disk::Mode::kShared), &bad);
  for (const uint64_t blocks : {1, 2}) {
    uint64_t unreadable = 0, repaired = 0;
    for (uint64_t at = 0; at < content_.size(); at += kLogBlock) {
      bad = {at, blocks * kLogBlock};
      const absl::StatusOr<ScannedLog> scanned = ScanLog(file);
      if (!scanned.ok()) {
        ++unreadable;
        EXPECT_EQ(model::ReasonOf(scanned.status()), model::kIo) << blocks << " blocks at " << at;
        continue;
      }
      repaired += scanned->repaired_blocks > 0 ? 1 : 0;
      EXPECT_EQ(scanned->record_count, scanned_.record_count) << blocks << " blocks at " << at;
    }
    // A single bad block is fatal only where the next batch would begin.
    if (blocks == 1) {
      EXPECT_EQ(unreadable, 1);
    } else {
      EXPECT_GT(unreadable, 10);
    }
    EXPECT_GT(repaired, 3);
  }
}

// Counts the payloads of the scanned log for which `damage` leaves nothing to read, and those that come out right.
struct Damaged {
  uint64_t right = 0, refused = 0;
};

TEST_F(LogFormatTest, ASingleRottenBlockOfAPayloadIsRebuilt) {
  const auto each = [&](uint64_t blocks, bool parity, const std::function<void(uint64_t at)>& damage) {
    Damaged damaged;
    const std::vector<ReadRecord> records = records_;
    for (const ReadRecord& record : records) {
      if (record.payload.bytes == 0 || (record.payload.parity_sum != 0) != parity) continue;
      for (uint64_t at = 0; at + (blocks - 1) * kLogBlock < record.payload.bytes; at += kLogBlock) {
        Restore();
        for (uint64_t i = 0; i < blocks; ++i) damage(record.payload.offset + at + i * kLogBlock);
        const absl::Status status = ScanStatus();
        EXPECT_TRUE(status.ok() || absl::IsDataLoss(status)) << status;
        status.ok() ? ++damaged.right : ++damaged.refused;
      }
    }
    return damaged;
  };
  const auto flip = [&](uint64_t at) { disk_.FlipBit(kPath, at * 8 + random_.Below(64)); };
  const auto spoil = [&](uint64_t at) { disk_.Corrupt(kPath, at, kLogBlock); };
  for (const auto& damage : {std::function<void(uint64_t)>(flip), std::function<void(uint64_t)>(spoil)}) {
    const Damaged with = each(1, /*parity=*/true, damage), without = each(1, /*parity=*/false, damage),
                  two = each(2, /*parity=*/true, damage);
    EXPECT_GT(with.right, 5);
    EXPECT_EQ(with.refused, 0);
    EXPECT_GT(without.refused, 3);
    EXPECT_EQ(two.right, 0);
    EXPECT_GT(two.refused, 3);
  }
}

TEST_F(LogFormatTest, APayloadWhoseParityIsRottenIsRead) {
  const std::vector<ReadRecord> records = records_;
  for (const ReadRecord& record : records) {
    if (record.payload.parity_sum == 0) continue;
    Restore();
    disk_.Corrupt(kPath, record.payload.parity_offset(), kLogBlock);
    EXPECT_TRUE(ScanStatus().ok()) << ScanStatus();
    disk_.FlipBit(kPath, record.payload.offset * 8);
    EXPECT_TRUE(absl::IsDataLoss(ScanStatus())) << ScanStatus();
  }
}

TEST_F(LogFormatTest, ABlockOfAPayloadThatCannotBeReadIsRebuilt) {
  BadBlocks bad;
  const BadFile file(*disk_.Open(kPath, Disk::Mode::kShared), &bad);
  for (const uint64_t blocks : {1, 2}) {
    uint64_t rebuilt = 0, refused = 0;
    for (const ReadRecord& record : records_) {
      if (record.payload.parity_sum == 0) continue;
      for (uint64_t at = 0; at + (blocks - 1) * kLogBlock < record.payload.bytes; at += kLogBlock) {
        bad = {record.payload.offset + at, blocks * kLogBlock};
        std::vector<std::byte> payload(record.payload.bytes);
        const absl::Status status = ReadPayload(file, record.payload, absl::MakeSpan(payload));
        status.ok() ? ++rebuilt : ++refused;
        EXPECT_TRUE(status.ok() || model::ReasonOf(status) == model::kIo) << status;
      }
    }
    EXPECT_EQ(rebuilt > 0, blocks == 1);
    EXPECT_EQ(refused > 0, blocks == 2);
  }
}

// Each seed leaves other void batches.
class LogFormatSeedTest : public LogFormatTest, public ::testing::WithParamInterface<uint64_t> {
 protected:
  LogFormatSeedTest() : LogFormatTest(GetParam()) {}
};

TEST_P(LogFormatSeedTest, BothCopiesSpoiled) {
  for (uint64_t at = 0; at + kLogBlock < content_.size(); at += kLogBlock) {
    Restore();
    disk_.Corrupt(kPath, at, 2 * kLogBlock);
    ExpectRightOrDataLoss(absl::StrCat("two blocks at ", at));
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, LogFormatSeedTest, ::testing::Range<uint64_t>(1, 101));

TEST_F(LogFormatTest, CutOff) {
  for (uint64_t bytes = 512; bytes < content_.size(); bytes += 512 * (1 + random_.Below(4))) {
    Restore();
    disk_.TruncateTo(kPath, bytes);
    ExpectRightOrDataLoss(absl::StrCat("cut to ", bytes));
  }
  disk_.TruncateTo(kPath, 0);
  EXPECT_EQ(ScanStatus().code(), absl::StatusCode::kNotFound);
}

TEST_F(LogFormatTest, ZeroedTail) {
  // From 512 on: the file's head, which is shorter, is still there.
  for (uint64_t at = 512; at < content_.size(); at += 512 * (1 + random_.Below(4))) {
    std::vector<std::byte> zeroed = content_;
    std::memset(zeroed.data() + at, 0, zeroed.size() - at);
    disk_.SetContent(kPath, zeroed);
    ExpectRightOrDataLoss(absl::StrCat("zero from ", at));
  }
}

TEST_F(LogFormatTest, AFileWithoutAFinishedHeadIsNoLog) {
  std::vector<std::byte> unfinished(content_.size());
  disk_.SetContent(kPath, unfinished);
  const absl::Status status = ScanStatus();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound) << status;
  EXPECT_EQ(model::ReasonOf(status), model::kIo);
  unfinished.resize(kLogBlock);
  disk_.SetContent(kPath, unfinished);
  EXPECT_EQ(ScanStatus().code(), absl::StatusCode::kNotFound);
}

TEST_F(LogFormatTest, AnotherFormatIsRefused) {
  FileHead head;
  ASSERT_TRUE(DecodeHead(absl::MakeSpan(content_).subspan(0, kLogBlock), &head));
  head.format = kLogFormat + 1;
  EncodeHead(head, absl::MakeSpan(content_).subspan(0, kLogBlock));
  Restore();
  const absl::Status status = ScanStatus();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_EQ(model::ReasonOf(status), model::kUnsupported);
}

TEST(LogMeta, SizesOfAnotherMakersDigestAreChecked) {
  std::vector<std::byte> memory(2 * kLogBlock);
  const absl::Span<std::byte> both = absl::MakeSpan(memory);
  const auto read = [&](const std::function<void(BatchHead&, RecordHead&)>& change) {
    BatchHead head{
        .incarnation = 1, .batch = 1, .meta_bytes = kLogBlock, .payload_bytes = kLogBlock, .record_count = 1};
    RecordHead record{.lsn = 1, .body_bytes = 10, .payload_bytes = 100};
    change(head, record);
    std::memcpy(memory.data(), &head, sizeof(head));
    std::memcpy(memory.data() + sizeof(head), &record, sizeof(record));
    SealMeta(both);
    ReadBatch batch;
    return DecodeBatchHead(both.subspan(0, kLogBlock), 0, 4 * kLogBlock, &batch.head) &&
           DecodeMeta(both.subspan(0, kLogBlock), &batch);
  };
  EXPECT_TRUE(read([](BatchHead&, RecordHead&) {}));
  EXPECT_FALSE(read([](BatchHead& head, RecordHead&) { head.record_count = 2000; }));
  EXPECT_FALSE(read([](BatchHead& head, RecordHead&) { head.meta_bytes = 0; }));
  EXPECT_FALSE(read([](BatchHead& head, RecordHead&) { head.meta_bytes = ~uint64_t{0} / kLogBlock * kLogBlock; }));
  EXPECT_FALSE(read([](BatchHead& head, RecordHead&) { head.payload_bytes = 3 * kLogBlock; }));
  EXPECT_FALSE(read([](BatchHead& head, RecordHead&) { head.payload_bytes = ~uint64_t{0} / kLogBlock * kLogBlock; }));
  EXPECT_FALSE(read([](BatchHead& head, RecordHead&) { head.offset = ~uint64_t{0}; }));
  EXPECT_FALSE(read([](BatchHead&, RecordHead& record) { record.body_bytes = 5000; }));
  EXPECT_FALSE(read([](BatchHead&, RecordHead& record) { record.body_bytes = ~uint32_t{0}; }));
  EXPECT_FALSE(read([](BatchHead&, RecordHead& record) { record.payload_bytes = kLogBlock + 1; }));
  EXPECT_FALSE(read([](BatchHead&, RecordHead& record) { record.payload_bytes = ~uint64_t{0}; }));
  EXPECT_FALSE(read([](BatchHead&, RecordHead& record) { record.payload_at = kLogBlock; }));
  EXPECT_FALSE(read([](BatchHead&, RecordHead& record) { record.payload_at = 8; }));
}

}  // namespace
}  // namespace ballast::storage
