// Which chunks go to the disk so that a log can be cut.
#include "ballast/services/journal/flushes.h"

#include <memory>
#include <vector>

#include "ballast/storage/log/gradient_log.h"
#include "ballast/tests/services/job_part.h"

namespace ballast::services {
namespace {

// A durable job, whose chunks lie in memory.
class FlushesTest : public JobPartTest {
 protected:
  FlushesTest() {
    spec_.set_durability(v1::DURABILITY_STEP);
    durable_ = true;
    record_ = [this](absl::Span<const storage::DurableChunk> chunks) {
      recorded_ += chunks.size();
      return recording_;
    };
  }
  void StartLog(uint64_t segments) {
    auto log = storage::GradientLog::Create(
        &disk_, {.path = "/data/log-job", .job = "job", .segment_bytes = uint64_t{1} << 20, .segment_count = segments});
    ASSERT_TRUE(log.ok()) << log.status();
    ASSERT_EQ(journal_.Start(*std::move(log), /*logged=*/true), absl::OkStatus());
  }
  std::shared_ptr<storage::ChunkStore> store() {
    JobMutexLock lock(&core_.mu);
    return core_.state.store();
  }
  // Updates of these chunks' first values, by step `step`.
  std::vector<storage::ChunkUpdate> UpdatesOf(const std::vector<uint64_t>& chunks, int64_t step) {
    std::vector<storage::ChunkUpdate> updates;
    for (const uint64_t chunk : chunks) {
      storage::ChunkUpdate& update = updates.emplace_back();
      update.chunk = chunk;
      update.version = step;
      update.values = {{.begin = 0, .values = values_}};
    }
    return updates;
  }
  // Marks, runs and flushes as a step does. Returns the chunks that went to the disk.
  std::vector<uint64_t> Step(const std::vector<uint64_t>& chunks, int64_t step) {
    std::vector<storage::ChunkUpdate> updates = UpdatesOf(chunks, step);
    std::vector<uint64_t> flushed = flushes_.Mark(store().get(), step, absl::MakeSpan(updates));
    EXPECT_EQ(store()->Run(updates, [](size_t) {}), absl::OkStatus());
    flushes_.SetApplied(step);
    EXPECT_EQ(flushes_.Run(store().get(), flushed), absl::OkStatus());
    for (const storage::ChunkUpdate& update : updates) {
      if (update.flush) flushed.push_back(update.chunk);
    }
    return flushed;
  }
  uint64_t StepsFree() {
    JobMutexLock lock(&core_.mu);
    return journal_.StepsFree().value_or(0);
  }
  uint64_t Dirty() {
    uint64_t dirty = 0;
    for (uint64_t chunk = 0; chunk < store()->chunk_count(); ++chunk) dirty += store()->dirty(chunk) ? 1 : 0;
    return dirty;
  }
  std::vector<uint64_t> All() {
    std::vector<uint64_t> chunks(store()->chunk_count());
    for (uint64_t i = 0; i < chunks.size(); ++i) chunks[i] = i;
    return chunks;
  }

  const std::vector<float> values_ = std::vector<float>(8, 1.0F);
  uint64_t recorded_ = 0;
  absl::Status recording_;
  Flushes flushes_{&core_, &journal_};
};

TEST_F(FlushesTest, WithoutALogNothingIsFlushed) {
  Open();
  EXPECT_TRUE(Step(All(), 0).empty());
  EXPECT_EQ(Dirty(), chunks_.size());
  EXPECT_EQ(flushes_.applied(), 0);
}

TEST_F(FlushesTest, AStepFlushesTheChunksThatHoldUpTheCut) {
  StartLog(12);
  Open();
  ASSERT_GE(chunks_.size(), 5u);
  ASSERT_GT(StepsFree(), 5u);
  EXPECT_LT(Step(All(), 0).size(), chunks_.size());
  std::vector<uint64_t> seen(chunks_.size());
  for (int64_t step = 1; step < 40; ++step) {
    for (const uint64_t chunk : Step(All(), step)) ++seen[chunk];
    ASSERT_EQ(flushes_.Harden(store().get()), absl::OkStatus());
  }
  for (const uint64_t times : seen) EXPECT_GT(times, 0) << "each has its turn";
}

TEST_F(FlushesTest, APostedFlushWritesAndRecordsWhateverIsDirtyOnce) {
  StartLog(40);
  Open();
  std::vector<storage::ChunkUpdate> updates = UpdatesOf(All(), 0);
  ASSERT_EQ(store()->Run(updates, [](size_t) {}), absl::OkStatus());
  flushes_.SetApplied(0);
  ASSERT_EQ(Dirty(), chunks_.size());
  Locked([&] {
    flushes_.Post();
    flushes_.Post();
  });
  EXPECT_EQ(recorded_, 0) << "the worker has not come to it";
  RunAll();
  EXPECT_EQ(recorded_, chunks_.size());
  EXPECT_EQ(Dirty(), 0);
  EXPECT_EQ(core_.counters.flushed_chunks, chunks_.size());
}

TEST_F(FlushesTest, RemovedAndVoidChunksArePassedOver) {
  StartLog(40);
  Open();
  std::vector<storage::ChunkUpdate> updates = UpdatesOf(All(), 0);
  ASSERT_EQ(store()->Run(updates, [](size_t) {}), absl::OkStatus());
  flushes_.SetApplied(0);
  ASSERT_EQ(store()->Remove({1}), absl::OkStatus());
  store()->Void({2});
  EXPECT_EQ(Dirty(), chunks_.size() - 2);
  std::vector<uint64_t> rest = All();
  std::erase_if(rest, [](uint64_t chunk) { return chunk == 1 || chunk == 2; });
  for (int64_t step = 1; step < 20; ++step) {
    for (const uint64_t chunk : Step(rest, step)) EXPECT_TRUE(chunk != 1 && chunk != 2) << chunk;
    ASSERT_EQ(flushes_.Harden(store().get()), absl::OkStatus());
  }
  Locked([&] { flushes_.Post(); });
  RunAll();
  EXPECT_EQ(Dirty(), 0);
  JobMutexLock lock(&core_.mu);
  EXPECT_EQ(core_.failure(), absl::OkStatus());
}

TEST_F(FlushesTest, AFailedFlushStopsTheJobWithTheReason) {
  StartLog(40);
  Open();
  std::vector<storage::ChunkUpdate> updates = UpdatesOf(All(), 0);
  ASSERT_EQ(store()->Run(updates, [](size_t) {}), absl::OkStatus());
  recording_ = absl::InternalError("the catalog failed");
  Locked([&] { flushes_.Post(); });
  RunAll();
  JobMutexLock lock(&core_.mu);
  EXPECT_THAT(core_.failure().ToString(), ::testing::HasSubstr("the catalog failed"));
  EXPECT_THAT(core_.failure().ToString(), ::testing::HasSubstr("chunks could not be flushed"));
}

}  // namespace
}  // namespace ballast::services
