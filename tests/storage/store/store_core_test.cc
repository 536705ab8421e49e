// The parts of a chunk store over one core: chunks are added, run, and scrubbed.
#include "ballast/storage/store/store_core.h"

#include <filesystem>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "ballast/proto/base/status.h"
#include "ballast/storage/io/interrupt.h"
#include "ballast/storage/memory/arena.h"
#include "ballast/storage/store/store_addition.h"
#include "ballast/storage/store/store_run.h"
#include "ballast/storage/store/store_scrub.h"
#include "ballast/tests/sim_disk/sim_disk.h"
#include "gtest/gtest.h"

namespace ballast::storage {
namespace {

class StoreCoreTest : public ::testing::Test {
 protected:
  static constexpr uint64_t kElements = 512;

  ~StoreCoreTest() override { core_.reset(); }
  void Use(bool durable) {
    std::optional<DurableOptions> options;
    if (durable) options = {.job = "job", .record = [](absl::Span<const DurableChunk>) { return absl::OkStatus(); }};
    core_ = std::make_unique<StoreCore>(tiers_.get(), layout_, nullptr, std::move(options), nullptr);
  }
  absl::Status Add(const std::vector<TierKind>& tiers, uint64_t elements = kElements) {
    std::vector<ChunkToAdd> added;
    Plan plan;
    for (const TierKind tier : tiers) {
      added.push_back({.elements = elements, .id = added.size()});
      plan.chunks.push_back({.state = tier});
    }
    return StoreAddition(core_.get(), added, plan).Run(Uninterrupted);
  }
  // Every value of these chunks becomes `value`.
  absl::Status Run(const std::vector<uint64_t>& chunks, float value, Interrupt interrupt = Uninterrupted) {
    std::fill(values_.begin(), values_.end(), value);
    std::vector<ChunkUpdate> updates;
    for (const uint64_t chunk : chunks) {
      ChunkUpdate& update = updates.emplace_back();
      update.chunk = chunk;
      update.values = {{.begin = 0, .values = values_}};
      update.version = version_;
      update.flush = core_->versions.has_value();
    }
    ++version_;
    done_.clear();
    const auto done = [this](size_t i) { done_.push_back(i); };
    StoreRun run(core_.get(), done, UnobservedStage);
    return run.Run(updates, {}, interrupt);
  }
  float Value(uint64_t chunk) {
    float first = -1;
    StoredChunk& stored = **core_->chunks.Find(chunk);
    absl::ReaderMutexLock reading(&stored.reading);
    const absl::Status status = core_->buffers.reader.Read(
        stored, StateArray::kMaster, (kElements - 1) * sizeof(float), sizeof(float),
        [&](uint64_t, absl::Span<const std::byte> bytes) { std::memcpy(&first, bytes.data(), sizeof(first)); });
    EXPECT_EQ(status, absl::OkStatus());
    return first;
  }
  // A whole pass: the outcome of each extent.
  std::vector<ScrubPiece> Scrub() {
    std::vector<ScrubPiece> checked;
    for (int i = 0; i < 1000; ++i) {
      ScrubPiece piece = core_->scrub.Next(*core_, buffer_.bytes());
      if (piece.pass_over) return checked;
      if (piece.checked.has_value()) checked.push_back(std::move(piece));
    }
    ADD_FAILURE() << "a pass without an end";
    return checked;
  }

  SimDisk disk_{1};
  std::unique_ptr<Tiers> tiers_ = *Tiers::Open({.budget = {.dram = 16 << 20, .nvme = 4 << 20},
                                                .directory = std::filesystem::temp_directory_path(),
                                                .staging_bytes = 2 << 20,
                                                .disk = &disk_});
  const StateLayout layout_{kernels::OptimizerSpec()};
  Arena buffer_ = *Arena::Map(8192);
  std::vector<float> values_ = std::vector<float>(kElements);
  int64_t version_ = 0;
  std::vector<size_t> done_;
  std::unique_ptr<StoreCore> core_;
};

TEST_F(StoreCoreTest, ChunksAreAddedAllOrNone) {
  Use(/*durable=*/false);
  const TierBytes used = tiers_->used();
  const absl::Status large = Add({TierKind::kDram, TierKind::kNvme}, /*elements=*/1 << 20);
  EXPECT_EQ(model::ReasonOf(large), model::kBudget) << large;
  EXPECT_EQ(core_->chunks.count(), 0);
  EXPECT_EQ(tiers_->used().dram, used.dram);
  EXPECT_EQ(tiers_->used().nvme, used.nvme);
  const absl::Status empty = Add({TierKind::kDram}, /*elements=*/0);
  EXPECT_EQ(model::ReasonOf(empty), model::kBadRequest) << empty;
  ASSERT_EQ(Add({TierKind::kDram, TierKind::kNvme}), absl::OkStatus());
  ASSERT_EQ(Add({TierKind::kNvme}), absl::OkStatus());
  EXPECT_EQ(core_->chunks.count(), 3);
  for (const uint64_t chunk : {0, 1, 2}) EXPECT_EQ(Value(chunk), 0);
}

TEST_F(StoreCoreTest, AddedChunksHaveOneEntryEachInThePlan) {
  Use(/*durable=*/false);
  const std::vector<ChunkToAdd> added(2, ChunkToAdd{.elements = kElements});
  Plan plan;
  plan.chunks.resize(1);
  const absl::Status status = StoreAddition(core_.get(), added, plan).Run(Uninterrupted);
  EXPECT_EQ(model::ReasonOf(status), model::kBadRequest) << status;
}

TEST_F(StoreCoreTest, ARunAnnouncesItsUpdatesInOrder) {
  Use(/*durable=*/false);
  ASSERT_EQ(Add({TierKind::kDram, TierKind::kNvme, TierKind::kDram}), absl::OkStatus());
  ASSERT_EQ(Run({2, 1, 0}, 3), absl::OkStatus());
  EXPECT_EQ(done_, (std::vector<size_t>{0, 1, 2}));
  for (const uint64_t chunk : {0, 1, 2}) EXPECT_EQ(Value(chunk), 3);
  ASSERT_EQ(Run({1}, 4), absl::OkStatus());
  EXPECT_EQ(Value(0), 3);
  EXPECT_EQ(Value(1), 4);
}

TEST_F(StoreCoreTest, AnUpdateThatIsRefusedKeepsAllOthersOut) {
  Use(/*durable=*/false);
  ASSERT_EQ(Add({TierKind::kDram, TierKind::kNvme}), absl::OkStatus());
  ASSERT_EQ(Run({0, 1}, 3), absl::OkStatus());
  EXPECT_EQ(model::ReasonOf(Run({0, 9}, 4)), model::kBadRange);
  EXPECT_EQ(model::ReasonOf(Run({0, 1, 0}, 4)), model::kBadRequest) << "twice in one run";
  EXPECT_TRUE(done_.empty());
  EXPECT_EQ(Value(0), 3);
  EXPECT_EQ(Value(1), 3);
}

TEST_F(StoreCoreTest, AnInterruptedRunLeavesTheRestAsItWas) {
  Use(/*durable=*/false);
  ASSERT_EQ(Add({TierKind::kDram, TierKind::kNvme, TierKind::kDram}), absl::OkStatus());
  int asked = 0;
  const auto interrupt = [&] { return ++asked < 3 ? absl::OkStatus() : absl::CancelledError("dropped"); };
  EXPECT_EQ(Run({0, 1, 2}, 3, interrupt), absl::CancelledError("dropped"));
  EXPECT_EQ(done_, (std::vector<size_t>{0, 1}));
  EXPECT_EQ(Value(1), 3);
  EXPECT_EQ(Value(2), 0);
  ASSERT_EQ(Run({2}, 4), absl::OkStatus()) << "the store goes on";
  EXPECT_EQ(Value(2), 4);
}

TEST_F(StoreCoreTest, AFailedStoreRefusesEveryFurtherRun) {
  Use(/*durable=*/false);
  ASSERT_EQ(Add({TierKind::kNvme}), absl::OkStatus());
  disk_.FailNext(SimOperation::kWrite, 1, SimFault::kEio);
  EXPECT_EQ(model::ReasonOf(Run({0}, 3)), model::kIo);
  const absl::Status failed = core_->failed();
  EXPECT_FALSE(failed.ok());
  EXPECT_EQ(Run({0}, 4), failed);
  EXPECT_EQ(Add({TierKind::kDram}), failed);
}

TEST_F(StoreCoreTest, AScrubFindsRotInThePlaceWhereItIs) {
  Use(/*durable=*/true);
  ASSERT_EQ(Add({TierKind::kDram, TierKind::kDram}), absl::OkStatus());
  EXPECT_TRUE(Scrub().empty()) << "nothing was written";
  ASSERT_EQ(Run({0, 1}, 3), absl::OkStatus());
  ASSERT_EQ(core_->Harden(), absl::OkStatus());
  std::vector<ScrubPiece> pass = Scrub();
  EXPECT_EQ(core_->scrub.pass_bytes(), 2 * layout_.StateBytes(kElements));
  ASSERT_EQ(pass.size(), 2);
  for (const ScrubPiece& piece : pass) EXPECT_EQ(piece.found, absl::OkStatus());

  const DurableChunk& second = pass[1].checked->entry;
  disk_.Corrupt(tiers_->nvme()->file(second.file).path(), second.offset + 100, 1);
  pass = Scrub();
  ASSERT_EQ(pass.size(), 2);
  EXPECT_EQ(pass[0].found, absl::OkStatus());
  EXPECT_EQ(model::ReasonOf(pass[1].found), model::kChecksum) << pass[1].found;
  EXPECT_EQ(pass[1].checked->chunk, 1);
  EXPECT_TRUE(pass[1].checked->in_memory);
  EXPECT_FALSE(pass[1].checked->dirty);

  ASSERT_EQ(StoreScrub::Rewrite(core_.get(), *pass[1].checked), absl::OkStatus());
  pass = Scrub();
  ASSERT_EQ(pass.size(), 2);
  EXPECT_EQ(pass[1].found, absl::OkStatus());
}

TEST_F(StoreCoreTest, MemoryThatDiffersNeverReplacesAnExtent) {
  Use(/*durable=*/true);
  ASSERT_EQ(Add({TierKind::kDram}), absl::OkStatus());
  ASSERT_EQ(Run({0}, 3), absl::OkStatus());
  ASSERT_EQ(core_->Harden(), absl::OkStatus());
  const ScrubbedExtent extent = StoreScrub::ExtentsOf(*core_, **core_->chunks.Find(0)).at(0);
  (*core_->chunks.Find(0))->memory.state()[5] ^= std::byte{1};
  const absl::Status refused = StoreScrub::Rewrite(core_.get(), extent);
  EXPECT_EQ(model::ReasonOf(refused), model::kChecksum) << refused;
  EXPECT_EQ(Scrub().at(0).found, absl::OkStatus()) << "the extent is as it was";
}

}  // namespace
}  // namespace ballast::storage
