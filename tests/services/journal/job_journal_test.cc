// Room that slices reserve in a job's log, without a server.

#include "ballast/services/journal/job_journal.h"

#include <gtest/gtest.h>

#include <vector>

#include "ballast/services/job_state/job_core.h"
#include "ballast/services/job_state/slice_room.h"
#include "ballast/services/job_state/surroundings.h"
#include "ballast/storage/io/disk.h"
#include "ballast/storage/log/gradient_log.h"
#include "ballast/tests/services/job_state.h"

namespace ballast::services {
namespace {

class NoHost : public StepHost {
 public:
  v1::ChunkNorm Norm(uint64_t, absl::string_view) override { return {}; }
  void Apply(const v1::PreparedRecord&, const v1::Decision&) override {}
  void Opened(std::shared_ptr<const model::EpochPlan>, const OpenChange&) override {}
  void PinDue(int64_t) override {}
  void PinChanged(const v1::PinnedVersion&) override {}
};

class JobJournalTest : public testing::Test {
 protected:
  static constexpr uint64_t kPayloadBytes = uint64_t{20} << 10;

  ~JobJournalTest() override { journal_.Stop(); }

  JobSurroundings Around() {
    JobSurroundings around;
    around.server_id = "s";
    around.tiers = job_.tiers.get();
    around.foundation = SystemFoundation();
    around.answers = around.step_answers = answers_.get();
    around.deadlines = &deadlines_;
    around.waiting = {&requests_max_, &bytes_max_};
    return around;
  }
  void Start(bool logged) {
    auto log = storage::GradientLog::Create(storage::SystemDisk(), {.path = directory_ / "log",
                                                                    .job = "job",
                                                                    .segment_bytes = uint64_t{256} << 10,
                                                                    .segment_count = 7,
                                                                    .transient = !logged});
    ASSERT_TRUE(log.ok()) << log.status();
    ASSERT_TRUE(journal_.Start(*std::move(log), logged).ok());
  }
  // The first chunk of the job, in an open epoch.
  std::shared_ptr<HeldChunk> Open() {
    const auto plan = PlanOf(MakeSpec("job", SmallModel()));
    const HeldChunks chunks = job_.ChunksOf(*plan);
    std::vector<uint64_t> indices;
    for (const auto& chunk : chunks) indices.push_back(chunk->id);
    JobMutexLock lock(&core_.mu);
    core_.state.Open(plan, chunks, indices);
    return chunks[0];
  }

  ScratchDirectory directory_;
  JobMemory job_;
  Deadlines deadlines_;
  std::atomic<uint64_t> count_{0}, bytes_{0};
  SharedBound requests_max_{100, &count_}, bytes_max_{1 << 20, &bytes_};
  const std::unique_ptr<Executor> answers_ = SystemFoundation()->MakeExecutor(1);
  NoHost host_;
  int flushes_ = 0;
  JobJournal journal_{"job", &core_, &room_, [this] { ++flushes_; }};
  JobCore core_{"job", Around(), &journal_, journal_.promises(), &host_, [](uint64_t) {}};
  SliceRoom room_{&core_};
};

// Nothing may be left to be cut then.
TEST_F(JobJournalTest, APushThatFindsTooLittleRoomIsWokenOnceNoneIsReserved) {
  const std::shared_ptr<HeldChunk> chunk = Open();
  Start(/*logged=*/true);
  Replies replies;
  {
    JobMutexLock lock(&core_.mu);
    std::vector<ReservedRoom::Lease> leases;
    while (auto room = journal_.Reserve(kPayloadBytes, /*leaves_memory=*/false)) leases.push_back(*std::move(room));
    EXPECT_GT(leases.size(), 10u);
    std::optional<ReservedRoom::Lease> mine;
    int attempts = 0;
    Waiter waiter;
    waiter.attempt = [&](Replies*) {
      core_.mu.AssertHeld();
      ++attempts;
      mine = journal_.Reserve(kPayloadBytes, /*leaves_memory=*/false);
      return mine.has_value();
    };
    core_.waiting.Submit(std::move(waiter), &chunk->pushes[0], &replies);
    journal_.WaitForCut();
    EXPECT_EQ(flushes_, 1);
    EXPECT_EQ(attempts, 1);
    while (leases.size() > 1) {
      journal_.GiveBack(std::move(leases.back()), &replies);
      leases.pop_back();
    }
    EXPECT_EQ(attempts, 1);
    journal_.GiveBack(std::move(leases.back()), &replies);
    EXPECT_EQ(attempts, 2);
    EXPECT_TRUE(mine.has_value());
    EXPECT_GT(journal_.use().waited, absl::ZeroDuration());
  }
  EXPECT_TRUE(replies.empty());
}

TEST_F(JobJournalTest, ASpillHasRoomOnlyForSlicesThatLeaveMemory) {
  (void)Open();
  Start(/*logged=*/false);
  JobMutexLock lock(&core_.mu);
  const auto stays = journal_.Reserve(kPayloadBytes, /*leaves_memory=*/false);
  const auto leaves = journal_.Reserve(kPayloadBytes, /*leaves_memory=*/true);
  ASSERT_TRUE(stays.has_value() && leaves.has_value());
  EXPECT_EQ(stays->bytes(), 0u);
  EXPECT_GE(leaves->bytes(), kPayloadBytes);
}

}  // namespace
}  // namespace ballast::services
