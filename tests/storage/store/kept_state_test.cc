// What durable pins keep of a chunk goes from one server to another: the copy's pin restores the same bits.
#include <algorithm>
#include <fstream>
#include <optional>
#include <vector>

#include "ballast/proto/base/status.h"
#include "ballast/tests/storage/store/copied_chunks.h"
#include "gtest/gtest.h"

namespace ballast::storage {
namespace {

using enum TierKind;

class KeptStateTest : public ::testing::TestWithParam<TierKind> {
 protected:
  static constexpr uint64_t kChunks = 3;

  KeptStateTest() {
    // Pins of versions 1 and 2, between which chunk 0 alone changed; chunk 2 has no state yet.
    for (const int64_t version : {0, 1}) {
      for (const uint64_t chunk : {0, 1}) EXPECT_EQ(original_.Step(chunk, version), absl::OkStatus());
    }
    EXPECT_TRUE(original_.store().PinDurably(1).ok());
    for (const uint64_t chunk : {0, 1}) at_1_.push_back(original_.Whole(chunk));
    EXPECT_EQ(original_.Step(0, 2), absl::OkStatus());
    EXPECT_TRUE(original_.store().PinDurably(2).ok());
    at_2_ = original_.Whole(0);
    for (uint64_t i = 0; i < kChunks; ++i) EXPECT_EQ(original_.Step(i, i == 2 ? 0 : 3), absl::OkStatus());
    copy_.store().Void({{0, 1, 2}});
  }

  KeptState Kept(int64_t pin, uint64_t chunk) {
    auto kept = original_.store().ReadKept(pin, chunk);
    EXPECT_EQ(kept.status(), absl::OkStatus());
    return kept.ok() ? *std::move(kept) : KeptState();
  }
  void CopyKept() {
    for (const int64_t pin : {1, 2}) {
      for (uint64_t i = 0; i < kChunks; ++i) {
        ASSERT_EQ(copy_.store().ImportKept(pin, i, Kept(pin, i)), absl::OkStatus());
      }
      ASSERT_EQ(copy_.store().SyncKept(pin), absl::OkStatus());
    }
  }
  void CopyNewest() {
    for (uint64_t i = 0; i < kChunks; ++i) ASSERT_EQ(copy_.Import(i, original_.Whole(i), 3), absl::OkStatus());
    ASSERT_EQ(copy_.store().Harden(), absl::OkStatus());
  }
  absl::Status Restore(uint64_t chunk, int64_t pin, int64_t version) {
    ChunkUpdate restore;
    restore.chunk = chunk;
    restore.version = version;
    restore.flush = true;
    restore.restored = pin;
    return copy_.Run(restore);
  }

  void Rot(int64_t pin, uint64_t chunk) {
    const std::vector<DurableChunk> kept = copy_.store().KeptBy(pin);
    const auto entry = std::find_if(kept.begin(), kept.end(), [&](const auto& one) { return one.id == chunk; });
    ASSERT_NE(entry, kept.end());
    std::fstream file(copy_.file(), std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(static_cast<std::streamoff>(entry->offset + 100));
    const char rotten = static_cast<char>(file.get() ^ 1);
    file.seekp(static_cast<std::streamoff>(entry->offset + 100));
    file.put(rotten);
    ASSERT_TRUE(file.flush().good());
  }
  absl::Status Verify(int64_t pin) { return copy_.store().VerifyPin(pin, Uninterrupted); }

  CopyingServer original_{{}, std::vector<CopiedChunk>(kChunks, {GetParam()}), true};
  CopyingServer copy_{{}, std::vector<CopiedChunk>(kChunks, {kDram}), true};
  std::vector<WholeState> at_1_;
  WholeState at_2_;
};
INSTANTIATE_TEST_SUITE_P(Tiers, KeptStateTest, ::testing::Values(kHbm, kDram, kNvme),
                         [](const auto& info) { return std::string(TierName(info.param)); });

TEST_P(KeptStateTest, IsReadAsItWasKept) {
  EXPECT_TRUE(SameState(Kept(1, 0).state, at_1_[0]));
  EXPECT_EQ(Kept(1, 0).version, 1);
  EXPECT_TRUE(SameState(Kept(2, 0).state, at_2_));
  EXPECT_EQ(Kept(2, 1).version, 1) << "it has not changed since";
  EXPECT_TRUE(Kept(2, 2).state.arrays.empty()) << "it had no state";
  EXPECT_EQ(model::ReasonOf(original_.store().ReadKept(7, 0).status()), model::kVersionGone);
}

TEST_P(KeptStateTest, ACopyRestoresTheSameBits) {
  CopyKept();
  CopyNewest();
  for (const int64_t pin : {1, 2}) ASSERT_EQ(copy_.store().VerifyPin(pin, Uninterrupted), absl::OkStatus());
  for (uint64_t i = 0; i < kChunks; ++i) ASSERT_EQ(Restore(i, 1, 4), absl::OkStatus());
  for (const uint64_t i : {0, 1}) EXPECT_TRUE(SameState(copy_.Whole(i), at_1_[i])) << i;
  const WholeState zero = copy_.Whole(2);
  for (const auto& array : zero.arrays)
    EXPECT_EQ(std::count(array.bytes.begin(), array.bytes.end(), std::byte{0}), array.bytes.size());
  ASSERT_EQ(Restore(0, 2, 5), absl::OkStatus());
  EXPECT_TRUE(SameState(copy_.Whole(0), at_2_));
}

TEST_P(KeptStateTest, ThePinsComeBackAfterARestart) {
  CopyKept();
  CopyNewest();
  std::map<int64_t, std::vector<DurableChunk>> kept;
  for (const int64_t pin : {1, 2}) kept[pin] = copy_.store().KeptBy(pin);
  EXPECT_EQ(kept[1].size(), 2u) << "the third was zero";
  EXPECT_EQ(kept[1][1].offset, kept[2][1].offset) << "both pins keep one state of chunk 1";
  std::vector<DurableChunk> extents = kept[1];
  extents.push_back(kept[2][0]);
  copy_.Restart(extents);
  for (const auto& [pin, entries] : kept) {
    for (const DurableChunk& entry : entries)
      ASSERT_EQ(copy_.store().TakeBackPin(pin, entry.id, entry), absl::OkStatus());
    EXPECT_EQ(copy_.store().VerifyPin(pin, Uninterrupted), absl::OkStatus());
  }
  ASSERT_EQ(Restore(1, 2, 4), absl::OkStatus());
  EXPECT_TRUE(SameState(copy_.Whole(1), at_1_[1]));
}

TEST_P(KeptStateTest, APinThatLacksAnImportedChunkIsRefused) {
  for (const uint64_t i : {0, 2}) ASSERT_EQ(copy_.store().ImportKept(1, i, Kept(1, i)), absl::OkStatus());
  CopyNewest();
  EXPECT_EQ(model::ReasonOf(copy_.store().VerifyPin(1, Uninterrupted)), model::kVersionGone);
  EXPECT_EQ(model::ReasonOf(copy_.store().ReadKept(1, 1).status()), model::kVersionGone);
  EXPECT_EQ(model::ReasonOf(Restore(1, 1, 4)), model::kVersionGone);
  EXPECT_EQ(Restore(0, 1, 4), absl::OkStatus());
}

TEST_P(KeptStateTest, WhatWasTakenIsFreeOnceThePinsAreDropped) {
  CopyNewest();
  EXPECT_EQ(copy_.store().KeptBytes(), std::vector<uint64_t>(kChunks, 0));
  const uint64_t before = copy_.tiers().used().nvme;
  CopyKept();
  const uint64_t state = copy_.recorded()[0].bytes;
  EXPECT_EQ(copy_.tiers().used().nvme, before + 3 * state);
  // As the original tells, where both pins keep one state of chunk 1.
  EXPECT_EQ(original_.store().KeptBytes(), (std::vector<uint64_t>{2 * state, state, 0}));
  EXPECT_EQ(copy_.store().KeptBytes(), original_.store().KeptBytes());
  copy_.store().UnpinDurably(2);
  EXPECT_EQ(copy_.tiers().used().nvme, before + 2 * state);
  EXPECT_EQ(copy_.store().KeptBytes(), (std::vector<uint64_t>{state, state, 0}));
  copy_.store().UnpinDurably(1);
  EXPECT_EQ(copy_.store().KeptBytes(), std::vector<uint64_t>(kChunks, 0));
  EXPECT_EQ(copy_.tiers().used().nvme, before);
}

TEST_P(KeptStateTest, DamagedBytesAreMendedInTheirPlace) {
  CopyKept();
  CopyNewest();
  Rot(1, 0);
  EXPECT_TRUE(absl::IsDataLoss(Verify(1)));
  std::vector<uint64_t> damaged;
  const auto note = [&](uint64_t chunk, const absl::Status&) {
    damaged.push_back(chunk);
    return true;
  };
  EXPECT_EQ(copy_.store().VerifyPin(1, Uninterrupted, note), absl::OkStatus());
  EXPECT_EQ(damaged, std::vector<uint64_t>{0});
  EXPECT_EQ(model::ReasonOf(copy_.store().MendKept(1, 0, Kept(2, 0))), model::kDiverged);
  EXPECT_EQ(model::ReasonOf(copy_.store().MendKept(1, 0, KeptState())), model::kDiverged) << "zero there";
  KeptState bad = Kept(1, 0);
  bad.state.arrays[1].bytes[5] ^= std::byte{1};
  EXPECT_EQ(model::ReasonOf(copy_.store().MendKept(1, 0, bad)), model::kChecksum);
  EXPECT_TRUE(absl::IsDataLoss(Verify(1)));
  const uint64_t before = copy_.tiers().used().nvme;
  ASSERT_EQ(copy_.store().MendKept(1, 0, Kept(1, 0)), absl::OkStatus());
  EXPECT_EQ(copy_.tiers().used().nvme, before);
  EXPECT_EQ(Verify(1), absl::OkStatus());
  EXPECT_EQ(copy_.store().MendKept(1, 0, Kept(2, 0)), absl::OkStatus()) << "it is whole";
  for (const auto& [pin, chunk] : {std::pair(7, 0), std::pair(1, 2)}) {
    const absl::Status nothing = copy_.store().MendKept(pin, static_cast<uint64_t>(chunk), Kept(1, 0));
    EXPECT_EQ(model::ReasonOf(nothing), model::kVersionGone) << pin;
  }
  ASSERT_EQ(Restore(0, 1, 4), absl::OkStatus());
  EXPECT_TRUE(SameState(copy_.Whole(0), at_1_[0]));
}

// Of a chunk whose newest state was found damaged, pins may keep damaged bytes as well.
TEST_P(KeptStateTest, AnImportMendsWhatThePinHasAlready) {
  CopyKept();
  CopyNewest();
  Rot(1, 1);  // which both pins keep
  const uint64_t before = copy_.tiers().used().nvme;
  EXPECT_EQ(copy_.store().ImportKept(1, 1, Kept(1, 0)), absl::OkStatus());
  EXPECT_TRUE(absl::IsDataLoss(Verify(1))) << "another state does not replace it";
  KeptState bad = Kept(1, 1);
  bad.state.arrays[0].bytes[5] ^= std::byte{1};
  EXPECT_EQ(model::ReasonOf(copy_.store().ImportKept(1, 1, bad)), model::kChecksum);
  ASSERT_EQ(copy_.store().ImportKept(1, 1, Kept(1, 1)), absl::OkStatus());
  for (const int64_t pin : {1, 2}) EXPECT_EQ(Verify(pin), absl::OkStatus());
  EXPECT_EQ(copy_.tiers().used().nvme, before);
}

TEST_P(KeptStateTest, AnExtentIsKnownByAPinThatKeepsIt) {
  CopyKept();
  CopyNewest();
  std::vector<std::optional<int64_t>> pins;
  for (uint64_t chunk = 0; chunk < kChunks; ++chunk) {
    for (const ScrubbedExtent& extent : copy_.store().Extents(chunk)) {
      if (extent.kept) {
        pins.push_back(copy_.store().PinOf(extent));
      } else {
        EXPECT_EQ(copy_.store().PinOf(extent), std::nullopt) << chunk;
      }
    }
  }
  EXPECT_EQ(pins, (std::vector<std::optional<int64_t>>{1, 2, 1})) << "the second chunk has one state for both";
}

TEST_P(KeptStateTest, ADamagedOrForeignStateChangesNothing) {
  const uint64_t before = copy_.tiers().used().nvme;
  KeptState kept = Kept(1, 0);
  kept.state.arrays[1].bytes[5] ^= std::byte{1};
  EXPECT_EQ(model::ReasonOf(copy_.store().ImportKept(1, 0, kept)), model::kChecksum);
  kept.state.arrays.pop_back();
  EXPECT_EQ(model::ReasonOf(copy_.store().ImportKept(1, 0, kept)), model::kBadLength);
  const absl::Status refused = copy_.store().ImportKept(1, 0, Kept(1, 0), [](uint64_t bytes) {
    return model::Error(absl::StatusCode::kResourceExhausted, model::kBudget, absl::StrCat(bytes));
  });
  EXPECT_EQ(refused.message(), absl::StrCat(original_.recorded()[0].bytes));
  EXPECT_EQ(copy_.tiers().used().nvme, before);
  EXPECT_TRUE(copy_.store().KeptBy(1).empty());
}

}  // namespace
}  // namespace ballast::storage
