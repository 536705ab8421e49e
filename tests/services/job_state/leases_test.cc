#include "ballast/services/job_state/leases.h"

#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "ballast/services/job_state/held_chunk.h"
#include "ballast/storage/tier/tiers.h"
#include "ballast/tests/sim_disk/sim_disk.h"

namespace ballast::services {
namespace {

class LeasesTest : public ::testing::Test {
 protected:
  std::shared_ptr<HeldChunk> NewChunk() const {
    return std::make_shared<HeldChunk>(memory_, 0, 0, 65536, storage::StateForm::kFull, kernels::OptimizerSpec(),
                                       false);
  }
  std::shared_ptr<const void> Take(const std::shared_ptr<HeldChunk>& chunk) {
    JobMutexLock lock(&mu_);
    return leases_->Take(chunk, token_);
  }
  static absl::Status GoOn() { return absl::OkStatus(); }

  storage::SimDisk disk_{1};
  const std::unique_ptr<storage::Tiers> tiers_ = *storage::Tiers::Open(
      {.budget = {.dram = uint64_t{1} << 20}, .directory = std::filesystem::temp_directory_path(), .disk = &disk_});
  const std::shared_ptr<SliceMemory> memory_ = std::make_shared<SliceMemory>(tiers_.get());
  const std::shared_ptr<int> token_ = std::make_shared<int>();
  JobMutex mu_;
  std::shared_ptr<Leases> leases_ = std::make_shared<Leases>();
  const std::shared_ptr<HeldChunk> a_ = NewChunk(), b_ = NewChunk();
};

TEST_F(LeasesTest, LeasesAreCountedByChunkAndKeepTheMemory) {
  const absl::Time before = absl::Now();
  auto first = Take(a_), second = Take(a_);
  EXPECT_EQ(a_->leases.held(), 2u);
  EXPECT_EQ(b_->leases.held(), 0u);
  EXPECT_EQ(leases_->held(), 2u);
  EXPECT_GE(a_->leases.since(), absl::FromUnixNanos(absl::ToUnixNanos(before)));
  EXPECT_EQ(token_.use_count(), 3);
  const absl::Time since = a_->leases.since();
  first.reset();
  EXPECT_EQ(a_->leases.since(), since) << "it was leased all the time";
  second.reset();
  EXPECT_EQ(leases_->held(), 0u);
  EXPECT_EQ(token_.use_count(), 1);
}

TEST_F(LeasesTest, NoneIsTakenWhileTheyAreShutOut) {
  {
    const std::shared_ptr<void> shut = leases_->ShutOut();
    EXPECT_EQ(Take(a_), nullptr);
    EXPECT_EQ(leases_->held(), 0u);
    EXPECT_EQ(a_->leases.held(), 0u);
  }
  EXPECT_NE(Take(a_), nullptr);
}

TEST_F(LeasesTest, AWaitEndsWithTheLeasesThatItIsFor) {
  auto lease = Take(a_);
  const auto other = Take(b_);
  std::thread dropper([&] { lease.reset(); });
  EXPECT_EQ(leases_->Await([&] { return a_->leases.held() == 0; }, GoOn), absl::OkStatus());
  dropper.join();
  EXPECT_EQ(leases_->Await([&] { return leases_->held() == 1; }, GoOn), absl::OkStatus());
}

TEST_F(LeasesTest, AWaitCanBeInterrupted) {
  const auto lease = Take(a_);
  EXPECT_TRUE(absl::IsCancelled(
      leases_->Await([&] { return leases_->held() == 0; }, [] { return absl::CancelledError("stop"); })));
}

TEST_F(LeasesTest, WhoWantsNoneIsToldOnceTheLastEnds) {
  int told = 0;
  EXPECT_FALSE(leases_->OnceNone([&] { ++told; }));
  auto first = Take(a_), second = Take(b_);
  EXPECT_TRUE(leases_->OnceNone([&] { told += 10; }));
  EXPECT_TRUE(leases_->OnceNone([&] { ++told; })) << "in place of the first";
  first.reset();
  EXPECT_EQ(told, 0);
  second.reset();
  EXPECT_EQ(told, 1);
  Take(a_).reset();
  EXPECT_EQ(told, 1);
}

// Leases end on many threads, beside a wait for each: none is missed, and a lease may outlive its job.
TEST_F(LeasesTest, NoEndIsMissed) {
  for (int i = 0; i < 300; ++i) {
    std::vector<std::shared_ptr<const void>> held;
    for (int k = 0; k < 4; ++k) held.push_back(Take(k % 2 == 0 ? a_ : b_));
    std::vector<std::thread> droppers;
    for (auto& lease : held) droppers.emplace_back([mine = std::move(lease)]() mutable { mine.reset(); });
    std::atomic<bool> told = false;
    const bool later = leases_->OnceNone([&] { told = true; });
    ASSERT_EQ(leases_->Await([&] { return leases_->held() == 0; }, GoOn), absl::OkStatus());
    for (std::thread& dropper : droppers) dropper.join();
    ASSERT_EQ(told, later);
  }
  const auto last = Take(a_);
  leases_.reset();
}

}  // namespace
}  // namespace ballast::services
