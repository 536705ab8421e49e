#include "ballast/storage/io/piece.h"

#include <fcntl.h>

#include <cerrno>

#include "ballast/proto/base/status.h"
#include "ballast/storage/io/disk.h"
#include "ballast/tests/scratch_directory.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ballast::storage {
namespace {

using ::testing::HasSubstr;

class PieceTest : public ::testing::Test {
 protected:
  PieceTest() : file_(*SystemDisk()->Open(directory_ / "piece", Disk::Mode::kEmptied)) {
    piece_ = {.file = file_.get(), .offset = 8192, .data = nullptr, .bytes = 16384};
  }

  ScratchDirectory directory_;
  std::unique_ptr<BlockFile> file_;
  Piece piece_;
};

TEST_F(PieceTest, AllBytesComplete) { EXPECT_TRUE(*Advance(piece_, 16384)); }

TEST_F(PieceTest, ShortTransferLeavesTheRest) {
  EXPECT_FALSE(*Advance(piece_, 4096));
  EXPECT_EQ(piece_.offset, 12288);
  EXPECT_EQ(piece_.bytes, 12288);
  EXPECT_TRUE(*Advance(piece_, 12288));
}

TEST_F(PieceTest, PartialBlockIsMovedAgain) {
  EXPECT_FALSE(*Advance(piece_, 5000));
  EXPECT_EQ(piece_.offset, 12288);
  EXPECT_EQ(piece_.bytes, 12288);
}

TEST_F(PieceTest, InterruptionsAreRetriedUpToTheCap) {
  for (int i = 0; i < kIoRetriesMax; ++i) {
    const absl::StatusOr<bool> complete = Advance(piece_, i % 2 == 0 ? -EINTR : -EAGAIN);
    ASSERT_TRUE(complete.ok()) << complete.status();
    EXPECT_FALSE(*complete);
  }
  const absl::Status status = Advance(piece_, -EAGAIN).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(status.ToString(), HasSubstr("temporarily unavailable"));
}

// A device short of memory gets time, and no more than a second or so; the error says how much.
TEST_F(PieceTest, BusyDevicesAreTriedLessAndLessOften) {
  std::vector<std::chrono::microseconds> rests;
  int tries = 0;
  const auto rest = [&](std::chrono::microseconds taken) { rests.push_back(taken); };
  const auto busy = [&](const Piece&) {
    ++tries;
    return -EAGAIN;
  };
  const absl::Status status = Transfer(piece_, busy, rest);
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_EQ(model::ReasonOf(status), model::kIo);
  EXPECT_THAT(status.ToString(), HasSubstr("tried 33 times, with rests of 1201 ms in all"));
  EXPECT_THAT(status.ToString(), HasSubstr("read of 16384 bytes at offset 8192"));
  EXPECT_EQ(tries, kIoRetriesMax + 1);
  ASSERT_EQ(rests.size(), static_cast<size_t>(kIoRetriesMax));
  EXPECT_EQ(rests.front(), kIoRestMin);
  EXPECT_EQ(rests.back(), kIoRestMax);
  for (size_t i = 1; i < rests.size(); ++i) EXPECT_EQ(rests[i], std::min(2 * rests[i - 1], kIoRestMax));
}

TEST_F(PieceTest, InterruptedAndShortTransfersGoOnAtOnce) {
  const int64_t results[] = {-EINTR, 4096, -EAGAIN, 4096, 8192};
  size_t next = 0, rests = 0;
  const absl::Status status = Transfer(
      piece_, [&](const Piece&) { return results[next++]; }, [&](std::chrono::microseconds) { ++rests; });
  EXPECT_EQ(status, absl::OkStatus());
  EXPECT_EQ(next, std::size(results));
  EXPECT_EQ(rests, 1) << "after EAGAIN";
}

TEST_F(PieceTest, ErrorsNameFileOffsetAndText) {
  const absl::Status status = Advance(piece_, -EIO).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_EQ(model::ReasonOf(status), model::kIo);
  EXPECT_THAT(status.ToString(), HasSubstr("read of 16384 bytes at offset 8192 of " + file_->path()));
  EXPECT_THAT(status.ToString(), HasSubstr("Input/output error"));
}

TEST_F(PieceTest, FullDiskHasAReasonOfItsOwn) {
  for (const int error : {ENOSPC, EDQUOT}) {
    const absl::Status full = Advance(piece_, -error).status();
    EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_EQ(model::ReasonOf(full), model::kDiskFull);
  }
}

// Free space would not help.
TEST_F(PieceTest, AFileThatIsTooLongIsNoFullDisk) {
  const absl::Status status = Advance(piece_, -EFBIG).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(model::ReasonOf(status), model::kIo);
  EXPECT_THAT(status.ToString(), HasSubstr("does not allow a file of this size"));
}

TEST_F(PieceTest, EndOfFileIsDataLoss) {
  const absl::Status status = Advance(piece_, 0).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(status.ToString(), HasSubstr("the file ends there"));
}

TEST_F(PieceTest, ErrorDropsTheUncutRestOfItsRequestOnly) {
  auto table = std::make_unique<RequestTable>();
  std::byte* const base = reinterpret_cast<std::byte*>(kIoAlignment);  // never dereferenced
  ASSERT_TRUE(table->Add({.file = file_.get(), .buffer = {base, 3 * kIoPieceBytesMax}, .tag = 1}).ok());
  ASSERT_TRUE(table->Add({.file = file_.get(), .buffer = {base, kIoAlignment}, .tag = 2}).ok());
  Piece first, second;
  ASSERT_TRUE(table->Cut(&first));
  ASSERT_TRUE(table->Cut(&second));
  table->End(first, absl::DataLossError("x"));
  EXPECT_FALSE(table->finished());  // its second piece is still out
  Piece other;
  ASSERT_TRUE(table->Cut(&other));
  EXPECT_EQ(other.bytes, kIoAlignment);
  EXPECT_FALSE(table->uncut());
  table->End(second, absl::OkStatus());
  table->End(other, absl::OkStatus());
  std::vector<IoCompletion> completions;
  table->Take(&completions);
  ASSERT_EQ(completions.size(), 2);
  EXPECT_EQ(completions[0].tag, 1);
  EXPECT_EQ(completions[0].status.code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(completions[1].tag, 2);
  EXPECT_TRUE(completions[1].status.ok());
  EXPECT_EQ(table->in_flight(), 0);
}

}  // namespace
}  // namespace ballast::storage
