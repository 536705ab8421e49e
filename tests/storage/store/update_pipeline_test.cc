// States on their way between disk and kernels: more chunks than slots, and a disk that fails.
#include "ballast/storage/store/update_pipeline.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <filesystem>
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

class UpdatePipelineTest : public ::testing::Test {
 protected:
  static constexpr uint64_t kElements = 256, kSlots = 2;

  UpdatePipelineTest() {
    staging_.Take(*tiers_->dram()->Allocate(kSlots * bytes(), "slots"));
    staging_.slot_bytes = bytes();
  }
  uint64_t bytes() const { return layout_.StateBytes(kElements); }

  // A chunk on the disk, each byte `value`; none: it was never updated.
  void AddOnDisk(std::optional<uint8_t> value) {
    NvmeExtent extent = *tiers_->nvme()->Allocate(bytes(), "a test");
    if (value.has_value()) {
      std::memset(page_.bytes().data(), *value, bytes());
      ASSERT_EQ(extent.home()->Write(extent.offset(), page_.bytes().first(bytes())), absl::OkStatus());
    }
    Add(TierKind::kNvme, nullptr, std::move(extent));
    absl::MutexLock lock(&chunks_.back().mutex);
    if (value.has_value()) chunks_.back().history.Update(1);
  }
  // A chunk in memory, which has an extent for its next version.
  void AddInMemory(std::byte* state) { Add(TierKind::kDram, state, *tiers_->nvme()->Allocate(bytes(), "a test")); }
  void Add(TierKind tier, std::byte* state, NvmeExtent extent) {
    const uint64_t index = chunks_.size();
    chunks_.emplace_back(layout_, index, kElements, index,
                         ChunkMemory({.state = tier, .working = std::nullopt}, {}, {.state = state}),
                         std::move(extent));
    pointers_.push_back(&chunks_.back());
  }
  void Start() {
    const absl::StatusOr<IoQueue*> queue = staging_.Queue(&disk_);
    ASSERT_TRUE(queue.ok()) << queue.status();
    pipeline_.emplace(pointers_, &staging_, *queue, tiers_.get(), nullptr);
  }
  // The kernel's turn: the state becomes `value` in memory, and is on its way back.
  absl::Status Update(size_t i, std::byte* state, uint8_t value) {
    std::memset(state, value, bytes());
    {
      absl::MutexLock lock(&chunks_[i].mutex);
      chunks_[i].on_disk.Stage(state);
    }
    return pipeline_->Store(i);
  }
  bool Staged(size_t i) {
    absl::ReaderMutexLock lock(&chunks_[i].mutex);
    return chunks_[i].on_disk.staged() != nullptr;
  }
  static bool All(const std::byte* state, uint64_t bytes, uint8_t value) {
    return std::all_of(state, state + bytes, [&](std::byte b) { return b == static_cast<std::byte>(value); });
  }
  bool OnDisk(size_t i, uint8_t value) {
    absl::ReaderMutexLock lock(&chunks_[i].mutex);
    const NvmeExtent& extent = chunks_[i].on_disk.extent();
    EXPECT_EQ(extent.file().Read(extent.offset(), page_.bytes().first(bytes())), absl::OkStatus());
    return All(page_.bytes().data(), bytes(), value);
  }

  SimDisk disk_{1};
  std::unique_ptr<Tiers> tiers_ = *Tiers::Open({.budget = {.dram = 1 << 20, .nvme = 1 << 20},
                                                .directory = std::filesystem::temp_directory_path(),
                                                .disk = &disk_});
  const StateLayout layout_{kernels::OptimizerSpec(), /*working_copies=*/false};
  Arena page_ = *Arena::Map(1 << 20);
  PipelineStaging staging_;
  std::deque<StoredChunk> chunks_;
  std::vector<StoredChunk*> pointers_;
  std::optional<UpdatePipeline> pipeline_;
};

TEST_F(UpdatePipelineTest, EachStatePassesItsKernelOnceAndGoesBackToItsExtent) {
  for (uint8_t i = 0; i < 7; ++i) AddOnDisk(i);
  Start();
  for (size_t i = 0; i < 7; ++i) {
    const absl::StatusOr<std::byte*> state = pipeline_->Load(i);
    ASSERT_TRUE(state.ok()) << state.status();
    EXPECT_TRUE(pipeline_->Loaded(i));
    ASSERT_TRUE(All(*state, bytes(), static_cast<uint8_t>(i))) << i;
    ASSERT_EQ(Update(i, *state, static_cast<uint8_t>(100 + i)), absl::OkStatus());
  }
  ASSERT_EQ(pipeline_->Drain(), absl::OkStatus());
  for (size_t i = 0; i < 7; ++i) {
    EXPECT_TRUE(OnDisk(i, static_cast<uint8_t>(100 + i))) << i;
    EXPECT_FALSE(Staged(i)) << "readers go to the disk again";
  }
  EXPECT_EQ(tiers_->traffic().read.nvme, 7 * bytes());
  EXPECT_EQ(tiers_->traffic().written.nvme, 7 * bytes());
}

TEST_F(UpdatePipelineTest, AStateThatWasNeverUpdatedIsZeroWithoutARead) {
  AddOnDisk(std::nullopt);
  std::memset(staging_.memory.bytes().data(), 9, kSlots * bytes());
  const uint64_t reads = disk_.operations(SimOperation::kRead);
  Start();
  const absl::StatusOr<std::byte*> state = pipeline_->Load(0);
  ASSERT_TRUE(state.ok()) << state.status();
  EXPECT_TRUE(All(*state, bytes(), 0));
  EXPECT_EQ(disk_.operations(SimOperation::kRead), reads);
}

TEST_F(UpdatePipelineTest, ChunksInMemoryTakeNoSlot) {
  Arena memory = *Arena::Map(bytes());
  AddOnDisk(1);
  for (int i = 0; i < 4; ++i) AddInMemory(memory.bytes().data());
  AddOnDisk(2);
  Start();
  ASSERT_TRUE(pipeline_->Load(0).ok());
  const absl::StatusOr<std::byte*> last = pipeline_->Load(5);
  ASSERT_TRUE(last.ok()) << last.status();
  EXPECT_TRUE(All(*last, bytes(), 2));
}

TEST_F(UpdatePipelineTest, AFailedReadIsTheLoadsErrorUnlessTheUpdateDoesWithoutIt) {
  AddOnDisk(1);
  AddOnDisk(2);
  disk_.FailNext(SimOperation::kRead, 1, SimFault::kEio);
  disk_.FailNext(SimOperation::kRead, 2, SimFault::kEio);
  Start();
  EXPECT_EQ(model::ReasonOf(pipeline_->Load(0).status()), model::kIo);
  absl::Status unreadable;
  const absl::StatusOr<std::byte*> restored = pipeline_->Load(1, &unreadable);
  ASSERT_TRUE(restored.ok()) << restored.status();
  EXPECT_EQ(model::ReasonOf(unreadable), model::kIo);
  ASSERT_EQ(Update(1, *restored, 5), absl::OkStatus());
  EXPECT_EQ(pipeline_->Drain(), absl::OkStatus()) << "a read that failed loses nothing";
  EXPECT_TRUE(OnDisk(1, 5));
}

TEST_F(UpdatePipelineTest, AFailedStoreEndsTheRunAndLeavesTheStateInMemory) {
  for (uint8_t i = 0; i < 5; ++i) AddOnDisk(i);
  Start();
  disk_.FailNext(SimOperation::kWrite, 1, SimFault::kEio);
  const absl::StatusOr<std::byte*> state = pipeline_->Load(0);
  ASSERT_TRUE(state.ok()) << state.status();
  ASSERT_EQ(Update(0, *state, 50), absl::OkStatus());
  EXPECT_EQ(model::ReasonOf(pipeline_->DrainStores()), model::kIo);
  EXPECT_TRUE(Staged(0));
  EXPECT_TRUE(All(*state, bytes(), 50)) << "what readers of the chunk get";
  absl::Status failed;
  for (size_t i = 1; i < 5 && failed.ok(); ++i) {
    const absl::StatusOr<std::byte*> next = pipeline_->Load(i);
    failed = next.ok() ? Update(i, *next, 51) : next.status();
  }
  EXPECT_EQ(model::ReasonOf(failed), model::kIo) << "no load waits for a slot that never comes";
  EXPECT_EQ(model::ReasonOf(pipeline_->Drain()), model::kIo);
}

TEST_F(UpdatePipelineTest, AFlushWritesStateThatStaysInMemory) {
  Arena memory = *Arena::Map(3 * bytes());
  for (uint8_t i = 0; i < 3; ++i) {
    std::memset(memory.bytes().data() + i * bytes(), 20 + i, bytes());
    AddInMemory(memory.bytes().data() + i * bytes());
  }
  AddOnDisk(1);
  Start();
  for (size_t i = 0; i < 3; ++i) ASSERT_EQ(pipeline_->Flush(i), absl::OkStatus());
  ASSERT_EQ(pipeline_->DrainStores(), absl::OkStatus());
  for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(OnDisk(i, static_cast<uint8_t>(20 + i)));
  EXPECT_EQ(pipeline_->Drain(), absl::OkStatus());
  EXPECT_EQ(tiers_->moved()[static_cast<int>(TierKind::kDram)][static_cast<int>(TierKind::kNvme)]
                           [static_cast<int>(MoveReason::kFlush)],
            3 * bytes());
}

TEST_F(UpdatePipelineTest, WithoutAQueueThereIsNothingToWaitFor) {
  AddInMemory(page_.bytes().data());
  pipeline_.emplace(pointers_, &staging_, nullptr, tiers_.get(), nullptr);
  pipeline_->Poll();
  EXPECT_EQ(pipeline_->Drain(), absl::OkStatus());
}

}  // namespace
}  // namespace ballast::storage
