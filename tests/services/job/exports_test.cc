// Whole chunks for other servers: which ones, at which version, and within which room.
#include "ballast/services/job/exports.h"

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "ballast/proto/base/status.h"
#include "ballast/services/job/damaged_chunks.h"
#include "ballast/services/job/filling.h"
#include "ballast/services/job/kept_copies.h"
#include "ballast/services/job/kept_versions.h"
#include "ballast/services/journal/flushes.h"
#include "ballast/tests/services/job_part.h"

namespace ballast::services {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kExportedLife = 77;

class ExportsTest : public JobPartTest {
 protected:
  ~ExportsTest() override {
    EndTimers();
    core_.JoinThreads();
  }
  void OpenWithTable() {
    v1::Table table;
    v1::Member* const member = table.add_members();
    member->set_server_id("s");
    member->set_weight(1);
    table.set_replicas(1);
    table.set_life(kExportedLife);
    table.add_shards()->add_holders(0);
    table_ = table;
    Open();
  }
  v1::ExportRequest RequestOf(uint64_t chunk, int64_t least) const {
    v1::ExportRequest request;
    request.set_job("job");
    request.set_life(kExportedLife);
    request.set_spec_digest(model::SpecDigest(spec_));
    request.set_chunk(chunk);
    request.set_least(least);
    return request;
  }
  Answer<ExportedChunk> Begin(const v1::ExportRequest& request, const CallLimit& limit = absl::InfiniteFuture()) {
    Answer<ExportedChunk> answer;
    exports_.Export(request, limit, answer.reply());
    RunAll();
    return answer;
  }
  void ExpectRefused(const v1::ExportRequest& request, absl::StatusCode code, const char* reason, const char* words) {
    Answer<ExportedChunk> answer = Begin(request);
    ASSERT_TRUE(answer.arrived()) << "it waits";
    const absl::Status status = answer.Wait().status();
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_EQ(model::ReasonOf(status), reason) << status;
    EXPECT_THAT(status.ToString(), HasSubstr(words));
  }
  storage::WholeState Whole(uint64_t chunk) {
    JobMutexLock lock(&core_.mu);
    absl::StatusOr<storage::WholeState> state = core_.state.store()->ReadWhole(chunk);
    EXPECT_TRUE(state.ok()) << state.status();
    return *std::move(state);
  }

  Flushes flushes_{&core_, &journal_};
  KeptCopies kept_copies_{&core_, &journal_};
  KeptVersions kept_versions_{&core_, &journal_, &flushes_, &kept_copies_};
  Filling filling_{&core_, &kept_copies_, &kept_versions_};
  DamagedChunks damaged_{&core_, &filling_, &kept_copies_};
  Exports exports_{&core_, &damaged_};
};

TEST_F(ExportsTest, AChunkIsExportedAsItIs) {
  OpenWithTable();
  StepOfValues(3);
  Step(UpdateHeader(tensors()), 0.5f);
  Answer<ExportedChunk> answer = Begin(RequestOf(1, 0));
  ASSERT_TRUE(answer.arrived());
  const absl::StatusOr<ExportedChunk> chunk = answer.Wait();
  ASSERT_TRUE(chunk.ok()) << chunk.status();
  EXPECT_EQ(chunk->head.version(), 1);
  EXPECT_EQ(chunk->head.changed(), 1);
  EXPECT_EQ(chunk->head.elements(), chunks_[1]->elements);
  EXPECT_NE(chunk->room, nullptr);
  const storage::WholeState whole = Whole(1);
  ASSERT_EQ(chunk->state.arrays.size(), 3u) << "AdamW: masters and two moments";
  ASSERT_EQ(whole.arrays.size(), 3u);
  uint64_t bytes = 0;
  for (size_t i = 0; i < whole.arrays.size(); ++i) {
    EXPECT_TRUE(chunk->state.arrays[i].bytes == whole.arrays[i].bytes) << "array " << i;
    EXPECT_EQ(chunk->state.arrays[i].crc32c, kernels::Crc32c(whole.arrays[i].bytes));
    bytes += whole.arrays[i].bytes.size();
  }
  EXPECT_EQ(core_.counters.exported_bytes, bytes);
}

// After a power cut the disk may have a step whose decision the log has lost. Who takes the copy for older than it is
// would, after a power cut of its own, take an older state for the newest.
TEST_F(ExportsTest, AChunkAheadOfTheLogIsToldAsChangedByTheStepThatItHas) {
  OpenWithTable();
  StepOfValues(3);
  v1::StepHeader header = UpdateHeader(tensors());
  header.set_gradient_presence(model::MakeBitmap(tensors(), {}));
  const std::optional<v1::PreparedRecord> record = Prepare(header);
  ASSERT_TRUE(record.has_value());
  Commit(*record);  // leaves all chunks as they were
  Locked([&] { chunks_[1]->Reach(2); });
  const auto exported = [&](uint64_t chunk) {
    Answer<ExportedChunk> answer = Begin(RequestOf(chunk, 1));
    EXPECT_TRUE(answer.arrived() && answer.Wait().ok()) << answer.Wait().status();
    return std::pair(answer.Wait()->head.version(), answer.Wait()->head.changed());
  };
  EXPECT_EQ(exported(0), std::pair(int64_t{1}, int64_t{0}));
  EXPECT_EQ(exported(1), std::pair(int64_t{2}, int64_t{2}));
}

TEST_F(ExportsTest, AnExportWaitsForItsVersion) {
  OpenWithTable();
  StepOfValues(3);
  Answer<ExportedChunk> answer = Begin(RequestOf(0, 1));
  EXPECT_FALSE(answer.arrived());
  StepOfValues(4);
  ASSERT_TRUE(answer.arrived());
  ASSERT_TRUE(answer.Wait().ok());
  EXPECT_EQ(answer.Wait()->head.version(), 1);
  float value = 0;
  std::memcpy(&value, answer.Wait()->state.arrays[0].bytes.data(), sizeof(value));
  EXPECT_EQ(value, 4);
}

TEST_F(ExportsTest, AnExportEndsAtItsDeadlineAndSaysForWhatItWaited) {
  OpenWithTable();
  StepOfValues(3);
  Answer<ExportedChunk> answer = Begin(RequestOf(0, 9), absl::Now() + absl::Hours(1));
  EXPECT_FALSE(answer.arrived());
  for (uint64_t id = 1; id < 100; ++id) core_.Expire(id);
  RunAll();
  ASSERT_TRUE(answer.arrived());
  EXPECT_TRUE(absl::IsDeadlineExceeded(answer.Wait().status()));
  EXPECT_THAT(answer.Wait().status().ToString(), HasSubstr("chunk 0 was at version 0, wanted at 9 or later"));
}

TEST_F(ExportsTest, WhatIsNotMeantIsRefusedByName) {
  ExpectRefused(RequestOf(0, 0), absl::StatusCode::kFailedPrecondition, model::kNotOpen, "was not opened yet");
  OpenWithTable();
  StepOfValues(3);
  v1::ExportRequest other = RequestOf(0, 0);
  other.set_life(78);
  ExpectRefused(other, absl::StatusCode::kNotFound, model::kUnknownJob, "is not the job that the asking server has");
  other.set_life(0);
  ExpectRefused(other, absl::StatusCode::kNotFound, model::kUnknownJob, "is not the job that the asking server has");
  other = RequestOf(0, 0);
  other.set_spec_digest("another");
  ExpectRefused(other, absl::StatusCode::kFailedPrecondition, model::kBehind, "has not opened the spec");
  ExpectRefused(RequestOf(chunks_.size(), 0), absl::StatusCode::kInvalidArgument, model::kBadRequest,
                "does not have chunk");
  Locked([&] { chunks_[0]->Void(0); });
  ExpectRefused(RequestOf(0, 0), absl::StatusCode::kFailedPrecondition, model::kNotOpen, "lacks chunk 0 of job 'job'");
  EXPECT_EQ(core_.counters.exported_bytes, 0u);
}

TEST_F(ExportsTest, AChunkThatGoesMeanwhileIsRefused) {
  OpenWithTable();
  StepOfValues(3);
  Answer<ExportedChunk> answer = Begin(RequestOf(0, 1));
  Locked([&](Replies* replies) {
    chunks_[0]->Void(0);
    core_.waiting.Wake(&chunks_[0]->pulls, replies);
  });
  RunAll();
  ASSERT_TRUE(answer.arrived());
  EXPECT_EQ(model::ReasonOf(answer.Wait().status()), model::kNotOpen) << answer.Wait().status();
}

TEST_F(ExportsTest, AnExportWaitsForRoom) {
  OpenWithTable();
  StepOfValues(3);
  // The state of a chunk of 2^16 elements takes three quarters of the room.
  Answer<ExportedChunk> first = Begin(RequestOf(0, 0));
  ASSERT_TRUE(first.arrived());
  std::optional<ExportedChunk> kept(*first.Wait());
  first = Answer<ExportedChunk>();
  Answer<ExportedChunk> second = Begin(RequestOf(1, 0));
  EXPECT_FALSE(second.arrived());
  kept.reset();
  RunAll();
  ASSERT_TRUE(second.arrived());
  EXPECT_TRUE(second.Wait().ok()) << second.Wait().status();
}

TEST_F(ExportsTest, AServerThatIsGoneIsNotReadFor) {
  OpenWithTable();
  StepOfValues(3);
  const auto caller = std::make_shared<Caller>();
  Answer<ExportedChunk> answer;
  exports_.Export(RequestOf(0, 0), CallLimit(absl::InfiniteFuture(), caller), answer.reply());
  caller->Leave();  // the worker has not run
  RunAll();
  ASSERT_TRUE(answer.arrived());
  EXPECT_TRUE(absl::IsCancelled(answer.Wait().status()));
  EXPECT_EQ(core_.counters.exported_bytes, 0u);
}

}  // namespace
}  // namespace ballast::services
