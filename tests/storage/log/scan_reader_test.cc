// What a scan reads of a log, and what it remembers of blocks that the disk cannot read.
#include "ballast/storage/log/scan_reader.h"

#include <atomic>
#include <memory>
#include <vector>

#include "ballast/tests/sim_disk/bad_file.h"
#include "ballast/tests/sim_disk/sim_disk.h"
#include "ballast/tests/storage/log/log_caller.h"
#include "gtest/gtest.h"

namespace ballast::storage {
namespace {

constexpr uint64_t kScannedBytes = 64 * kLogBlock;

class ScanReaderTest : public ::testing::Test {
 protected:
  ScanReaderTest() : disk_(1), content_(Content(3, kScannedBytes)) {
    disk_.SetContent("file", content_);
    file_ = std::make_unique<BadFile>(*disk_.Open("file", Disk::Mode::kShared), &bad_);
    reader_ = std::make_unique<ScanReader>(file_.get(), &told_);
    EXPECT_EQ(reader_->Begin(), absl::StatusOr<uint64_t>(kScannedBytes));
  }
  absl::Span<const std::byte> At(uint64_t offset, uint64_t bytes) const {
    return absl::MakeConstSpan(content_).subspan(offset, bytes);
  }

  SimDisk disk_;
  BadBlocks bad_;
  std::vector<std::byte> content_;
  std::unique_ptr<BlockFile> file_;
  std::atomic<uint64_t> told_{0};
  std::unique_ptr<ScanReader> reader_;
};

TEST_F(ScanReaderTest, CountsWhatItReadsUpToTheSizeOfTheFile) {
  const auto read = reader_->Read(8 * kLogBlock, 16 * kLogBlock);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(*read, At(8 * kLogBlock, 16 * kLogBlock));
  EXPECT_EQ(reader_->read_bytes(), 16 * kLogBlock);
  EXPECT_EQ(told_, 16 * kLogBlock);
  for (int again = 0; again < 2; ++again) ASSERT_TRUE(reader_->Read(0, kScannedBytes).ok());
  EXPECT_EQ(reader_->read_bytes(), kScannedBytes);
  EXPECT_EQ(told_, kScannedBytes);
}

TEST_F(ScanReaderTest, ACopyThatTheDiskCannotReadIsEmptyAndRemembered) {
  bad_ = {.offset = 8 * kLogBlock, .bytes = kLogBlock};
  const auto whole = reader_->ReadCopy(0, kLogBlock, kLogBlock);
  ASSERT_TRUE(whole.ok()) << whole.status();
  EXPECT_EQ(*whole, At(0, kLogBlock));
  EXPECT_EQ(reader_->UnreadFrom(0), absl::OkStatus());

  const auto copy = reader_->ReadCopy(8 * kLogBlock, kLogBlock, 9 * kLogBlock);
  ASSERT_TRUE(copy.ok()) << copy.status();
  EXPECT_TRUE(copy->empty());
  EXPECT_TRUE(absl::IsInternal(reader_->UnreadAt(8 * kLogBlock)));
  EXPECT_TRUE(absl::IsInternal(reader_->UnreadFrom(0)));
  EXPECT_EQ(reader_->UnreadAt(7 * kLogBlock), absl::OkStatus());
  EXPECT_EQ(reader_->UnreadFrom(9 * kLogBlock), absl::OkStatus());
}

TEST_F(ScanReaderTest, APayloadThatTheDiskCannotReadIsItsCallersError) {
  bad_ = {.offset = 8 * kLogBlock, .bytes = kLogBlock};
  EXPECT_TRUE(absl::IsInternal(reader_->Read(4 * kLogBlock, 8 * kLogBlock).status()));
  EXPECT_EQ(reader_->UnreadFrom(0), absl::OkStatus());
  EXPECT_EQ(reader_->read_bytes(), 0u);
}

TEST_F(ScanReaderTest, OtherBytesAreNoBatch) {
  const auto batch = reader_->ReadBatchAt(4 * kLogBlock, kScannedBytes, SegmentHead());
  ASSERT_TRUE(batch.ok()) << batch.status();
  EXPECT_FALSE(batch->has_value());
  const auto at_the_end = reader_->ReadBatchAt(kScannedBytes, kScannedBytes, SegmentHead());
  EXPECT_TRUE(at_the_end.ok() && !at_the_end->has_value());
}

}  // namespace
}  // namespace ballast::storage
