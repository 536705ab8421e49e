// A chunk's state on the disk, and when two scrubs have seen the same.
#include "ballast/storage/store/state_on_disk.h"

#include <filesystem>
#include <memory>
#include <utility>
#include <vector>

#include "ballast/storage/store/scrubbed_extent.h"
#include "ballast/storage/tier/nvme_file.h"
#include "ballast/storage/tier/tiers.h"
#include "ballast/tests/sim_disk/sim_disk.h"
#include "gtest/gtest.h"

namespace ballast::storage {
namespace {

class StateOnDiskTest : public ::testing::Test {
 protected:
  NvmeExtent Allocate() { return *tiers_->nvme()->Allocate(8192, "a test"); }
  SimDisk disk_{1};
  std::unique_ptr<Tiers> tiers_ = *Tiers::Open({.budget = {.dram = 1 << 20, .nvme = 1 << 20},
                                                .directory = std::filesystem::temp_directory_path(),
                                                .disk = &disk_});
};

TEST_F(StateOnDiskTest, AReadKnowsThePlaceThatItsDigestsAreOf) {
  StateOnDisk empty{NvmeExtent()};
  EXPECT_EQ(empty.written().file, nullptr);
  StateOnDisk state(Allocate());
  state.SetDigests({1, 2, 3});
  const WrittenState first = state.written();
  EXPECT_EQ(first.file, &state.extent().file());
  EXPECT_EQ(first.offset, state.extent().offset());
  const NvmeExtent old = state.MoveTo(Allocate());
  state.SetDigests({4, 5, 6});
  EXPECT_EQ(old.offset(), first.offset);
  EXPECT_NE(state.written().offset, first.offset);
  EXPECT_EQ(state.written().digests, (ArrayDigests{4, 5, 6}));
  EXPECT_EQ(first.digests, (ArrayDigests{1, 2, 3})) << "a read that is under way";
}

TEST_F(StateOnDiskTest, AStateLeftForTheNextRunStaysTaken) {
  uint64_t offset = 0;
  {
    StateOnDisk state(Allocate());
    offset = state.extent().offset();
    state.Leave();
  }
  EXPECT_TRUE(tiers_->nvme()->TakeKept(offset).ok());
  { StateOnDisk freed(Allocate()); }
  EXPECT_EQ(tiers_->used().nvme, 0);
}

TEST_F(StateOnDiskTest, MemoryHasTheStateUntilTheExtentHas) {
  std::vector<std::byte> memory(8192);
  StateOnDisk state(Allocate());
  EXPECT_EQ(state.staged(), nullptr);
  state.Stage(memory.data());
  EXPECT_EQ(state.staged(), memory.data());
  state.EndStage();
  EXPECT_EQ(state.staged(), nullptr);
  EXPECT_FALSE(state.moments_unread());
  state.LeaveMoments();
  EXPECT_TRUE(state.moments_unread());
  state.EndMoments();
  EXPECT_FALSE(state.moments_unread());
}

TEST(ScrubbedExtentTest, APlaceWithAnotherVersionIsAnotherState) {
  const ScrubbedExtent durable{.chunk = 1, .entry = {.version = 5, .offset = 4096, .file = 2}, .updated_in = 3};
  EXPECT_TRUE(durable.Matches(durable));
  ScrubbedExtent other = durable;
  other.updated_in = 4;
  EXPECT_TRUE(durable.Matches(other)) << "in memory it went on; the extent holds version 5";
  other.entry.version = 6;
  EXPECT_FALSE(durable.Matches(other));
  for (const ScrubbedExtent& elsewhere : {ScrubbedExtent{.chunk = 2, .entry = durable.entry},
                                          ScrubbedExtent{.chunk = 1, .entry = {.version = 5, .offset = 0, .file = 2}},
                                          ScrubbedExtent{.chunk = 1, .entry = {.version = 5, .offset = 4096}}}) {
    EXPECT_FALSE(durable.Matches(elsewhere));
  }
}

TEST(ScrubbedExtentTest, WithoutVersionsTheRunTells) {
  const ScrubbedExtent state{.chunk = 1, .entry = {.offset = 4096}, .updated_in = 3};
  ScrubbedExtent next = state;
  EXPECT_TRUE(state.Matches(next));
  next.updated_in = 4;
  EXPECT_FALSE(state.Matches(next)) << "the run wrote other bytes to the same place";
}

}  // namespace
}  // namespace ballast::storage
