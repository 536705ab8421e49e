// Rot in a job's states, found by its worker piece by piece; and whose turn it is.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "ballast/services/job/damaged_chunks.h"
#include "ballast/services/job/filling.h"
#include "ballast/services/job/kept_copies.h"
#include "ballast/services/job/kept_versions.h"
#include "ballast/services/job/scrub.h"
#include "ballast/services/job/scrubber.h"
#include "ballast/services/journal/flushes.h"
#include "ballast/storage/memory/arena.h"
#include "ballast/storage/tier/nvme_tier.h"
#include "ballast/tests/services/job_part.h"

namespace ballast::services {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class ScrubOfAJobTest : public JobPartTest {
 protected:
  ScrubOfAJobTest() {
    durable_ = true;
    record_ = [](absl::Span<const storage::DurableChunk>) { return absl::OkStatus(); };
  }
  // All chunks at a version of values, in memory and recorded on the disk.
  void FlushAll(int64_t version) {
    std::vector<storage::ChunkUpdate> updates;
    for (uint64_t chunk = 0; chunk < chunks_.size(); ++chunk) {
      storage::ChunkUpdate& update = updates.emplace_back();
      update.chunk = chunk;
      update.version = version;
      update.values = {{.begin = 0, .values = values_}};
      update.flush = true;
    }
    ASSERT_EQ(store()->Run(updates, [](size_t) {}), absl::OkStatus());
    ASSERT_EQ(store()->Harden(), absl::OkStatus());
    flushes_.SetApplied(version);
  }
  std::shared_ptr<storage::ChunkStore> store() {
    JobMutexLock lock(&core_.mu);
    return core_.state.store();
  }
  void Corrupt(uint64_t chunk) {
    const storage::DurableChunk entry = store()->Extents(chunk).at(0).entry;
    disk_.Corrupt(tiers_->nvme()->file(entry.file).path(), entry.offset + 5, 1);
  }
  // A pass, to its end.
  v1::ScrubStatus Pass() {
    v1::ScrubStatus status = Describe();
    const uint64_t passes = status.passes();
    for (int i = 0; i < 1000 && status.passes() == passes; ++i) {
      scrub_.Next(buffer_.bytes());
      status = Describe();
    }
    EXPECT_EQ(status.passes(), passes + 1);
    return status;
  }
  v1::ScrubStatus Describe() {
    JobMutexLock lock(&core_.mu);
    return scrub_.Describe();
  }

  const std::vector<float> values_ = std::vector<float>(100, 2.0F);
  storage::Arena buffer_ = *storage::Arena::Map(64 << 10);
  Flushes flushes_{&core_, &journal_};
  KeptCopies kept_copies_{&core_, &journal_};
  KeptVersions kept_versions_{&core_, &journal_, &flushes_, &kept_copies_};
  Filling filling_{&core_, &kept_copies_, &kept_versions_};
  DamagedChunks damaged_{&core_, &filling_, &kept_copies_};
  Scrub scrub_{&core_, &flushes_, &damaged_};
};

TEST_F(ScrubOfAJobTest, APassReadsAllStatesAndFindsNothing) {
  scrub_.Next(buffer_.bytes());
  Open();
  FlushAll(0);
  EXPECT_EQ(scrub_.last_pass(), absl::InfinitePast());
  const v1::ScrubStatus status = Pass();
  EXPECT_GT(scrub_.last_pass(), absl::InfinitePast());
  EXPECT_EQ(status.damaged(), 0);
  EXPECT_EQ(status.total_bytes(), tiers_->usage().parts[static_cast<size_t>(storage::TierPart::kState)].nvme);
  EXPECT_EQ(status.read_bytes(), status.total_bytes());
}

TEST_F(ScrubOfAJobTest, AStateThatMemoryHasNewerIsFlushed) {
  Open();
  FlushAll(0);
  std::vector<storage::ChunkUpdate> updates(1);
  updates[0].chunk = 1;
  updates[0].version = 1;
  updates[0].values = {{.begin = 3, .values = values_}};
  ASSERT_EQ(store()->Run(updates, [](size_t) {}), absl::OkStatus());
  ASSERT_TRUE(store()->dirty(1));
  flushes_.SetApplied(1);
  Corrupt(1);
  EXPECT_EQ(Pass().mended(), 1);
  EXPECT_FALSE(store()->dirty(1));
  EXPECT_EQ(store()->durable_version(1), 1);
}

class ScrubberTest : public ::testing::Test {
 protected:
  Scrubber::Jobs Jobs() {
    Scrubber::Jobs jobs;
    for (const auto& [name, last_pass] : last_passes_) {
      jobs[name] = {last_pass, [this, name = name](absl::Span<std::byte> buffer, std::shared_ptr<void> lease) {
                      EXPECT_EQ(buffer.size(), Scrubber::kPieceBytes);
                      read_.push_back(name);
                      lease_ = std::move(lease);
                    }};
    }
    return jobs;
  }
  void Turns(int count) {
    for (int i = 0; i < count; ++i) {
      scrubber_.Next();
      lease_.reset();
    }
  }

  std::map<std::string, absl::Time> last_passes_;
  std::vector<std::string> read_;
  std::shared_ptr<void> lease_;
  Deadlines deadlines_;
  Scrubber scrubber_{1 << 20, &deadlines_, [this] { return Jobs(); }};
};

TEST_F(ScrubberTest, JobsTakeTurns) {
  Turns(2);
  EXPECT_TRUE(read_.empty()) << "there is none";
  for (const char* name : {"a", "b", "c"}) last_passes_[name] = absl::InfinitePast();
  Turns(4);
  last_passes_.erase("b");
  Turns(2);
  EXPECT_THAT(read_, ElementsAre("a", "b", "c", "a", "c", "a"));
}

TEST_F(ScrubberTest, AJobThatWasReadAMomentAgoIsPassedOver) {
  last_passes_ = {{"a", absl::Now()}, {"b", absl::InfinitePast()}};
  Turns(2);
  EXPECT_THAT(read_, ElementsAre("b", "b"));
  last_passes_["b"] = absl::Now();
  last_passes_["a"] = absl::Now() - 2 * Scrubber::kBetweenPasses;
  Turns(1);
  EXPECT_THAT(read_, ElementsAre("b", "b", "a"));
}

TEST_F(ScrubberTest, OnePieceIsReadAtATime) {
  last_passes_ = {{"a", absl::InfinitePast()}};
  scrubber_.Next();
  scrubber_.Next();
  EXPECT_THAT(read_, ElementsAre("a")) << "the worker has not come to it";
  lease_.reset();
  scrubber_.Next();
  EXPECT_THAT(read_, ElementsAre("a", "a"));
  scrubber_.Stop();
  lease_.reset();
  scrubber_.Next();
  EXPECT_EQ(read_.size(), 2);
}

}  // namespace
}  // namespace ballast::services
