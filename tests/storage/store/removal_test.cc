// Chunks are removed from a store: everything that they took returns to the tiers, and the others do not notice.
#include <atomic>
#include <thread>

#include "ballast/proto/base/status.h"
#include "ballast/storage/io/interrupt.h"
#include "ballast/storage/memory/arena.h"
#include "ballast/tests/storage/store/copied_chunks.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ballast::storage {
namespace {

using enum TierKind;

struct RemovalShape {
  const char* name;
  bool durable;
  bool gpu;
};

// Chunks 0 to 2 stay, chunks from 3 on go.
class RemovalTest : public ::testing::TestWithParam<RemovalShape> {
 protected:
  static constexpr uint64_t kElements = CopyingServer::kElements;

  RemovalTest() {
    for (const uint64_t chunk : {0, 1, 2}) EXPECT_EQ(s_.Step(chunk, 0, /*flush=*/true), absl::OkStatus());
    EXPECT_EQ(s_.store().Harden(), absl::OkStatus());
    for (const uint64_t chunk : {0, 1, 2}) stay_.push_back(s_.Whole(chunk));
    before_ = s_.tiers().usage();
    residency_ = s_.store().residency();
  }
  static CopyingServer::Chunks Others() {
    CopyingServer::Chunks others = {{kDram},
                                    {kNvme},
                                    {kDram, StateForm::kFull, std::nullopt},
                                    {kNvme, StateForm::kWorking},
                                    {kDram, StateForm::kQ8},
                                    {kDram, StateForm::kMaster}};
    if (GetParam().gpu) others.insert(others.end(), {{kHbm}, {kHbm, StateForm::kFull, kHbm}});
    return others;
  }
  std::vector<uint64_t> Added() {
    std::vector<uint64_t> added;
    const std::vector<PlacedChunk> placed = s_.store().placed();
    for (uint64_t i = 3; i < placed.size(); ++i) {
      if (!placed[i].gap()) added.push_back(i);
    }
    return added;
  }
  void AddOthers(uint64_t aside_bytes = 0) {
    ASSERT_EQ(s_.Add(Others(), aside_bytes), absl::OkStatus());
    for (const uint64_t chunk : Added()) {
      for (int64_t version = 0; version < 2; ++version) {
        ASSERT_EQ(s_.Step(chunk, version, chunk % 2 == 0), absl::OkStatus());
      }
    }
  }
  // Erases the entries of the chunks, and removes these.
  absl::Status Remove(const std::vector<uint64_t>& chunks) {
    for (const uint64_t chunk : chunks) s_.recorded().erase(chunk);
    return s_.store().Remove(chunks);
  }
  void ExpectUsed(const TierUsage& expected) {
    const TierUsage usage = s_.tiers().usage();
    for (const TierKind tier : {kHbm, kDram, kNvme}) {
      EXPECT_EQ(usage.used[tier], expected.used[tier]) << TierName(tier);
      for (size_t part = 0; part < kTierParts; ++part) {
        EXPECT_EQ(usage.parts[part][tier], expected.parts[part][tier]) << TierName(tier) << " " << kTierPartNames[part];
      }
    }
  }
  void ExpectOthersStay() {
    for (const uint64_t chunk : {0, 1, 2}) EXPECT_TRUE(SameState(s_.Whole(chunk), stay_[chunk])) << chunk;
  }
  absl::Status Read(uint64_t chunk) {
    std::vector<float> to(kElements);
    return s_.store().ReadState(chunk, StateArray::kMaster, 0, absl::MakeSpan(to));
  }

  CopyingServer s_{{}, {{kDram}, {kNvme}, {kDram, StateForm::kFull, std::nullopt}}, GetParam().durable, GetParam().gpu};
  std::vector<WholeState> stay_;
  TierUsage before_;
  ChunkStore::Residency residency_;
};
INSTANTIATE_TEST_SUITE_P(Stores, RemovalTest,
                         ::testing::Values(RemovalShape{"Plain", false, false}, RemovalShape{"Durable", true, false},
                                           RemovalShape{"Gpu", false, true}, RemovalShape{"DurableGpu", true, true}),
                         [](const auto& info) { return info.param.name; });

TEST_P(RemovalTest, GivesBackWhatTheyTookAndMoreMayCome) {
  for (int round = 0; round < 3; ++round) {
    SCOPED_TRACE(round);
    const uint64_t first = s_.store().chunk_count();
    AddOthers();
    if (HasFatalFailure()) return;
    const std::vector<uint64_t> added = Added();
    ASSERT_EQ(added.size(), Others().size());
    ASSERT_EQ(Remove(added), absl::OkStatus());
    ExpectUsed(before_);
    EXPECT_EQ(s_.store().chunk_count(), first + Others().size());
    EXPECT_EQ(s_.store().present_count(), 3u);
    for (const TierKind tier : {kHbm, kDram, kNvme}) {
      EXPECT_EQ(s_.store().residency().state[tier], residency_.state[tier]);
      EXPECT_EQ(s_.store().residency().working[tier], residency_.working[tier]);
    }
    for (const uint64_t chunk : added) EXPECT_EQ(s_.recorded().count(chunk), 0u) << "nothing of it is recorded later";
    ExpectOthersStay();
  }
  for (const uint64_t chunk : {0, 1, 2}) ASSERT_EQ(s_.Step(chunk, 1), absl::OkStatus());
}

TEST_P(RemovalTest, ARemovedChunkIsAGap) {
  AddOthers();
  ASSERT_EQ(Remove({4}), absl::OkStatus());
  const ChunkStore& store = s_.store();
  EXPECT_TRUE(store.placed()[4].gap());
  EXPECT_FALSE(store.placed()[3].gap());
  EXPECT_EQ(store.layout().StateBytes(store.placed()[4].elements), 0u);
  EXPECT_EQ(model::ReasonOf(Read(4)), model::kBadRange);
  EXPECT_EQ(model::ReasonOf(store.ReadWhole(4).status()), model::kBadRange);
  EXPECT_EQ(model::ReasonOf(s_.store().Move(4, kDram)), model::kBadRange);
  EXPECT_EQ(model::ReasonOf(Remove({3, 4})), model::kBadRange);
  EXPECT_EQ(Read(3), absl::OkStatus()) << "nothing has changed";
  std::vector<float> values;
  std::vector<std::byte> gradient;
  std::vector<ChunkUpdate> updates(2);
  updates[1].chunk = 4;
  updates[0] = s_.UpdateOf(0, 1, &values, &gradient);
  EXPECT_EQ(model::ReasonOf(s_.store().Run(updates, [](size_t) {})), model::kBadRange);
  ExpectOthersStay();
  EXPECT_FALSE(store.dirty(4));
  EXPECT_EQ(store.durable_version(4), -1);
  EXPECT_EQ(store.recoverable_from(4), std::nullopt);
  EXPECT_FALSE(store.has_working_copy(4));
  EXPECT_TRUE(store.working_copy(4).empty());
  EXPECT_TRUE(store.Extents(4).empty());
  EXPECT_EQ(store.CopyBytes({}), 0u);
  // Those that are dropped by index are the right ones.
  ASSERT_EQ(s_.store().DropWorkingCopies({3, 4}), absl::OkStatus());
  EXPECT_EQ(store.has_working_copy(3), GetParam().gpu);
  EXPECT_TRUE(store.has_working_copy(0));
}

TEST_P(RemovalTest, PartsOfAnAddGoAloneWhereMemoryIsNotPageLocked) {
  AddOthers();
  for (const uint64_t chunk : {5, 3, 7, 4}) ASSERT_EQ(Remove({chunk}), absl::OkStatus());
  if (!GetParam().gpu) {
    const uint64_t expected = before_.used.dram + s_.store().residency().state.dram +
                              s_.store().residency().working.dram - residency_.state.dram - residency_.working.dram;
    EXPECT_EQ(s_.tiers().used().dram, expected);
  }
  ASSERT_EQ(s_.Step(8, 2), absl::OkStatus());
  EXPECT_TRUE(s_.store().ReadWhole(6).ok());
  ASSERT_EQ(Remove(Added()), absl::OkStatus());
  ExpectUsed(before_);
}

TEST_P(RemovalTest, AnEmptyStoreHasNothing) {
  AddOthers();
  std::vector<uint64_t> all = Added();
  all.insert(all.end(), {0, 1, 2});
  ASSERT_EQ(Remove(all), absl::OkStatus());
  EXPECT_EQ(s_.tiers().used().hbm, GetParam().gpu ? kHbmScratchBytes : 0);
  EXPECT_EQ(s_.tiers().used().dram, 0u);
  EXPECT_EQ(s_.tiers().used().nvme, 0u);
  ASSERT_EQ(s_.Add(Others()), absl::OkStatus());
  const uint64_t first = s_.store().chunk_count() - Others().size();
  for (uint64_t chunk = first; chunk < s_.store().chunk_count(); ++chunk) {
    ASSERT_EQ(s_.Step(chunk, 0), absl::OkStatus());
    ASSERT_EQ(s_.Step(chunk, 1), absl::OkStatus());
    EXPECT_FALSE(s_.Whole(chunk).arrays.empty());
  }
}

TEST_P(RemovalTest, CopiesOfPinsGoToo) {
  AddOthers();
  ASSERT_EQ(s_.store().Pin(1), absl::OkStatus());
  for (const uint64_t chunk : Added()) ASSERT_EQ(s_.Step(chunk, 2), absl::OkStatus());
  ASSERT_EQ(s_.store().Pin(2), absl::OkStatus());
  for (const uint64_t chunk : Added()) ASSERT_EQ(s_.Step(chunk, 3), absl::OkStatus());
  const std::vector<uint64_t> added = Added();
  ASSERT_EQ(Remove(added), absl::OkStatus());
  std::vector<float> to(kElements);
  for (const uint64_t chunk : added) {
    EXPECT_EQ(model::ReasonOf(s_.store().ReadPinnedState(1, chunk, StateArray::kMaster, 0, absl::MakeSpan(to))),
              model::kBadRange);
  }
  EXPECT_EQ(s_.store().ReadPinnedState(1, 0, StateArray::kMaster, 0, absl::MakeSpan(to)), absl::OkStatus());
  s_.store().Unpin(1);
  s_.store().Unpin(2);
  ExpectUsed(before_);
}

TEST_P(RemovalTest, KeptVersionsOfItGoToo) {
  if (!GetParam().durable) return;
  AddOthers(/*aside_bytes=*/2 * StateLayout().StateBytes(kElements));
  ASSERT_TRUE(s_.store().PinDurably(1).ok());
  ASSERT_TRUE(s_.store().PinDurably(2, /*automatic=*/true).ok());
  for (const uint64_t chunk : Added()) ASSERT_EQ(s_.Step(chunk, 3, /*flush=*/true), absl::OkStatus());
  ASSERT_TRUE(s_.store().PinDurably(4, /*automatic=*/true).ok());
  for (const uint64_t chunk : Added()) ASSERT_EQ(s_.Step(chunk, 5, /*flush=*/true), absl::OkStatus());
  ASSERT_EQ(Remove(Added()), absl::OkStatus());
  for (const int64_t pin : {1, 2, 4}) EXPECT_EQ(s_.store().VerifyPin(pin, Uninterrupted), absl::OkStatus());
  for (const int64_t pin : {1, 2, 4}) s_.store().UnpinDurably(pin);
  ExpectUsed(before_);
  ExpectOthersStay();
}

TEST_P(RemovalTest, WhatWaitsForItsRecordIsNotRecorded) {
  if (!GetParam().durable) return;
  AddOthers();
  ASSERT_EQ(s_.store().Harden(), absl::OkStatus());
  ASSERT_EQ(s_.Step(4, 2, /*flush=*/true), absl::OkStatus());
  ASSERT_EQ(s_.Step(0, 1, /*flush=*/true), absl::OkStatus());
  const WholeState newest = s_.Whole(0);
  ASSERT_EQ(Remove(Added()), absl::OkStatus());
  EXPECT_EQ(s_.recorded().size(), 3u);
  EXPECT_EQ(s_.recorded()[0].version, 1) << "what waits of others is";
  ExpectUsed(before_);
  s_.Restart();
  EXPECT_TRUE(SameState(s_.Whole(0), newest));
  ASSERT_EQ(s_.Add(Others()), absl::OkStatus());
}

TEST_P(RemovalTest, AScrubLeavesItOut) {
  AddOthers();
  ASSERT_EQ(s_.store().Harden(), absl::OkStatus());
  const Arena buffer = *Arena::Map(64 << 10);
  EXPECT_FALSE(s_.store().ScrubNext(buffer.bytes()).pass_over);
  // Until it is amid chunk 4.
  while (s_.store().scrub_pass_bytes() == 0) s_.store().ScrubNext(buffer.bytes());
  for (int reads = 0; reads < 60; ++reads) s_.store().ScrubNext(buffer.bytes());
  ASSERT_EQ(Remove(Added()), absl::OkStatus());
  std::vector<uint64_t> checked;
  for (int pass = 0; pass < 2;) {
    const ScrubPiece piece = s_.store().ScrubNext(buffer.bytes());
    if (piece.checked.has_value()) {
      EXPECT_EQ(piece.found, absl::OkStatus());
      if (pass == 1) checked.push_back(piece.checked->chunk);
    }
    if (piece.pass_over) ++pass;
  }
  EXPECT_EQ(checked, GetParam().durable ? (std::vector<uint64_t>{0, 1, 2}) : (std::vector<uint64_t>{1}));
}

TEST_P(RemovalTest, ReadersOnTheWayAreRefusedOrRight) {
  AddOthers();
  std::vector<std::vector<float>> expected;
  for (const uint64_t chunk : Added()) {
    expected.emplace_back(kElements);
    ASSERT_EQ(s_.store().ReadState(chunk, StateArray::kMaster, 0, absl::MakeSpan(expected.back())), absl::OkStatus());
  }
  std::atomic<int> refused{0};
  std::atomic<bool> reading{false};
  const std::vector<uint64_t> added = Added();
  std::thread reader([&] {
    std::vector<float> to(kElements);
    std::vector<std::byte> working(kElements * 2);
    while (refused < 2) {
      for (const uint64_t chunk : added) {
        const absl::Status status = s_.store().ReadState(chunk, StateArray::kMaster, 0, absl::MakeSpan(to));
        EXPECT_TRUE(status.ok() ? to == expected[chunk - 3] : model::ReasonOf(status) == model::kBadRange) << status;
        const absl::Status rounded = s_.store().ReadWorking(chunk, 0, absl::MakeSpan(working));
        EXPECT_TRUE(rounded.ok() || model::ReasonOf(rounded) == model::kBadRange) << rounded;
        if (chunk == added.back() && !rounded.ok()) ++refused;
      }
      reading = true;
    }
  });
  while (!reading) std::this_thread::yield();
  for (const uint64_t chunk : added) EXPECT_EQ(Remove({chunk}), absl::OkStatus());
  reader.join();
  ExpectUsed(before_);
}

}  // namespace
}  // namespace ballast::storage
