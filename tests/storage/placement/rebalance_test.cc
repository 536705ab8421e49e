#include "ballast/storage/placement/rebalance.h"

#include <algorithm>
#include <string>

#include "ballast/proto/base/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ballast::storage {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kEqualChunk = uint64_t{1} << 16;
constexpr uint64_t kEqualState = 3 * 4 * kEqualChunk + StateLayout::kLabelBytes;
constexpr uint64_t kStaging = 3 * kEqualState;
constexpr uint64_t kOther = 12345;  // what else DRAM and NVMe hold

JobHolding Job(const std::string& name, uint64_t dram, uint64_t nvme, bool durable = false) {
  JobHolding job{.name = name, .durable = durable, .staging_bytes_missing = nvme > 0 ? 0 : kStaging};
  job.chunks.resize(dram, {kEqualChunk, {.state = TierKind::kDram}});
  job.chunks.resize(dram + nvme, {kEqualChunk, {.state = TierKind::kNvme}});
  return job;
}

std::string Letters(const Plan& plan) {
  std::string letters;
  for (const ChunkPlacement& chunk : plan.chunks) letters += TierName(chunk.state)[0];
  return letters;
}

TierBytes Used(uint64_t dram_chunks, uint64_t nvme_chunks) {
  return {.dram = kOther + dram_chunks * kEqualState, .nvme = kOther + nvme_chunks * kEqualState};
}

TEST(RebalanceTest, LessDramSendsTheLastChunksDown) {
  const TierBytes budget{.dram = kOther + kStaging + kEqualState, .nvme = kOther + 4 * kEqualState};
  const auto targets = PlanBudgets(budget, Used(5, 0), {Job("a", 5, 0)});
  ASSERT_TRUE(targets.ok()) << targets.status();
  EXPECT_EQ(Letters((*targets)[0]), "dnnnn");
  // Buffers for moving are needed only if something has to go.
  const auto all = PlanBudgets({.dram = kOther + 5 * kEqualState, .nvme = kOther}, Used(5, 0), {Job("a", 5, 0)});
  EXPECT_EQ(Letters((*all)[0]), "ddddd");
}

TEST(RebalanceTest, MoreDramBringsThemBack) {
  const auto letters = [&](uint64_t dram) {
    return Letters((*PlanBudgets({.dram = dram, .nvme = kOther + 5 * kEqualState}, Used(1, 4), {Job("a", 1, 4)}))[0]);
  };
  EXPECT_EQ(letters(kOther + 5 * kEqualState), "ddddd");
  EXPECT_EQ(letters(kOther + 5 * kEqualState - 1), "ddddn");
  EXPECT_EQ(letters(kOther), "nnnnn") << "state alone moves, and all of it may";
}

// Each chunk goes where it would go if those that were removed had never been there.
TEST(RebalanceTest, GapsTakeNothing) {
  JobHolding job = Job("a", 5, 0), with_gaps = job;
  job.pull = with_gaps.pull = PullMemory();
  for (const std::ptrdiff_t at : {5, 3, 0, 0}) {
    with_gaps.chunks.insert(with_gaps.chunks.begin() + at, PlacedChunk::Gap());
  }
  for (const uint64_t chunks : {0, 1, 3, 5}) {
    const TierBytes budget{.dram = kOther + kStaging + chunks * kEqualState, .nvme = kOther + 5 * kEqualState};
    const auto plain = PlanBudgets(budget, Used(5, 0), {job}), plan = PlanBudgets(budget, Used(5, 0), {with_gaps});
    ASSERT_TRUE(plan.ok()) << plan.status();
    ASSERT_EQ((*plan)[0].chunks.size(), with_gaps.chunks.size());
    std::string letters = Letters((*plan)[0]);
    for (size_t i = letters.size(); i-- > 0;) {
      if (with_gaps.chunks[i].gap()) letters.erase(i, 1);
    }
    EXPECT_EQ(letters, Letters((*plain)[0])) << chunks;
    EXPECT_EQ((*plan)[0].state.nvme, (*plain)[0].state.nvme);
  }
}

TEST(RebalanceTest, JobsShareInProportion) {
  const TierBytes budget{.dram = kOther + 6 * kEqualState, .nvme = kOther + 12 * kEqualState};
  const auto targets = PlanBudgets(budget, Used(2, 10), {Job("a", 1, 3), Job("b", 1, 7)});
  ASSERT_TRUE(targets.ok()) << targets.status();
  EXPECT_EQ(Letters((*targets)[0]), "ddnn");
  EXPECT_EQ(Letters((*targets)[1]), "ddddnnnn");
}

TEST(RebalanceTest, WhatASharesChunksLeaveIsTheNextJobs) {
  const TierBytes budget{.dram = kOther + 3 * kEqualState, .nvme = kOther + 4 * kEqualState};
  const auto targets = PlanBudgets(budget, Used(0, 4), {Job("a", 0, 2), Job("b", 0, 2)});
  ASSERT_TRUE(targets.ok()) << targets.status();
  EXPECT_EQ(Letters((*targets)[0]) + Letters((*targets)[1]), "dndd");
}

// Job a's state exceeds its share, but fits with the DRAM for its staging. In DRAM as a whole, the job needs no
// staging.
TEST(RebalanceTest, WhatAJobHasBeyondItsShareIsNotTheOthers) {
  const TierBytes budget{.dram = kOther + kStaging + kEqualState, .nvme = kOther + 20 * kEqualState};
  const auto targets = PlanBudgets(budget, Used(11, 1), {Job("a", 3, 0), Job("b", 8, 1)});
  ASSERT_TRUE(targets.ok()) << targets.status();
  EXPECT_EQ(Letters((*targets)[0]), "ddd");
  EXPECT_EQ(Letters((*targets)[1]), "nnnnnnnnn");
}

TEST(RebalanceTest, RefusesWhatIsFixedWithTheMissingBytes) {
  const auto message = [](const TierBytes& budget, const TierBytes& used, const JobHolding& job) {
    const absl::Status status = PlanBudgets(budget, used, {job}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_EQ(model::ReasonOf(status), model::kBudget);
    return std::string(status.message());
  };
  const uint64_t plenty = kOther + 100 * kEqualState;
  EXPECT_THAT(message({.dram = kOther - 5, .nvme = plenty}, Used(1, 1), Job("a", 1, 1)),
              HasSubstr("a dram budget of 12340 bytes is short of 5 bytes"));
  EXPECT_THAT(message({.dram = kOther + kStaging - 7, .nvme = plenty}, Used(5, 0), Job("a", 5, 0)),
              HasSubstr("short of 7 bytes"));
  EXPECT_THAT(message({.dram = plenty, .nvme = kOther - 1}, Used(0, 2), Job("a", 0, 2)),
              HasSubstr("a nvme budget of 12344 bytes is short of 1 bytes"));
  EXPECT_THAT(message({.dram = kOther + kEqualState, .nvme = kOther + kEqualState - 3}, Used(0, 2), Job("a", 0, 2)),
              HasSubstr("nvme is short of 3 bytes"));
}

TEST(RebalanceTest, DurableStateHasItsPlaceOnNvmeInAnyCase) {
  const TierBytes used = Used(5, 20);  // versions and log
  const auto targets = PlanBudgets({.dram = kOther + kStaging + kEqualState, .nvme = used.nvme}, used,
                                   {Job("a", 5, 0, /*durable=*/true)});
  ASSERT_TRUE(targets.ok()) << targets.status();
  EXPECT_EQ(Letters((*targets)[0]), "dnnnn");
  EXPECT_EQ(PlanBudgets({.dram = used.dram, .nvme = used.nvme - 1}, used, {Job("a", 5, 0, true)}).status().code(),
            absl::StatusCode::kResourceExhausted);
}

constexpr uint64_t kEqualWorking = 2 * kEqualChunk;
constexpr uint64_t kScratch = 777;

// A job whose first chunks are in HBM, with or without their working copies.
JobHolding HbmJob(const std::string& name, uint64_t hbm, uint64_t dram, uint64_t nvme, TierKind working) {
  JobHolding job = Job(name, dram, nvme);
  job.chunks.insert(job.chunks.begin(), hbm, {kEqualChunk, {.state = TierKind::kHbm, .working = working}});
  return job;
}

TEST(RebalanceTest, LessHbmSendsTheLastChunksDown) {
  const TierBytes used{kScratch + 3 * kEqualState, kOther + kEqualState, kOther + kEqualState};
  const JobHolding job = HbmJob("a", 3, 1, 1, TierKind::kDram);
  const auto letters = [&](uint64_t hbm, uint64_t dram) {
    const auto plans = PlanBudgets({hbm, dram, kOther + 5 * kEqualState}, used, {job});
    return plans.ok() ? Letters((*plans)[0]) : std::string(plans.status().message());
  };
  EXPECT_EQ(letters(used.hbm, used.dram), "hhhdn") << "what stays stays";
  EXPECT_EQ(letters(used.hbm - 1, used.dram), "hhdnn");
  EXPECT_EQ(letters(kScratch + kEqualState, kOther + 3 * kEqualState), "hdddn");
  EXPECT_EQ(letters(kScratch, kOther), "nnnnn");
  EXPECT_EQ(letters(kScratch + 5 * kEqualState, kOther), "hhhhh");
  EXPECT_THAT(letters(kScratch - 1, used.dram), HasSubstr("a hbm budget of 776 bytes is short of 1 bytes"));
}

TEST(RebalanceTest, AWorkingCopyLeavesHbmWithItsState) {
  const uint64_t each = kEqualState + kEqualWorking;
  const TierBytes used{kScratch + 2 * each, kOther, kOther};
  JobHolding job = HbmJob("a", 2, 0, 0, TierKind::kHbm);
  job.staging_bytes_missing = 1000;
  const auto plan = [&](uint64_t hbm, uint64_t dram) {
    return PlanBudgets({hbm, dram, kOther + 2 * kEqualState}, used, {job});
  };
  const auto less = plan(kScratch + 2 * each - 1, kOther + kEqualWorking + kEqualState);
  ASSERT_TRUE(less.ok()) << less.status();
  EXPECT_EQ(Letters((*less)[0]), "hd");
  EXPECT_EQ((*less)[0].working.hbm, kEqualWorking);
  EXPECT_EQ((*less)[0].working.dram, kEqualWorking);
  EXPECT_EQ((*less)[0].state.hbm, kEqualState);
  // Working copies and buffers come before state.
  const auto none = plan(kScratch, kOther + 2 * kEqualWorking + 1000);
  ASSERT_TRUE(none.ok()) << none.status();
  EXPECT_EQ(Letters((*none)[0]), "nn");
  EXPECT_THAT(std::string(plan(kScratch, kOther + 2 * kEqualWorking + 1000 - 1).status().message()),
              HasSubstr("short of 1 bytes"));
}

TEST(RebalanceTest, JobsShareHbmInProportion) {
  const TierBytes used{kScratch + 3 * kEqualState, kOther, kOther + 9 * kEqualState};
  const auto plans = PlanBudgets({kScratch + 6 * kEqualState, kOther, used.nvme}, used,
                                 {HbmJob("a", 3, 0, 1, TierKind::kDram), HbmJob("b", 0, 0, 8, TierKind::kDram)});
  ASSERT_TRUE(plans.ok()) << plans.status();
  EXPECT_EQ(Letters((*plans)[0]), "hhnn");
  EXPECT_EQ(Letters((*plans)[1]), "hhhhnnnn");
}

// A trainer's memory takes the working copies, and no kernel on a GPU writes it.
TEST(RebalanceTest, WithoutWorkingCopiesNothingGoesToHbm) {
  JobHolding job = Job("a", 2, 0);
  job.layout = StateLayout(kernels::OptimizerSpec(), /*working_copies=*/false);
  const auto plans = PlanBudgets({.hbm = 10 * kEqualState, .dram = Used(2, 0).dram, .nvme = kOther}, Used(2, 0), {job});
  ASSERT_TRUE(plans.ok()) << plans.status();
  EXPECT_EQ(Letters((*plans)[0]), "dd");
}

// Copies of chunk c of each job that stay, as letters.
std::string Copies(const Plan& plan) {
  std::string letters;
  for (const ChunkPlacement& chunk : plan.chunks) letters += chunk.working.has_value() ? 'c' : '-';
  return letters;
}

// All state is on NVMe; the jobs' copies alone exceed the budget.
TEST(RebalanceTest, WorkingCopiesGoWhereNothingElseCan) {
  JobHolding a = Job("a", 0, 8), b = Job("b", 0, 4);
  a.pull = b.pull = PullMemory{.slots = 1, .slot_bytes = kEqualWorking};
  const TierBytes used{.dram = kOther + 12 * kEqualWorking, .nvme = kOther + 12 * kEqualState};
  const auto plans = [&](uint64_t dram) { return PlanBudgets({.dram = dram, .nvme = used.nvme}, used, {a, b}); };
  const auto all = plans(used.dram);
  ASSERT_TRUE(all.ok()) << all.status();
  EXPECT_EQ(Copies((*all)[0]) + Copies((*all)[1]), "cccccccccccc");
  // Each job gives up as much as it can in proportion, and needs a slot for pulls.
  const auto some = plans(used.dram - 5 * kEqualWorking);
  ASSERT_TRUE(some.ok()) << some.status();
  uint64_t left = 0;
  for (const Plan& plan : *some) {
    const std::string copies = Copies(plan);
    const auto here = static_cast<uint64_t>(std::count(copies.begin(), copies.end(), 'c'));
    EXPECT_GT(here, 0u);
    EXPECT_LT(here, plan.chunks.size());
    left += here + 1;
  }
  EXPECT_LE(left, 7u) << "copies and slots";
  const auto none = plans(kOther + 2 * kEqualWorking);
  ASSERT_TRUE(none.ok()) << none.status();
  EXPECT_EQ(Copies((*none)[0]) + Copies((*none)[1]), "------------");
  EXPECT_THAT(std::string(plans(kOther + 2 * kEqualWorking - 3).status().message()), HasSubstr("short of 3 bytes"));
  // The first job's stay, beside a GPU for example.
  a.pull.reset();
  const auto second = plans(used.dram - kEqualWorking);
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_EQ(Copies((*second)[0]), "cccccccc");
  EXPECT_EQ(std::count_if((*second)[1].chunks.begin(), (*second)[1].chunks.end(),
                          [](const ChunkPlacement& chunk) { return !chunk.working.has_value(); }),
            2);
}

}  // namespace
}  // namespace ballast::storage
