#include "ballast/storage/store/store_versions.h"

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ballast/storage/tier/tiers.h"
#include "ballast/tests/sim_disk/sim_disk.h"
#include "gtest/gtest.h"

namespace ballast::storage {
namespace {

// One chunk in memory of its own, of a store that records.
class StoreVersionsTest : public ::testing::Test {
 protected:
  static constexpr uint64_t kElements = 256;
  StoreVersionsTest() {
    versions_.Add(std::nullopt);
    versions_.extents.AddRoom(*tiers_->nvme()->Promise(2 * chunk_.state_bytes(), "a test"), chunk_.state_bytes());
  }

  void Start(int64_t version) {
    NvmeExtent fresh = *versions_.extents.Take(chunk_.state_bytes());
    absl::MutexLock lock(&chunk_.mutex);
    versions_.Start(chunk_, state_.data(), version, std::move(fresh));
  }
  const DurableProgress& progress() const { return versions_.Of(chunk_); }
  uint64_t Offset() {
    absl::ReaderMutexLock lock(&chunk_.mutex);
    return chunk_.on_disk.extent().offset();
  }

  SimDisk disk_{1};
  std::unique_ptr<Tiers> tiers_ = *Tiers::Open({.budget = {.dram = 1 << 20, .nvme = 1 << 20},
                                                .directory = std::filesystem::temp_directory_path(),
                                                .disk = &disk_});
  std::vector<DurableChunk> recorded_;
  absl::Status recording_;
  StoreVersions versions_{tiers_->nvme(),
                          {.job = "job",
                           .life = 5,
                           .record =
                               [this](absl::Span<const DurableChunk> entries) {
                                 recorded_.assign(entries.begin(), entries.end());
                                 return recording_;
                               }},
                          nullptr};
  const StateLayout layout_{kernels::OptimizerSpec()};
  StoredChunk chunk_{layout_, 0, kElements, 42, ChunkMemory({}, {}, {}), NvmeExtent()};
  std::vector<std::byte> state_ = std::vector<std::byte>(chunk_.state_bytes());
};

TEST_F(StoreVersionsTest, AVersionIsLabelledAndRecordedAtItsPlace) {
  Start(3);
  EXPECT_EQ(progress().newest().version, 3);
  EXPECT_EQ(progress().newest().offset, Offset());
  DurableChunk found;
  std::string job;
  uint64_t layout_bits = 0;
  const absl::Span<const std::byte> label(state_.data() + layout_.LabelAt(kElements), StateLayout::kLabelBytes);
  ASSERT_TRUE(DecodeLabel(label, &found, &job, &layout_bits));
  EXPECT_EQ(job, "job");
  EXPECT_EQ(found.Encode(), progress().newest().Encode());
  EXPECT_EQ(progress().recoverable_from(), 2);
  ASSERT_EQ(versions_.Harden(), absl::OkStatus());
  ASSERT_EQ(recorded_.size(), 1u);
  EXPECT_EQ(recorded_[0].Encode(), found.Encode());
  EXPECT_EQ(progress().recoverable_from(), std::nullopt);
}

TEST_F(StoreVersionsTest, AnOldVersionsRoomIsFreeOnceTheNextIsRecorded) {
  Start(3);
  const uint64_t first = Offset();
  Start(4);
  EXPECT_NE(Offset(), first);
  EXPECT_FALSE(versions_.extents.HasRoom(chunk_.state_bytes()));
  ASSERT_EQ(versions_.Harden(), absl::OkStatus());
  EXPECT_TRUE(versions_.extents.HasRoom(chunk_.state_bytes()));
}

TEST_F(StoreVersionsTest, APinKeepsTheVersionThatItsChunkLeaves) {
  Start(3);
  NvmeRoom reserve = *versions_.pins.Reserve(chunk_.state_bytes());
  versions_.pins.Keep(3, 0, progress().newest(), &reserve);
  Start(4);
  EXPECT_TRUE(versions_.extents.HasRoom(chunk_.state_bytes())) << "the pin's room, in return for the extent";
  ASSERT_NE(versions_.pins.Find(3, 0), nullptr);
  EXPECT_EQ(versions_.pins.Find(3, 0)->version, 3);
}

TEST_F(StoreVersionsTest, AVersionThatIsNotRecordedIsStillMissing) {
  Start(3);
  recording_ = absl::InternalError("the catalog's disk");
  EXPECT_EQ(versions_.Harden(), recording_);
  EXPECT_EQ(progress().recoverable_from(), 2);
}

}  // namespace
}  // namespace ballast::storage
