// Over a disk that completes requests in random order.
#include "ballast/storage/io/reads_ahead.h"

#include "ballast/proto/base/status.h"
#include "ballast/storage/memory/arena.h"
#include "ballast/tests/sim_disk/sim_disk.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ballast::storage {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr uint64_t kBlock = kIoAlignment;
constexpr uint64_t kBlocks = 40;

class ReadsAheadTest : public ::testing::Test {
 protected:
  // Block i is full of i.
  void SetUp() override {
    file_ = *disk_.Open("file", Disk::Mode::kEmptied);
    for (uint64_t i = 0; i < kBlocks; ++i) {
      std::fill_n(memory_.bytes().begin(), kBlock, static_cast<std::byte>(i));
      ASSERT_TRUE(file_->Write(i * kBlock, memory_.bytes().subspan(0, kBlock)).ok());
      reads_.push_back({.offset = i * kBlock, .bytes = kBlock, .file = file_.get()});
    }
    queue_ = *disk_.MakeQueue({});
  }
  ReadSlots Slots(uint64_t count) { return {memory_.bytes().subspan(0, count * kBlock), kBlock}; }

  SimDisk disk_{17};
  std::unique_ptr<BlockFile> file_;
  std::unique_ptr<IoQueue> queue_;
  Arena memory_ = *Arena::Map(kBlocks * kBlock);
  std::vector<ReadAhead> reads_;
};

TEST_F(ReadsAheadTest, InOrderWithTheNextOnesUnderWay) {
  for (const uint64_t slots : {1, 2, 3, 20}) {
    SCOPED_TRACE(slots);
    size_t next = 0;
    uint64_t most = 0;
    const absl::Status status =
        ForEachRead(queue_.get(), reads_, Slots(slots), [&](size_t i, std::byte* data, auto poll) {
          EXPECT_EQ(i, next++);
          poll();
          EXPECT_THAT(absl::MakeSpan(data, kBlock), Each(static_cast<std::byte>(i)));
          most = std::max(most, queue_->in_flight());
          return absl::OkStatus();
        });
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_EQ(next, kBlocks);
    EXPECT_LT(most, slots);
    EXPECT_EQ(most > 0, slots > 1);
  }
}

TEST_F(ReadsAheadTest, ReadsWithAPlaceNeedNoSlot) {
  for (uint64_t i = 0; i < kBlocks; ++i) reads_[i].to = memory_.bytes().data() + i * kBlock;
  ASSERT_TRUE(ForEachRead(queue_.get(), reads_, {}, [&](size_t i, std::byte* data, auto) {
                EXPECT_EQ(data, reads_[i].to);
                return absl::OkStatus();
              }).ok());
  for (uint64_t i = 0; i < kBlocks; ++i) {
    EXPECT_THAT(memory_.bytes().subspan(i * kBlock, kBlock), Each(static_cast<std::byte>(i)));
  }
}

TEST_F(ReadsAheadTest, AFailedReadEndsItAndNothingStaysInFlight) {
  disk_.FailNext(SimOperation::kRead, 7, SimFault::kEio);
  std::vector<size_t> seen;
  const absl::Status status = ForEachRead(queue_.get(), reads_, Slots(4), [&](size_t i, std::byte*, auto) {
    seen.push_back(i);
    return absl::OkStatus();
  });
  EXPECT_TRUE(absl::IsInternal(status)) << status;
  EXPECT_LT(seen.size(), 10);
  EXPECT_EQ(queue_->in_flight(), 0);
}

TEST_F(ReadsAheadTest, WhatWasFoundEndsItAndNothingStaysInFlight) {
  std::vector<size_t> seen;
  const absl::Status status = ForEachRead(queue_.get(), reads_, Slots(4), [&](size_t i, std::byte*, auto) {
    seen.push_back(i);
    return i == 1 ? absl::DataLossError("rotten") : absl::OkStatus();
  });
  EXPECT_THAT(status.message(), HasSubstr("rotten"));
  EXPECT_THAT(seen, ElementsAre(0, 1));
  EXPECT_EQ(queue_->in_flight(), 0);
}

}  // namespace
}  // namespace ballast::storage
