// Extents that an earlier run has left, until chunks take them back.
#include "ballast/services/journal/earlier_extents.h"

#include <filesystem>
#include <memory>
#include <utility>
#include <vector>

#include "ballast/proto/base/status.h"
#include "ballast/tests/services/job_state.h"
#include "ballast/tests/sim_disk/sim_disk.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ballast::services {
namespace {

using ::testing::ElementsAre;

class EarlierExtentsTest : public ::testing::Test {
 protected:
  static storage::DurableChunk Chunk(uint64_t id, int64_t version, uint64_t offset) {
    return {.id = id, .version = version, .offset = offset, .bytes = 4096, .elements = 256};
  }
  static v1::PinnedVersion Pin(int64_t version, const std::vector<storage::DurableChunk>& chunks,
                               bool automatic = false) {
    v1::PinnedVersion pin;
    pin.set_version(version);
    pin.set_automatic(automatic);
    pin.set_requested(!automatic);
    for (const storage::DurableChunk& chunk : chunks) pin.add_chunks(chunk.Encode());
    return pin;
  }

  EarlierExtents earlier_;
};

TEST_F(EarlierExtentsTest, AChunkIsTakenOnce) {
  const std::vector<storage::DurableChunk> chunks = {Chunk(3, 7, 0), Chunk(5, 6, 4096)};
  earlier_.AddChunks(chunks);
  EXPECT_EQ(earlier_.chunks(), 2);
  EXPECT_EQ(earlier_.first(), 3);
  ASSERT_TRUE(earlier_.FindChunk(5).has_value());
  EXPECT_EQ(earlier_.FindChunk(5)->version, 6);
  EXPECT_FALSE(earlier_.FindChunk(4).has_value());
  earlier_.Taken(3);
  EXPECT_FALSE(earlier_.FindChunk(3).has_value());
  EXPECT_EQ(earlier_.first(), 5);
}

TEST_F(EarlierExtentsTest, WhatAutomaticPinsHaveOnTheDiskIsNotSetAsideAgain) {
  EXPECT_EQ(earlier_.AsideBytes(3, 4096), 2 * 4096) << "the version that all servers have, and the next";
  const std::vector<v1::PinnedVersion> pins = {Pin(4, {Chunk(3, 4, 0)}, /*automatic=*/true),
                                               Pin(8, {Chunk(3, 4, 0)}, /*automatic=*/true)};
  earlier_.AddPins(pins);
  EXPECT_EQ(earlier_.AsideBytes(3, 4096), 4096) << "both pins have the same extent";
  EXPECT_EQ(earlier_.AsideBytes(9, 4096), 2 * 4096) << "another chunk";
  const std::vector<v1::PinnedVersion> more = {Pin(9, {Chunk(3, 9, 4096)}, /*automatic=*/true),
                                               Pin(10, {Chunk(3, 10, 8192)}, /*automatic=*/true)};
  earlier_.AddPins(more);
  EXPECT_EQ(earlier_.AsideBytes(3, 4096), 0);
}

TEST_F(EarlierExtentsTest, APinThatSomebodyAskedForPaysForItself) {
  const std::vector<v1::PinnedVersion> pins = {Pin(4, {Chunk(3, 4, 0)}, /*automatic=*/true), Pin(5, {Chunk(3, 4, 0)})};
  earlier_.AddPins(pins);
  EXPECT_EQ(earlier_.AsideBytes(3, 4096), 2 * 4096);
}

TEST_F(EarlierExtentsTest, TheSameOffsetInAnotherFileIsAnotherExtent) {
  storage::DurableChunk elsewhere = Chunk(3, 5, 0);
  elsewhere.file = 7;
  const std::vector<v1::PinnedVersion> automatic = {Pin(4, {Chunk(3, 4, 0)}, /*automatic=*/true),
                                                    Pin(5, {elsewhere}, /*automatic=*/true)};
  earlier_.AddPins(automatic);
  EXPECT_EQ(earlier_.AsideBytes(3, 4096), 0);
  const std::vector<v1::PinnedVersion> asked_for = {Pin(4, {Chunk(3, 4, 0)})};
  earlier_.AddPins(asked_for);
  EXPECT_EQ(earlier_.AsideBytes(3, 4096), 4096) << "of the two, only the other file's extent is the server's alone";
}

// A store leaves two versions of its chunks; the next takes them back.
TEST_F(EarlierExtentsTest, AStoreGetsThePinsOfItsChunks) {
  storage::SimDisk disk(1);
  const auto tiers = *storage::Tiers::Open({.budget = {.dram = uint64_t{16} << 20, .nvme = uint64_t{16} << 20},
                                            .directory = std::filesystem::temp_directory_path(),
                                            .disk = &disk});
  const storage::StateLayout layout{kernels::OptimizerSpec()};
  const auto make = [&] {
    return std::make_unique<storage::ChunkStore>(tiers.get(), layout, nullptr, storage::DurableOptions{.job = "job"});
  };
  storage::Plan plan;
  plan.chunks.resize(2);
  std::vector<storage::ChunkToAdd> added = {{.elements = 256, .id = 3}, {.elements = 256, .id = 5}};
  std::vector<float> values(256, 7);
  std::vector<storage::DurableChunk> kept;
  {
    const auto store = make();
    ASSERT_EQ(store->Add(added, plan), absl::OkStatus());
    for (const int64_t version : {0, 1}) {
      std::vector<storage::ChunkUpdate> updates(2);
      for (uint64_t i = 0; i < 2; ++i) {
        updates[i].chunk = i;
        updates[i].values = {{.begin = 0, .values = values}};
        updates[i].version = version;
        updates[i].flush = true;
      }
      ASSERT_EQ(store->Run(updates, [](size_t) {}), absl::OkStatus());
      if (version == 0) kept = *store->PinDurably(0);
      std::fill(values.begin(), values.end(), 8);
    }
  }
  ASSERT_EQ(kept.size(), 2);
  const std::vector<v1::PinnedVersion> pins = {Pin(0, kept)};
  earlier_.AddPins(pins);
  EXPECT_THAT(earlier_.PinnedIds(), ElementsAre(3, 5));
  const auto store = make();
  ASSERT_EQ(store->Add(added, plan), absl::OkStatus());
  const auto memory = std::make_shared<SliceMemory>(tiers.get());
  HeldChunks chunks;
  chunks.push_back(
      std::make_shared<HeldChunk>(memory, 0, 3, 256, storage::StateForm::kFull, kernels::OptimizerSpec(), false));
  const std::vector<int64_t> versions = {0, 6};
  ASSERT_EQ(earlier_.TakeBackPins(versions, chunks, store.get()), absl::OkStatus());
  EXPECT_THAT(earlier_.PinnedIds(), ElementsAre(5)) << "its chunk has not come yet";
  EXPECT_EQ(store->VerifyPin(0, storage::Uninterrupted), absl::OkStatus());
  EXPECT_EQ(store->VerifyPin(6, storage::Uninterrupted), absl::OkStatus()) << "a pin without a chunk here";
  std::vector<storage::ChunkUpdate> restore(1);
  restore[0].restored = 0;
  restore[0].version = 7;
  ASSERT_EQ(store->Run(restore, [](size_t) {}), absl::OkStatus());
  float value = 0;
  ASSERT_EQ(store->ReadState(0, storage::StateArray::kMaster, 255, {&value, 1}), absl::OkStatus());
  EXPECT_EQ(value, 7);
}

}  // namespace
}  // namespace ballast::services
