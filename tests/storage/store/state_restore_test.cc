#include "ballast/storage/store/state_restore.h"

#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "ballast/proto/base/status.h"
#include "ballast/storage/memory/arena.h"
#include "ballast/tests/sim_disk/sim_disk.h"
#include "gtest/gtest.h"

namespace ballast::storage {
namespace {

// One chunk in DRAM, whose state an earlier run has left on the disk.
class StateRestoreTest : public ::testing::Test {
 protected:
  static constexpr uint64_t kElements = 1024;

  StateRestoreTest() {
    std::byte* const state = written_.bytes().data();
    for (uint64_t i = 0; i < layout_.LabelAt(kElements); ++i) state[i] = static_cast<std::byte>(i % 251);
    NvmeExtent extent = *tiers_->nvme()->Allocate(bytes(), "a test");
    entry_ = {.id = 42,
              .version = 7,
              .offset = extent.offset(),
              .bytes = bytes(),
              .elements = kElements,
              .digests = DigestState({&layout_, state, kElements}, with_),
              .file = extent.file_id()};
    EncodeLabel(entry_, layout_, "job", {state + layout_.LabelAt(kElements), StateLayout::kLabelBytes});
    EXPECT_EQ(extent.home()->Write(extent.offset(), {state, bytes()}), absl::OkStatus());
    EXPECT_EQ(tiers_->nvme()->Sync({entry_.file}), absl::OkStatus());
    const SharedMemory memory{.state = memory_.bytes().data(), .working = working_.data()};
    chunk_.emplace(layout_, 0, kElements, 42, ChunkMemory({}, {}, memory), std::move(extent));
  }

  uint64_t bytes() const { return layout_.StateBytes(kElements); }
  absl::Status Restore() {
    const ChunkToAdd added{.elements = kElements, .id = 42, .durable = entry_};
    return restore_.All({&added, 1}, {&*chunk_}, Uninterrupted);
  }
  void Corrupt(StateArray array) {
    const BlockFile& file = tiers_->nvme()->file(entry_.file);
    disk_.Corrupt(file.path(), entry_.offset + layout_.ArrayAt(array, kElements), 1);
  }
  // Does memory hold the array as it was written?
  bool Has(StateArray array) const {
    const uint64_t at = layout_.ArrayAt(array, kElements);
    return std::memcmp(memory_.bytes().data() + at, written_.bytes().data() + at,
                       layout_.ArrayBytes(array, kElements)) == 0;
  }
  bool MomentsUnread() {
    absl::ReaderMutexLock lock(&chunk_->mutex);
    return chunk_->on_disk.moments_unread();
  }

  SimDisk disk_{1};
  std::unique_ptr<Tiers> tiers_ = *Tiers::Open({.budget = {.dram = 1 << 20, .nvme = 1 << 20},
                                                .directory = std::filesystem::temp_directory_path(),
                                                .disk = &disk_});
  PipelineStaging staging_;
  const StateRestore restore_{tiers_.get(), nullptr, &staging_, "job"};
  const StateLayout layout_{kernels::OptimizerSpec()};
  const std::function<void()> no_poll_ = [] {};
  const Compute with_{.pool = nullptr, .poll = no_poll_};
  Arena written_ = *Arena::Map(bytes()), memory_ = *Arena::Map(bytes());
  std::vector<std::byte> working_ = std::vector<std::byte>(layout_.WorkingBytes(kElements));
  DurableChunk entry_;
  std::optional<StoredChunk> chunk_;
};

TEST_F(StateRestoreTest, ARestartReadsTheMasterAndLeavesTheMoments) {
  ASSERT_EQ(Restore(), absl::OkStatus());
  EXPECT_TRUE(Has(StateArray::kMaster));
  EXPECT_FALSE(Has(StateArray::kMoment1));
  EXPECT_TRUE(MomentsUnread());
  EXPECT_NE(working_, std::vector<std::byte>(working_.size())) << "no working copy was made";
  ASSERT_EQ(restore_.Moments(*chunk_), absl::OkStatus());
  EXPECT_TRUE(Has(StateArray::kMoment1));
  EXPECT_TRUE(Has(StateArray::kMoment2));
  EXPECT_FALSE(MomentsUnread());
}

TEST_F(StateRestoreTest, ARottenMasterIsFoundAtOnceAndARottenMomentLater) {
  Corrupt(StateArray::kMoment2);
  ASSERT_EQ(Restore(), absl::OkStatus());
  StoredChunk* const chunk = &*chunk_;
  EXPECT_EQ(model::ReasonOf(restore_.Moments({&chunk, 1}, Uninterrupted)), model::kChecksum);
  EXPECT_TRUE(MomentsUnread());
  Corrupt(StateArray::kMaster);
  EXPECT_EQ(model::ReasonOf(Restore()), model::kChecksum);
}

TEST_F(StateRestoreTest, AnEntryOfAnotherStateIsRefused) {
  ++entry_.version;
  EXPECT_EQ(model::ReasonOf(Restore()), model::kChecksum) << "the label says another version";
  entry_.id = 43;
  EXPECT_EQ(model::ReasonOf(Restore()), model::kIo);
}

TEST_F(StateRestoreTest, AVersionIsReadWhole) {
  ASSERT_EQ(restore_.Version(*chunk_, entry_, memory_.bytes().data(), with_), absl::OkStatus());
  EXPECT_TRUE(Has(StateArray::kMaster));
  EXPECT_TRUE(Has(StateArray::kMoment2));
  ASSERT_EQ(restore_.Zero(*chunk_, memory_.bytes().data(), with_), absl::OkStatus());
  EXPECT_FALSE(Has(StateArray::kMaster));
  EXPECT_EQ(working_, std::vector<std::byte>(working_.size()));
}

}  // namespace
}  // namespace ballast::storage
