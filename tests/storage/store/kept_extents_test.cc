// Kept versions: who owns an extent, and who pays for it, while pins and chunks come and go.
#include "ballast/storage/store/kept_extents.h"

#include <filesystem>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "ballast/proto/base/status.h"
#include "ballast/storage/tier/tiers.h"
#include "ballast/tests/sim_disk/sim_disk.h"
#include "gtest/gtest.h"

namespace ballast::storage {
namespace {

class KeptExtentsTest : public ::testing::Test {
 protected:
  static constexpr uint64_t kStateBytes = 64 << 10;

  KeptExtentsTest() { Move(0, 1); }
  NvmeTier* nvme() { return tiers_->nvme(); }
  uint64_t used() const { return tiers_->used().nvme; }
  uint64_t used(TierPart part) const { return tiers_->usage().parts[static_cast<size_t>(part)].nvme; }

  // The chunk goes on to `version`, in another extent.
  void Move(uint64_t chunk, int64_t version) {
    NvmeExtent old = std::exchange(chunks_[chunk].first, *nvme()->Allocate(kStateBytes, "a test"));
    chunks_[chunk].second = {.version = version,
                             .offset = chunks_[chunk].first.offset(),
                             .bytes = kStateBytes,
                             .file = chunks_[chunk].first.file_id()};
    const bool keeps = kept_.KeepsNewest(chunk);
    const uint64_t bytes = old.bytes();
    const NvmeRoom in_return = kept_.TakeOver(chunk, &old);
    EXPECT_EQ(in_return.bytes(), keeps ? kStateBytes : 0);
    EXPECT_EQ(old.bytes(), keeps ? 0 : bytes) << "what no pin has taken over is the chunk's to free";
  }
  // Pins the chunk's newest state. Returns the bytes that this took.
  uint64_t Pin(int64_t pin, uint64_t chunk = 0, bool automatic = false) {
    const uint64_t before = used();
    NvmeRoom reserve = *kept_.Reserve(kept_.NeedsBytes(chunk, automatic) ? kStateBytes : 0, automatic);
    kept_.Keep(pin, chunk, chunks_[chunk].second, &reserve, automatic);
    EXPECT_EQ(reserve.bytes(), 0);
    return used() - before;
  }

  SimDisk disk_{1};
  std::unique_ptr<Tiers> tiers_ = *Tiers::Open({.budget = {.dram = 1 << 20, .nvme = 16 * kStateBytes},
                                                .directory = std::filesystem::temp_directory_path(),
                                                .disk = &disk_});
  const std::shared_ptr<Account> account_ = std::make_shared<Account>();
  std::map<uint64_t, std::pair<NvmeExtent, DurableChunk>> chunks_;
  KeptExtents kept_{tiers_->nvme(), account_};
};

TEST_F(KeptExtentsTest, APinTakesRoomForOneMoreVersionAndGivesItBack) {
  EXPECT_FALSE(kept_.KeepsNewest(0));
  EXPECT_EQ(Pin(1), kStateBytes);
  EXPECT_TRUE(kept_.Has(1));
  EXPECT_TRUE(kept_.KeepsNewest(0));
  EXPECT_EQ(tiers_->taken(*account_)[static_cast<size_t>(TierPart::kPins)].nvme, kStateBytes);
  kept_.Drop(1);
  EXPECT_FALSE(kept_.Has(1));
  EXPECT_FALSE(kept_.KeepsNewest(0));
  EXPECT_EQ(used(), kStateBytes) << "the chunk's own";
  kept_.Drop(1);
}

TEST_F(KeptExtentsTest, TwoPinsOfOneVersionPayOnce) {
  EXPECT_EQ(Pin(1), kStateBytes);
  EXPECT_EQ(Pin(2), 0);
  EXPECT_EQ(kept_.Of(0).size(), 1);
  kept_.Drop(1);
  EXPECT_EQ(used(), 2 * kStateBytes) << "pin 2 still keeps it";
  kept_.Drop(2);
  EXPECT_EQ(used(), kStateBytes);
}

TEST_F(KeptExtentsTest, TheOldExtentStaysWhereItIsWhenTheChunkGoesOn) {
  const DurableChunk first = chunks_[0].second;
  Pin(1);
  Move(0, 2);
  Pin(2);
  Move(0, 3);
  Move(0, 4);
  ASSERT_NE(kept_.Find(1, 0), nullptr);
  EXPECT_EQ(kept_.Find(1, 0)->offset, first.offset);
  EXPECT_EQ(kept_.Find(2, 0)->version, 2);
  EXPECT_EQ(kept_.Find(2, 1), nullptr);
  EXPECT_EQ(kept_.Find(3, 0), nullptr);
  EXPECT_EQ(kept_.Of(0).size(), 2);
  EXPECT_EQ(used(), 3 * kStateBytes) << "two kept versions, and the newest";
  const NvmeExtent other = *nvme()->Allocate(kStateBytes, "a test");
  EXPECT_NE(other.offset(), first.offset);
  EXPECT_NE(other.offset(), kept_.Find(2, 0)->offset);
  kept_.Drop(1);
  EXPECT_EQ(used(), 3 * kStateBytes);
  EXPECT_EQ(nvme()->Allocate(kStateBytes, "a test")->offset(), first.offset) << "free now";
}

TEST_F(KeptExtentsTest, APinKnowsItsChunks) {
  Move(3, 7);
  kept_.Expect(5);
  EXPECT_TRUE(kept_.Has(5)) << "perhaps without a chunk";
  EXPECT_TRUE(kept_.ChunksOf(5).empty());
  Pin(1, 3);
  Pin(1, 0);
  kept_.Expect(1);
  EXPECT_EQ(kept_.ChunksOf(1), (std::vector<uint64_t>{0, 3}));
  EXPECT_TRUE(kept_.ChunksOf(9).empty());
}

TEST_F(KeptExtentsTest, AFullBudgetRefusesAPinAndTakesNothing) {
  const uint64_t before = used();
  const auto refused = kept_.Reserve(16 * kStateBytes);
  EXPECT_EQ(model::ReasonOf(refused.status()), model::kBudget) << refused.status();
  EXPECT_EQ(used(), before);
}

TEST_F(KeptExtentsTest, AnAutomaticPinUsesWhatIsSetAsideAndReturnsIt) {
  kept_.SetAside(*nvme()->Promise(kStateBytes, "a test"));
  EXPECT_EQ(Pin(1, 0, /*automatic=*/true), 0);
  EXPECT_EQ(kept_.AsideBytes(1), kStateBytes);
  Move(0, 2);
  const uint64_t before = used();
  kept_.Drop(1);
  EXPECT_EQ(used(), before) << "the next automatic pin finds its room";
  EXPECT_EQ(Pin(2, 0, /*automatic=*/true), 0);
  EXPECT_EQ(Pin(3, 0, /*automatic=*/true), 0) << "it shares the extent";
}

TEST_F(KeptExtentsTest, AnOrdinaryPinOfAnAutomaticOnesVersionPaysItself) {
  kept_.SetAside(*nvme()->Promise(kStateBytes, "a test"));
  EXPECT_EQ(Pin(1, 0, /*automatic=*/true), 0);
  EXPECT_TRUE(kept_.NeedsBytes(0, /*automatic=*/false));
  EXPECT_FALSE(kept_.NeedsBytes(0, /*automatic=*/true));
  EXPECT_EQ(Pin(2, 0, /*automatic=*/false), kStateBytes);
  EXPECT_FALSE(kept_.NeedsBytes(0, /*automatic=*/false));
  EXPECT_EQ(kept_.AsideBytes(1), 0) << "what was set aside serves the next automatic pin";
  kept_.Drop(1);
  Move(0, 2);
  EXPECT_EQ(Pin(3, 0, /*automatic=*/true), 0);
  EXPECT_EQ(kept_.Find(2, 0)->version, 1);
}

TEST_F(KeptExtentsTest, AnAdoptedPinIsPaidForAndStays) {
  kept_.SetAside(*nvme()->Promise(kStateBytes, "a test"));
  Pin(1, 0, /*automatic=*/true);
  kept_.Adopt(1, *kept_.Reserve(kept_.AsideBytes(1)));
  EXPECT_EQ(kept_.AsideBytes(1), 0);
  Move(0, 2);
  EXPECT_EQ(Pin(2, 0, /*automatic=*/true), 0);
  const uint64_t before = used();
  kept_.Drop(1);
  EXPECT_EQ(used(), before - kStateBytes) << "its room was its own";
}

TEST_F(KeptExtentsTest, APinLacksAnImportedChunkOfWhichItKnowsNoState) {
  Pin(1);
  Move(1, 2);
  kept_.Expect(2);
  kept_.AddZero(2, 1);
  kept_.Imported(0);
  kept_.Imported(1);
  EXPECT_FALSE(kept_.Lacks(1, 0)) << "what it keeps is as it was";
  EXPECT_TRUE(kept_.Lacks(1, 1));
  EXPECT_EQ(kept_.LackedBy(1), std::vector<uint64_t>{1});
  EXPECT_TRUE(kept_.Lacks(2, 0));
  EXPECT_FALSE(kept_.Lacks(2, 1)) << "it was zero";
  EXPECT_TRUE(kept_.Lacks(3, 0)) << "there is no such pin";
  kept_.Remove(1);
  EXPECT_FALSE(kept_.Lacks(1, 1)) << "the chunk is gone";
}

TEST_F(KeptExtentsTest, AnotherServersStateIsSharedByThePinsThatHaveIt) {
  const uint64_t before = used();
  const ArrayDigests digests = {1, 2, 3};
  EXPECT_FALSE(kept_.Share(1, 0, 4, digests));
  NvmeExtent extent = *nvme()->Allocate(kStateBytes, "a test");
  const DurableChunk entry{
      .version = 4, .offset = extent.offset(), .bytes = kStateBytes, .digests = digests, .file = extent.file_id()};
  kept_.Add(1, 0, entry, std::move(extent));
  EXPECT_FALSE(kept_.Share(2, 0, 5, digests)) << "another version";
  EXPECT_FALSE(kept_.Share(2, 0, 4, {1, 2, 4})) << "other bytes";
  EXPECT_FALSE(kept_.Share(2, 1, 4, digests)) << "another chunk";
  EXPECT_TRUE(kept_.Share(2, 0, 4, digests));
  EXPECT_EQ(kept_.Find(2, 0)->offset, entry.offset);
  EXPECT_EQ(kept_.Of(0).size(), 1);
  EXPECT_EQ(tiers_->taken(*account_)[static_cast<size_t>(TierPart::kPins)].nvme, kStateBytes);
  kept_.Drop(1);
  EXPECT_EQ(used(), before + kStateBytes);
  kept_.Drop(2);
  EXPECT_EQ(used(), before);
}

TEST_F(KeptExtentsTest, ARemovedChunkLeavesNothingBehind) {
  const uint64_t before = used();
  Move(1, 1);
  for (const uint64_t chunk : {0, 1}) {
    kept_.SetAside(*nvme()->Promise(kStateBytes, "a test"));
    kept_.AddShare(chunk, kStateBytes);
  }
  Pin(1, 1);
  Pin(2, 1, /*automatic=*/true);
  Move(1, 2);
  Pin(3, 1, /*automatic=*/true);
  chunks_.erase(1);
  kept_.Remove(1);
  EXPECT_EQ(used(), before + kStateBytes) << "what the other chunk has aside";
  EXPECT_TRUE(kept_.Of(1).empty());
  EXPECT_TRUE(kept_.Has(1));
  EXPECT_EQ(Pin(4, 0, /*automatic=*/true), 0) << "which is there for its pins";
}

TEST_F(KeptExtentsTest, AShareThatAnotherChunkUsesGoesOnceItReturns) {
  const uint64_t before = used();
  kept_.SetAside(*nvme()->Promise(2 * kStateBytes, "a test"));
  for (const uint64_t chunk : {0, 1}) kept_.AddShare(chunk, kStateBytes);
  Pin(1, 0, /*automatic=*/true);
  Move(0, 2);
  Pin(2, 0, /*automatic=*/true);
  const uint64_t both = used();
  kept_.Remove(1);
  EXPECT_EQ(used(), both);
  kept_.Drop(1);
  EXPECT_EQ(used(), both - kStateBytes);
  kept_.Drop(2);
  kept_.Remove(0);
  EXPECT_EQ(used(), before);
}

TEST_F(KeptExtentsTest, ARestartFindsTheExtentsOfItsPins) {
  Pin(1);
  const DurableChunk first = chunks_[0].second;
  Move(0, 2);
  kept_.Leave();
  kept_.Drop(1);
  KeptExtents restarted(nvme(), account_);
  restarted.Expect(1);
  ASSERT_EQ(restarted.TakeBack(1, 0, first), absl::OkStatus());
  ASSERT_EQ(restarted.TakeBack(4, 0, first), absl::OkStatus()) << "two pins share it";
  EXPECT_EQ(used(), 2 * kStateBytes);
  EXPECT_EQ(tiers_->taken(*account_)[static_cast<size_t>(TierPart::kPins)].nvme, kStateBytes);
  DurableChunk elsewhere = first;
  elsewhere.offset += kStateBytes;
  const absl::Status none = restarted.TakeBack(1, 0, elsewhere);
  EXPECT_EQ(none.code(), absl::StatusCode::kDataLoss) << none;
  EXPECT_EQ(restarted.Find(1, 0)->offset, first.offset);
  restarted.Drop(1);
  EXPECT_EQ(used(), 2 * kStateBytes);
  restarted.Drop(4);
  EXPECT_EQ(used(), kStateBytes);
}

}  // namespace
}  // namespace ballast::storage
