// A chunk whose state counts no more: nothing writes it, and only another server's state makes the chunk normal again.
#include "ballast/proto/base/status.h"
#include "ballast/storage/io/interrupt.h"
#include "ballast/storage/memory/arena.h"
#include "ballast/storage/tier/nvme_tier.h"
#include "ballast/tests/storage/store/copied_chunks.h"
#include "gtest/gtest.h"

namespace ballast::storage {
namespace {

using enum TierKind;

// Every chunk's version 0 is recorded; then each is updated, and some of them are void.
class VoidTest : public ::testing::TestWithParam<TierKind> {
 protected:
  static constexpr uint64_t kChunks = 6;

  VoidTest() {
    for (int64_t version = 0; version < 6; ++version) EXPECT_EQ(original_.Step(0, version), absl::OkStatus());
    for (uint64_t i = 0; i < kChunks; ++i) EXPECT_EQ(s_.Step(i, 0, /*flush=*/true), absl::OkStatus());
    EXPECT_EQ(s_.store().Harden(), absl::OkStatus());
    recorded_ = s_.Whole(0);
    for (const uint64_t i : {0, 1}) EXPECT_EQ(s_.Step(i, 1), absl::OkStatus());
  }
  ChunkUpdate Flush(uint64_t chunk) {
    ChunkUpdate flush;
    flush.chunk = chunk;
    flush.version = 1;
    flush.flush = true;
    return flush;
  }
  // Flushes all that is dirty, as a server that wants to cut its log.
  void FlushAll() {
    for (uint64_t i = 0; i < kChunks; ++i) {
      if (s_.store().dirty(i)) {
        ASSERT_EQ(s_.Run(Flush(i)), absl::OkStatus());
      }
    }
    ASSERT_EQ(s_.store().Harden(), absl::OkStatus());
  }

  CopyingServer original_{{}, {{kDram}}, false};
  CopyingServer s_{{}, CopyingServer::Chunks(kChunks, {GetParam()}), true};
  WholeState recorded_;
};
INSTANTIATE_TEST_SUITE_P(Tiers, VoidTest, ::testing::Values(kHbm, kDram, kNvme),
                         [](const auto& info) { return std::string(TierName(info.param)); });

TEST_P(VoidTest, NothingWritesItsState) {
  if (GetParam() == kNvme) return;  // the update before went to the disk
  s_.store().Void({0});
  EXPECT_FALSE(s_.store().dirty(0));
  EXPECT_TRUE(s_.store().dirty(1));
  EXPECT_EQ(s_.store().recoverable_from(0), std::nullopt);
  FlushAll();
  EXPECT_EQ(s_.recorded()[0].version, 0);
  EXPECT_EQ(s_.recorded()[1].version, 1);
  s_.Restart();
  EXPECT_EQ(s_.store().durable_version(0), 0);
  EXPECT_TRUE(SameState(s_.Whole(0), recorded_));
  ASSERT_EQ(s_.Step(0, 1), absl::OkStatus()) << "a restart knows of nothing that is void";
}

TEST_P(VoidTest, WhatWasOnItsWayToItsRecordIsRecorded) {
  ASSERT_EQ(s_.Run(Flush(0)), absl::OkStatus());
  const WholeState flushed = s_.Whole(0);
  s_.store().Void({0});
  EXPECT_EQ(s_.store().recoverable_from(0), std::nullopt);
  FlushAll();
  EXPECT_EQ(s_.recorded()[0].version, 1);
  s_.Restart();
  EXPECT_TRUE(SameState(s_.Whole(0), flushed));
}

TEST_P(VoidTest, OnlyAnImportedStateComes) {
  s_.store().Void({0, 99});
  std::vector<float> values[2];
  std::vector<std::byte> gradients[2];
  ChunkUpdate updates[] = {s_.UpdateOf(1, 2, &values[0], &gradients[0]), s_.UpdateOf(0, 2, &values[1], &gradients[1])};
  const WholeState other = s_.Whole(1);
  const absl::Status refused = s_.store().Run(updates, [](size_t) {});
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument) << refused;
  EXPECT_TRUE(SameState(s_.Whole(1), other)) << "before anything changes";
  EXPECT_EQ(s_.Run(Flush(0)).code(), absl::StatusCode::kInvalidArgument);
  ChunkUpdate restored;
  restored.restored = 0;
  EXPECT_EQ(s_.Run(restored).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(s_.store().ReadWhole(0).status().code(), absl::StatusCode::kInvalidArgument);
  ASSERT_EQ(s_.Run(updates[0]), absl::OkStatus());

  const WholeState whole = original_.Whole(0);
  ASSERT_EQ(s_.Import(0, whole, 5), absl::OkStatus());
  EXPECT_TRUE(SameState(s_.Whole(0), whole));
  ASSERT_EQ(s_.Step(0, 6), absl::OkStatus());
  ASSERT_EQ(original_.Step(0, 6), absl::OkStatus());
  EXPECT_TRUE(SameState(s_.Whole(0), original_.Whole(0)));
  EXPECT_EQ(s_.Working(0), original_.Working(0));
  EXPECT_EQ(s_.store().dirty(0), GetParam() != kNvme);
  FlushAll();
  EXPECT_EQ(s_.recorded()[0].version, GetParam() == kNvme ? 6 : 1) << "as a flush calls it";
  s_.Restart();
  EXPECT_TRUE(SameState(s_.Whole(0), original_.Whole(0)));
}

TEST_P(VoidTest, ItMovesAsItIsAndIsFilledThere) {
  s_.store().Void({0});
  const WholeState whole = original_.Whole(0);
  for (const TierKind to : {kNvme, kDram, kHbm, kNvme}) {
    ASSERT_EQ(s_.store().Move(0, to), absl::OkStatus()) << TierName(to);
  }
  FlushAll();
  EXPECT_EQ(s_.recorded()[0].version, GetParam() == kNvme ? 1 : 0);
  ASSERT_EQ(s_.Import(0, whole, 5), absl::OkStatus());
  FlushAll();
  EXPECT_TRUE(SameState(s_.Whole(0), whole));
  EXPECT_EQ(s_.recorded()[0].version, 5);
}

TEST_P(VoidTest, PinsDoNotHaveIt) {
  ASSERT_EQ(s_.store().Pin(1), absl::OkStatus());
  s_.store().Void({0});
  ASSERT_EQ(s_.store().Pin(2), absl::OkStatus());
  std::vector<float> to(1);
  const auto read = [&](int64_t pin, uint64_t chunk) {
    return s_.store().ReadPinnedState(pin, chunk, StateArray::kMaster, 0, absl::MakeSpan(to));
  };
  const auto expect = [&] {
    for (const int64_t pin : {1, 2}) {
      EXPECT_EQ(model::ReasonOf(read(pin, 0)), model::kVersionGone);
      EXPECT_EQ(read(pin, 1), absl::OkStatus());
    }
  };
  expect();
  const absl::Status kept = s_.store().PinDurably(1).status();
  EXPECT_EQ(model::ReasonOf(kept), model::kBusy) << kept;
  ASSERT_EQ(s_.Import(0, original_.Whole(0), 5), absl::OkStatus());
  expect();
  EXPECT_TRUE(s_.store().PinDurably(5).ok());
}

TEST_P(VoidTest, AScrubLeavesItOut) {
  FlushAll();
  s_.store().Void({2});
  EXPECT_TRUE(s_.store().Extents(2).empty());
  const Arena buffer = *Arena::Map(256 << 10);
  std::vector<uint64_t> checked;
  for (ScrubPiece piece; !piece.pass_over;) {
    piece = s_.store().ScrubNext(buffer.bytes());
    if (piece.checked.has_value()) checked.push_back(piece.checked->chunk);
  }
  EXPECT_EQ(checked, (std::vector<uint64_t>{0, 1, 3, 4, 5}));
}

TEST_P(VoidTest, ItIsRemovedAsOthersAre) {
  ASSERT_EQ(s_.store().Harden(), absl::OkStatus());
  s_.store().Void({0, 3});
  for (const uint64_t i : {0, 3}) s_.recorded().erase(i);
  ASSERT_EQ(s_.store().Remove({0, 3}), absl::OkStatus());
  EXPECT_TRUE(s_.store().PinDurably(1).ok());
  EXPECT_TRUE(s_.store().placed()[3].gap());
}

// A server crashed after it gave a chunk up, and before it erased the chunk's entry.
TEST(FreeKeptTest, TheExtentOfAChunkThatIsNotThereIsFreed) {
  CopyingServer s({}, {{kNvme}, {kDram}}, true);
  ASSERT_EQ(s.Add({{kNvme}}), absl::OkStatus());
  for (uint64_t i = 0; i < 3; ++i) ASSERT_EQ(s.Step(i, 0, /*flush=*/true), absl::OkStatus());
  ASSERT_EQ(s.store().Harden(), absl::OkStatus());
  s.Restart();  // without the third
  const DurableChunk left = s.recorded()[2];
  const uint64_t used = s.tiers().used().nvme;
  s.recorded().erase(2);
  ASSERT_EQ(s.tiers().nvme()->FreeKept(left.offset, left.file), absl::OkStatus());
  EXPECT_EQ(s.tiers().used().nvme, used - left.bytes);
  EXPECT_EQ(s.tiers().nvme()->FreeKept(left.offset, left.file).code(), absl::StatusCode::kDataLoss);
  ASSERT_EQ(s.Add({{kNvme}}), absl::OkStatus());
  ASSERT_EQ(s.Step(2, 0), absl::OkStatus());
}

}  // namespace
}  // namespace ballast::storage
