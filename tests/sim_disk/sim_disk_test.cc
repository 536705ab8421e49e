// The contract of Disk, BlockFile and IoQueue, over the simulated disk without faults.
#include "ballast/tests/sim_disk/sim_disk.h"

#include <set>
#include <thread>

#include "absl/strings/str_cat.h"
#include "ballast/proto/base/status.h"
#include "ballast/tests/sim_disk/blocks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ballast::storage {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class SimDiskTest : public ::testing::Test {
 protected:
  std::vector<IoCompletion> ReapAll() {
    std::vector<IoCompletion> completions;
    while (queue_->in_flight() > 0) queue_->Reap(/*wait=*/true, &completions);
    return completions;
  }

  absl::Status Only(const IoRequest& request) {
    if (const absl::Status status = queue_->Submit(request); !status.ok()) return status;
    const std::vector<IoCompletion> completions = ReapAll();
    EXPECT_EQ(completions.size(), 1);
    EXPECT_EQ(completions.at(0).tag, request.tag);
    return completions.at(0).status;
  }

  SimDisk disk_{1};
  std::unique_ptr<BlockFile> file_ = *disk_.Open("f", Disk::Mode::kEmptied);
  std::unique_ptr<IoQueue> queue_ = *disk_.MakeQueue({});
};

TEST_F(SimDiskTest, WhatIsWrittenIsReadBack) {
  Blocks written(769, 7);  // more than kIoPieceBytesMax
  Blocks read(769);
  ASSERT_TRUE(Only({IoRequest::Kind::kWrite, file_.get(), kIoAlignment, written.span(), 7}).ok());
  ASSERT_TRUE(Only({IoRequest::Kind::kRead, file_.get(), kIoAlignment, read.span(), 8}).ok());
  EXPECT_TRUE(read.AllAre(7));
  read.Fill(0);
  ASSERT_TRUE(file_->Read(kIoAlignment, read.span()).ok());
  EXPECT_TRUE(read.AllAre(7));
  ASSERT_TRUE(file_->Read(0, read.Part(0, kIoAlignment)).ok());
  EXPECT_EQ(read.at(0), 0) << "a hole";
  EXPECT_EQ(*file_->Size(), 770 * kIoAlignment);
  EXPECT_EQ(disk_.used_bytes(), 769 * kIoAlignment);
  EXPECT_EQ(file_->fd(), -1);
  EXPECT_EQ(file_->buffered_because(), "");
}

TEST_F(SimDiskTest, SyncCompletesAndTakesNoBuffer) {
  Blocks block(1);
  EXPECT_TRUE(Only({IoRequest::Kind::kSync, file_.get(), 0, {}, 2}).ok());
  EXPECT_EQ(Only({IoRequest::Kind::kSync, file_.get(), 0, block.span(), 3}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Only({IoRequest::Kind::kWrite, file_.get(), 0, {}, 4}).code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(SimDiskTest, ManyInFlightCompleteOnceEachInAnyOrder) {
  Blocks blocks(kIoRequestsMax);
  for (uint64_t i = 0; i < kIoRequestsMax; ++i) {
    blocks.span()[i * kIoAlignment] = static_cast<std::byte>(i);
    ASSERT_TRUE(queue_
                    ->Submit({IoRequest::Kind::kWrite, file_.get(), i * kIoAlignment,
                              blocks.Part(i * kIoAlignment, kIoAlignment), i})
                    .ok());
  }
  std::vector<uint64_t> tags;
  for (const IoCompletion& completion : ReapAll()) {
    EXPECT_TRUE(completion.status.ok()) << completion.status;
    tags.push_back(completion.tag);
  }
  EXPECT_EQ(tags.size(), kIoRequestsMax);
  EXPECT_EQ(std::set<uint64_t>(tags.begin(), tags.end()).size(), kIoRequestsMax);
  EXPECT_FALSE(std::is_sorted(tags.begin(), tags.end()));
  Blocks read(kIoRequestsMax);
  ASSERT_TRUE(file_->Read(0, read.span()).ok());
  EXPECT_EQ(read.span(), blocks.span());
}

TEST_F(SimDiskTest, ReapSometimesReturnsNothingUnlessItWaits) {
  Blocks blocks(1);
  bool nothing = false;
  for (int round = 0; round < 50; ++round) {
    for (uint64_t i = 0; i < 4; ++i) {
      ASSERT_TRUE(queue_->Submit({IoRequest::Kind::kRead, file_.get(), 0, blocks.span(), i}).ok());
    }
    std::vector<IoCompletion> completions;
    queue_->Reap(/*wait=*/false, &completions);
    nothing |= completions.empty();
    EXPECT_EQ(queue_->in_flight() + completions.size(), 4);
    completions.clear();
    const bool any = queue_->in_flight() > 0;
    queue_->Reap(/*wait=*/true, &completions);
    EXPECT_EQ(completions.empty(), !any);
    ReapAll();
  }
  EXPECT_TRUE(nothing);
}

TEST_F(SimDiskTest, RefusesMoreThanItsBound) {
  Blocks block(1);
  for (uint64_t i = 0; i < kIoRequestsMax; ++i) {
    ASSERT_TRUE(queue_->Submit({IoRequest::Kind::kWrite, file_.get(), 0, block.span(), i}).ok());
  }
  const absl::Status status = queue_->Submit({IoRequest::Kind::kWrite, file_.get(), 0, block.span(), 99});
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(model::ReasonOf(status), model::kBusy);
  EXPECT_EQ(ReapAll().size(), kIoRequestsMax);
  EXPECT_TRUE(Only({IoRequest::Kind::kWrite, file_.get(), 0, block.span(), 1}).ok());
}

TEST_F(SimDiskTest, DestructionFinishesWhatIsInFlight) {
  Blocks block(1, 3);
  ASSERT_TRUE(queue_->Submit({IoRequest::Kind::kWrite, file_.get(), 0, block.span(), 1}).ok());
  queue_.reset();
  Blocks read(1);
  ASSERT_TRUE(file_->Read(0, read.span()).ok());
  EXPECT_TRUE(read.AllAre(3));
}

TEST_F(SimDiskTest, MisalignmentIsRefused) {
  Blocks blocks(2);
  const auto code = [&](uint64_t offset, absl::Span<std::byte> buffer) {
    return queue_->Submit({IoRequest::Kind::kRead, file_.get(), offset, buffer, 0}).code();
  };
  EXPECT_EQ(code(512, blocks.Part(0, 4096)), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(0, blocks.Part(512, 4096)), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(0, blocks.Part(0, 4000)), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(0, blocks.Part(0, 0)), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(queue_->in_flight(), 0);
  EXPECT_EQ(file_->Write(512, blocks.Part(0, 4096)).code(), absl::StatusCode::kInternal);
}

TEST_F(SimDiskTest, AnotherDisksFileIsRefused) {
  SimDisk other(2);
  const auto file = *other.Open("f", Disk::Mode::kEmptied);
  EXPECT_EQ(queue_->Submit({IoRequest::Kind::kSync, file.get(), 0, {}, 0}).code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(SimDiskTest, ReadPastTheEndIsDataLoss) {
  Blocks blocks(2);
  ASSERT_TRUE(file_->Write(0, blocks.Part(0, kIoAlignment)).ok());
  const absl::Status status = Only({IoRequest::Kind::kRead, file_.get(), 0, blocks.span(), 2});
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(model::ReasonOf(status), model::kIo);
  EXPECT_EQ(file_->Read(kIoAlignment, blocks.Part(0, kIoAlignment)).code(), absl::StatusCode::kDataLoss);
}

TEST_F(SimDiskTest, OneOpenerAndOthersThatShare) {
  const absl::Status status = disk_.Open("f", Disk::Mode::kKept).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(model::ReasonOf(status), model::kBusy);
  EXPECT_TRUE(disk_.Open("f", Disk::Mode::kShared).ok());
  Blocks block(1, 5);
  ASSERT_TRUE(file_->Write(0, block.span()).ok());
  file_.reset();
  file_ = *disk_.Open("f", Disk::Mode::kKept);
  EXPECT_EQ(*file_->Size(), kIoAlignment);
  file_.reset();
  file_ = *disk_.Open("f", Disk::Mode::kEmptied);
  EXPECT_EQ(*file_->Size(), 0);
}

TEST_F(SimDiskTest, RemovedIsGoneButForItsOpeners) {
  Blocks block(1, 5);
  ASSERT_TRUE(file_->Write(0, block.span()).ok());
  ASSERT_TRUE(disk_.Remove("f").ok());
  EXPECT_TRUE(disk_.Remove("f").ok());
  EXPECT_THAT(disk_.List(), ElementsAre());
  const absl::Status status = disk_.Open("f", Disk::Mode::kShared).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(status.ToString(), HasSubstr("No such file"));
  EXPECT_TRUE(file_->Read(0, block.span()).ok());
  const auto next = disk_.Open("f", Disk::Mode::kKept);
  ASSERT_TRUE(next.ok()) << next.status();
  EXPECT_EQ(*(*next)->Size(), 0);
}

TEST_F(SimDiskTest, TruncateCutsAndExtendsWithZeros) {
  Blocks blocks(3, 9);
  ASSERT_TRUE(file_->Write(0, blocks.span()).ok());
  ASSERT_TRUE(file_->Truncate(kIoAlignment + 100).ok());
  ASSERT_TRUE(file_->Truncate(3 * kIoAlignment).ok());
  ASSERT_TRUE(file_->Sync().ok());  // of the write before
  ASSERT_TRUE(file_->Read(0, blocks.span()).ok());
  EXPECT_EQ(blocks.at(kIoAlignment + 99), 9);
  EXPECT_EQ(blocks.at(kIoAlignment + 100), 0);
  EXPECT_EQ(blocks.at(2 * kIoAlignment), 0);
  EXPECT_EQ(disk_.DurableContent("f"), std::vector<std::byte>(blocks.span().begin(), blocks.span().end()));
}

TEST_F(SimDiskTest, CapacityBoundsWritesAndReservations) {
  disk_.set_capacity_bytes(4 * kIoAlignment);
  Blocks blocks(3, 1);
  ASSERT_TRUE(file_->Reserve(0, 2 * kIoAlignment).ok());
  EXPECT_EQ(disk_.used_bytes(), 2 * kIoAlignment);
  const absl::Status reserved = file_->Reserve(0, uint64_t{1} << 50);
  EXPECT_EQ(reserved.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(model::ReasonOf(reserved), model::kDiskFull);
  EXPECT_TRUE(file_->Write(0, blocks.Part(0, 2 * kIoAlignment)).ok()) << "reserved";
  EXPECT_TRUE(file_->Write(0, blocks.span()).ok());
  const auto other = *disk_.Open("g", Disk::Mode::kEmptied);
  const absl::Status written = other->Write(0, blocks.span());
  EXPECT_EQ(written.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(written.ToString(), HasSubstr("No space left on device"));
  EXPECT_EQ(*other->Size(), kIoAlignment) << "the block that fits is there";
  EXPECT_TRUE(file_->Write(0, blocks.span()).ok()) << "no new space";
  file_->Discard(0, 2 * kIoAlignment);
  EXPECT_EQ(disk_.used_bytes(), 2 * kIoAlignment);
  EXPECT_TRUE(other->Write(0, blocks.span()).ok());
  ASSERT_TRUE(disk_.Remove("g").ok());
  EXPECT_EQ(disk_.used_bytes(), kIoAlignment);
}

TEST_F(SimDiskTest, DiscardedReadsAsZero) {
  Blocks blocks(2, 4);
  ASSERT_TRUE(file_->Write(0, blocks.span()).ok());
  file_->Discard(0, kIoAlignment);
  ASSERT_TRUE(file_->Sync().ok());
  ASSERT_TRUE(file_->Read(0, blocks.span()).ok());
  EXPECT_EQ(blocks.at(0), 0);
  EXPECT_EQ(blocks.at(kIoAlignment), 4);
  EXPECT_EQ(disk_.DurableContent("f")[0], std::byte{0});
}

TEST_F(SimDiskTest, ManyThreadsMayUseIt) {
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < 4; ++t) {
    threads.emplace_back([this, t] {
      const auto queue = *disk_.MakeQueue({});
      Blocks block(1, static_cast<uint8_t>(t + 1));
      for (uint64_t i = 0; i < 200; ++i) {
        EXPECT_TRUE(queue->Submit({IoRequest::Kind::kWrite, file_.get(), t * kIoAlignment, block.span(), i}).ok());
        std::vector<IoCompletion> completions;
        queue->Reap(/*wait=*/true, &completions);
        EXPECT_EQ(completions.size(), 1);
        EXPECT_TRUE(file_->Sync().ok());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (uint64_t t = 0; t < 4; ++t)
    EXPECT_EQ(disk_.DurableContent("f")[t * kIoAlignment], static_cast<std::byte>(t + 1));
}

}  // namespace
}  // namespace ballast::storage
