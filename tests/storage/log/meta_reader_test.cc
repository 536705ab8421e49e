// Reads of metas: how much of the file they take, and what damage they survive.
#include "ballast/storage/log/meta_reader.h"

#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "ballast/proto/base/status.h"
#include "ballast/tests/sim_disk/bad_file.h"
#include "ballast/tests/sim_disk/sim_disk.h"
#include "ballast/tests/storage/log/log_caller.h"
#include "gtest/gtest.h"

namespace ballast::storage {
namespace {

constexpr uint64_t kReadFileBytes = 4 * MetaReader::kWindowBytes;

class MetaReaderTest : public ::testing::Test {
 protected:
  MetaReaderTest() : disk_(1), content_(Content(3, kReadFileBytes)) { Open(); }

  void Open() {
    disk_.SetContent("file", content_);
    file_ = std::make_unique<BadFile>(*disk_.Open("file", Disk::Mode::kShared), &bad_);
    reader_ = std::make_unique<MetaReader>(file_.get(), [this](uint64_t bytes) { reads_.push_back(bytes); });
  }
  void ExpectRead(uint64_t offset, uint64_t bytes, uint64_t limit = kReadFileBytes) {
    const auto read = reader_->Read(offset, bytes, limit);
    ASSERT_TRUE(read.ok()) << read.status();
    EXPECT_EQ(*read, absl::MakeConstSpan(content_).subspan(offset, bytes));
  }

  SimDisk disk_;
  BadBlocks bad_;
  std::vector<std::byte> content_;
  std::unique_ptr<BlockFile> file_;
  std::unique_ptr<MetaReader> reader_;
  std::vector<uint64_t> reads_;
};

TEST_F(MetaReaderTest, ReadsAWindowWhereMetasLieCloseTogether) {
  ExpectRead(0, kLogBlock);
  ExpectRead(kLogBlock, kLogBlock);
  EXPECT_EQ(reads_, std::vector<uint64_t>{2 * kLogBlock}) << "both copies of a usual meta";
  ExpectRead(3 * kLogBlock, kLogBlock);
  for (uint64_t at = 3 * kLogBlock; at < MetaReader::kWindowBytes; at += 7 * kLogBlock) ExpectRead(at, kLogBlock);
  EXPECT_EQ(reads_, (std::vector<uint64_t>{2 * kLogBlock, MetaReader::kWindowBytes}));
}

TEST_F(MetaReaderTest, ReadsLittleWhereMetasLieFarApart) {
  ExpectRead(0, kLogBlock);
  ExpectRead(MetaReader::kCloseBytes + kLogBlock, kLogBlock);
  ExpectRead(kLogBlock, kLogBlock);
  EXPECT_EQ(reads_, (std::vector<uint64_t>{2 * kLogBlock, 2 * kLogBlock, 2 * kLogBlock}));
}

TEST_F(MetaReaderTest, ReadsNothingBehindTheLimitThatWasNotAskedFor) {
  const uint64_t limit = 20 * kLogBlock;
  ExpectRead(0, kLogBlock, limit);
  ExpectRead(5 * kLogBlock, kLogBlock, limit);
  ExpectRead(19 * kLogBlock, 4 * kLogBlock, limit);
  EXPECT_EQ(reads_, (std::vector<uint64_t>{2 * kLogBlock, 15 * kLogBlock, 4 * kLogBlock}));
}

TEST_F(MetaReaderTest, ABlockThatNobodyAskedForMayBeUnreadable) {
  bad_ = {9 * kLogBlock, kLogBlock};
  ExpectRead(0, kLogBlock);
  ExpectRead(4 * kLogBlock, kLogBlock);
  ExpectRead(8 * kLogBlock, kLogBlock);
  const auto read = reader_->Read(9 * kLogBlock, kLogBlock, kReadFileBytes);
  EXPECT_EQ(model::ReasonOf(read.status()), model::kIo) << read.status();
  ExpectRead(10 * kLogBlock, kLogBlock);
}

TEST_F(MetaReaderTest, AFailedReadLeavesNothingThatCouldPassForTheFile) {
  ExpectRead(0, kLogBlock);
  bad_ = {0, kReadFileBytes};
  EXPECT_FALSE(reader_->Read(4 * kLogBlock, kLogBlock, kReadFileBytes).ok());
  EXPECT_FALSE(reader_->Read(0, kLogBlock, kReadFileBytes).ok());
  bad_ = {};
  ExpectRead(0, kLogBlock);
}

// A batch of one record lies in the file, where its meta takes two blocks.
class ReadBatchTest : public MetaReaderTest {
 protected:
  ReadBatchTest() {
    BatchEncoder encoder(/*segment_bytes=*/64 * kLogBlock, /*salt=*/5, /*next_batch=*/9, /*previous_incarnation=*/1);
    std::vector<std::byte> head(kSegmentHeadBytes);
    encoder.BeginSegment({.incarnation = 2, .segment = 1, .oldest = 1}, 8, absl::MakeSpan(head));
    std::vector<LogRecord> records(1);
    records[0].lsn = 40;
    records[0].body = std::string(kLogBlock, 'x');
    const LogBatch batch = encoder.Encode(std::move(records), 1, 8);
    const LogBatch::Write& write = batch.writes.front();
    std::memcpy(content_.data() + write.offset, write.bytes.data(), write.bytes.size());
    which_.offset = write.offset;
    which_.meta_bytes = write.bytes.size() / 2;
    which_.batch = 9;
    which_.incarnation = 2;
    which_.salt = 5;
    Open();
  }
  absl::StatusOr<std::optional<ReadBatch>> Read() { return ReadBatchOf(reader_.get(), which_, kReadFileBytes); }
  void ExpectFound() {
    const auto read = Read();
    ASSERT_TRUE(read.ok()) << read.status();
    ASSERT_TRUE(read->has_value());
    ASSERT_EQ((*read)->records.size(), 1);
    EXPECT_EQ((*read)->records[0].lsn, 40);
    EXPECT_EQ((*read)->records[0].body, std::string(kLogBlock, 'x'));
  }
  void ExpectNone() {
    const auto read = Read();
    ASSERT_TRUE(read.ok()) << read.status();
    EXPECT_FALSE(read->has_value());
  }
  void Spoil(uint64_t copy) {
    content_[which_.offset + copy * which_.meta_bytes + kLogBlock + 9] ^= std::byte{1};
    Open();
  }

  BatchHead which_;
};

TEST_F(ReadBatchTest, EitherCopyOfTheMetaDoes) {
  EXPECT_EQ(which_.meta_bytes, 2 * kLogBlock);
  ExpectFound();
  Spoil(0);
  ExpectFound();
  Spoil(1);
  ExpectNone();
}

TEST_F(ReadBatchTest, ACopyThatCannotBeReadIsNoErrorWhileTheOtherIsWhole) {
  bad_ = {which_.offset, kLogBlock};
  ExpectFound();
  bad_ = {which_.offset + which_.meta_bytes, kLogBlock};
  Open();
  ExpectFound();
}

TEST_F(ReadBatchTest, ACopyThatCannotBeReadMayBeTheWholeOne) {
  Spoil(1);
  bad_ = {which_.offset, kLogBlock};
  EXPECT_EQ(model::ReasonOf(Read().status()), model::kIo) << "none would say that no batch is there";
}

TEST_F(ReadBatchTest, ABatchOfAnotherLifeIsNone) {
  const BatchHead which = which_;
  which_.salt = 6;
  ExpectNone();
  which_ = which;
  which_.incarnation = 1;
  ExpectNone();
  which_ = which;
  which_.batch = 8;
  ExpectNone();
  which_ = which;
  which_.meta_bytes = kLogBlock;
  ExpectNone();
}

}  // namespace
}  // namespace ballast::storage
