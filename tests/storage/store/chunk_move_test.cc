// One chunk's state on its way between memory and disk, and copies of it for pins.
#include "ballast/storage/store/chunk_move.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "ballast/proto/base/status.h"
#include "ballast/storage/store/pinned_copy.h"
#include "ballast/storage/store/state_update.h"
#include "ballast/storage/store/stored_chunk.h"
#include "ballast/storage/tier/tiers.h"
#include "ballast/tests/sim_disk/sim_disk.h"
#include "gtest/gtest.h"

namespace ballast::storage {
namespace {

// A chunk with state in DRAM, of memory that it shares with nobody.
class ChunkMoveTest : public ::testing::Test {
 protected:
  static constexpr uint64_t kElements = 1024;

  ChunkMoveTest() {
    SharedMemory memory{.block = &shared_, .state = shared_.bytes().data()};
    chunk_.emplace(layout_, 0, kElements, 42, ChunkMemory({.working = std::nullopt}, {}, memory), NvmeExtent());
    EXPECT_EQ(reader_.Prepare(), absl::OkStatus());
  }
  uint64_t bytes() const { return layout_.StateBytes(kElements); }

  // An update that leaves `value` in every byte of the arrays.
  void Fill(uint8_t value, uint64_t run = 1) {
    std::memset(chunk_->memory.state(), value, layout_.LabelAt(kElements));
    absl::MutexLock lock(&chunk_->mutex);
    chunk_->history.Update(run);
  }
  absl::Status Move(TierKind to) {
    StateMove move{.to = to};
    if (to == TierKind::kNvme) move.extent = *tiers_->nvme()->Allocate(bytes(), "a test");
    const absl::Status moved = MoveState(tiers_.get(), nullptr, &reader_, *chunk_, move);
    left_ = std::move(move.extent);
    return moved;
  }
  absl::Status Move(TierKind to, NvmeExtent extent, bool keep_extent) {
    StateMove move{.to = to, .extent = std::move(extent), .keep_extent = keep_extent};
    return MoveState(tiers_.get(), nullptr, &reader_, *chunk_, move);
  }
  // The first value of an array, as a read has it; all others are the same.
  absl::StatusOr<uint8_t> Read(StateArray array) {
    absl::ReaderMutexLock reading(&chunk_->reading);
    return ReadWith([&](auto sink) { return reader_.Read(*chunk_, array, 0, kElements * sizeof(float), sink); });
  }
  template <typename ReadIt>
  static absl::StatusOr<uint8_t> ReadWith(ReadIt read) {
    std::vector<std::byte> found;
    const absl::Status status = read([&](uint64_t at, absl::Span<const std::byte> part) {
      EXPECT_EQ(at, found.size());
      found.insert(found.end(), part.begin(), part.end());
    });
    if (!status.ok()) return status;
    EXPECT_EQ(found.size(), kElements * sizeof(float));
    EXPECT_EQ(std::count(found.begin(), found.end(), found.front()), static_cast<std::ptrdiff_t>(found.size()));
    return static_cast<uint8_t>(found.front());
  }
  void ExpectState(uint8_t value) {
    for (const StateArray array : {StateArray::kMaster, StateArray::kMoment1, StateArray::kMoment2}) {
      const auto read = Read(array);
      ASSERT_TRUE(read.ok()) << read.status();
      EXPECT_EQ(*read, value);
    }
  }
  void Corrupt() {
    absl::ReaderMutexLock lock(&chunk_->mutex);
    const NvmeExtent& extent = chunk_->on_disk.extent();
    disk_.Corrupt(extent.file().path(), extent.offset() + layout_.ArrayAt(StateArray::kMoment2, kElements), 1);
  }
  // A corruption is seen once what was written is durable.
  void SyncDisk() { ASSERT_EQ(tiers_->nvme()->Sync({chunk_file()}), absl::OkStatus()); }
  NvmeFileId chunk_file() {
    absl::ReaderMutexLock lock(&chunk_->mutex);
    return chunk_->on_disk.extent().file_id();
  }

  SimDisk disk_{1};
  std::unique_ptr<Tiers> tiers_ = *Tiers::Open({.budget = {.dram = 8 << 20, .nvme = 1 << 20},
                                                .directory = std::filesystem::temp_directory_path(),
                                                .disk = &disk_});
  ChunkReader reader_{tiers_.get()};
  const StateLayout layout_{kernels::OptimizerSpec(), /*working_copies=*/false};
  DramBlock shared_ = *tiers_->dram()->Allocate(StateLayout().StateBytes(kElements), "a test");
  NvmeExtent left_;
  std::optional<StoredChunk> chunk_;
};

TEST_F(ChunkMoveTest, TheStateIsTheSameInBothTiersAndTheOldPlaceIsGivenBack) {
  Fill(7);
  const uint64_t dram = tiers_->used().dram;
  ASSERT_EQ(Move(TierKind::kNvme), absl::OkStatus());
  EXPECT_EQ(chunk_->memory.tier(), TierKind::kNvme);
  EXPECT_EQ(tiers_->used().dram, dram - bytes());
  ExpectState(7);
  ASSERT_EQ(Move(TierKind::kDram), absl::OkStatus());
  EXPECT_EQ(chunk_->memory.tier(), TierKind::kDram);
  EXPECT_EQ(tiers_->used().dram, dram);
  EXPECT_EQ(left_.bytes(), bytes()) << "the caller's to free";
  ExpectState(7);
}

TEST_F(ChunkMoveTest, AStateThatWasNeverUpdatedIsZeroWithoutARead) {
  ASSERT_EQ(Move(TierKind::kNvme), absl::OkStatus());
  const uint64_t reads = disk_.operations(SimOperation::kRead), writes = disk_.operations(SimOperation::kWrite);
  ExpectState(0);
  ASSERT_EQ(Move(TierKind::kDram), absl::OkStatus());
  ExpectState(0);
  EXPECT_EQ(disk_.operations(SimOperation::kRead), reads);
  EXPECT_EQ(disk_.operations(SimOperation::kWrite), writes);
}

TEST_F(ChunkMoveTest, ARottenStateDoesNotMove) {
  Fill(7);
  ASSERT_EQ(Move(TierKind::kNvme), absl::OkStatus());
  SyncDisk();
  Corrupt();
  const uint64_t dram = tiers_->used().dram;
  const absl::Status moved = Move(TierKind::kDram);
  EXPECT_EQ(moved.code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(model::ReasonOf(moved), model::kChecksum) << moved;
  EXPECT_EQ(chunk_->memory.tier(), TierKind::kNvme);
  EXPECT_EQ(tiers_->used().dram, dram);
  EXPECT_EQ(*Read(StateArray::kMaster), 7) << "what is whole stays readable";
  EXPECT_FALSE(Read(StateArray::kMoment2).ok());
}

TEST_F(ChunkMoveTest, AFailedWriteLeavesTheStateInMemory) {
  Fill(7);
  disk_.FailNext(SimOperation::kWrite, 1, SimFault::kEio);
  EXPECT_EQ(model::ReasonOf(Move(TierKind::kNvme)), model::kIo);
  EXPECT_EQ(left_.bytes(), bytes()) << "the caller's, as before";
  EXPECT_EQ(chunk_->memory.tier(), TierKind::kDram);
  ExpectState(7);
}

TEST_F(ChunkMoveTest, AFullBudgetLeavesTheStateOnTheDisk) {
  Fill(7);
  ASSERT_EQ(Move(TierKind::kNvme), absl::OkStatus());
  const DramBlock all = *tiers_->dram()->Allocate(tiers_->budget().dram - tiers_->used().dram, "all that is left");
  EXPECT_EQ(model::ReasonOf(Move(TierKind::kDram)), model::kBudget);
  EXPECT_EQ(chunk_->memory.tier(), TierKind::kNvme);
  ExpectState(7);
}

// Of a durable store: the extent has the durable version.
TEST_F(ChunkMoveTest, AnExtentThatIsKeptTakesTheStateBackWithoutAWrite) {
  Fill(7);
  ASSERT_EQ(Move(TierKind::kNvme), absl::OkStatus());
  ASSERT_EQ(Move(TierKind::kDram, {}, /*keep_extent=*/true), absl::OkStatus());
  ExpectState(7);
  const uint64_t writes = disk_.operations(SimOperation::kWrite);
  ASSERT_EQ(Move(TierKind::kNvme, {}, /*keep_extent=*/true), absl::OkStatus());
  EXPECT_EQ(disk_.operations(SimOperation::kWrite), writes);
  ExpectState(7);
}

// A chunk that an update is about to change, and a pin that keeps what it had.
class CopyOnWriteTest : public ChunkMoveTest {
 protected:
  // Copies for a pin, then updates the chunk to `value` in run 2.
  void Update(CopyOnWrite copy, uint8_t value) {
    {
      absl::MutexLock reading(&chunk_->reading);
      absl::MutexLock lock(&chunk_->mutex);
      std::move(copy).Install(*chunk_, 2);
    }
    if (chunk_->memory.tier() == TierKind::kDram) return Fill(value, 2);
    std::vector<std::byte> state(bytes(), static_cast<std::byte>(value));
    absl::MutexLock lock(&chunk_->mutex);
    const NvmeExtent& extent = chunk_->on_disk.extent();
    ASSERT_EQ(extent.home()->Write(extent.offset(), Aligned(state)), absl::OkStatus());
    chunk_->on_disk.SetDigests(DigestState(chunk_->View(aligned_.get()), {nullptr, [] {}}));
    chunk_->history.Update(2);
  }
  absl::Span<const std::byte> Aligned(const std::vector<std::byte>& from) {
    aligned_.reset(static_cast<std::byte*>(std::aligned_alloc(4096, from.size())));
    std::memcpy(aligned_.get(), from.data(), from.size());
    return {aligned_.get(), from.size()};
  }
  absl::StatusOr<CopyOnWrite> Prepare(bool extent_is_kept = false) {
    loaded_.assign(bytes(), std::byte{0});
    const bool on_nvme = chunk_->memory.tier() == TierKind::kNvme;
    std::fill_n(loaded_.begin(), layout_.LabelAt(kElements), std::byte{7});
    const std::byte* const loaded = on_nvme ? Aligned(loaded_).data() : nullptr;
    return CopyOnWrite::Prepare(tiers_.get(), nullptr, &reader_, *chunk_, loaded, extent_is_kept);
  }
  // What the pin reads after the run before the update.
  absl::StatusOr<uint8_t> Pinned(StateArray array = StateArray::kMoment1) {
    absl::ReaderMutexLock reading(&chunk_->reading);
    const PinnedCopy* copy = nullptr;
    {
      absl::ReaderMutexLock lock(&chunk_->mutex);
      copy = chunk_->history.Find(1);
    }
    if (copy == nullptr) return absl::NotFoundError("no copy");
    return ReadWith(
        [&](auto sink) { return reader_.ReadCopy(*chunk_, *copy, array, 0, kElements * sizeof(float), sink); });
  }
  // All of NVMe is taken.
  void FillNvme() { filler_ = *tiers_->nvme()->Promise(tiers_->budget().nvme - tiers_->used().nvme, "all"); }

  std::unique_ptr<std::byte, void (*)(void*)> aligned_{nullptr, std::free};
  std::vector<std::byte> loaded_;
  NvmeRoom filler_;
};

TEST_F(CopyOnWriteTest, APinKeepsStateInMemoryByACopyOnTheDisk) {
  Fill(7);
  const uint64_t nvme = tiers_->used().nvme;
  absl::StatusOr<CopyOnWrite> copy = Prepare();
  ASSERT_TRUE(copy.ok()) << copy.status();
  EXPECT_FALSE(copy->takes_extent());
  EXPECT_EQ(tiers_->used().nvme, nvme + bytes());
  EXPECT_EQ(tiers_->usage().parts[static_cast<size_t>(TierPart::kPins)].nvme, bytes());
  Update(*std::move(copy), 9);
  EXPECT_EQ(*Pinned(), 7);
  ExpectState(9);
}

TEST_F(CopyOnWriteTest, WithoutDiskTheCopyLiesInMemory) {
  Fill(7);
  FillNvme();
  absl::StatusOr<CopyOnWrite> copy = Prepare();
  ASSERT_TRUE(copy.ok()) << copy.status();
  EXPECT_EQ(tiers_->usage().parts[static_cast<size_t>(TierPart::kPins)].dram, bytes());
  Update(*std::move(copy), 9);
  EXPECT_EQ(*Pinned(), 7);
  ExpectState(9);
}

TEST_F(CopyOnWriteTest, WithoutRoomInEitherTierNothingIsTaken) {
  Fill(7);
  FillNvme();
  const DramBlock all = *tiers_->dram()->Allocate(tiers_->budget().dram - tiers_->used().dram, "all");
  const uint64_t dram = tiers_->used().dram;
  const absl::Status refused = Prepare().status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(model::ReasonOf(refused), model::kBudget) << refused;
  EXPECT_NE(refused.ToString().find("and in dram instead"), std::string::npos) << refused;
  EXPECT_EQ(tiers_->used().dram, dram);
  ExpectState(7);
}

TEST_F(CopyOnWriteTest, APinInheritsTheExtentOfStateOnTheDisk) {
  Fill(7);
  ASSERT_EQ(Move(TierKind::kNvme), absl::OkStatus());
  const uint64_t writes = disk_.operations(SimOperation::kWrite);
  absl::StatusOr<CopyOnWrite> copy = Prepare();
  ASSERT_TRUE(copy.ok()) << copy.status();
  EXPECT_TRUE(copy->takes_extent());
  EXPECT_EQ(disk_.operations(SimOperation::kWrite), writes) << "nothing is copied";
  Update(*std::move(copy), 9);
  EXPECT_EQ(*Pinned(), 7);
  ExpectState(9);
}

TEST_F(CopyOnWriteTest, AnExtentThatADurablePinKeepsIsCopied) {
  Fill(7);
  ASSERT_EQ(Move(TierKind::kNvme), absl::OkStatus());
  absl::StatusOr<CopyOnWrite> copy = Prepare(/*extent_is_kept=*/true);
  ASSERT_TRUE(copy.ok()) << copy.status();
  EXPECT_FALSE(copy->takes_extent());
  Update(*std::move(copy), 9);
  EXPECT_EQ(*Pinned(), 7);
  ExpectState(9);
}

TEST_F(CopyOnWriteTest, AStateBeforeItsFirstUpdateTakesNoSpace) {
  const TierBytes used = tiers_->used();
  absl::StatusOr<CopyOnWrite> copy = Prepare();
  ASSERT_TRUE(copy.ok()) << copy.status();
  EXPECT_EQ(tiers_->used().nvme, used.nvme);
  EXPECT_EQ(tiers_->used().dram, used.dram);
  Update(*std::move(copy), 9);
  EXPECT_EQ(*Pinned(), 0);
  ExpectState(9);
}

TEST_F(CopyOnWriteTest, ALostStateIsToldToReadersOfThePin) {
  Fill(7);
  Update(CopyOnWrite::Lost(*chunk_, absl::DataLossError("rotten")), 9);
  absl::ReaderMutexLock lock(&chunk_->mutex);
  ASSERT_NE(chunk_->history.Find(1), nullptr);
  EXPECT_EQ(chunk_->history.Find(1)->lost, absl::DataLossError("rotten"));
}

}  // namespace
}  // namespace ballast::storage
